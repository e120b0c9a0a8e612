"""Experts from the generator to the trainer: recorded, packed, replayed, or refused."""

import base64
import dataclasses
import io
import pickle

import numpy as np
import pytest
import torch

from tests.distributed.layout_matrix import build_engine, random_experts
from tests.unit.generation.test_generation import FAMILIES, initialized
from tests.unit.rl.test_decoding import PROMPTS, V, uniform_numbers
from tests.unit.rl.toy import gradients, rows_of
from torchtitan.config import ConfigManager
from torchtitan.integrations.openai import _array
from torchtitan.protocols.train_spec import _extra_train_specs, get_train_spec, register_train_spec
from torchtitan.rl.batcher import Batcher
from torchtitan.rl.decoding import LocalDecoder, continue_prompts
from torchtitan.rl.foreign_generator import ForeignGenerator
from torchtitan.rl.generator import LocalGenerator
from torchtitan.rl.job_config import JobConfig
from torchtitan.rl.policy import PolicyTrainer
from torchtitan.rl.rollout import _joined_experts
from torchtitan.rl.types import SamplingConfig, TrainingSample
from torchtitan.tools.errors import ConfigError, RunError

MIXTURES = ["qwen3 with experts", "deepseek_v3"]  # the first layer of the second is dense


def build_model(family: str):
    model_cls, args = FAMILIES[family]
    moe_args = dataclasses.replace(args.moe_args, num_experts=8, top_k=3)
    model = initialized(model_cls, dataclasses.replace(args, moe_args=moe_args))
    with torch.no_grad():
        for layer in model.layers.values():
            if layer.moe_enabled:  # scores far apart, so that rounding changes no choice
                layer.moe.router.gate.weight.normal_()
    return model.eval()


@torch.no_grad()
def experts_of_whole_forward(model, tokens: list[int]) -> torch.Tensor:
    """[T, L, k], by hooks on the routers."""
    chosen = []
    routers = [layer.moe.router for layer in model.layers.values() if layer.moe_enabled]
    hooks = [r.register_forward_hook(lambda _m, _i, out: chosen.append(out[1])) for r in routers]
    model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1)


@pytest.mark.parametrize("max_rows", [0, 2])
@pytest.mark.parametrize("family", MIXTURES)
def test_recorded_experts_are_those_of_a_forward_of_the_whole_text(family, max_rows):
    """Rows that share a prompt's forward, end early, wait for a place, and are dropped."""
    model = build_model(family)
    prompt_of_row = [i for i in range(len(PROMPTS)) for _ in range(3)]
    uniform = uniform_numbers(len(prompt_of_row), 10)
    sampling = SamplingConfig(max_tokens=10, stop_token_ids=tuple(range(0, V, 7)))
    inputs = LocalDecoder.from_model(model), PROMPTS, prompt_of_row, uniform, sampling, max_rows
    drawn = continue_prompts(*inputs, records_experts=True)
    assert len({len(row.token_ids) for row in drawn}) > 2  # rows that ended at different times
    for row, prompt in zip(drawn, prompt_of_row, strict=True):
        text = [*PROMPTS[prompt], *row.token_ids][:-1]  # the last token is never read
        expected = experts_of_whole_forward(model, text)
        assert torch.equal(row.routed_experts.long().sort(-1).values, expected.sort(-1).values)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    flags = ["--model.attn_type=flex", "--model.attn_mask_type=position_block_causal"]
    engine = build_engine("qwen3 MoE", flags, str(tmp_path_factory.mktemp("run")))
    trainer = PolicyTrainer(ConfigManager(JobConfig).parse_args([]), engine=engine)
    yield trainer
    trainer.close()


def samples_of(trainer, n: int = 5) -> list[TrainingSample]:
    """Samples of different lengths, each with experts that no router would choose."""
    experts = random_experts(trainer.engine.model_parts[0], 0)
    samples = []
    for i in range(n):
        length = 6 + 2 * i
        tokens = torch.randint(0, 2000, (length,), generator=torch.manual_seed(i)).tolist()
        values = tokens[:3], tokens[3:], [-7.0] * (length - 3), 1.0 - i
        own = {"routed_experts": experts[i, : length - 1]}
        samples.append(TrainingSample.from_sequence(*values, **own))
    return samples


def test_packed_samples_give_the_log_probs_and_gradients_of_single_rows(trainer):
    samples = samples_of(trainer)
    results = {}
    for packing in (False, True):
        batch = Batcher(seq_len=32, rows=2, packing=packing, pad_multiple=4).batch(samples)
        assert batch.microbatches[0][0].inputs["routed_experts"].dtype == torch.int16
        trainer.zero_grad()
        output = trainer.forward_backward(batch, return_logprobs=True)
        results[packing] = output.logprobs, gradients(trainer)
    trainer.zero_grad()
    # fp32, sums in another order.
    torch.testing.assert_close(*results.values(), rtol=1e-4, atol=1e-5)
    without = [dataclasses.replace(sample, routed_experts=None) for sample in samples]
    chosen_again = trainer.forward(Batcher(seq_len=32, rows=2).batch(without))
    # Random experts with small weights: log-probs move little, but far more than by rounding.
    assert (chosen_again[4] - results[True][0][4]).abs().max() > 5e-4


