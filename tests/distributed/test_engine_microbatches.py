"""Ranks that bring unequally many microbatches, or none: the step is that of one process."""

from collections.abc import Callable

import pytest
import torch

from tests.distributed.layout_matrix import (
    SEQ_LEN,
    VOCAB,
    Layout,
    batch_flags,
    build_engine,
    gradients_of,
    whole,
)
from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.batch.dummy_microbatches import token_counters
from torchtitan.distributed.utils import dist_sum
from torchtitan.testing.gloo import run_ranks
from torchtitan.tools.errors import RunError

LENGTHS = (7, SEQ_LEN, 16, 5)
# Per call the microbatches of each data-parallel rank; further ranks have none.
CALLS = (([0, 1, 2], [3]), ([], [1, 0]), ([], []))

DENSE = ("llama3", "documents, varlen")
EXPERTS = ("qwen3 MoE", "documents, varlen")
FULL_AC = ("--activation_checkpoint.mode=full",)
MEAN = ("--training.gradient_reduction=mean",)
CASES = {
    2: [
        (Layout("FSDP 2", dp_shard=2), DENSE),
        (Layout("DDP 2", dp_replicate=2, extra=MEAN), ("llama3", "whole rows")),
        (Layout("DDP 2", dp_replicate=2), EXPERTS),
        (Layout("FSDP 2, EP 2, full AC", dp_shard=2, ep=2, extra=FULL_AC + MEAN), EXPERTS),
    ],
    4: [
        (Layout("HSDP 2x2", dp_replicate=2, dp_shard=2, extra=MEAN), DENSE),
        (Layout("FSDP 2, CP 2", dp_shard=2, cp=2), DENSE),
        (Layout("DDP 2, PP 2", dp_replicate=2, pp=2, extra=MEAN), DENSE),
        (Layout("FSDP 2, PP 2, EP 2, full AC", dp_shard=2, pp=2, ep=2, extra=FULL_AC), EXPERTS),
    ],
    "more of 4": [
        (Layout("FSDP 2, TP 2", dp_shard=2, tp=2, extra=MEAN), DENSE),
        (Layout("FSDP 2, PP 2", dp_shard=2, pp=2, extra=MEAN), DENSE),
    ],
}


