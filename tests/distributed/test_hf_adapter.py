"""Translating sharded weights gives the shards of the translated weights."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.unit.models.test_hf_adapter import FusedExperts, PerExpert, expert_weights
from torchtitan.distributed.dtensor import whole_tensor
from torchtitan.distributed.processes.ranks import all_ranks
from torchtitan.models.hf_adapter import Fused, KeyMapAdapter, swap_rope_layout
from torchtitan.testing.gloo import run_ranks

SHAPE = (24, 5)


def whole(bias):
    weight = torch.arange(24 * 5.0).view(SHAPE)
    return weight[:, 0].contiguous() if bias else weight


def _swap_sharded():
    flat = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2))
    layouts = [
        (flat, [Shard(0)]),
        (flat, [Replicate()]),
        (grid, [Replicate(), Shard(0)]),
        (grid, [Shard(0), Shard(0)]),
    ]
    for n_heads in (2, 4, 3):  # fewer heads than ranks, as many, and a number that won't divide
        for bias in (False, True):
            for to_hf in (False, True):
                expected = swap_rope_layout(whole(bias), n_heads, to_hf)
                for mesh, placements in layouts:
                    sharded = distribute_tensor(whole(bias), mesh, placements)
                    swapped = swap_rope_layout(sharded, n_heads, to_hf)
                    case = (n_heads, bias, to_hf, placements)
                    assert swapped.placements == sharded.placements, case
                    assert torch.equal(swapped.full_tensor(), expected), case


def test_sharded_projections_are_reordered_like_whole_ones():
    run_ranks(_swap_sharded, 4)


def _experts_sharded():
    """Check the names of each rank, values, the way back, and whose memory it is."""
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    layouts = [
        (3, flat, [Shard(0)]),  # the last rank has none
        (5, flat, [Shard(0)]),
        (3, flat, [Shard(1)]),
        (3, flat, [Shard(2)]),
        (3, flat, [Replicate()]),
        (3, grid, [Replicate(), Shard(0)]),
        (3, grid, [Shard(1), Shard(0)]),
        (4, grid, [_StridedShard(0, split_factor=2), Shard(0)]),
    ]
    for n_experts, mesh, placements in layouts:
        whole = expert_weights(n_experts, layers=(0,))
        sharded = {k: distribute_tensor(t, mesh, placements) for k, t in whole.items()}
        for adapter in (PerExpert(None, None), FusedExperts(None, None)):
            where = (type(adapter).__name__, n_experts, placements)
            files = adapter.to_hf(sharded)
            expected = adapter.to_hf(whole)
            adapter.to_hf(sharded)  # the last call decides what `from_hf` gives back
            for name, tensor in files.items():
                assert tensor.shape == expected[name].shape, (where, name)
                assert torch.equal(whole_tensor(tensor), expected[name]), (where, name)
            held = {name for rank in all_ranks(list(files)) for name in rank}
            assert held == set(expected), where
            back = adapter.from_hf(files)
            for name, tensor in sharded.items():
                assert torch.equal(back[name].full_tensor(), whole[name]), (where, name)
                row_split = any(p.is_shard(dim=1) for p in placements)
                assert row_split or back[name].placements == tensor.placements, (where, name)
                if type(adapter) is PerExpert:  # not copied
                    assert back[name].to_local().data_ptr() == tensor.to_local().data_ptr(), where


def test_sharded_experts_are_taken_apart_and_put_together_like_whole_ones():
    run_ranks(_experts_sharded, 4)


class Joined(KeyMapAdapter):
    from_hf_map = {"layers.{}.qkv": Fused(("layers.{}.q", "layers.{}.v"), rows=(1, 2), n_groups=4)}


def _rows_sharded():
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    ours = {"layers.0.q": torch.randn(8, 6), "layers.0.v": torch.randn(16, 6)}
    torch.distributed.broadcast(ours["layers.0.q"], 0)
    torch.distributed.broadcast(ours["layers.0.v"], 0)
    expected = Joined(None, None).to_hf(ours)
    for placements in (
        [Shard(0), Replicate()],
        [Replicate(), Shard(0)],
        [Shard(1), Shard(0)],
        [_StridedShard(0, split_factor=2), Shard(0)],
    ):
        sharded = {n: distribute_tensor(t, grid, placements) for n, t in ours.items()}
        files = Joined(None, None).to_hf(sharded)
        back = Joined(None, None).from_hf(files)
        for name, tensor in [*expected.items(), *ours.items()]:
            assert torch.equal((files | back)[name].full_tensor(), tensor), (placements, name)
        columns = {each["layers.0.v"].to_local().shape[1] for each in (back, sharded)}
        assert len(columns) == 1, placements


def test_sharded_rows_are_joined_per_head_and_split_again():
    run_ranks(_rows_sharded, 4)
