"""Adapters give the numbers of the library `peft`, and its files are ours."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from tests.reference.families import hf_model
from tests.reliability import jobs
from tests.tiny_hf import VOCAB, tiny_hf_model
from torchtitan.adapters.lora import adapted_weights, redraw_adapters
from torchtitan.config import ConfigManager
from torchtitan.engine import TrainingEngine
from torchtitan.numerics import nf4
from torchtitan.rl.generator import LocalGenerator
from torchtitan.rl.snapshots import host_copy
from torchtitan.rl.types import SamplingConfig
from torchtitan.trainer import Trainer

peft = pytest.importorskip("peft", reason="the oracle is an optional library")
transformers = pytest.importorskip("transformers")

STEPS, LR, EPS, ROWS, SEQ_LEN = 20, 1e-3, 1e-3, 2, 16
# fp32: two implementations of attention and of the norms round differently.
TOLERANCE = 1e-6
# With its own eps, AdamW makes steps of full size from gradients that are rounding errors.
FLAGS = f"""
    --model.converters=lora --lora.rank=4 --lora.alpha=8 --debug.seed=3
    --training.mixed_precision_param=float32 --training.max_norm=inf --training.steps=20
    --training.seq_len={SEQ_LEN} --activation_checkpoint.mode=none --lr_scheduler.warmup_steps=0
    --lr_scheduler.decay_ratio=0 --optimizer.lr={LR} --optimizer.eps={EPS}
""".split()
DATA = [flag for flag in jobs.TINY_JOB if "hf_assets_path" in flag or "dataset" in flag]
PATTERNS = [
    "--lora.use_rslora",
    "--lora.target_modules=wq,mlp,layers.1.self_attn.o_proj",
    '--lora.rank_pattern="layers.0"=2',
    "--lora.alpha_pattern=down_proj=3.5",
]


def base_folder(tmp_path, family, **changes):
    folder = str(tmp_path / "base")
    tiny_hf_model(family, **changes).save_pretrained(folder)
    return folder


def engine_of(folder, *flags):
    return TrainingEngine.from_hf(folder, ConfigManager().parse_args([*FLAGS, *flags]))


def hf_model_in(folder, auto="AutoModelForCausalLM"):
    auto = getattr(transformers, auto)
    return auto.from_pretrained(str(folder), attn_implementation="eager").eval()


def peft_model(folder, adapters, **options):
    return peft.PeftModel.from_pretrained(hf_model_in(folder), str(adapters), **options)


def new_peft_model(folder, to, **options):
    """Return peft's model with random adapters of rank 4, which are saved in the folder `to`."""
    options = peft.LoraConfig(r=4, lora_alpha=8, **options)
    theirs = peft.get_peft_model(hf_model_in(folder), options).eval()
    for name, parameter in theirs.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(str(to))
    return theirs


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (ROWS, SEQ_LEN), generator=generator)


@torch.no_grad()
def logits_of(model, seed=9):
    """Return the logits of an engine or of a model of transformers or peft."""
    if isinstance(model, TrainingEngine):
        return model.forward_step({"input": batch(seed)})[0]
    return model.eval()(input_ids=batch(seed)).logits


def relative(ours, theirs):
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12)).item()


def hf_gradients(engine):
    """Return the gradients of all adapters under PEFT's names."""
    parameters = dict(engine.model_parts[0].named_parameters())
    gradients = {}
    for one in adapted_weights(engine.model_parts):
        b = engine.checkpointer.sd_adapter.to_hf({one.weight: parameters[one.b].grad})
        ((name, grad),) = b.items()
        name = f"base_model.model.{name.removesuffix('.weight')}"
        gradients[f"{name}.lora_A.default.weight"] = parameters[one.a].grad
        gradients[f"{name}.lora_B.default.weight"] = grad
    return gradients


def randomize(engine):
    parameters = dict(engine.model_parts[0].named_parameters())
    for one in adapted_weights(engine.model_parts):
        torch.nn.init.normal_(parameters[one.b], std=0.3)


