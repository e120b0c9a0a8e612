"""Generators on several ranks: the draws do not depend on the layout."""

import dataclasses
import itertools
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.distributed.layout_matrix import (
    ONE_PROCESS,
    SEQ_LEN,
    Layout,
    batch_flags,
    build_engine,
    run_step,
    whole,
)
from tests.unit.models.tiny import Operators
from tests.unit.rl.test_dialogues import Scripted, bisect
from tests.unit.rl.test_generator import FakeVLLM
from tests.unit.rl.toy import sampled, toy_config
from torchtitan.experiments.rl_toy.tasks import GuessTask
from torchtitan.integrations.vllm import VLLMGenerator
from torchtitan.rl import decoding
from torchtitan.rl.batcher import Batcher
from torchtitan.rl.generator import CopyGenerator, LocalGenerator, PolicyModel
from torchtitan.rl.job_config import JobConfig, RLGenerator
from torchtitan.rl.policy import PolicyTrainer
from torchtitan.rl.rollout import Draws, Rollouts
from torchtitan.rl.tasks import Grade, build_task
from torchtitan.rl.types import Completion, SamplingConfig
from torchtitan.rl.weight_sync import push_weights
from torchtitan.testing.gloo import run_ranks
from torchtitan.tools.errors import RunError

INTERLEAVED = ("--parallelism.pipeline_parallel_schedule=Interleaved1F1B",)
LAYOUTS = [Layout("FSDP 2", dp_shard=2), Layout("TP 2", tp=2)]
SLOW_LAYOUTS = [Layout("PP 2", pp=2), Layout("DDP 2", dp_replicate=2), Layout("CP 2", cp=2)]
MOE_LAYOUTS = [
    Layout("FSDP 2, EP 2", dp_shard=2, ep=2),
    Layout("PP 2, Interleaved1F1B", pp=2, extra=INTERLEAVED),
]
# Five rows of different lengths, so that two ranks get different numbers of rows.
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10], [11], [12, 13, 14, 15]]
SAMPLING = SamplingConfig(temperature=0.8, max_tokens=12, seed=3)


def generate_on_rank(layout: Layout, family: str, folder: str, stops: tuple[int, ...]):
    """(completions, with stop tokens, of a copy, how far log-probs are from the trainer's, whether
    all stayed as it was, loss after)"""
    flags = [*layout.overrides(), *batch_flags(family, "whole rows")]
    engine = build_engine(family, flags, folder)
    run_step(engine, layout, 0)
    named = [item for part in engine.model_parts for item in part.named_parameters()]
    gradients = [parameter.grad.clone() for _, parameter in named if parameter.grad is not None]

    generator = LocalGenerator(engine)
    free = generator.generate(PROMPTS, SAMPLING)
    stopped = None
    if stops:
        sampling = dataclasses.replace(SAMPLING, stop_token_ids=stops)
        # The ranks' rows begin and end at different steps, two at a time.
        few = LocalGenerator(engine, max_rows=2)
        stopped = generator.generate(PROMPTS, sampling) + few.generate(PROMPTS, sampling, 3)
    copy = CopyGenerator.from_policy(PolicyModel.from_engine(engine))
    push_weights(engine, copy)
    of_copy = copy.generate(PROMPTS, SAMPLING)
    batcher = Batcher(dp_size=engine.dp_size, seq_len=SEQ_LEN, rows=2)
    batch = batcher.batch(sampled(PROMPTS, free))
    config = JobConfig()
    config.rl.sampling.temperature = SAMPLING.temperature
    trainer = PolicyTrainer(config, engine=engine)
    rescored, off = trainer.rescore(batch)
    _, still_off = trainer.rescore(rescored)

    now = [item for part in engine.model_parts for item in part.named_parameters()]
    stayed = all(a is b for (_, a), (_, b) in zip(named, now, strict=True))
    after = [parameter.grad for _, parameter in named if parameter.grad is not None]
    stayed &= all(map(torch.equal, map(whole, gradients), map(whole, after)))
    stayed &= all(part.training for part in engine.model_parts)
    engine.optim_step()
    loss = run_step(engine, layout, 1)
    engine.close()
    return free, stopped, of_copy, (off, still_off), stayed, loss


def generate_in_layouts(layouts: list[Layout], *arguments):
    return [generate_on_rank(layout, *arguments) for layout in layouts]


@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        ("llama3", LAYOUTS),
        pytest.param("llama3", SLOW_LAYOUTS, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", MOE_LAYOUTS, marks=pytest.mark.slow),
    ],
)
def test_completions_are_those_of_one_process_in_every_layout(family, layouts, tmp_path):
    free, *_ = generate_on_rank(ONE_PROCESS, family, str(tmp_path), ())
    # Tokens that end three of the rows early, at different places.
    stops = free[0].token_ids[1], free[3].token_ids[4], free[4].token_ids[7]
    expected = generate_on_rank(ONE_PROCESS, family, str(tmp_path), stops)
    assert {c.finish_reason for c in expected[1]} == {"stop", "length"}
    arguments = layouts, family, str(tmp_path), stops
    ranks = run_ranks(generate_in_layouts, 2, *arguments, timeout_seconds=300)
    for layout, *of_ranks in zip(layouts, *ranks, strict=True):
        for free, stopped, of_copy, (off, still_off), stayed, loss in of_ranks:
            assert off <= 5e-6 and still_off == 0, layout.name
            assert_alike(free, expected[0], layout.name)
            assert_alike(stopped, expected[1], layout.name)
            assert_alike(of_copy, expected[2], layout.name)
            assert stayed, layout.name
            assert loss == pytest.approx(expected[5], rel=1e-5), layout.name
        assert of_ranks[0][:2] == of_ranks[1][:2], layout.name


