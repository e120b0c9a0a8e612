"""Translating sharded weights gives the shards of the translated weights."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torchtitan.models.hf_adapter import swap_rope_layout
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
    mistakes = []
    for n_heads in (2, 4, 3):  # fewer heads than ranks, as many, and a number that won't divide
        for bias in (False, True):
            for to_hf in (False, True):
                expected = swap_rope_layout(whole(bias), n_heads, to_hf)
                for mesh, placements in layouts:
                    sharded = distribute_tensor(whole(bias), mesh, placements)
                    swapped = swap_rope_layout(sharded, n_heads, to_hf)
                    if (
                        not isinstance(swapped, DTensor)
                        or swapped.placements != sharded.placements
                        or not torch.equal(swapped.full_tensor(), expected)
                    ):
                        mistakes.append((n_heads, bias, to_hf, placements))
    return mistakes


def test_sharded_projections_are_reordered_like_whole_ones():
    assert run_ranks(_swap_sharded, 4) == [[]] * 4
