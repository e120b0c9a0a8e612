"""The trainer's own data are the same rows in the same steps on every layout.

A shuffled mixture of two sources, in packed documents that attention keeps apart by positions.
"""

import hashlib
import math
import multiprocessing
from typing import Any

import pytest
import torch

from torchtitan.config import ConfigManager
from torchtitan.config.job_config import MixtureSource
from torchtitan.testing.gloo import run_ranks
from torchtitan.train import Trainer

GLOBAL_BATCH_SIZE = 8


def train(dump_folder: str, ranks: dict[str, int], overrides: list[str]) -> dict[str, Any]:
    """Train on this rank. Returns the losses, and this data-parallel rank's rows of all steps."""
    # A test's ranks are daemons, which may not start data workers.
    multiprocessing.current_process()._config["daemon"] = False
    flags = f"""
        job.dump_folder={dump_folder} model.flavor=debugmodel model.attn_type=varlen
        model.attn_mask_type=position_block_causal training.seq_len=128 training.shuffle
        training.global_batch_size={GLOBAL_BATCH_SIZE} training.mixed_precision_param=float32
        activation_checkpoint.mode=none lr_scheduler.warmup_steps=4 debug.seed=7 metrics.log_freq=1
        validation.enable validation.dataset=python_docs_validation validation.freq=2
        validation.steps=2 validation.local_batch_size=4
    """.split()
    flags += [f"parallelism.{name}_degree={n}" for name, n in ranks.items()]
    model = "--model.args=dim=64, n_layers=2, n_heads=4"
    config = ConfigManager().parse_args([model, *(f"--{flag}" for flag in flags), *overrides])
    config.training.mixture = [
        MixtureSource("python_docs", weight=0.7),
        MixtureSource("c4_test", weight=0.3),
    ]
    trainer = Trainer(config)
    read_next, losses, steps = trainer.next_step, [], []

    def next_step(iterator):
        step = read_next(iterator)
        # Labels too, because they depend on where documents end.
        rows = [row for b in step.batches for row in torch.stack((b.tokens, b.labels), 1)]
        steps.append([hashlib.sha256(str(row.tolist()).encode()).digest() for row in rows])
        return step

    def note(step, loss, max_loss, grad_norm, extra_metrics):
        losses.append((loss, *(v for k, v in extra_metrics.items() if k.startswith("sources/"))))

    trainer.next_step, trainer.metrics_processor.log = next_step, note
    validation_losses = []
    trainer.metrics_processor.log_validation = lambda loss, step: validation_losses.append(loss)
    dp_rank = trainer.dp_rank
    trainer.train()
    config.validation.steps, config.training.packing = -1, "fit"
    trainer._build_validator()
    trainer.validator.validate(trainer.model_parts, trainer.step)
    trainer.close()
    return {"losses": losses, "validation": validation_losses, "dp_rank": dp_rank, "steps": steps}


def run(folder, ranks: dict[str, int], local_batch_size: int, workers: int, n_steps: int, *more):
    """Return the losses and metrics of each step, a hash of all global batches, validation losses."""
    flags = f"local_batch_size={local_batch_size} dataloader.num_workers={workers} steps={n_steps}"
    overrides = [*(f"--training.{flag}" for flag in flags.split()), *more]
    options = {"timeout_seconds": 600, "init_process_group": False}
    n_ranks = math.prod(ranks.values())
    records = run_ranks(train, n_ranks, str(folder), ranks, overrides, **options)
    rows = {record["dp_rank"]: record["steps"] for record in records}
    assert all(record["steps"] == rows[record["dp_rank"]] for record in records)
    by_step = zip(*(rows[rank] for rank in sorted(rows)), strict=True)
    in_order = [row for step in by_step for part in step for row in part]
    assert len(in_order) == GLOBAL_BATCH_SIZE * n_steps
    row_hash = hashlib.sha256(b"".join(in_order)).hexdigest()
    return records[0]["losses"], row_hash, records[0]["validation"]


FSDP, DDP = "data_parallel_shard", "data_parallel_replicate"
PP = ("--parallelism.pipeline_parallel_schedule=1F1B",)
# name -> (ranks, local batch size, data workers, further flags)
LAYOUTS: dict[str, tuple] = {
    "accumulation 2": ({}, 4, 0),
    "accumulation 4, 1 worker": ({}, 2, 1),
    "2 workers": ({}, 8, 2),
    "FSDP 2, 1 worker": ({FSDP: 2}, 4, 1),
    "FSDP 4, accumulation 2, 2 workers": ({FSDP: 4}, 1, 2),
    "DDP 2, accumulation 4": ({DDP: 2, FSDP: 1}, 1, 0),
    "HSDP 2x2": ({DDP: 2, FSDP: 2}, 2, 0),
    "TP 2, 2 workers": ({"tensor_parallel": 2}, 8, 2),
    "PP 2": ({"pipeline_parallel": 2}, 8, 0, *PP),
    "CP 2, accumulation 2": ({"context_parallel": 2}, 4, 0),
}
QUICK = ["FSDP 2, 1 worker", "TP 2, 2 workers", "PP 2", "CP 2, accumulation 2"]


@pytest.fixture(scope="module")
def n_steps(request):
    return 20 if request.config.getoption("-m") == "slow" else 4


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, n_steps):
    return run(tmp_path_factory.mktemp("one"), {}, 8, 0, n_steps)


@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=[] if x in QUICK else pytest.mark.slow) for x in LAYOUTS]
)
def test_every_layout_trains_and_validates_on_the_rows_of_one_process(
    layout, one_process, n_steps, tmp_path
):
    ranks, local_batch_size, workers, *more = LAYOUTS[layout]
    losses, rows, validation_losses = run(
        tmp_path, ranks, local_batch_size, workers, n_steps, *more
    )
    assert rows == one_process[1]
    assert len(validation_losses) == n_steps // 2 + 2
    assert validation_losses == pytest.approx(one_process[2], rel=1e-6)
    assert losses == [pytest.approx(theirs, rel=1e-5) for theirs in one_process[0]]
