"""Generators on one process: the trainer's own modules, and a copy of them."""

import dataclasses
import itertools
import sys
import types

import pytest
import torch

from tests.unit.rl.test_job_config import config_with
from tests.unit.test_engine import make_config, random_batch
from torchtitan.checkpoint.stream import digest_of
from torchtitan.config.checks import ConfigError
from torchtitan.engine import TrainingEngine
from torchtitan.integrations.vllm import VLLMGenerator
from torchtitan.rl.generator import CopyGenerator, LocalGenerator, PolicyModel, build_generator
from torchtitan.rl.job_config import RLGenerator, longest_episode
from torchtitan.rl.types import SamplingConfig
from torchtitan.rl.weight_sync import (
    NoWeightsError,
    StaleWeightsError,
    WeightMismatchError,
    push_weights,
    weights_for,
)

pytestmark = pytest.mark.long

PROMPTS = [[5, 6, 7], [8, 9], [1000, 3, 2, 1]]
SAMPLING = SamplingConfig(max_tokens=6, temperature=0.9)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return TrainingEngine(make_config(tmp_path_factory.mktemp("engine")))


def with_seed(seed):
    return dataclasses.replace(SAMPLING, seed=seed)


def test_generator_goes_on_from_its_saved_state_and_a_seed_needs_none(engine):
    generator = LocalGenerator(engine, seed=7)
    generator.generate(PROMPTS, SAMPLING)
    saved = generator.state_dict()
    second = generator.generate(PROMPTS, SAMPLING)
    resumed = LocalGenerator(engine, seed=0)
    resumed.load_state_dict(saved)
    assert resumed.generate(PROMPTS, SAMPLING) == second
    assert generator.generate(PROMPTS, SAMPLING) != second
    whole = generator.generate(PROMPTS, with_seed(5), 2)
    parts = [
        *resumed.generate(PROMPTS[:1], with_seed(5), 2),
        *resumed.generate(PROMPTS[1:], with_seed(5), 2, first_row=2),
    ]
    assert [c.token_ids for c in parts] == [c.token_ids for c in whole]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], r"prompt 1 must be .* at least one token id, .* 2048, got \[\]; encode"),
        ([[1], [2.0]], r"prompt 1 must be .*, got \[2.0\]; encode"),
        (["ab"], r"prompt 0 must be .*, got 'ab'; encode texts"),
        ([torch.tensor([1, 2])], r"prompt 0 must be .* got tensor.*tolist"),
        ([[1, 2048]], r"each below the model's 2048, got \[1, 2048\]"),
        ([[1] * 28], "prompt 0 of 28 tokens with max_tokens = 6 does not fit .* of 32"),
    ],
)
def test_prompts_that_cannot_be_continued_are_named(engine, prompts, message):
    generator = LocalGenerator(engine)
    with pytest.raises(ValueError, match=message):
        generator.generate(prompts, SAMPLING)
    (completion,) = generator.generate([[1] * 27], SAMPLING)  # the last token is never read
    assert len(completion.token_ids) == 6


def test_garbage_weights_are_told(engine, monkeypatch):
    norm = engine.model_parts[0].norm.weight
    monkeypatch.setattr(norm, "data", torch.full_like(norm, torch.nan))
    with pytest.raises(FloatingPointError, match="log-probs that are not finite"):
        LocalGenerator(engine).generate(PROMPTS, SAMPLING)


def take_a_step(engine):
    batch, labels = random_batch(2, 16)
    engine.forward_backward_step(input_dict=batch, labels=labels, global_valid_tokens=20)
    engine.optim_step()


def test_weights_that_changed_unannounced_are_refused(engine):
    generator = LocalGenerator(engine)
    before = engine.weights_version
    take_a_step(engine)
    with pytest.raises(StaleWeightsError, match=f"was version {before}; call update_weights"):
        generator.generate(PROMPTS, SAMPLING)
    assert push_weights(engine, generator) == before + 1
    assert generator.generate(PROMPTS, SAMPLING)[0].policy_version == before + 1


def test_copy_keeps_its_weights_until_an_update_and_then_has_the_trainers(engine):
    state = torch.get_rng_state()
    generator = CopyGenerator.from_policy(PolicyModel.from_engine(engine))
    push_weights(engine, generator)
    assert torch.equal(torch.get_rng_state(), state)
    old = generator.generate(PROMPTS, with_seed(1))
    assert old == LocalGenerator(engine).generate(PROMPTS, with_seed(1))
    take_a_step(engine)
    assert generator.generate(PROMPTS, with_seed(1)) == old
    push_weights(engine, generator)
    new = generator.generate(PROMPTS, with_seed(1))
    assert new != old
    assert new == LocalGenerator(engine).generate(PROMPTS, with_seed(1))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_receiver_that_takes_shards_gets_them_in_its_dtype_and_the_live_tensors(dtype, engine):
    receiver = types.SimpleNamespace(weight_names="ours", weight_dtype=dtype, takes_shards=True)
    weights, live = weights_for(receiver, engine), engine.model_parts[0].state_dict()
    shards = dict(weights)
    assert weights.digest == digest_of(shards.items())
    given = weights.state_dict()
    assert shards.keys() == given.keys() == live.keys()
    for name, tensor in live.items():
        assert torch.equal(shards[name].tensor, given[name])
        assert torch.equal(given[name], tensor.to(given[name].dtype))
        assert given[name].dtype in (dtype, torch.float32)
        assert given[name].data_ptr() == tensor.data_ptr() or given[name].dtype != tensor.dtype


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, LocalGenerator),
        ({"generator.dtype": "float32"}, LocalGenerator),
        ({"generator.dtype": "bfloat16"}, CopyGenerator),
        ({"async_steps": 1}, CopyGenerator),
        ({"weight_sync.mode": "broadcast"}, CopyGenerator),
    ],
)
def test_config_chooses_the_generator(engine, changes, kind):
    config = config_with(changes)
    generator = build_generator(config, engine)
    assert type(generator) is kind
    assert generator.is_collective == (kind is LocalGenerator)
    push_weights(engine, generator)
    found = generator.generate(PROMPTS, with_seed(1))
    assert {c.policy_version for c in found} == {engine.weights_version}