def step_of_engine(engine, tokens):
    labels = torch.cat([tokens[:, 1:], torch.full((ROWS, 1), -100)], dim=1)
    n_valid = ROWS * (SEQ_LEN - 1)
    return engine.forward_backward_step(
        input_dict={"input": tokens}, labels=labels, global_valid_tokens=n_valid
    ).item()


def optimizer_of(theirs):
    trained = [p for p in theirs.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.1)


def step_of_peft(model, optimizer, tokens):
    logits = model(input_ids=tokens).logits[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    loss = loss / tokens[:, 1:].numel()
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), gradients


OUTPUT = ["--lora.target_modules=all-linear,lm_head"]


@pytest.mark.parametrize(
    "flags", [[], PATTERNS, OUTPUT], ids=["all layers", "patterns", "output, too"]
)
@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_twenty_steps_give_the_losses_and_gradients_of_peft(family, flags, tmp_path):
    folder = base_folder(tmp_path, family)
    with engine_of(folder, *flags) as engine:
        engine.save_peft(tmp_path / "start")
        theirs = peft_model(folder, tmp_path / "start", is_trainable=True)
        optimizer, first = optimizer_of(theirs), None
        n_adapters = len(list(adapted_weights(engine.model_parts)))
        assert len(optimizer.param_groups[0]["params"]) == 2 * n_adapters
        for step in range(STEPS):
            tokens = batch(step % 4)
            loss = step_of_engine(engine, tokens)
            gradients = hf_gradients(engine)
            expected, their_gradients = step_of_peft(theirs, optimizer, tokens)
            assert loss == pytest.approx(expected, rel=TOLERANCE), step
            assert gradients.keys() == their_gradients.keys()
            norm = torch.cat([g.flatten() for g in their_gradients.values()]).norm()
            difference = [(gradients[n] - g).flatten() for n, g in their_gradients.items()]
            assert torch.cat(difference).norm() <= TOLERANCE * norm, step
            engine.optim_step()
            first = loss if first is None else first
        assert loss < first - 0.05
        # Trained adapters, in both directions.
        engine.save_peft(tmp_path / "end")
        loaded = peft_model(folder, tmp_path / "end")
        assert relative(logits_of(engine), logits_of(loaded)) <= TOLERANCE
        theirs.save_pretrained(str(tmp_path / "theirs"))
    with engine_of(folder, *flags, f"--lora.adapter_path={tmp_path / 'theirs'}") as engine:
        assert relative(logits_of(engine), logits_of(theirs)) <= TOLERANCE


@pytest.mark.parametrize("family", ["llama3", "qwen3_moe"])
def test_base_in_4_bits_gives_the_numbers_of_peft_on_rounded_weights(family, tmp_path):
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "moe_intermediate_size": 64}
    folder = base_folder(tmp_path, family, **sizes)
    in_4_bits = "--lora.base_format=nf4"

    def peft_on_rounded(adapters, **options):
        model = peft_model(folder, adapters, **options)
        for name, weight in model.named_parameters():
            is_matrix = ".layers." in name and weight.ndim > 1 and ".lora_" not in name
            if is_matrix and not name.endswith(".mlp.gate.weight"):  # a router
                weight.data = nf4.dequantize(nf4.quantize(weight.data))
        return model

    with engine_of(folder, in_4_bits) as engine:
        base = [p for p in engine.model_parts[0].layers.parameters() if not p.requires_grad]
        routers = [torch.float32] * (family == "qwen3_moe")
        assert {p.dtype for p in base if p.ndim > 1} == {torch.uint8, *routers}
        randomize(engine)
        engine.save_peft(tmp_path / "start")
        theirs = peft_on_rounded(tmp_path / "start", is_trainable=True)
        optimizer = optimizer_of(theirs)
        # peft trains the gates and ups of experts as one adapter, so later losses differ.
        for step in range(3 if family == "llama3" else 1):
            tokens = batch(step)
            loss = step_of_engine(engine, tokens)
            assert loss == pytest.approx(step_of_peft(theirs, optimizer, tokens)[0], rel=TOLERANCE)
            engine.optim_step()
        ours = logits_of(engine)
        engine.save_peft(tmp_path / "end")
        engine.save_hf(tmp_path / "merged")
        engine.save(str(tmp_path / "step"))
    for model in (peft_on_rounded(tmp_path / "end"), hf_model_in(tmp_path / "merged")):
        assert relative(ours, logits_of(model)) <= 4 * TOLERANCE
    with engine_of(folder, in_4_bits) as engine:
        engine.load(str(tmp_path / "step"))
        assert torch.equal(logits_of(engine), ours)
    with engine_of(folder) as engine, pytest.raises(ValueError, match="trained on another base"):
        engine.load(str(tmp_path / "step"))


