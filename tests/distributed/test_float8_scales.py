"""float8 scales that were computed in advance belong to the weights that are gathered."""

import math

import pytest
import torch

from tests.unit.rl.toy import toy_config, toy_samples
from torchtitan.rl.batcher import Batcher
from torchtitan.rl.policy import PolicyTrainer, ReferencePolicy
from torchtitan.rl.snapshots import Snapshots, host_copy
from torchtitan.rl.types import OptimParams
from torchtitan.rl.weight_sync import copy_weights
from torchtitan.testing.gloo import run_ranks

pytest.importorskip("torchao")

FLOAT8 = (
    "--parallelism.data_parallel_shard_degree=2",
    "--model.converters=quantize.linear.float8",
    "--quantize.linear.float8.emulate",
    "--quantize.linear.float8.filter_fqns=output",
    "--quantize.linear.float8.enable_fsdp_float8_all_gather",
)
IN_ADVANCE = "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"


def logprobs_on_this_rank(folder, flags):
    """Log-probs of one batch after every kind of change of the weights that is no optimizer step.

    An optimizer step before each change moves the weights far, and computes scales.
    """
    trainer = PolicyTrainer(toy_config(folder, *FLOAT8, *flags))
    batcher = Batcher(dp_size=2, seq_len=24, rows=2, deferred=True)
    batch = batcher.batch(toy_samples(4))
    found = {}

    def step():
        trainer.forward_backward(batch)
        trainer.optim_step(OptimParams(lr=0.2, weight_decay=0.0, max_norm=math.inf))

    def note(name, logprobs=None):
        logprobs = trainer.forward(batch) if logprobs is None else logprobs
        found[name] = torch.cat([x for x in logprobs if x is not None])

    step()
    note("start")
    reference = ReferencePolicy(trainer)
    first = host_copy(trainer.engine)
    (model,) = trainer.engine.model_parts
    pushed = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    snapshots = Snapshots(trainer.engine, limit=4)
    key = snapshots.key()
    path = f"{folder}/first{len(flags)}"
    trainer.save_checkpoint(path)
    with snapshots.changing():
        step()
    note("stepped")
    note("reference", reference.logprobs(batch))
    note("stepped, after reference")
    with snapshots.using(key):
        note("snapshot")
    note("stepped, after snapshot")
    loaded = snapshots.loaded(lambda: trainer.load_checkpoint(path, model_only=True))
    note("stepped, after loading a snapshot")
    with snapshots.using(loaded):
        note("loaded snapshot")
    trainer.load_checkpoint(path)
    note("loaded")
    step()
    trainer.replace_weights(first)
    note("replaced")
    step()
    copy_weights(pushed.items(), model, check_digest=False)
    note("pushed")
    trainer.close()
    return found


def both_on_this_rank(folder):
    return [logprobs_on_this_rank(folder, flags) for flags in ((IN_ADVANCE,), ())]


def test_scales_in_advance_change_no_bit_after_any_change_of_the_weights(tmp_path):
    for in_advance, at_gather in run_ranks(both_on_this_rank, 2, tmp_path, timeout_seconds=300):
        assert in_advance.keys() == at_gather.keys()
        assert not torch.equal(at_gather["start"], at_gather["stepped"])
        for name, logprobs in at_gather.items():
            assert torch.equal(in_advance[name], logprobs), name
            expected = "stepped" if name.startswith("stepped") else "start"
            assert torch.equal(logprobs, at_gather[expected]), name