WRONG = {
    "layers": (lambda x: x[:, :1], r"experts per token\] = \(5, 16, 4, 2\), got \(5, 16, 1, 2\)"),
    "experts per token": (lambda x: x[..., :1], r"got \(5, 16, 4, 1\)"),
    "an id too large": (lambda x: x.masked_fill(x == 0, 8), r"ids in \[0, 8\), .* got -1 to 8"),
    "an id too small": (lambda x: x - 1, "got -2 to 6"),
    "half of a token's": (lambda x: x.index_fill(2, torch.tensor(1), -1), "2 different experts"),
    "an expert twice": (lambda x: x[..., :1].expand_as(x), "got an expert twice"),
    "floats": (lambda x: x.float(), "must be integers, got torch.float32"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_experts_are_refused_in_one_sentence(name, trainer):
    change, words = WRONG[name]
    samples = samples_of(trainer)
    samples = [dataclasses.replace(s, routed_experts=change(s.routed_experts)) for s in samples]
    batch = Batcher(seq_len=16, rows=5, pad_multiple=16).batch(samples)
    with pytest.raises(ValueError, match=words) as error:
        trainer.forward_backward(batch)
    assert str(error.value).count(". ") == 0


def test_experts_must_fit_the_sample_and_the_model(trainer, tmp_path):
    sample = samples_of(trainer)[0]
    with pytest.raises(ValueError, match=r"\[5 input tokens, .* got \[4, 4, 2\]; leave out"):
        dataclasses.replace(sample, routed_experts=sample.routed_experts[:4])
    other = dataclasses.replace(sample, routed_experts=sample.routed_experts[:, :1])
    with pytest.raises(ValueError, match=r"same numbers of layers .* got \[\(1, 2\), \(4, 2\)\]"):
        Batcher(seq_len=16).batch([sample, other])
    dense = build_engine("qwen3", [], str(tmp_path))
    with pytest.raises(ConfigError, match="this model is dense; set rl.generator.replay_experts"):
        LocalGenerator(dense, records_experts=True)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    experts = torch.zeros(1, 4, 4, 2, dtype=torch.int16)
    with pytest.raises(ValueError, match="this model is dense; leave them out"):
        dense.forward_step({"input": tokens, "routed_experts": experts})
    dense.close()


def test_dialogue_keeps_the_experts_with_which_each_token_was_first_read():
    first, second = torch.zeros(5, 2, 3), torch.ones(9, 2, 3)
    joined = _joined_experts([first, second])
    assert joined[:, 0, 0].tolist() == [0.0] * 5 + [1.0] * 4


class AnotherEngine(ForeignGenerator):
    _complete_all = _load = None


def test_experts_of_another_engine_are_cut_to_the_tokens_that_it_read():
    generator = AnotherEngine(None, 0, records_experts=True)
    generator.policy_version = 0
    experts = np.arange(2 * 6, dtype=np.uint8).reshape(6, 1, 2)

    def complete(experts):
        return generator._completion((7, 8), (-1.0, -1.0), SamplingConfig(), [1, 2, 3, 4], experts)

    assert complete(experts).routed_experts.tolist() == experts[:5].tolist()
    for wrong in (None, experts[:4], experts[:, 0]):
        with pytest.raises(RunError, match="needs the experts of 5 tokens .* vLLM"):
            complete(wrong)


def test_experts_in_an_answer_are_read_without_pickles(tmp_path):
    file = io.BytesIO()
    experts = np.arange(8, dtype=np.int16).reshape(2, 2, 2)
    np.save(file, experts)
    assert np.array_equal(_array(base64.b64encode(file.getvalue()).decode()), experts)

    class Bomb:
        def __reduce__(self):
            return (tmp_path.joinpath("ran").touch, ())

    objects = io.BytesIO()
    np.save(objects, np.array([Bomb()], dtype=object), allow_pickle=True)
    for hostile in (objects.getvalue(), pickle.dumps(Bomb()), b"x", b"\x93NUMPY\x01\x00"):
        assert _array(base64.b64encode(hostile).decode()) is None
    assert _array(None) is None and _array(17) is None
    assert not (tmp_path / "ran").exists()


@pytest.fixture(scope="module")
def mixture():
    """The name of a mixture of experts with the toy tasks' vocabulary."""
    args = dataclasses.replace(FAMILIES[MIXTURES[0]][1], vocab_size=32, max_seq_len=24)
    changes = {"model_args": {"debugmodel": args}, "build_tokenizer_fn": None}
    name = "mixture_of_toys"
    register_train_spec(name, dataclasses.replace(get_train_spec("qwen3"), **changes))
    yield name
    del _extra_train_specs[name]


@pytest.mark.parametrize("more", [[], ["--rl.async_steps=1", "--rl.advantage.name=gae"]], ids=str)
def test_loop_trains_with_the_experts_of_a_bf16_generator(more, mixture, tmp_path, start):
    flags = ["--rl.loss.kl_coef=0.1", "--rl.generator.dtype=bfloat16", *more]
    controller = start(f"--model.name={mixture}", "--rl.generator.replay_experts", *flags)
    batches, run = [], controller.trainer.forward_backward
    controller.trainer.forward_backward = lambda batch: batches.append(batch) or run(batch)
    first = controller.train_step()
    assert abs(first["loss/kl_ref"]) < 1e-9  # the reference replays, too
    controller.train_step()
    for batch in batches:
        inputs = batch.of_rank(0)[0].inputs
        experts, is_token = inputs["routed_experts"], inputs["positions"] >= 0
        assert experts.shape[2:] == (4, 1)
        assert (experts[is_token] >= 0).all() and (experts[~is_token] == -1).all()
    assert rows_of(tmp_path / "episodes.jsonl")[0]["routed_experts"] is None
