"""Attention over tokens that are spread over ranks equals attention of one process."""

import functools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from torchtitan.distributed.context_parallel import ShardedMask, cp_shard
from torchtitan.models.attention import (
    attend,
    build_inner_attention,
    create_causal_block_mask,
    create_document_block_mask,
    create_document_varlen_metadata,
)
from torchtitan.models.documents import document_ids_from_lengths
from torchtitan.testing.gloo import run_ranks

ROWS, TOKENS, HEADS, KV_HEADS, DIM = 2, 64, 4, 2, 8
LENGTHS = torch.tensor([[5, 1, 30, 20, 0], [17, 3, 3, 2, 30]])  # the rest of a row is padding
METHODS = ["allgather", "alltoall"]


def document_ids(n_tokens=TOKENS):
    return document_ids_from_lengths(LENGTHS * (n_tokens // TOKENS), n_tokens)


def masks():
    ids = document_ids()
    return {
        "sdpa": ("sdpa", None),
        "flex causal": ("flex", create_causal_block_mask(ROWS, TOKENS, torch.device("cpu"))),
        "flex documents": ("flex", create_document_block_mask(ids)),
        "flex window": ("flex", create_document_block_mask(ids, window=6)),
        "varlen documents": ("varlen", create_document_varlen_metadata(ids)),
    }


def random_inputs(kv_heads=KV_HEADS, n_tokens=TOKENS):
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, kv_heads, kv_heads, HEADS)
    shapes = [(ROWS, n, n_tokens, DIM) for n in heads]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def out_and_gradients(attn_type, mask, tensors, **options):
    q, k, v, weight = tensors
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(build_inner_attention(attn_type), *inputs, mask, **options)
    loss = 0
    if options.get("return_lse"):
        out, lse = out
        loss = lse.sin().sum()
    loss = loss + (out * weight.transpose(1, 2)).sum()
    loss.backward()
    return [out.detach().transpose(1, 2), *(x.grad for x in inputs)]


def largest_difference_over_ranks(attn_type, mask, balancer, method, tensors, **options):
    """Every rank computes its part and the whole, and compares."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("cp",))
    rows_first = tuple(x.transpose(1, 2) for x in tensors)
    parts, sharded = cp_shard(mesh, rows_first, mask, balancer, rotate_method=method)
    assert isinstance(sharded, ShardedMask)
    mine = out_and_gradients(attn_type, sharded, [x.transpose(1, 2) for x in parts], **options)
    whole = out_and_gradients(attn_type, mask, tensors, **options)
    theirs = [sharded.shards.unshard(x, dim=2) for x in mine]
    return max((a - b).abs().max().item() for a, b in zip(theirs, whole, strict=True))


def every_mask_and_balancer():
    differences = {}
    for name, (attn_type, mask) in masks().items():
        for balancer in ("headtail", None):
            for method in METHODS:
                run = functools.partial(
                    largest_difference_over_ranks, attn_type, mask, balancer, method
                )
                differences[name, balancer, method] = run(random_inputs())
                if attn_type != "sdpa":
                    differences[name, balancer, method, "lse"] = run(
                        random_inputs(), return_lse=True
                    )
    tensors = random_inputs(n_tokens=1024)
    mask = create_document_varlen_metadata(document_ids(1024))
    for method in METHODS:
        differences["ptrr", method] = largest_difference_over_ranks(
            "varlen", mask, "ptrr", method, tensors
        )
    # One key head cannot be dealt to several ranks: each gets a copy.
    tensors = random_inputs(kv_heads=1)
    differences["one key head"] = largest_difference_over_ranks(
        "sdpa", None, "headtail", "alltoall", tensors
    )
    return differences


@pytest.mark.parametrize("world_size", [2, 4])
def test_attention_and_gradients_equal_one_process(world_size):
    for differences in run_ranks(every_mask_and_balancer, world_size):
        assert len(differences) == 39
        for case, difference in differences.items():
            assert difference < 1e-12, case