def test_sharing_weights_of_another_type_is_refused(engine):
    config = config_with({"weight_sync.mode": "reference", "generator.dtype": "bfloat16"})
    with pytest.raises(ConfigError, match="rl.generator.dtype = 'bfloat16' is not the trainer's"):
        build_generator(config, engine)


# ---- vLLM, replaced by a fake: only our code runs here ----


class FakeVLLM(types.ModuleType):
    """Fakes the calls of vLLM; continues every prompt with 7, 8 and the stop token."""

    def __init__(self):
        super().__init__("vllm")
        self.loaded, self.can_empty_cache = [], True
        self.n_read, self.fault = None, None  # of an update
        self.SamplingParams = types.SimpleNamespace

    def LLM(self, **options):
        self.options = options
        return types.SimpleNamespace(
            generate=self.generate,
            collective_rpc=self.collective_rpc,
            reset_prefix_cache=lambda: self.can_empty_cache,
        )

    def collective_rpc(self, method, kwargs=None):
        if callable(method):  # for workers, which the fake lacks
            return
        assert method == "reload_weights"
        self.loaded.extend(itertools.islice(kwargs["weights_iterator"], self.n_read))
        if self.fault is not None:
            raise self.fault

    def generate(self, prompts, params, use_tqdm, lora_request):
        self.requests = list(zip(prompts, params, strict=True))
        tokens = [7, 8, 9]
        chances = [{t: types.SimpleNamespace(logprob=-0.1 * t)} for t in tokens]
        output = types.SimpleNamespace(token_ids=tokens, logprobs=chances)
        return [types.SimpleNamespace(outputs=[output] * one.n) for one in params]


def test_vllm_gets_weights_and_prompts_and_gives_completions(engine, monkeypatch):
    fake = FakeVLLM()
    monkeypatch.setitem(sys.modules, "vllm", fake)
    generator = VLLMGenerator(RLGenerator(), "assets", seed=3)
    assert fake.options["logprobs_mode"] == "processed_logprobs"
    with pytest.raises(NoWeightsError):
        generator.generate(PROMPTS, SAMPLING)
    version = push_weights(engine, generator)
    names = [name for name, _ in fake.loaded]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" in names

    sampling = dataclasses.replace(with_seed(5), stop_token_ids=(9,))
    found = generator.generate(PROMPTS, sampling, 2, first_row=4)
    assert len(found) == 6
    assert found[0].token_ids == (7, 8, 9)
    assert found[0].token_logprobs == pytest.approx((-0.7, -0.8, -0.9))
    assert (found[0].finish_reason, found[0].policy_version) == ("stop", version)
    # Each prompt once; vLLM gives its samples the seeds that follow.
    assert [p["prompt_token_ids"] for p, _ in fake.requests] == PROMPTS
    assert [(params.n, params.seed) for _, params in fake.requests] == [(2, 9), (2, 11), (2, 13)]
    greedy = generator.generate(PROMPTS, dataclasses.replace(sampling, temperature=0.0))[0]
    assert greedy.token_logprobs == (0.0,) * 3
    with pytest.raises(ValueError, match="no log-probs of a truncated distribution"):
        generator.generate(PROMPTS, dataclasses.replace(sampling, top_p=0.9))


def test_vllm_takes_memory_length_and_degree_from_the_config(engine, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm", fake := FakeVLLM())
    config = config_with({"generator.backend": "vllm", "generator.memory_share": 0.7})
    config.training.seq_len, config.model.fp32_head = 96, True
    build_generator(config, engine)
    assert "model.fp32_head applies to the trainer" in caplog.text
    assert fake.options["gpu_memory_utilization"] == 0.7
    assert (fake.options["tensor_parallel_size"], fake.options["max_model_len"]) == (1, 96)
    assert longest_episode(config) == 96
    assert fake.options["enable_prefix_caching"] is True
    assert "distributed_executor_backend" not in fake.options
    config.rl.generator.max_seq_len = 48
    build_generator(config, engine)
    assert fake.options["max_model_len"] == longest_episode(config) == 48
    config.rl.generator.tensor_parallel_degree = 2
    with pytest.raises(ConfigError, match="number of ranks that generate, got 2 with 1 ranks"):
        build_generator(config, engine)


@pytest.mark.parametrize(
    ("faults", "problem"),
    [
        ({"n_read": 3}, "did not read all weights"),
        ({"n_read": 3, "fault": RuntimeError("no such shape")}, "no such shape"),
        ({"can_empty_cache": False}, "kept its prefix cache"),
    ],
)
def test_vllm_that_does_not_take_the_weights_is_told(faults, problem, engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", fake := FakeVLLM())
    generator = VLLMGenerator(RLGenerator(), "assets")
    vars(fake).update(faults)
    with pytest.raises(WeightMismatchError, match=f"rank 0: vLLM did not load .*{problem}"):
        push_weights(engine, generator)
    with pytest.raises(NoWeightsError):
        generator.generate(PROMPTS, SAMPLING)
