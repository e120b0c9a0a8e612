"""Seeds of simulated ranks, read back from torch's generator."""

import os
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
import torch

from torchtitan.config import Debug
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_determinism
from torchtitan.testing.gloo import run_ranks


class SimulatedDims:
    """The part of ParallelDims that `set_determinism` uses, for one rank of a simulated world."""

    def __init__(self, sizes, coordinate):
        self.meshes = {}
        for name, size in sizes.items():
            mesh = MagicMock(device_type="cpu")
            mesh.size.return_value = size
            mesh.get_local_rank.return_value = coordinate[name]
            self.meshes[name] = mesh
        self.world_size = 1
        for size in sizes.values():
            self.world_size *= size
        self.world_mesh = SimpleNamespace(device_type="cpu")
        for name in ("pp", "tp", "cp", "dp_replicate", "dp_shard", "ep", "etp"):
            setattr(self, name, sizes.get(name, 1))

    def get_optional_mesh(self, name):
        return self.meshes.get(name)


@pytest.fixture(autouse=True)
def keep_process_state():
    with patch.dict(os.environ), torch.random.fork_rng():
        yield
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False


def seed_in_use():
    return torch.get_rng_state()[:8].view(torch.int64).item()


def seeds(sizes, distinct, seed):
    """Return the seed of every rank, by coordinate, and the set of base seeds."""
    found, bases = {}, set()
    coordinates = [{}]
    for name, size in sizes.items():
        coordinates = [c | {name: i} for c in coordinates for i in range(size)]
    for coordinate in coordinates:
        simulated = SimulatedDims(sizes, coordinate)
        with (
            patch("torch.distributed.distributed_c10d.get_world_size", return_value=8),
            patch("torch.distributed.distributed_c10d.get_rank", return_value=0),
        ):
            base = set_determinism(
                parallel_dims=simulated,
                device=torch.device("cpu"),
                debug_config=Debug(seed=seed, deterministic=False),
                distinct_seed_mesh_dims=distinct,
            )
        bases.add(base)
        found[tuple(coordinate.values())] = seed_in_use()
    return found, bases


def test_pipeline_ranks_differ_and_data_parallel_ranks_agree():
    found, bases = seeds({"dp_shard": 4, "pp": 2}, ["pp"], 1000)
    assert bases == {1000}
    for pp in range(2):
        assert {found[dp, pp] for dp in range(4)} == {1000 + pp}


def test_first_distinct_axis_varies_fastest():
    sizes = {"dp_shard": 3, "dp_replicate": 2, "tp": 4}
    found, bases = seeds(sizes, ["dp_shard", "dp_replicate"], 2000)
    assert bases == {2000}
    for (shard, replicate, _tp), seed in found.items():
        assert seed == 2000 + shard + 3 * replicate
    assert len(set(found.values())) == 6


def test_one_process_is_seeded_without_a_process_group():
    simulated = MagicMock(world_size=1)
    base = set_determinism(simulated, torch.device("cpu"), Debug(seed=42), ["pp"])
    assert base == 42 and seed_in_use() == 42 and torch.initial_seed() == 42
    assert os.environ["PYTHONHASHSEED"] == "42"


def test_one_process_without_a_seed_keeps_its_generator():
    torch.manual_seed(123)
    torch.rand(3)
    state = torch.get_rng_state()
    base = set_determinism(MagicMock(world_size=1), torch.device("cpu"), Debug(seed=None), [])
    assert base == 123
    assert torch.equal(state, torch.get_rng_state())


def test_deterministic_restricts_torch_to_deterministic_kernels():
    config = Debug(seed=1, deterministic=True, deterministic_warn_only=True)
    set_determinism(MagicMock(world_size=1), torch.device("cpu"), config, [])
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def base_and_own_seed(torch_seed):
    rank = torch.distributed.get_rank()
    torch.manual_seed(torch_seed + rank)
    dims = ParallelDims(
        dp_replicate=1, dp_shard=2, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=2
    )  # fmt: skip
    base = set_determinism(dims, torch.device("cpu"), Debug(), ["fsdp"])
    return base, seed_in_use()


def test_without_a_seed_all_ranks_take_rank_zeros():
    assert run_ranks(base_and_own_seed, 2, 50) == [(50, 50), (50, 51)]
