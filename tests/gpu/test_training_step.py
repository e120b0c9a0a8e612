"""The trainer on one GPU, under FSDP; test_families.py has engines without it."""

import math

import pytest

from tests.reliability.jobs import flags_in
from torchtitan.config import ConfigManager
from torchtitan.trainer import Trainer

FLAVORS = ["debugmodel", "debugmodel_flex_attn", "debugmodel_varlen_attn"]


def losses_of(dump_folder, flavor, *overrides):
    settings = flags_in(f"""
        job.dump_folder={dump_folder} model.flavor={flavor} training.dataset=c4_test
        training.local_batch_size=2 training.seq_len=512 training.steps=3
        lr_scheduler.warmup_steps=2 metrics.log_freq=1 debug.seed=1
    """)
    trainer = Trainer(ConfigManager().parse_args([*settings, *overrides]))
    losses = []
    trainer.metrics_processor.log = lambda step, loss, *_args, **_kwargs: losses.append(loss)
    trainer.train()
    trainer.close()
    assert trainer.device.type == "cuda"
    return losses


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("flavor", FLAVORS)
def test_debug_flavor_learns(flavor, compiled, tmp_path):
    losses = losses_of(tmp_path, flavor, *(["--compile.enable"] if compiled else []))
    assert all(math.isfinite(loss) for loss in losses)
    # An untrained model's loss is about the logarithm of the vocabulary's size, 2,048.
    assert losses[0] == pytest.approx(math.log(2048), abs=1.0) and losses[-1] < losses[0]
