"""The time of gradient reductions, the number of weight gathers, and skipped steps."""

import contextlib
import inspect
from unittest import mock

import pytest
import torch

from tests.distributed.layout_matrix import (
    SHALLOW,
    gradients_of,
    named_parameters,
    register_tiny,
    whole,
)
from torchtitan.distributed.dtensor import local_tensor
from torchtitan.testing.gloo import run_ranks

EP = "--parallelism.expert_parallel_degree=2"
REPLICAS = "--parallelism.data_parallel_replicate_degree=2"
NEVER = "--parallelism.fsdp_reshard_after_forward=never"
PIPELINE = "--parallelism.pipeline_parallel_degree=2"
BF16 = "--training.mixed_precision_param=bfloat16"
GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


def make_engine(folder, *flags, family="llama3"):
    from tests.unit.test_engine import make_engine

    return make_engine(folder, f"--model.name={register_tiny(family)}", SHALLOW, *flags)


def own_microbatches(engine):
    """Return microbatches of different lengths; the last rank has one less, and runs a dummy."""
    generator = torch.Generator().manual_seed(engine.dp_rank)
    rows = [torch.randint(0, 2048, (1, n + 1), generator=generator) for n in (32, 16, 24)]
    rows = rows[: 3 - (engine.dp_rank + 1 == engine.dp_size)]
    return [{"input": row[:, :-1]} for row in rows], [row[:, 1:] for row in rows]


def step(engine):
    """Run backward on a list and then on a single batch; returns the accumulated gradients."""
    batches, labels = own_microbatches(engine)
    engine.forward_backward_step(input_dict=batches, labels=labels, global_valid_tokens=100)
    engine.forward_backward_step(input_dict=batches[0], labels=labels[0], global_valid_tokens=100)
    return gradients_of(engine)


@contextlib.contextmanager
def counting(name):
    import torch.distributed.fsdp._fully_shard._fsdp_param_group as group

    original = getattr(group, name)
    with mock.patch(f"{GROUP}.{name}", wraps=original) as function:
        function.arguments = []
        yield function
    bind = inspect.signature(original).bind
    function.arguments += [bind(*x.args, **x.kwargs).arguments for x in function.call_args_list]


def largest_difference(expected, ours):
    """Relative to the norm of a parameter's gradient."""
    return max(((ours[n] - g).norm() / g.norm()).item() for n, g in expected.items())


def gradients_of_both(folder, flags, family="llama3"):
    """Return the largest difference to undeferred gradients, relative to their norm, and both counts."""
    with make_engine(folder, *flags, family=family) as engine:
        with counting("foreach_reduce") as at_once:
            expected = step(engine)
        engine.optimizers.zero_grad()
        engine.runner.defers_reduction = True
        with counting("foreach_reduce") as deferred:
            ours = step(engine)
        largest = largest_difference(expected, ours)
        # A step that fails half-way leaves nothing behind for the next.
        engine.optimizers.zero_grad()
        with pytest.raises(ZeroDivisionError), engine.runner.more_microbatches_follow():
            batches, labels = own_microbatches(engine)
            sizes = iter([1, 1])

            def loss_fn(logits, labels, batch):
                return logits.sum() if next(sizes, None) else 1 / 0

            for _ in range(3):
                engine.forward_backward_step(
                    input_dict=batches[0], labels=labels[0], global_valid_tokens=1, loss_fn=loss_fn
                )
        engine.optimizers.zero_grad()
        largest = max(largest, largest_difference(ours, step(engine)))
        return largest, at_once.call_count, deferred.call_count


def weights_of_accumulating_trainer(folder):
    """Return both trainers' weights, and how often each trainer reduced and all-reduced."""
    from tests.distributed.training_runs import make_trainer

    found = []
    common = [REPLICAS, "--parallelism.data_parallel_shard_degree=2", "--training.steps=2"]
    common += ["--training.local_batch_size=1", "--training.global_batch_size=8"]
    for key, flags in (("plain", []), ("deferred", ["--training.defer_gradient_sync"])):
        with make_trainer(f"{folder}/{key}", [*common, *flags]) as trainer:
            with counting("foreach_reduce") as reduce:
                trainer.train()
            all_reduced = sum(call["all_reduce_grads"] for call in reduce.arguments)
            weights = {name: whole(p) for name, p in named_parameters(trainer)}
            found.append((weights, reduce.call_count, all_reduced))
    (expected, *counts), (ours, *deferred_counts) = found
    largest = max((ours[name] - expected[name]).abs().max().item() for name in ours)
    return largest, counts, deferred_counts


def gathers_of_backward(folder):
    with make_engine(folder, "--parallelism.fsdp_reshard_after_forward=always") as engine:
        batches, labels = own_microbatches(engine)
        step = dict(input_dict=batches[0], labels=labels[0], global_valid_tokens=10)
        with counting("foreach_all_gather") as alone:
            engine.forward_backward_step(**step)
        engine.forward_step(batches[0])
        with counting("foreach_all_gather") as after_scoring:
            engine.forward_backward_step(**step)
        return alone.call_count, after_scoring.call_count