def microbatch(index: int):
    """Rows [1 or 2, LENGTHS[index]] of two documents each, the same wherever they are run."""
    generator = torch.Generator().manual_seed(index)
    rows, length = 1 + index % 2, LENGTHS[index]
    tokens = torch.randint(0, VOCAB, (rows, length), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[:, ::3] = IGNORE_INDEX
    positions = torch.arange(length).repeat(rows, 1)
    positions[:, length // 2 :] -= length // 2
    return {"input": tokens, "positions": positions}, labels


def measure(layout: Layout, case: tuple[str, str], dump_folder: str) -> dict:
    family, batch = case
    flags = [*layout.overrides(), *batch_flags(family, batch)]
    with build_engine(family, flags, dump_folder) as engine:
        return _measure(engine)


def _measure(engine) -> dict:
    losses, scores = [], {}
    for call in CALLS:
        if engine.dp_size == 1:
            mine = [index for indices in call for index in indices]
        else:
            mine = call[engine.dp_rank] if engine.dp_rank < len(call) else []
        pairs = [microbatch(index) for index in mine]
        loss = engine.forward_backward_step(
            input_dict=[batch for batch, _ in pairs],
            labels=[labels for _, labels in pairs],
            global_valid_tokens=50,
        )
        losses.append(dist_sum(loss, engine.parallel_dims.get_optional_mesh("loss")))
        # In between, as a policy's log-probs are: gradients must not notice.
        outputs = engine.forward_step(
            [batch for batch, _ in pairs], output_fn=lambda logits, batch: logits.norm(dim=-1)
        )
        if outputs is not None:
            assert len(outputs) == len(mine)
            scores.update(zip(mine, outputs, strict=True))
    return {
        "losses": losses,
        "scores": scores,
        "gradients": gradients_of(engine),
        "dp_size": engine.dp_size,
        "counts": [_summed(counter, engine) for counter in token_counters(engine.model_parts)],
        "grad_norm": engine.optim_step(denominator=10.0).grad_norm.item(),
    }


def _summed(counter: torch.Tensor, engine) -> torch.Tensor:
    counter = whole(counter)
    mesh = engine.parallel_dims.get_optional_mesh("loss")
    if mesh is not None:
        torch.distributed.all_reduce(counter, group=mesh.get_group())
    return counter


def each(function: Callable, cases: list[tuple], dump_folder: str) -> list:
    """The results of a function in all cases, one after another on the same ranks."""
    return [function(*case, dump_folder) for case in cases]


@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (4, "more of 4"))]
)
def test_unequal_lists_give_the_step_of_one_process(ranks, tmp_path):
    cases = CASES[ranks]
    world_size = cases[0][0].world_size
    one = Layout("1 process")
    alone = {case: measure(one, case, str(tmp_path)) for case in {case for _, case in cases}}
    ranks = run_ranks(each, world_size, measure, cases, str(tmp_path), timeout_seconds=300)
    for (layout, case), runs in zip(cases, zip(*ranks, strict=True), strict=True):
        expected = alone[case]
        assert bool(expected["counts"]) == (case is EXPERTS)
        gradients, scores = {}, {}
        for run in runs:
            gradients |= run["gradients"]
            scores |= run["scores"]
            assert run["losses"] == pytest.approx(expected["losses"], rel=1e-5), layout.name
            # Of gradients divided by 10 per data-parallel rank, whichever way they were reduced.
            grad_norm = expected["grad_norm"] / run["dp_size"]
            assert run["grad_norm"] == pytest.approx(grad_norm, rel=1e-5), layout.name
        counts = runs[0]["counts"] if layout.pp == 1 else runs[0]["counts"] + runs[-1]["counts"]
        assert len(counts) == len(expected["counts"]), layout.name
        for ours, theirs in zip(counts, expected["counts"], strict=True):
            if "full AC" in layout.name:  # recomputation counts every token again
                ours = ours / 2
            # Scores of two experts may be equal up to rounding.
            assert (ours - theirs).abs().sum() <= 2, layout.name
        assert scores.keys() == expected["scores"].keys(), layout.name
        for index, score in scores.items():
            torch.testing.assert_close(
                score, expected["scores"][index], rtol=1e-4, atol=1e-4, msg=layout.name
            )
        assert gradients.keys() == expected["gradients"].keys(), layout.name
        for name, gradient in gradients.items():
            if layout.extra[-1:] == MEAN:
                gradient = gradient * runs[0]["dp_size"]
            difference = (gradient - expected["gradients"][name]).abs().max()
            scale = expected["gradients"][name].abs().max()
            assert difference <= 2e-5 * scale, f"{layout.name}: {name}"


def step_on_unequal_rows(reshard: str, dump_folder: str) -> list[float]:
    """The global loss and the gradient norm of one batch per rank: 3 rows or 1 row."""
    layout = Layout("FSDP 2, PP 2", dp_shard=2, pp=2)
    reshard = f"--parallelism.fsdp_reshard_after_forward={reshard}"
    flags = [*layout.overrides(), *batch_flags(*DENSE), reshard]
    with build_engine("llama3", flags, dump_folder) as engine:
        batch, labels = microbatch(0)
        n_rows = 3 - 2 * engine.dp_rank
        batch = {name: values.repeat(n_rows, 1) for name, values in batch.items()}
        loss = engine.forward_backward_step(
            input_dict=batch, labels=labels.repeat(n_rows, 1), global_valid_tokens=10
        )
        loss = dist_sum(loss, engine.parallel_dims.get_optional_mesh("loss"))
        return [loss, engine.optim_step().grad_norm.item()]


@pytest.mark.slow
def test_pipelines_may_split_unequal_batches_whenever_weights_are_gathered(tmp_path):
    by_default, always = (
        run_ranks(step_on_unequal_rows, 4, reshard, str(tmp_path), timeout_seconds=60)
        for reshard in ("default", "always")
    )
    assert always == [pytest.approx(numbers, rel=1e-5) for numbers in by_default]


class FailedOnPurpose(Exception):
    pass


def fail(*_):
    raise FailedOnPurpose


