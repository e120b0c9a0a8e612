import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.testing.gloo import run_ranks

AXES = {"pp", "batch", "loss", "dp_replicate", "fsdp", "cp", "tp", "ep", "efsdp", "etp"}


def dims(world_size=None, **degrees):
    ones = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp"), 1)
    degrees = ones | degrees
    if world_size is None:
        world_size = math.prod(degrees[d] for d in ("dp_replicate", "dp_shard", "cp", "tp", "pp"))
    return ParallelDims(world_size=world_size, **degrees)


def test_shard_degree_minus_one_takes_the_ranks_that_are_left():
    assert dims(dp_replicate=2, dp_shard=-1, tp=2, world_size=8).dp_shard == 2


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
        ({"dp_replicate": 0, "world_size": 8}, "dp_replicate must be at least 1, got 0"),
        ({"tp": 0, "world_size": 8}, "tp must be at least 1, got 0"),
        ({"dp_shard": 0, "world_size": 8}, "dp_shard must be at least 1"),
        ({"dp_shard": -2, "world_size": 8}, "dp_shard must be at least 1.* got -2"),
        ({"dp_shard": -1, "tp": 16, "world_size": 8}, "world size 8"),
        ({"dp_shard": 2, "tp": 4, "ep": 2, "etp": 2}, r"must be 1 or .* \(4\), got 2"),
    ],
)
def test_impossible_degrees_raise_assertion_error(degrees, message):
    with pytest.raises(AssertionError, match=message):
        dims(**degrees)


def test_expert_degree_is_no_factor_of_the_world_size():
    d = dims(dp_shard=2, ep=2, world_size=2)
    assert d.ep_enabled and not d.etp_enabled
    assert dims(dp_replicate=2, dp_shard=2, ep=3, world_size=4).ep == 3


def test_enabled_flags_follow_the_degrees():
    none = dims()
    for flag in ("dp", "dp_replicate", "dp_shard", "cp", "dp_cp", "fsdp", "tp", "pp", "ep", "etp"):
        assert getattr(none, f"{flag}_enabled") is False
    cp = dims(cp=2)
    assert not cp.dp_enabled and cp.cp_enabled and cp.dp_cp_enabled and cp.fsdp_enabled
    replicate = dims(dp_replicate=2)
    assert replicate.dp_enabled and replicate.dp_replicate_enabled and replicate.dp_cp_enabled
    assert not replicate.fsdp_enabled and not replicate.dp_shard_enabled
    both = dims(tp=2, pp=2, dp_shard=2, ep=4, etp=2)
    assert both.tp_enabled and both.pp_enabled and both.ep_enabled and both.etp_enabled


def test_derived_numbers():
    assert dims(dp_replicate=2, dp_shard=3, cp=2).fsdp_gradient_divide_factor == 12
    assert dims(dp_shard=4, cp=2, tp=3, pp=2).non_data_parallel_size == 12
    assert dims(cp=2, tp=4).seq_len_divisor == 16
    assert dims(tp=2).seq_len_divisor == 4


@pytest.mark.parametrize(
    "degrees, uses_fsdp",
    [
        ({}, False),
        ({"tp": 2}, False),
        ({"dp_replicate": 2}, False),  # DDP
        ({"dp_replicate": 2, "tp": 2}, True),  # which DDP cannot
        ({"dp_shard": 2}, True),
        ({"cp": 2}, True),
        ({"always_fsdp": True}, True),
    ],
)
def test_fsdp_holds_parameters_where_it_shards_them_or_ddp_cannot(degrees, uses_fsdp):
    assert dims(**degrees).uses_fsdp is uses_fsdp


def test_context_parallel_ranks_share_rows_parameters_and_the_loss():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    d = dims(dp_shard=2, cp=2, tp=2)
    ranks = {name: d.get_mesh(name).mesh.tolist() for name in ("batch", "cp", "fsdp", "loss")}
    assert ranks == {"batch": [3, 7], "cp": [1, 3], "fsdp": [1, 3, 5, 7], "loss": [1, 3, 5, 7]}


def look_at_single_rank(_):
    d = dims()
    before = len(d._meshes)
    tp = d.get_optional_mesh("tp")
    try:
        d.get_mesh("invalid_mesh")
    except ValueError as error:
        message = str(error)
    try:
        d.get_mesh("tp")
    except ValueError as error:
        unavailable = str(error)
    return {
        "before": before,
        "tp": tp,
        "sizes": {name: mesh.size() for name, mesh in d._meshes.items()},
        "cuts": set(d._global_meshes),
        "singles": [d.get_optional_mesh(name) for name in d._meshes],
        "pairs": [
            d.get_optional_mesh(pair)
            for pair in (["dp_replicate", "fsdp"], ["dp_replicate", "efsdp"], ["ep", "etp"])
        ],
        "one_dimensional": d.get_all_one_dimensional_meshes(),
        "message": message,
        "unavailable": unavailable,
        "world": (d.build_mesh().size(), d.world_mesh.size()),
        "fsdp": d.get_fsdp_mesh().size(),
    }


