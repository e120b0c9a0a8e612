"""Value heads on two ranks where `tests/reference/test_embedding_parity.py` does not look."""

import warnings

import pytest
import torch

from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.engine import TrainingEngine
from torchtitan.testing.gloo import run_ranks
from torchtitan.testing.tiny_jobs import (
    add_tiny_flavors,
    make_documents,
    run_step,
    tiny_job,
    whole_weights,
)

STAGES = [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]
LAYOUTS = {
    "experts": ("tiny_moe", {"expert_parallel_degree": 2}),
    "stages": ("tiny_tied", {"pipeline_parallel_degree": 2, "module_fqns_per_model_part": STAGES}),
    "FSDP around TP": ("tiny_tied", {"tensor_parallel_degree": 2, "always_fsdp": True}),
}


def squared_error(values, labels, batch):
    """It changes the values in place, as FSDP warns of where they are a view."""
    errors = values.squeeze(-1)
    errors -= batch["input"].float().sin()
    return (errors.square() * (labels != IGNORE_INDEX)).sum()


def train(folder, flavor, parallelism):
    """((loss, norm) of two steps, weights after them, whether this rank has no score)."""
    warnings.filterwarnings("error", ".*returned a view tensor")
    add_tiny_flavors()
    job = tiny_job(str(folder), flavor, model={"value_head": True}, parallelism=parallelism)
    with TrainingEngine(job) as engine:
        steps = [run_step(engine, make_documents(seed), loss_fn=squared_error) for seed in range(2)]
        return steps, whole_weights(engine), getattr(engine.model_parts[-1], "score", None) is None


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_train_as_one_process(tmp_path, name):
    flavor, parallelism = LAYOUTS[name]
    expected_steps, expected, _ = train(tmp_path, flavor, {})
    ranks = run_ranks(train, 2, str(tmp_path), flavor, parallelism)
    for steps, weights, _ in ranks:
        for ours, theirs in zip(steps, expected_steps, strict=True):
            assert ours == pytest.approx(theirs, rel=5e-6)
        assert weights.keys() == expected.keys()
        for key, weight in weights.items():
            torch.testing.assert_close(weight, expected[key], rtol=1e-5, atol=1e-6, msg=key)
    has_no_score = [missing for *_, missing in ranks]
    assert has_no_score == ([True, False] if name == "stages" else [False, False])
