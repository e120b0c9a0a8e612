"""Losses by source are reported beside the package's own loss, and never in place of another one."""

import dataclasses

import pytest

from torchtitan.config import ConfigManager
from torchtitan.config.job_config import MixtureSource
from torchtitan.loss.cross_entropy import cross_entropy_loss
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.trainer import Trainer

pytestmark = pytest.mark.usefixtures("narrow_debugmodel")


@pytest.mark.parametrize("has_token_loss", [None, True])
def test_loss_of_a_client_trains_on_a_mixture(has_token_loss, tmp_path):
    calls = []

    def build_loss(job_config, **kwargs):
        def loss(logits, labels):
            calls.append(len(labels))
            return cross_entropy_loss(logits, labels)

        return loss

    spec = get_train_spec("llama3")
    spec = dataclasses.replace(spec, build_loss_fn=build_loss, has_token_loss=has_token_loss)
    flags = f"model.flavor=debugmodel job.dump_folder={tmp_path} training.seq_len=32".split()
    flags += ["training.steps=1", "training.local_batch_size=1", "lr_scheduler.warmup_steps=0"]
    config = ConfigManager().parse_args([f"--{flag}" for flag in flags])
    config.training.mixture = [MixtureSource("python_docs"), MixtureSource("c4_test")]
    with Trainer(config, train_spec=spec) as trainer:
        trainer.train()
    assert calls == [1]
