"""Distillation by the trainer is a plain loop with two transformers models."""

import pytest

from tests.distillation_jobs import Recorded, curves, job, make_folders, plain_loop
from torchtitan.trainer import Trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_folders(folder)
    return folder


@pytest.mark.parametrize("top_k", [0, 8])
@pytest.mark.parametrize("divergence, temperature", [("forward", 1.0), ("reverse", 2.0)])
def test_steps_have_the_losses_of_a_plain_loop(divergence, temperature, top_k, folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    weights = {"loss__kl_weight": 0.7, "loss__label_weight": 0.3}
    kind = {"loss__divergence": divergence, "loss__top_k": top_k, "loss__temperature": temperature}
    config = job(folder, tmp_path, **weights, **kind)
    with Trainer(config) as trainer:
        recorded = Recorded(trainer)
        trainer.train()
    student, teacher = (
        transformers.AutoModelForCausalLM.from_pretrained(folder / name, attn_implementation="eager")
        for name in ("student", "teacher")
    )
    expected = plain_loop(student, teacher, recorded.steps, config)
    assert any(batch.document_ids.max() > 0 for batch in recorded.steps[0])  # packed documents
    found = curves(tmp_path)
    assert len(found) == 5
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
