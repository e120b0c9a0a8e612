"""Continuing a prompt: sampling, the cache of keys and values, and the program around them."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from scripts.checkpoint_conversion.convert_to_hf import convert_to_hf
from tests.reliability import jobs
from torchtitan.commands.generate import main
from torchtitan.generation.kv_cache import kv_cache
from torchtitan.generation.sampling import generate
from torchtitan.models.causal_lm import CausalLM
from torchtitan.models.deepseek_v3 import DeepSeekV3Model, DeepSeekV3ModelArgs
from torchtitan.models.gpt_oss import GptOssModel, GptOssModelArgs
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.llama4 import Transformer as Llama4
from torchtitan.models.llama4 import TransformerModelArgs as Llama4Args
from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs
from torchtitan.protocols.train_spec import get_train_spec

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.long]
ROOT = Path(__file__).parents[3]
CONFIG = "torchtitan/models/llama3/train_configs/python_docs.toml"
ATTENTION = {
    "sdpa": {},
    "flex": {"attn_type": "flex", "attn_mask_type": "causal"},
    "varlen": {"attn_type": "varlen", "attn_mask_type": "block_causal"},
}


def initialized(model_cls, args):
    torch.manual_seed(0)
    model = model_cls(args)
    with torch.no_grad():
        model.init_weights()
    return model


TINY = {"dim": 32, "n_layers": 4, "n_heads": 4, "vocab_size": 50, "max_seq_len": 64}


def tiny_model(**changes) -> Transformer:
    sizes = TINY | {"n_layers": 3, "n_kv_heads": 2, "multiple_of": 16}
    return initialized(Transformer, TransformerModelArgs(**sizes | changes))


QWEN3_ARGS = Qwen3ModelArgs(
    **TINY | {"n_layers": 2, "n_kv_heads": 2, "head_dim": 16, "hidden_dim": 48},
    enable_weight_tying=True,
)


def random_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(1))


def uncached(model: nn.Module, tokens: torch.Tensor, n_new: int) -> torch.Tensor:
    """The likeliest continuation, by a forward of the whole text for each token."""
    for _ in range(n_new):
        tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(dim=-1)), dim=1)
    return tokens


# ---- the cache ----


LATENTS = dict(
    inter_dim=48, moe_inter_dim=16, kv_lora_rank=12, qk_nope_head_dim=16, qk_rope_head_dim=8,
    v_head_dim=12,
)  # fmt: skip
CHUNKED = dict(
    n_kv_heads=2, multiple_of=16, every_n_layers_nope=4, fixed_attn_block_size=7,
    attn_temperature_tuning=True, floor_scale=8, attn_type="flex",
)  # fmt: skip
LINEAR = dict(
    head_dim=16, hidden_dim=48, linear_key_heads=2, linear_value_heads=4, linear_key_dim=8,
    linear_value_dim=6,
)  # fmt: skip
HEADS = {"n_kv_heads": 2, "head_dim": 16, "moe_inter_dim": 16}
TWO_SIZES = {"n_layers": 6, "hidden_dim": 48, "softmax_scale": 0.1}  # of heads
WINDOWED = HEADS | {"sliding_window_size": 5, "attn_type": "flex"}


def debug_model(family, sizes):
    args = get_train_spec(family).model_args["debugmodel"]
    return CausalLM, dataclasses.replace(args, **TINY | sizes)


FAMILIES = {
    "qwen3": (Qwen3Model, QWEN3_ARGS),
    "qwen3 with experts": (Qwen3Model, Qwen3ModelArgs(**TINY, **HEADS, moe_enabled=True)),
    "deepseek_v3": (DeepSeekV3Model, DeepSeekV3ModelArgs(**TINY, **LATENTS)),
    "llama4": (Llama4, Llama4Args(**TINY, **CHUNKED)),
    "gpt_oss": (GptOssModel, GptOssModelArgs(**TINY, **WINDOWED)),
    "qwen3_5": debug_model("qwen3_5", LINEAR),
    "gemma4": debug_model("gemma4", TWO_SIZES),
}


@pytest.mark.parametrize("name", [*ATTENTION, *FAMILIES])
@torch.no_grad()
def test_cached_log_probs_equal_those_of_the_full_forward(name):
    tokens = random_tokens(2, 24)
    if name in ATTENTION:
        # Same weights for each kernel; sdpa runs whole sequences without a mask.
        whole, model, masks = tiny_model(), tiny_model(**ATTENTION[name]), None
    else:
        whole = model = initialized(*FAMILIES[name])
        is_masked = model.model_args.attn_type != "sdpa"
        masks = model.get_attention_masks(tokens, None) if is_masked else None
    expected = whole(tokens, masks).log_softmax(dim=-1)
    # A prompt of 13 is longer than a chunk and a window, and decoding crosses the next ones.
    for split in ([13, *[1] * 6, 5], [1] * 24):
        with kv_cache(model, max_length=24) as forward:
            pieces = [forward(piece) for piece in tokens.split(split, dim=1)]
        difference = torch.cat(pieces, dim=1).log_softmax(dim=-1) - expected
        # fp32, sums in another order. A token out of place moves log-probs by 1e-2 and more.
        assert difference.abs().max() <= 5e-6


@torch.no_grad()
def test_model_is_as_before_after_generation_and_after_an_error():
    model, tokens = tiny_model(), random_tokens(2, 8)
    names, expected = list(model.state_dict()), model(tokens)
    generate(model, tokens, max_new_tokens=3)
    with pytest.raises(ValueError, match="holds 5 tokens per row, got 8"):
        with kv_cache(model, max_length=5) as forward:
            forward(tokens[:, :2])
            assert list(model.state_dict()) == names
            forward.lengths = []
            forward(tokens)
    with pytest.raises(ValueError, match="needs a model on .*Decoder.*got Linear"):
        kv_cache(nn.Linear(2, 2), max_length=4).__enter__()
    assert torch.equal(model(tokens), expected)
    assert list(model.state_dict()) == names


# ---- sampling ----


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"temperature": 1e-9}, {"top_k": 1}], ids=str
)
def test_likeliest_token_is_taken_each_time_up_to_the_end_of_the_rope_table(options):
    model, prompt = tiny_model(), random_tokens(2, 6)
    tokens = generate(model, prompt, max_new_tokens=58, **options)
    assert torch.equal(tokens, uncached(model, prompt, 58))


@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_finite_draw_nothing(temperature):
    model = tiny_model()
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    with pytest.raises(FloatingPointError, match="not finite, so no token can be drawn"):
        generate(model, random_tokens(2, 6), max_new_tokens=2, temperature=temperature)


# ---- where it ends ----


def test_rows_are_filled_with_end_of_text_once_they_drew_it():
    model, prompts = tiny_model(), random_tokens(2, 6)
    free, again, other = (generate(model, prompts, max_new_tokens=12, seed=s) for s in (0, 0, 1))
    assert torch.equal(free, again) and not torch.equal(free, other)
    eos = int(free[0, 8])  # the third token drawn in the first row
    for ids in ([eos], [eos, int(free[1, 9])]):
        tokens = generate(model, prompts, max_new_tokens=12, seed=0, eos_id=ids)
        for row, without in zip(tokens[:, 6:].tolist(), free[:, 6:].tolist(), strict=True):
            end = next((i for i, token in enumerate(without) if token in ids), len(row) - 1)
            assert row[: end + 1] == without[: end + 1]
            assert set(row[end:]) == {without[end]}
    assert generate(model, prompts[0], max_new_tokens=12, temperature=0).shape == (1, 18)
    likeliest = int(uncached(model, prompts[:1], 1)[0, -1])
    stopped = generate(model, prompts[0], max_new_tokens=12, temperature=0, eos_id=likeliest)
    assert stopped.shape == (1, 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 59}, "65 tokens, and the model's RoPE table holds 64 positions; lower"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"temperature": -1.0}, "temperature must be at least 0, got -1.0"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"input_ids": random_tokens(0)}, "at least one token, got none"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    defaults = {"input_ids": random_tokens(6), "max_new_tokens": 2}
    with pytest.raises(ValueError, match=message):
        generate(tiny_model(), **defaults | options)


# ---- the program ----


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """The checkpoints of a run of two steps."""
    folder = tmp_path_factory.mktemp("run")
    flags = jobs.flags_in(f"""
        job.config_file={CONFIG} job.dump_folder={folder} training.steps=2
        training.local_batch_size=1 checkpoint.enable checkpoint.interval=1
    """)
    outcome = jobs.run(flags, folder / "logs", timeout_seconds=100)
    assert outcome.exit_codes == [0], outcome.output
    return folder / "checkpoint"


def test_report_of_a_trained_checkpoint_and_of_its_hf_export_agree(
    checkpoints, tmp_path, monkeypatch, capsys
):
    saved = str(checkpoints / "step-2")
    convert_to_hf(saved, str(tmp_path), "llama3", "debugmodel", None, "float32")
    options = "--max_new_tokens=9 --batch_size=2 --seed=5 --out --ignore_eos".split()
    arguments = [f"--config={CONFIG}", "--prompt=Return a list", *options]
    monkeypatch.chdir(ROOT)
    reports = []
    for folder in (checkpoints, tmp_path):
        monkeypatch.setattr(sys, "argv", ["generate", str(folder), *arguments])
        main()
        reports.append(json.loads(capsys.readouterr().out))
    report, from_hf = reports
    assert report["responses"] == from_hf["responses"]
    keys = {"input_text", "output_text", "response_idx"}
    assert [set(response) for response in report["responses"]] == [keys] * 2
    assert report["responses"][0]["input_text"] == "Return a list"
    metadata = report["metadata"]
    expected = {"generated_n_tokens": 9, "batch_size": 2, "seed": 5, "world_size": 1}
    expected["torch_version"] = torch.__version__
    assert metadata.items() >= expected.items()
    assert sum(key.startswith("memory/") for key in metadata) == 6
    n_tokens = 2 * (9 + metadata["input_n_tokens"])
    speed = n_tokens / metadata["generation_time_sec"]
    assert metadata["tokens_per_sec"] == pytest.approx(speed)


def test_text_alone_is_on_stdout(checkpoints):
    # A flavor with another kernel, and a longer table than the model trained with.
    options = "--prompt=Return --max_new_tokens=300 --temperature=0 --deterministic"
    options += " --training.seq_len=512 --model.flavor=debugmodel_varlen_attn"
    source = f"--checkpoint={checkpoints / 'step-1'}"
    command = [sys.executable, "-m", "scripts.generate.test_generate", f"--config={CONFIG}", source]
    command += options.split()
    place = {"cwd": ROOT, "env": {"PATH": "", "OMP_NUM_THREADS": "1"}, "timeout": 100}
    done = subprocess.run(command, capture_output=True, text=True, **place)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Return")
    assert "tokens after 2 in" in done.stderr


@pytest.mark.parametrize(
    ("source", "options", "world_size", "message"),
    [
        ("/nowhere", [], 1, "error: SOURCE must be a step folder of a run"),
        (None, ["--batch_size=0"], 1, "--batch_size must be at least 1, got 0"),
        (None, [], 2, "one process, got 2: tensor parallelism is not available yet"),
    ],
)
def test_mistakes_are_one_sentence(
    checkpoints, monkeypatch, capsys, source, options, world_size, message
):
    arguments = [source or str(checkpoints), f"--config={CONFIG}", *options]
    monkeypatch.setattr(sys, "argv", ["generate", *arguments])
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        main()
    assert message in capsys.readouterr().err
