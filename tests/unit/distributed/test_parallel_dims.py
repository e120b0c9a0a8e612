import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.distributed import parallel_dims as dims

AXES = {"pp", "batch", "loss", "dp_replicate", "fsdp", "cp", "tp", "ep", "efsdp", "etp"}


degree = st.integers(1, 4)


@given(degree, degree, degree, degree, degree)
def test_shard_degree_minus_one_always_gives_the_missing_factor(replicate, shard, cp, tp, pp):
    world_size = replicate * shard * cp * tp * pp
    found = dims(dp_replicate=replicate, dp_shard=-1, cp=cp, tp=tp, pp=pp, world_size=world_size)
    assert found.dp_shard == shard


@pytest.mark.parametrize(
    "degrees, message",
    [
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 2, "world_size": 10}, "world size 10, .* = 8"),
        ({"tp": 0, "world_size": 8}, "tp must be at least 1, got 0"),
        ({"dp_shard": -2, "world_size": 8}, "dp_shard must be at least 1.* got -2"),
        ({"dp_shard": -1, "tp": 16, "world_size": 8}, "world size 8"),
        ({"dp_shard": 2, "tp": 4, "ep": 2, "etp": 2}, r"must be 1 or .* \(4\), got 2"),
    ],
)
def test_impossible_degrees_raise_assertion_error(degrees, message):
    with pytest.raises(AssertionError, match=message):
        dims(**degrees)


# Parameters are held by FSDP where it shards them, and where DDP cannot hold them.
@pytest.mark.parametrize(
    "degrees, enabled, uses_fsdp",
    [
        ({}, "", False),
        ({"always_fsdp": True}, "", True),
        ({"tp": 2}, "tp", False),
        ({"cp": 2}, "cp dp_cp fsdp", True),
        ({"dp_replicate": 2}, "dp dp_replicate dp_cp", False),
        ({"dp_replicate": 2, "tp": 2}, "dp dp_replicate dp_cp tp", True),
        (
            {"tp": 2, "pp": 2, "dp_shard": 2, "ep": 4, "etp": 2},
            "dp dp_shard dp_cp fsdp tp pp ep etp",
            True,
        ),
    ],
)
def test_enabled_flags_follow_the_degrees(degrees, enabled, uses_fsdp):
    found = dims(**degrees)
    flags = "dp dp_replicate dp_shard cp dp_cp fsdp tp pp ep etp".split()
    assert {flag for flag in flags if getattr(found, f"{flag}_enabled")} == set(enabled.split())
    assert found.uses_fsdp is uses_fsdp


def test_derived_numbers():
    assert dims(dp_replicate=2, dp_shard=3, cp=2).fsdp_gradient_divide_factor == 12
    assert dims(dp_shard=4, cp=2, tp=3, pp=2).non_data_parallel_size == 12
    assert dims(cp=2, tp=4).seq_len_divisor == 16
    assert dims(tp=2).seq_len_divisor == 4


def join(rank, world_size):
    """Make this process a rank of a simulated world until the test ends."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def test_context_parallel_ranks_share_rows_parameters_and_the_loss():
    join(3, 8)
    d = dims(dp_shard=2, cp=2, tp=2)
    ranks = {name: d.get_mesh(name).mesh.tolist() for name in ("batch", "cp", "fsdp", "loss")}
    assert ranks == {"batch": [3, 7], "cp": [1, 3], "fsdp": [1, 3, 5, 7], "loss": [1, 3, 5, 7]}


def test_single_rank_has_all_meshes_and_all_are_off():
    join(0, 1)
    d = dims()
    assert not d._meshes and d.get_optional_mesh("tp") is None
    assert {name: mesh.size() for name, mesh in d._meshes.items()} == dict.fromkeys(AXES, 1)
    pairs = (["dp_replicate", "fsdp"], ["dp_replicate", "efsdp"], ["ep", "etp"])
    assert {d.get_optional_mesh(names) for names in (*AXES, *pairs)} == {None}
    assert d.get_all_one_dimensional_meshes() == {}
    with pytest.raises(ValueError, match="Invalid mesh dim.*efsdp"):
        d.get_mesh("invalid_mesh")
    with pytest.raises(ValueError, match="'tp'.*degree 1"):
        d.get_mesh("tp")
    assert (d.build_mesh().size(), d.world_mesh.size(), d.get_fsdp_mesh().size()) == (1, 1, 1)


def test_world_of_8():
    join(5, 8)
    d = dims(dp_replicate=2, dp_shard=2, tp=2, world_size=8)
    assert d.build_mesh().size() == d.world_mesh.size() == 8
    assert {name: mesh.size() for name, mesh in d._meshes.items()} == {
        "pp": 1, "batch": 4, "loss": 4, "dp_replicate": 2, "fsdp": 2,
        "cp": 1, "tp": 2, "ep": 1, "efsdp": 4, "etp": 1,
    }  # fmt: skip
    assert d.get_mesh(["dp_replicate", "fsdp"]).shape == d.get_fsdp_mesh().shape == (2, 2)
    # efsdp has size 4 here, yet is off: without experts nothing is sharded on it.
    off = ("pp", "cp", "ep", "etp", "efsdp", ["dp_replicate", "efsdp"], ["ep", "etp"])
    assert {d.get_optional_mesh(names) for names in off} == {None}
    active = {"dp_replicate", "fsdp", "tp", "batch", "loss", "efsdp"}
    assert set(d.get_all_one_dimensional_meshes()) == active
    with pytest.raises(ValueError, match=r"outermost first: \('dp_replicate', 'fsdp'\)"):
        d.get_mesh(["fsdp", "dp_replicate"])
    with pytest.raises(ValueError, match="Invalid mesh name combinations"):
        d.get_mesh(["batch", "fsdp"])
    # tp is innermost, so its ranks are neighbours (on one machine).
    ranks = {n: d.get_mesh(n).mesh.tolist() for n in ("tp", "fsdp", "dp_replicate", "loss")}
    assert ranks == {
        "tp": [4, 5], "fsdp": [5, 7], "dp_replicate": [1, 5], "loss": [1, 3, 5, 7],
    }  # fmt: skip


def test_expert_fsdp_mesh_exists_at_size_1_when_experts_are_on():
    join(0, 4)
    d = dims(dp_shard=2, tp=2, ep=4)
    sizes = d.get_mesh("efsdp").size(), d.get_mesh("ep").size(), d.get_mesh(["efsdp", "ep"]).shape
    assert sizes == (1, 4, (1, 4))


def test_expert_degree_that_does_not_divide_is_refused_at_mesh_building():
    join(0, 4)
    message = r"2 \* 1 \* 1 = 2 and 3 \* 1 = 3; change parallelism.expert_parallel_degree"
    with pytest.raises(ValueError, match=message):
        dims(dp_replicate=2, dp_shard=2, ep=3).build_mesh()
