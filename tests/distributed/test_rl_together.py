"""Models with adapters that share a pass have the numbers of one process, one after the other."""

import pytest

from tests.unit.rl.neighbours import changes
from tests.unit.rl.together import largest_difference, sample, train
from torchtitan.testing.gloo import run_ranks

FSDP, TP = "--parallelism.data_parallel_shard_degree=2", "--parallelism.tensor_parallel_degree=2"
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "FSDP": (2, [FSDP]),
    "TP": (2, [TP]),
    "FSDP x TP": (4, [FSDP, TP]),
    "PP": (2, ["--parallelism.pipeline_parallel_degree=2"]),
    "CP": (2, ["--parallelism.context_parallel_degree=2"]),
    "HSDP": (4, [FSDP, "--parallelism.data_parallel_replicate_degree=2"]),
    "DDP": (2, ["--parallelism.data_parallel_replicate_degree=2"]),
    "full AC": (1, ["--activation_checkpoint.mode=full"]),
    "compiled": (1, ["--compile.enable", "--compile.backend=eager"]),
}
QUICK = ("FSDP", "TP", "DDP")
# Four models, because context parallelism has no gspo, which is the fifth one's loss.
N_MODELS, N_STEPS = 4, 3


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return train(str(tmp_path_factory.mktemp("alone")), N_MODELS, N_STEPS, is_together=False)


@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=[pytest.mark.slow] * (x not in QUICK)) for x in LAYOUTS]
)
def test_models_in_one_pass_have_the_numbers_of_one_process(layout, alone, tmp_path):
    world_size, flags = LAYOUTS[layout]
    # A model's state has 0.6 MiB on one rank: with FSDP some wait in memory, otherwise in files.
    serve = ("--rl.serve.max_host_mib=1",)
    for found in run_ranks(
        train, world_size, str(tmp_path), N_MODELS, N_STEPS, flags, True, serve, timeout_seconds=240
    ):
        assert largest_difference(found, alone) <= 1e-6


@pytest.mark.parametrize("layout", ["FSDP", "TP", pytest.param("PP", marks=pytest.mark.slow)])
def test_samples_of_several_models_are_those_of_one_process(layout, tmp_path):
    expected = sample(str(tmp_path / "one"), 3)
    world_size, flags = LAYOUTS[layout]
    for found in run_ranks(sample, world_size, str(tmp_path / "several"), 3, flags):
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        assert largest_difference(found, expected) <= 1e-5


@pytest.mark.parametrize(
    "layout", ["DDP", *(pytest.param(x, marks=pytest.mark.slow) for x in ("FSDP", "TP"))]
)
def test_no_command_changes_the_model_of_another_client(layout, tmp_path):
    world_size, flags = LAYOUTS[layout]
    found = run_ranks(changes, world_size, str(tmp_path), flags, timeout_seconds=240)
    assert found == [[]] * world_size
