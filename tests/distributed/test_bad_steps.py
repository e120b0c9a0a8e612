"""A step that is not finite: all ranks take the same decision, and each logs its own bad loss."""

import math
from unittest import mock

import pytest
import torch

from tests.distributed.training_runs import make_trainer
from torchtitan.testing.gloo import run_ranks
from torchtitan.tools.logging import logger


def messages_of_bad_step(folder, layout, bad_ranks):
    """Both microbatches of `bad_ranks` get a loss of nan in step 1: this rank's log, then its error."""
    flags = [*layout, "--training.nonfinite_grad_norm=stop", "--training.local_batch_size=2"]
    with make_trainer(folder, flags) as engine, mock.patch.object(logger, "warning") as warning:
        rank = torch.distributed.get_rank()
        factor = math.nan if rank in bad_ranks else 1.0
        tokens = torch.arange(2 * 16).view(2, 16)
        tokens.sample_ids = torch.tensor([[rank, rank], [10 + rank, 20 + rank]])
        step = dict(input_dict={"input": tokens}, labels=tokens, global_valid_tokens=1.0)
        engine.step = 1
        for _ in range(2):
            engine.forward_backward_step(**step, loss_fn=lambda x, labels, batch: x.sum() * factor)
        with pytest.raises(FloatingPointError) as error:
            engine.optim_step()
        messages = [call.args[0] for call in warning.call_args_list]
    return [message for message in messages if "bad loss" in message], str(error.value)


LAYOUTS = [
    (["--parallelism.data_parallel_shard_degree=4"], [1]),
    (["--parallelism.data_parallel_replicate_degree=4"], [1, 2]),
    (["--parallelism.tensor_parallel_degree=2"], [2, 3]),
]


def messages_of_layouts(folder):
    return [messages_of_bad_step(folder, *case) for case in LAYOUTS]


def test_all_ranks_stop_in_the_same_step_and_each_names_its_own_bad_microbatch(tmp_path):
    ranks = run_ranks(messages_of_layouts, 4, str(tmp_path), init_process_group=False)
    for (layout, bad_ranks), found in zip(LAYOUTS, zip(*ranks, strict=True), strict=True):
        assert len({error for _, error in found}) == 1, layout
        assert "step 1: the gradient norm is nan, 1 time(s) in a row" in found[0][1]
        for rank, (logged, _) in enumerate(found):
            documents = f"row 1 (document {rank}), row 2 (documents {10 + rank} to {20 + rank})"
            bad = f"step 1: the first bad loss of rank {rank} is nan, in microbatch 1 of 2, "
            assert logged == ([bad + documents] if rank in bad_ranks else [])