def test_experts_adapters_of_peft_for_transformers_5_load(tmp_path):
    """It wraps the two parameters that hold the experts of a layer there."""
    folder = base_folder(tmp_path, "qwen3_moe")
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    targets = {"target_modules": ["q_proj"], "target_parameters": names}
    scales = {"alpha_pattern": {"mlp.experts.down_proj": 3.5}}
    expected = logits_of(new_peft_model(folder, tmp_path / "theirs", **targets, **scales))
    flags = ("--lora.target_modules=q_proj,experts", f"--lora.adapter_path={tmp_path / 'theirs'}")
    with engine_of(folder, *flags, "--lora.alpha_pattern=down_proj=3.5") as engine:
        assert relative(logits_of(engine), expected) <= TOLERANCE
        with engine.adapters_off():
            assert relative(logits_of(engine), expected) > 1e-2
    with pytest.raises(ValueError, match=r"experts\.0\.down_proj is scaled by 0\.875 in the file"):
        engine_of(folder, *flags)


LINEAR = "in_proj_qkv,in_proj_z,in_proj_b,in_proj_a,out_proj"
JOINED_TOLERANCE = 3e-5  # fp32: linear attention solves triangular systems
# Case of `families` -> layers, by PEFT's names.
LAYERS = {
    "qwen3_5": f"{LINEAR},q_proj,down_proj",
    "qwen3_5_moe": LINEAR,
    "qwen3_next": "in_proj_qkvz,in_proj_ba,out_proj,o_proj",
    "phi3": "qkv_proj,o_proj,gate_up_proj",
}


@pytest.mark.parametrize("case", LAYERS)
def test_adapters_of_joined_weights_are_those_of_peft_in_both_directions(case, tmp_path):
    folder = str(tmp_path / "base")
    hf_model(case).save_pretrained(folder)
    names = LAYERS[case].split(",")
    theirs = new_peft_model(folder, tmp_path / "theirs", target_modules=names)
    own_scale = '--lora.alpha_pattern="wq"=3'  # parts of one weight have two scales

    flags = f"--lora.target_modules={LAYERS[case]}"
    with engine_of(folder, flags, f"--lora.adapter_path={tmp_path / 'theirs'}") as engine:
        assert relative(logits_of(engine), logits_of(theirs)) <= JOINED_TOLERANCE
        # Targets by PEFT's names are PEFT's layers.
        n_joined = {"in_proj_qkv": 3, "in_proj_qkvz": 4, "in_proj_ba": 2, "qkv_proj": 3}
        n_joined |= {"q_proj": 2, "gate_up_proj": 2}  # q_proj: queries and gates
        layers = [n for n, _ in theirs.named_modules() if n.rpartition(".")[2] in names]
        n_adapters = sum(n_joined.get(name.rpartition(".")[2], 1) for name in layers)
        assert len(list(adapted_weights(engine.model_parts))) == n_adapters
        with engine.adapters_off():
            assert relative(logits_of(engine), logits_of(theirs)) > 1e-2
    with engine_of(folder, flags, own_scale) as engine:
        randomize(engine)
        ours = logits_of(engine)
        engine.save_peft(tmp_path / "ours")
        loaded = peft_model(folder, tmp_path / "ours")
        assert relative(ours, logits_of(loaded)) <= JOINED_TOLERANCE
        randomize(engine)
        engine.load_peft(tmp_path / "ours")
        assert relative(logits_of(engine), ours) <= JOINED_TOLERANCE
    part = "wk" if case == "phi3" else "linear_attn.wk"
    with pytest.raises(ValueError, match="model's adapters cannot hold .*wq.weight"):
        engine_of(folder, flags.replace(names[0], part), f"--lora.adapter_path={tmp_path}/theirs")


