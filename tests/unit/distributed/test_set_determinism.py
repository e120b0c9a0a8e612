"""Seeds of simulated ranks, read back from torch's generator."""

import math
import os
from collections import defaultdict
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.distributed import parallel_dims
from torchtitan.config import Debug
from torchtitan.distributed.utils import set_determinism
from torchtitan.testing.gloo import run_ranks


@pytest.fixture(autouse=True)
def keep_process_state():
    with patch.dict(os.environ), torch.random.fork_rng():
        yield
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False


def seed_in_use():
    return torch.get_rng_state()[:8].view(torch.int64).item()


def seeds(distinct, seed, **degrees):
    """Return (index on each of `distinct` -> its ranks' seeds) in a simulated world, and the base seeds."""
    world_size = math.prod(degrees.values())
    found, bases = defaultdict(set), set()
    for rank in range(world_size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        dims = parallel_dims(**degrees)
        bases.add(set_determinism(dims, torch.device("cpu"), Debug(seed=seed), distinct))
        found[tuple(dims.get_mesh(name).get_local_rank() for name in distinct)].add(seed_in_use())
        dist.destroy_process_group()
    return found, bases


def test_pipeline_ranks_differ_and_data_parallel_ranks_agree():
    assert seeds(["pp"], 1000, dp_shard=4, pp=2) == ({(0,): {1000}, (1,): {1001}}, {1000})


def test_first_distinct_axis_varies_fastest():
    found, bases = seeds(["fsdp", "dp_replicate"], 2000, dp_shard=3, dp_replicate=2, tp=2)
    assert bases == {2000}
    assert found == {(s, r): {2000 + s + 3 * r} for s in range(3) for r in range(2)}


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
    dims = parallel_dims(dp_shard=2)
    base = set_determinism(dims, torch.device("cpu"), Debug(), ["fsdp"])
    return base, seed_in_use()


def test_without_a_seed_all_ranks_take_rank_zeros():
    assert run_ranks(base_and_own_seed, 2, 50) == [(50, 50), (50, 51)]