def test_single_rank_has_all_meshes_and_all_are_off():
    (seen,) = run_ranks(look_at_single_rank, 1, None)
    assert seen["before"] == 0 and seen["tp"] is None
    assert seen["sizes"] == dict.fromkeys(AXES, 1)
    assert seen["cuts"] == {"dataloading", "loss", "dense", "sparse"}
    assert seen["singles"] == [None] * 10 and seen["pairs"] == [None] * 3
    assert seen["one_dimensional"] == {}
    assert "Invalid mesh dim" in seen["message"] and "efsdp" in seen["message"]
    assert "'tp'" in seen["unavailable"] and "degree 1" in seen["unavailable"]
    assert seen["world"] == (1, 1) and seen["fsdp"] == 1


def look_at_world_of_8(_):
    parallel_dims.device_type = "cpu"
    d = dims(dp_replicate=2, dp_shard=2, tp=2, world_size=8)
    world = d.build_mesh()
    hsdp = d.get_mesh(["dp_replicate", "fsdp"])
    errors = []
    for names in (["fsdp", "dp_replicate"], ["batch", "fsdp"]):
        try:
            d.get_mesh(names)
        except ValueError as error:
            errors.append(str(error))
    return {
        "sizes": {name: mesh.size() for name, mesh in d._meshes.items()},
        "world": (world.size(), d.world_mesh.size()),
        "hsdp": (hsdp.shape, hsdp.ndim, d.get_fsdp_mesh().shape),
        "got": {n: d.get_mesh(n).size() for n in ("tp", "dp_replicate", "fsdp", "batch", "loss")},
        "off": [
            d.get_optional_mesh(names)
            for names in ("pp", "cp", "ep", "etp", "efsdp", ["dp_replicate", "efsdp"], ["ep", "etp"])
        ],
        "one_dimensional": set(d.get_all_one_dimensional_meshes()),
        "numbers": (
            d.fsdp_gradient_divide_factor, d.non_data_parallel_size, d.seq_len_divisor,
        ),
        "ranks": {n: d.get_mesh(n).mesh.tolist() for n in ("tp", "fsdp", "dp_replicate", "loss")},
        "errors": errors,
    }  # fmt: skip


def test_world_of_8():
    ranks = run_ranks(look_at_world_of_8, 8, None)
    for seen in ranks:
        assert seen["sizes"] == {
            "pp": 1, "batch": 4, "loss": 4, "dp_replicate": 2, "fsdp": 2,
            "cp": 1, "tp": 2, "ep": 1, "efsdp": 4, "etp": 1,
        }  # fmt: skip
        assert seen["world"] == (8, 8)
        assert seen["hsdp"] == ((2, 2), 2, (2, 2))
        assert seen["got"] == {"tp": 2, "dp_replicate": 2, "fsdp": 2, "batch": 4, "loss": 4}
        # efsdp has size 4 here, yet is off: without experts nothing is sharded on it.
        assert seen["off"] == [None] * 7
        assert seen["one_dimensional"] == {
            "dp_replicate", "fsdp", "tp", "batch", "loss", "efsdp",
        }  # fmt: skip
        assert seen["numbers"] == (4, 2, 4)
        assert "outermost first: ('dp_replicate', 'fsdp')" in seen["errors"][0]
        assert "Invalid mesh name combinations" in seen["errors"][1]
    # tp is innermost, so its ranks are neighbours (on one machine).
    assert ranks[5]["ranks"] == {
        "tp": [4, 5], "fsdp": [5, 7], "dp_replicate": [1, 5], "loss": [1, 3, 5, 7],
    }  # fmt: skip


def expert_mesh_sizes(degrees):
    d = dims(**degrees)
    d.build_mesh()
    experts = d.get_mesh(["efsdp", "ep"])
    return d.get_mesh("efsdp").size(), d.get_mesh("ep").size(), experts.shape


def test_expert_fsdp_mesh_exists_at_size_1_when_experts_are_on():
    results = run_ranks(expert_mesh_sizes, 4, {"dp_shard": 2, "tp": 2, "ep": 4})
    assert results == [(1, 4, (1, 4))] * 4


def build_error(degrees):
    try:
        dims(**degrees).build_mesh()
    except ValueError as error:
        return str(error)


def test_expert_degree_that_does_not_divide_is_refused_at_mesh_building():
    for message in run_ranks(build_error, 4, {"dp_replicate": 2, "dp_shard": 2, "ep": 3}):
        assert "2 * 1 * 1 = 2 and 3 * 1 = 3" in message
        assert "parallelism.expert_parallel_degree" in message