# adapter_config.json of peft 0.18.0 on transformers 4.57.1.
PEFT_018: dict = dict.fromkeys(
    "alora_invocation_tokens arrow_config corda_config eva_config exclude_modules layer_replication "
    "layers_pattern layers_to_transform megatron_config modules_to_save revision target_parameters "
    "task_type trainable_token_indices".split()
) | dict.fromkeys(
    "ensure_weight_tying fan_in_fan_out lora_bias use_dora use_qalora use_rslora".split(), False
)
PEFT_018 |= dict(
    peft_type="LORA", peft_version="0.18.0", base_model_name_or_path="", bias="none",
    inference_mode=True, init_lora_weights=True, loftq_config={}, megatron_core="megatron.core",
    qalora_group_size=16, r=4, lora_alpha=8, lora_dropout=0.0, rank_pattern={},
    alpha_pattern={"layers.1.self_attn.q_proj": 3},
    target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"],
)  # fmt: skip


@pytest.mark.parametrize("family", ["llama3", "qwen3_moe"])
def test_adapters_of_peft_0_18_have_the_logits_of_their_merged_weights(family, tmp_path):
    folder, adapters = base_folder(tmp_path, family), tmp_path / "a"
    weights, tensors = load_file(f"{folder}/model.safetensors"), {}
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in PEFT_018["target_modules"]:
            a, b = torch.randn(4, weight.shape[1]), 0.3 * torch.randn(weight.shape[0], 4)
            tensors[f"base_model.model.{layer}.lora_A.weight"] = a
            tensors[f"base_model.model.{layer}.lora_B.weight"] = b
            weights[name] = weight + (3 if layer.endswith("1.self_attn.q_proj") else 8) / 4 * b @ a
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text(json.dumps(PEFT_018))
    save_file(tensors, adapters / "adapter_model.safetensors")
    flags = "--lora.target_modules=q_proj,mlp", '--lora.alpha_pattern="layers.1.self_attn.q_proj"=3'
    with engine_of(folder, *flags, f"--lora.adapter_path={adapters}") as engine:
        ours = logits_of(engine)
        engine.save_peft(tmp_path / "b")
    written = load_file(tmp_path / "b/adapter_model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[key], tensor) for key, tensor in tensors.items())
    save_file(weights, f"{folder}/model.safetensors", {"format": "pt"})
    assert relative(ours, logits_of(hf_model_in(folder))) <= 4 * TOLERANCE


@pytest.mark.parametrize(("family", "flags"), [("qwen3", OUTPUT), ("qwen3_moe", [])])
def test_adapters_in_one_batch_sample_with_the_logprobs_of_peft(family, flags, tmp_path):
    folder, n_new = base_folder(tmp_path, family), 6
    prompts, models = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [11, 12]], [2, 0, 1, 0, 2]
    with engine_of(folder, *flags) as engine:
        theirs, weights = None, []
        for seed in range(3):
            layers = ["self_attn", "mlp", "lm_head"][seed % 2 :]
            redraw_adapters(engine.model_parts, seed, 1 + seed, layers)
            randomize(engine)
            weights.append(host_copy(engine))
            engine.save_peft(tmp_path / str(seed))
            if theirs is None:
                theirs = peft_model(folder, tmp_path / "0", adapter_name="0")
            else:
                theirs.load_adapter(str(tmp_path / str(seed)), str(seed))
        # Rows of all models take free places.
        generator = LocalGenerator(engine, seed=1, max_rows=4)
        with generator.with_adapters(weights, models):
            drawn = generator.generate(prompts, SamplingConfig(max_tokens=n_new), 2)
    for number, completion in enumerate(drawn):
        prompt = prompts[number // 2]
        theirs.set_adapter(str(models[number // 2]))
        tokens = [*prompt, *completion.token_ids]
        with torch.no_grad():
            logprobs = theirs(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
        expected = logprobs[range(len(prompt) - 1, len(tokens) - 1), completion.token_ids]
        assert completion.token_logprobs == pytest.approx(expected.tolist(), abs=1e-5)


# What trains beside linear layers: family, our flags, changes of the base.
FILES = {
    "norms, embedding and output": ("qwen3", "--lora.also_train=norms,embed_tokens,lm_head", {}),
    "tied embedding": ("qwen3", "--lora.also_train=embed_tokens", {"tie_word_embeddings": True}),
    "biases": ("llama3", "--lora.also_train=biases", {"attention_bias": True}),
    "value head": ("qwen3", "--model.value_head", {"is_critic": True}),
    "attention beside experts": ("qwen3_moe", "--lora.target_modules=self_attn", {}),
}


@pytest.mark.parametrize("case", FILES)
def test_files_hold_all_that_trains_in_both_directions(case, tmp_path):
    family, flag, changes = FILES[case]
    folder = base_folder(tmp_path, family, **changes)
    head, loss_fn = "CausalLM", None
    if "is_critic" in changes:
        head, loss_fn = "TokenClassification", lambda values, *_: values.square().sum()

    def train(engine):
        for step in range(2):
            tokens = batch(step)
            engine.forward_backward_step(
                input_dict={"input": tokens},
                labels=tokens.roll(-1, dims=1),
                global_valid_tokens=tokens.numel(),
                loss_fn=loss_fn,
            )
            engine.optim_step(lr=1e-2)

    with engine_of(folder, flag) as engine:
        train(engine)
        engine.save_peft(tmp_path / "ours")
        ours, base = logits_of(engine), hf_model_in(folder, f"AutoModelFor{head}")
        theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "ours"), is_trainable=True)
        assert relative(ours, logits_of(theirs)) <= TOLERANCE
        theirs.save_pretrained(str(tmp_path / "theirs"))
        train(engine)
        assert relative(ours, logits_of(engine)) > 1e-3
        engine.load_peft(tmp_path / "theirs")
        assert relative(logits_of(engine), ours) <= TOLERANCE


# family -> flags of adapters that peft for transformers 5 joins, with other ranks and scales
UPS = ["--lora.rank_pattern=up_proj=2", "--lora.alpha_pattern=up_proj=4"]
PARTS = ['--lora.rank_pattern="layers.0.mlp"=2', "--lora.alpha_pattern=shared_experts=3"]
JOINED = {
    "rsLoRA": ("qwen3_moe", ["--lora.use_rslora"]),
    "scale of downs": ("qwen3_moe", ["--lora.alpha_pattern=down_proj=3.5"]),
    "rank of ups": ("qwen3_moe", UPS),
    "experts of one layer": ("qwen3_moe", ['--lora.rank_pattern="layers.1.mlp.experts"=2']),
    "dense and shared": ("deepseek_v3", []),
    "only shared": ("deepseek_v3", ["--lora.target_modules=shared_experts,self_attn"]),
    "only experts": ("deepseek_v3", ["--lora.target_modules=experts"]),
    "patterns": ("deepseek_v3", PARTS),
}


@pytest.mark.parametrize("case", JOINED)
def test_adapters_of_experts_have_their_logits_in_peft(case, tmp_path):
    family, flags = JOINED[case]
    folder = base_folder(tmp_path, family)
    with engine_of(folder, *flags) as engine:
        randomize(engine)
        engine.save_peft(tmp_path / "ours")
        ours = logits_of(engine)
        redraw_adapters(engine.model_parts, 5, 4, ["mlp", "self_attn"])
        engine.load_peft(tmp_path / "ours")
        assert relative(logits_of(engine), ours) <= 4 * TOLERANCE
    theirs = logits_of(peft_model(folder, tmp_path / "ours"))
    assert relative(ours, theirs) <= 4 * TOLERANCE  # large adapters round more


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_experts_that_peft_joined_and_trained_are_read_at_twice_their_rank(family, tmp_path):
    folder = base_folder(tmp_path, family)
    with engine_of(folder) as engine:
        engine.save_peft(tmp_path / "ours")
    theirs = peft_model(folder, tmp_path / "ours", is_trainable=True)
    optimizer = torch.optim.SGD([p for p in theirs.parameters() if p.requires_grad], lr=1.0)
    for step in range(2):
        step_of_peft(theirs, optimizer, batch(step))
    theirs.save_pretrained(str(tmp_path / "theirs"))
    flags = [
        f'--lora.{kind}_pattern="experts.gate_proj"={value},"experts.up_proj"={value}'
        for kind, value in (("rank", 8), ("alpha", 16))
    ]
    # peft made one matrix of twice the rank for gates and ups.
    with engine_of(folder) as engine, pytest.raises(ValueError, match="rank 8 .* twice their rank"):
        engine.load_peft(tmp_path / "theirs")
    with engine_of(folder, *flags) as engine:
        before = logits_of(engine)
        engine.load_peft(tmp_path / "theirs")
        ours, expected = logits_of(engine), logits_of(theirs)
    assert relative(ours, expected) <= 4 * TOLERANCE < 1e-2 < relative(before, expected)


def test_adapters_that_peft_cannot_join_are_named_at_export(tmp_path, caplog):
    folder = base_folder(tmp_path, "qwen3_moe")
    with engine_of(folder, "--lora.rank_pattern=up_proj=2", "--lora.dropout=0.1") as engine:
        engine.save_peft(tmp_path / "ours")
    assert "peft for transformers 5 cannot read the adapters of model.layers.0" in caplog.text
    with pytest.raises(RuntimeError, match="size mismatch"):
        peft_model(folder, tmp_path / "ours")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder of a base, folder of peft's adapters for it)"""
    path = tmp_path_factory.mktemp("trained")
    folder = base_folder(path, "llama3")
    new_peft_model(folder, path / "theirs", target_modules=["q_proj"])
    return folder, path / "theirs"


@pytest.fixture
def engine_and_copy(trained, tmp_path):
    """(engine of the base, a copy of peft's adapters)"""
    folder, theirs = trained
    shutil.copytree(theirs, tmp_path / "a")
    with engine_of(folder, "--lora.target_modules=q_proj") as engine:
        yield engine, tmp_path / "a"


def change_config(folder, **changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_tensors(folder, change, part=""):
    """Change the tensors whose names contain `part`."""
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: change(t) if part in name else t for name, t in tensors.items()}, file)


REFUSED_FIELDS = {
    "base without its first adapter": ({"init_lora_weights": "pissa"}, "_weights = 'pissa'"),
    "LoftQ": ({"init_lora_weights": "loftq"}, "init_lora_weights = 'loftq'"),
    "field of a later release": ({"use_new_kind": True}, "use_new_kind = True"),
    "DoRA": ({"use_dora": True}, "use_dora = True"),
    "another method": ({"peft_type": "LOHA"}, "peft_type = 'LOHA'"),
    "other rank than the tensors": ({"r": 8}, "has rank 4 in the file, but the config says 8"),
    "rank as a text": ({"r": "4"}, "config.json has r = '4': expected int, got str; correct"),
    "scale that is no number": ({"lora_alpha": float("nan")}, "lora_alpha = nan: expected finite"),
    "no pattern": ({"rank_pattern": {"(": 4}}, "rank_pattern = .*: missing \\), unterminated"),
}


@pytest.mark.parametrize("case", REFUSED_FIELDS)
def test_field_with_which_adapters_compute_something_else_is_refused(case, engine_and_copy):
    engine, folder = engine_and_copy
    changes, message = REFUSED_FIELDS[case]
    change_config(folder, **changes)
    with pytest.raises(ValueError, match=message):
        engine.load_peft(folder)


@pytest.mark.parametrize("first", [True, False, "gaussian", "orthogonal"])
def test_first_values_that_leave_the_base_alone_are_read(first, trained, engine_and_copy):
    base = hf_model_in(trained[0])
    before = logits_of(base)
    options = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=first)
    with peft.get_peft_model(base, options).disable_adapter():
        assert torch.equal(logits_of(base), before)
    engine, folder = engine_and_copy
    change_config(folder, init_lora_weights=first)
    engine.load_peft(folder)


def test_tensor_with_values_of_no_adapter_is_refused_before_anything_changes(engine_and_copy):
    engine, folder = engine_and_copy
    randomize(engine)
    before = logits_of(engine)
    for change in (lambda t: torch.full_like(t, torch.nan), lambda t: t.int()):
        change_tensors(folder, change, "0.self")
        with pytest.raises(
            ValueError, match="not finite, or not floating-point, in model.layers.0"
        ):
            engine.load_peft(folder)
        assert torch.equal(logits_of(engine), before)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ValueError, match="reading a pickle can run code.* save_pretrained"):
        engine.load_peft(folder)