def step_after_failures(fails: bool, dump_folder: str) -> tuple[float, float]:
    """Loss and gradient norm with weights that were changed after the failures."""
    layout = Layout("FSDP 2", dp_shard=2)
    flags = [*layout.overrides(), *batch_flags(*DENSE)]
    with build_engine("llama3", flags, dump_folder) as engine:
        (model,) = engine.model_parts
        batch, labels = microbatch(0)
        step = dict(input_dict=batch, labels=labels, global_valid_tokens=10)
        if fails:
            attention = model.layers["2"].attention
            for place in (
                attention.register_forward_pre_hook,
                model.register_forward_hook,
                attention.register_full_backward_hook,
            ):
                handle = place(fail)
                with pytest.raises(FailedOnPurpose):
                    engine.forward_backward_step(**step)
                handle.remove()
            engine.optimizers.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        loss = engine.forward_backward_step(**step).item()
        return loss, engine.optim_step().grad_norm.item()


def test_engine_goes_on_after_failures_in_forward_and_backward(tmp_path):
    cases = [(False,), (True,)]
    for without, with_failures in run_ranks(each, 2, step_after_failures, cases, str(tmp_path)):
        assert with_failures == without


def step_after_a_callers_failures(fails: bool, dump_folder: str) -> list:
    """Loss and gradient norm behind what this rank was told of each failure."""
    flags = [*Layout("PP 2", pp=2).overrides(), *batch_flags(*DENSE)]
    with build_engine("llama3", flags, dump_folder) as engine:
        batch, labels = microbatch(0)
        step = dict(input_dict=[batch] * 2, labels=[labels] * 2, global_valid_tokens=10)
        told = []
        for loss_fn in (fail, lambda *_: None, lambda *_: torch.zeros(())) if fails else ():
            with pytest.raises(Exception) as caught:
                engine.forward_backward_step(**step, loss_fn=loss_fn)
            told.append(caught.value)
        if fails:
            with pytest.raises(Exception) as caught:
                engine.forward_step([batch] * 2, output_fn=fail)
            told.append(caught.value)
            engine.optimizers.zero_grad()
        # Where it runs is where it is needed.
        own = {"output_fn": lambda logits, _: len(logits)} if engine.has_outputs else {}
        assert engine.forward_step([batch] * 2, **own) == (
            [len(batch["input"])] * 2 if own else None
        )
        loss = engine.forward_backward_step(**step).item()
        return [(loss, engine.optim_step().grad_norm.item()), *told]


def test_failure_of_a_callers_function_in_a_pipeline_is_raised_on_all_ranks(tmp_path):
    arguments = step_after_a_callers_failures, [(True,), (False,)], str(tmp_path)
    (first, expected), (last, _) = run_ranks(each, 2, *arguments, timeout_seconds=60)
    assert first[0] == last[0] == expected[0]
    assert [type(error) for error in first[1:]] == [RunError] * 4
    own = [type(error) for error in last[1:]]
    assert own == [FailedOnPurpose, ValueError, ValueError, FailedOnPurpose]
    for theirs, error in zip(first[1:], last[1:], strict=True):
        where = "rank 1 failed in the loss_fn, output_fn or head that its caller passed: "
        assert str(theirs).startswith(where) and str(error) in str(theirs)
    assert "scalar tensor computed from the outputs, got NoneType; " in str(last[2])
    assert "outputs, got one of shape [] without a gradient; " in str(last[3])


DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def losses_in(layout: Layout, dump_folder: str) -> list[torch.Tensor]:
    """Of lists of one microbatch on the first data-parallel rank, and none on others."""
    flags = [*layout.overrides(), *batch_flags(*DENSE)]
    with build_engine("llama3", flags, dump_folder) as engine:
        batch, labels = microbatch(1)
        n = 1 if engine.dp_rank == 0 else 0
        return [
            engine.forward_backward_step(
                input_dict=[batch] * n,
                labels=[labels] * n,
                global_valid_tokens=10,
                loss_fn=lambda logits, *_, dtype=dtype: logits.logsumexp(-1).sum().to(dtype),
            )
            for dtype in DTYPES
        ]


def test_loss_is_fp32_on_every_rank_whatever_the_loss_function_returns(tmp_path):
    layouts = [(Layout("PP 2", pp=2),), (Layout("DDP 2", dp_replicate=2),)]
    ranks = run_ranks(each, 2, losses_in, layouts, str(tmp_path))
    for (layout,), first, second in zip(layouts, *ranks, strict=True):
        assert {loss.dtype for loss in (*first, *second)} == {torch.float32}
        full, half, double = (loss.item() for loss in first)
        assert half == pytest.approx(full, rel=2**-8)
        assert double == pytest.approx(full, rel=1e-6)
        assert torch.equal(torch.stack(second), torch.stack(first) * (layout.pp > 1))
