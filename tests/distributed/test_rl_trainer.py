"""`PolicyTrainer` gives every layout the gradients, log-probs and numbers of one process."""

import dataclasses
import math
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.rl_runs import LAYOUTS
from tests.unit.rl.toy import gradients, toy_config, toy_samples
from torchtitan.rl.batcher import Batcher
from torchtitan.rl.losses import GRPOLoss
from torchtitan.rl.policy import PolicyTrainer
from torchtitan.rl.types import OptimParams
from torchtitan.testing.gloo import run_ranks

# Fewer samples than data-parallel ranks, an odd number, several microbatches, and split calls.
CALLS = {"one": [1], "odd": [3], "many": [9], "split": [4, 5]}
MODES = ["token-mean", "seq-mean-token-mean"]
# Corrections of the generator's mismatch, which is up to 0.9 nats here; the caps and bounds are
# reached. Ratios of whole sequences are refused under context parallelism.
CORRECTIONS = [
    GRPOLoss(correction="token", correction_cap=1.1, max_token_mismatch=0.4),
    GRPOLoss(correction="sequence", correction_cap=1.2, max_sequence_mismatch=0.2),
]


def numbers_of(trainer, outputs):
    no_update = OptimParams(lr=0.0, weight_decay=0.0, max_norm=math.inf)
    return {
        "gradients": gradients(trainer),
        "loss": [output.loss for output in outputs],
        "metrics": outputs[-1].metrics,
        "logprobs": torch.cat([x for output in outputs for x in output.logprobs]),
        "grad_norm": trainer.optim_step(no_update).grad_norm,
    }


def run_on_this_rank(dump_folder, overrides):
    config = toy_config(dump_folder, "--rl.loss.entropy_coef=0.01", *overrides)
    trainer = PolicyTrainer(config)
    found = {}
    for mode in MODES:
        batcher = Batcher(
            dp_size=trainer.engine.dp_size, seq_len=24, rows=2, agg_mode=mode, deferred=True
        )
        for name, counts in CALLS.items():
            samples = toy_samples(sum(counts))
            outputs = []
            for n in counts:
                batch, samples = batcher.batch(samples[:n]), samples[n:]
                outputs.append(trainer.forward_backward(batch, return_logprobs=True))
            found[mode, name] = numbers_of(trainer, outputs)
    cp = trainer.engine.parallel_dims.cp_enabled
    for loss in CORRECTIONS:
        if loss.needs_whole_sequences and cp:
            with pytest.raises(ValueError, match="takes ratios over whole sequences"):
                trainer.forward_backward(batcher.batch(toy_samples(9)), loss)
            continue
        batcher = Batcher(dp_size=trainer.engine.dp_size, seq_len=24, rows=2)
        # Microbatches of several shapes, too, which pipelines take one after another.
        for bucketing in (False, True):
            batch = dataclasses.replace(batcher, bucketing=bucketing).batch(toy_samples(9))
            trainer.zero_grad()
            output = trainer.forward_backward(batch, loss, return_logprobs=True)
        found[loss.correction, "corrected"] = numbers_of(trainer, [output])
    trainer.close()
    return found


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    (run,) = run_ranks(run_on_this_rank, 1, tmp_path_factory.mktemp("one"), [])
    return run


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_computes_what_one_process_does(layout, one_process, tmp_path):
    runs = run_ranks(run_on_this_rank, 2, tmp_path, LAYOUTS[layout])
    for key, expected in one_process.items():
        for run in runs:
            if layout == "CP" and key == ("sequence", "corrected"):
                assert key not in run
                continue
            found = run[key]
            # Parameters of other stages are on other ranks.
            own = {name: expected["gradients"][name] for name in found["gradients"]}
            torch.testing.assert_close(found["gradients"], own, rtol=1e-4, atol=2e-6)
            assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-5)
            assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-4, abs=1e-5)
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
            logprobs = found["logprobs"], expected["logprobs"]
            torch.testing.assert_close(*logprobs, rtol=1e-5, atol=2e-6)
    if layout == "PP":
        key = MODES[0], "one"
        names = set(runs[0][key]["gradients"]) | set(runs[1][key]["gradients"])
        assert names == set(one_process[key]["gradients"])


def mistakes_on_this_rank(dump_folder, overrides, same_batch):
    """Return (the error of each mistake, whether the trainer trains afterwards)."""
    trainer = PolicyTrainer(toy_config(dump_folder, "--rl.loss.kl_coef=0.1", *overrides))
    rank, dp_size, said = dist.get_rank(), trainer.engine.dp_size, []

    def batch(dp_size, with_reference=True, n=4, unknown=None):
        """unknown: tensor with an unknown token id, for the second data-parallel rank, if any."""
        samples = toy_samples(n)
        if with_reference:
            samples = [dataclasses.replace(s, ref_logprobs=s.logprobs) for s in samples]
        if unknown is not None:
            getattr(samples[1], unknown)[-1] = 32
        return Batcher(dp_size=dp_size, seq_len=24, rows=2).batch(samples)

    good, wrong = batch(dp_size), batch(3 - dp_size)
    for own in (
        batch(dp_size, unknown="token_ids"),
        batch(dp_size, unknown="labels"),
        wrong if same_batch or rank == 1 else good,
        batch(dp_size, with_reference=False) if same_batch or rank == 1 else good,
        batch(dp_size, n=4 if rank == 0 else 8),
    ):
        started = time.monotonic()
        try:
            trainer.forward_backward(own)
        except ValueError as error:
            said.append(str(error))
        assert time.monotonic() - started < 5
    trainer.forward_backward(good)
    finite = math.isfinite(trainer.optim_step().grad_norm)
    trainer.close()
    return said, finite


@pytest.mark.parametrize("layout, same_batch", [("FSDP", True), ("FSDP", False), ("PP", True)])
def test_batch_that_does_not_fit_the_layout_stops_all_ranks_with_a_sentence(
    layout, same_batch, tmp_path
):
    dp_size = 2 if layout == "FSDP" else 1
    for said, finite in run_ranks(mistakes_on_this_rank, 2, tmp_path, LAYOUTS[layout], same_batch):
        token, label, for_other_layout, without_reference, unlike = said
        assert token.startswith("the tokens of samples must be ids in [0, 32), got ")
        assert label.startswith("labels must be ids in [0, 32) or -100, got ")
        assert f"made for {3 - dp_size} data-parallel ranks" in for_other_layout
        assert "needs ref_logprobs in the samples, got none" in without_reference
        assert "all ranks must pass the same batch, got rank 0: " in unlike
        assert finite