def test_trained_output_is_not_dropped_for_the_weight_that_it_was_shared_with(tmp_path):
    folder = base_folder(tmp_path, "qwen3", tie_word_embeddings=True)
    with engine_of(folder, "--lora.also_train=embed_tokens") as engine:
        engine.save_peft(tmp_path / "a")
        engine.load_peft(tmp_path / "a")
        change_tensors(tmp_path / "a", lambda t: t + 1, "lm_head")
        with pytest.raises(Exception, match="lm_head.weight that differs from the model's"):
            engine.load_peft(tmp_path / "a")
    folder = base_folder(tmp_path, "llama3")
    with engine_of(folder, *OUTPUT) as engine:
        names = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj lm_head".split()
        options = peft.LoraConfig(r=4, lora_alpha=8, target_modules=names)
        theirs = peft.get_peft_model(hf_model_in(folder), options)
        theirs.save_pretrained(str(tmp_path / "b"), save_embedding_layers=True)
        engine.load_peft(tmp_path / "b")
        change_tensors(tmp_path / "b", lambda t: t + 1, "lm_head.base_layer")
        with pytest.raises(Exception, match=r"lm_head.base_layer.weight that differs from the mod"):
            engine.load_peft(tmp_path / "b")


def test_job_writes_peft_folders_that_no_retention_removes_and_a_resumed_job_goes_on(tmp_path):
    folder = base_folder(tmp_path, "llama3", vocab_size=2048)
    job = [*(flag for flag in FLAGS if "training.steps" not in flag), *DATA]
    job += [f"--job.dump_folder={tmp_path}", f"--model.hf_config={folder}"]
    job += [f"--checkpoint.initial_load_path={folder}", "--checkpoint.initial_load_in_hf"]
    job += ["--checkpoint.enable", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=2"]
    job += ["--checkpoint.no_last_save_model_only", "--checkpoint.async_mode=async"]
    job += ["--checkpoint.last_save_peft", "--checkpoint.save_peft_interval=3"]
    for last_step in (4, 7):
        trainer = Trainer(ConfigManager().parse_args([*job, f"--training.steps={last_step}"]))
        trainer.train()
        ours = logits_of(trainer)
        trainer.close()
        theirs = logits_of(peft_model(folder, tmp_path / f"checkpoint/peft-step-{last_step}"))
        assert (ours - theirs).abs().max() <= 1e-5
    found = {path.name for path in (tmp_path / "checkpoint").iterdir() if path.is_dir()}
    assert found == {"step-6", "step-7", *(f"peft-step-{step}" for step in (3, 4, 6, 7))}
    config = json.loads((tmp_path / "checkpoint/peft-step-7/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == folder