def late_steps(folder, flags, family="llama3"):
    """Return hashes of local states after the same steps, with immediate and with late host reads."""
    from tests.unit.step.test_late_norm import differing, states

    results = []
    for is_late in (False, True):
        with make_engine(f"{folder}/{is_late}", *flags, family=family) as engine:
            engine.update.skips_on_device = is_late
            batches, labels = own_microbatches(engine)
            skipped = []
            for number in range(3):
                engine.forward_backward_step(
                    input_dict=batches, labels=labels, global_valid_tokens=1.0
                )
                if number == 1 and engine.dp_rank == 0:  # one rank has it, all skip
                    p = next(engine.model_parts[0].parameters())
                    p.grad.to_local().fill_(float("inf"))
                share = sum(label.numel() for label in labels)
                result = engine.optim_step(denominator=share)
                skipped.append(result.skipped)
            local = {name: local_tensor(t) for name, t in states(engine).items()}
            results.append((skipped, engine.weights_version, local))
    (skipped, version, expected), (late_skipped, late_version, ours) = results
    assert (late_skipped, late_version) == (skipped, version)
    return skipped, version, differing(expected, ours)


def gradients_of_schedules(folder):
    """Return the largest difference of a zero-bubble schedule's gradients to 1F1B's, per norm.

    8 microbatches in bf16. A weight's gradient is added up in fp32 after each weight half.
    """
    found = []
    for schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        pipeline = f"--parallelism.pipeline_parallel_schedule={schedule}"
        with make_engine(f"{folder}/{schedule}", BF16, PIPELINE, pipeline) as engine:
            generator = torch.Generator().manual_seed(engine.dp_rank)
            rows = [torch.randint(0, 2048, (1, 33), generator=generator) for _ in range(8)]
            batches, labels = [{"input": r[:, :-1]} for r in rows], [r[:, 1:] for r in rows]
            step = dict(input_dict=batches, labels=labels, global_valid_tokens=512.0)
            engine.forward_backward_step(**step)
            found.append(gradients_of(engine))
    return largest_difference(*found)


# name -> (function of (folder, *arguments), *its arguments); those of as many ranks run in one job.
CASES = {
    2: {
        "FSDP": (gradients_of_both, ()),
        "FSDP bf16 never": (gradients_of_both, (NEVER, BF16)),
        "EP": (gradients_of_both, (EP,), "qwen3 MoE"),
        "DDP": (gradients_of_both, (REPLICAS,)),
        "gathers": (gathers_of_backward,),
        "late FSDP": (late_steps, ()),
        "late EP": (late_steps, (EP,), "qwen3 MoE"),
    },
    4: {
        "trainer": (weights_of_accumulating_trainer,),
        "schedules": (gradients_of_schedules,),
    },
}


def run_cases(folder, n_ranks):
    return {
        name: function(f"{folder}/{name}", *arguments)
        for name, (function, *arguments) in CASES[n_ranks].items()
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return the results of all ranks, by case."""
    of_cases = {}
    for n_ranks in CASES:
        folder = str(tmp_path_factory.mktemp(f"{n_ranks}_ranks"))
        of_ranks = run_ranks(
            run_cases, n_ranks, folder, n_ranks, init_process_group=False, timeout_seconds=300
        )
        of_cases |= {name: [results[name] for results in of_ranks] for name in CASES[n_ranks]}
    return of_cases


@pytest.mark.parametrize("case", ["FSDP", "FSDP bf16 never", "EP", "DDP"])
def test_deferred_gradients_are_those_of_reducing_each_microbatch(found, case):
    for largest, at_once, deferred in found[case]:
        assert largest < 1e-6  # in bf16, too: what waits is added up in fp32
        assert deferred * 2 == at_once  # of 3 microbatches and 1: with each, or with 2 of them


def test_trainer_reduces_with_the_last_microbatch(found):
    for largest, counts, deferred in found["trainer"]:
        assert largest < 2e-6  # sums of four microbatches and two ranks in another order: 1.02e-6
        n = deferred[0]
        assert deferred == [n, n]
        assert counts == [2 * n, n]  # HSDP's copies are summed with the last one anyway


def test_backward_gathers_no_more_after_a_forward_without_one(found):
    for without, after in found["gathers"]:
        assert after == without


@pytest.mark.parametrize("case", ["late FSDP", "late EP"])
def test_all_ranks_skip_on_the_device_what_the_host_would_skip(found, case):
    assert found[case] == [([False, True, False], 2, [])] * 2


def test_zero_bubble_adds_up_bf16_gradients_in_fp32_as_1f1b_does(found):
    assert max(found["schedules"]) < 1e-4
