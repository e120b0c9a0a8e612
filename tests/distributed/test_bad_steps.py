"""A step that is not finite: all ranks take the same decision and say the same."""

import math

import pytest
import torch

from tests.distributed.training_runs import make_trainer
from torchtitan.step import losses as step_losses
from torchtitan.testing.gloo import run_ranks


def errors_of_bad_step(folder, layout, bad_ranks, looks_alone):
    """Both microbatches of `bad_ranks` get a loss of nan in step 1; what this rank says."""
    step_losses._SECONDS_TO_WAIT = 2
    flags = [*layout, "--training.nonfinite_grad_norm=stop", "--training.local_batch_size=2"]
    engine = make_trainer(folder, flags)
    rank = torch.distributed.get_rank()
    factor = math.nan if rank in bad_ranks else 1.0
    tokens = torch.arange(2 * 16).view(2, 16)
    tokens.sample_ids = torch.tensor([[rank, rank], [10 + rank, 20 + rank]])
    engine.step = 1
    with pytest.raises(FloatingPointError) as error:
        for _ in range(2):
            engine.forward_backward_step(
                input_dict={"input": tokens},
                labels=tokens,
                global_valid_tokens=1.0,
                loss_fn=lambda logits, labels, batch: logits.sum() * factor,
            )
        if looks_alone and rank == 0:
            engine.update.settle = lambda: None
        engine.optim_step()
        raise FloatingPointError("not asked")
    engine.close()
    return str(error.value)


@pytest.mark.parametrize(
    ("ranks", "layout", "bad_ranks", "told"),
    [
        (2, ["data_parallel_shard_degree=2"], [1], "rank 1, row 1 (document 1), row 2 (documents"),
        (3, ["data_parallel_replicate_degree=3"], [1, 2], "ranks with a bad loss: 1, 2"),
        (4, ["tensor_parallel_degree=2"], [2, 3], "ranks with a bad loss: 2, 3"),
    ],
    ids=["FSDP", "DDP", "TP"],
)
def test_all_ranks_stop_in_the_same_step_and_name_the_same_ranks(
    ranks, layout, bad_ranks, told, tmp_path
):
    flags = [f"--parallelism.{flag}" for flag in layout]
    args = (str(tmp_path), flags, bad_ranks, False)
    errors = run_ranks(errors_of_bad_step, ranks, *args, init_process_group=False)
    assert len(set(errors)) == 1
    assert "step 1: the gradient norm is nan, 1 time(s) in a row; the first bad" in errors[0]
    assert told in errors[0]


def test_first_bad_microbatch_is_named_whichever_rank_tells_first(monkeypatch):
    entries = [
        {"microbatch": microbatch, "of": 3, "loss": "nan", "rows": [], "rank": rank}
        for microbatch, rank in ((2, 0), (1, 3), (1, 1), (2, 2))
    ]
    monkeypatch.setattr(step_losses, "_of_all_ranks", lambda own: (entries, [0, 1, 2, 3], ""))
    assert "microbatch 1 of 3 on rank 1;" in step_losses._describe([], [])


def test_rank_that_looks_alone_does_not_wait_long(tmp_path):
    flags = ["--parallelism.data_parallel_shard_degree=2"]
    errors = run_ranks(
        errors_of_bad_step, 2, str(tmp_path), flags, [0, 1], True, init_process_group=False
    )
    assert errors[0] == "not asked"
    assert "other ranks did not say" in errors[1] and "bad loss: 1 (" in errors[1]