def assert_alike(found: list[Completion], expected: list[Completion], where: str) -> None:
    assert [c.token_ids for c in found] == [c.token_ids for c in expected], where
    for ours, theirs in zip(found, expected, strict=True):
        difference = torch.tensor(ours.token_logprobs) - torch.tensor(theirs.token_logprobs)
        # fp32, sums in another order
        assert difference.abs().max() <= 5e-6, where


def gathers_on_rank(folder: str):
    """All-gathers of one call: with room for all weights, without, and of a training step after."""
    layout = Layout("FSDP 2", dp_shard=2)
    extra = ["--parallelism.fsdp_reshard_after_forward=always"]
    engine = build_engine("qwen3", [*layout.overrides(), *extra], folder)
    generator, counts, drawn = LocalGenerator(engine), [], []
    for room in (float("inf"), 0.0):
        has_room = mock.patch.object(decoding, "free_memory", return_value=room)
        with has_room, Operators() as operators:
            drawn.append(generator.generate(PROMPTS, SAMPLING))
        counts.append(n_gathers(operators))
    assert drawn[0] == drawn[1]
    with Operators() as operators:
        run_step(engine, layout, 0)
    engine.close()
    return [*counts, n_gathers(operators)]


def n_gathers(operators: Operators) -> int:
    return sum("fsdp.all_gather_copy_in" in str(operator) for operator, _ in operators.calls)


def test_weights_are_gathered_once_where_memory_allows(tmp_path):
    for once, for_each_token, step in run_ranks(gathers_on_rank, 2, str(tmp_path)):
        # Embedding, blocks, norm and output; for each token but the last again.
        assert for_each_token == once * SAMPLING.max_tokens
        # Backward gathers again what forward freed, afterwards as before.
        assert step > once


# ---- a draw that fails on one rank ----


class FailsOnRankOne(Scripted):
    """Generates on two ranks together; rank 1 fails at the call of this number."""

    ranks_per_copy = 2

    def __init__(self, tokenizer, fails_at: int):
        super().__init__(tokenizer, bisect)
        self.fails_at = fails_at

    def _draw(self, *arguments):
        if len(self.calls) + 1 == self.fails_at and dist.get_rank() == 1:
            raise ValueError(f"no memory at {self.fails_at}")
        return super()._draw(*arguments)


def errors_on_rank(folder: str) -> list[str]:
    errors = []
    for fails_at, turns, redraws in (1, 3, 0), (2, 3, 0), (3, 3, 0), (1, 1, 1), (2, 1, 1):
        task = GuessTask(value_max=6)
        generator = FailsOnRankOne(task.tokenizer, fails_at)
        draws = Draws(task, generator, torch.device("cpu"), ahead=False)
        flags = [f"--rl.task.max_turns={turns}", f"--rl.redraws={redraws}"]
        rollouts = Rollouts(task, toy_config(folder, "--rl.task.name=guess", *flags).rl, draws)
        rollouts.start_until(1)
        with pytest.raises((ValueError, RunError)) as error:
            rollouts.take(1)
        errors.append(str(error.value))
    return errors


def test_draw_that_fails_on_one_of_the_ranks_that_generate_together_is_raised_on_both(tmp_path):
    for errors in run_ranks(errors_on_rank, 2, str(tmp_path)):
        for error, call in zip(errors, (1, 2, 3, 1, 2), strict=True):
            assert f"no memory at {call}" in error


# ---- vLLM, replaced by a fake: only our code runs here ----


def ask_vllm_on_rank(folder: str, degree: int):
    """(options of this rank's engine, the prompts that it got, how often each episode was drawn again)."""
    sys.modules["vllm"] = fake = FakeVLLM()
    generator = VLLMGenerator(RLGenerator(tensor_parallel_degree=degree), "assets")
    generator.policy_version = 0
    config = toy_config(folder, "--rl.redraws=1").rl
    task = build_task(config, None)
    teaches = {task.prompt(place).text for place in (1, 2)}
    n_graded = itertools.count()
    task.grade = lambda prompt, _: Grade(next(n_graded) if prompt.text in teaches else 0.5, {})
    rollouts = Rollouts(task, config, Draws(task, generator, torch.device("cpu"), ahead=False))
    rollouts.start_until(1)
    with mock.patch.object(generator, "generate", wraps=generator.generate) as generate:
        episodes = rollouts.take(1)
    asked = [list(prompt) for call in generate.call_args_list for prompt in call.args[0]]
    return fake.options, asked, [int(episode.scores["redraws"]) for episode in episodes[::4]]


@pytest.mark.parametrize("degree", [1, 2])
def test_ranks_that_split_a_vllm_engine_draw_the_same_also_again(degree, tmp_path):
    """Only rank 0 knows that place 0 needs another draw, and only rank 1 that place 3 does."""
    first, second = run_ranks(ask_vllm_on_rank, 2, str(tmp_path), degree)
    config = toy_config(tmp_path).rl
    task = build_task(config, None)
    by_try = [(0, 1, 2, 3), (4, 7)] if degree == 2 else [(0, 1), (4,)]
    assert first[1] == [list(task.prompt(i).token_ids) for indices in by_try for i in indices]
    assert (second[1] == first[1]) == (degree == 2)
    for options, _, redraws in (first, second):
        # Of torchrun: it takes the rank's own device.
        assert options["distributed_executor_backend"] == "external_launcher"
        assert options["tensor_parallel_size"] == degree
        assert redraws == [1, 0, 0, 1]
