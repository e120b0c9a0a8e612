"""Attention over tokens that are spread over ranks equals attention of one process."""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.unit.distributed.test_activation_checkpoint import Calls
from torchtitan.batch.context import cp_shard
from torchtitan.batch.documents import branch_depths, document_ids_from_lengths
from torchtitan.batch.mask import DocumentMask
from torchtitan.distributed.context_parallel import TokenShards, deal_chunks
from torchtitan.models.attention import attend, build_inner_attention
from torchtitan.testing.gloo import run_ranks
from torchtitan.testing.isolation import random_tree_row

ROWS, TOKENS, HEADS, KV_HEADS, DIM = 2, 64, 4, 2, 8
LENGTHS = torch.tensor([[5, 1, 30, 20, 0], [17, 3, 3, 2, 30]])  # the rest of a row is padding
METHODS = ["allgather", "alltoall"]


def document_ids(n_tokens=TOKENS):
    return document_ids_from_lengths(LENGTHS * (n_tokens // TOKENS), n_tokens)


def masks():
    """Return a model's masks, from which `DocumentMask.from_mask` recovers the value, and bare VarlenMetadata."""
    documents = DocumentMask.from_documents(document_ids())
    causal = DocumentMask.from_rows(ROWS, TOKENS, torch.device("cpu"))
    rows = [random_tree_row(random.Random(5), row, TOKENS)[:2] for row in range(ROWS)]
    ids, parents = (torch.tensor(x) for x in zip(*rows, strict=True))
    trees = DocumentMask.from_documents(ids, depths=branch_depths(ids, parents))
    return {
        "sdpa": ("sdpa", None),
        "flex causal": ("flex", causal.lower("flex").lowered),
        "flex documents": ("flex", documents.lower("flex").lowered),
        "flex window": ("flex", documents.with_window(6).lower("flex").lowered),
        "varlen documents": ("varlen", documents.lower("varlen").lowered),
        "flex trees": ("flex", trees.lower("flex").lowered),
        "varlen trees, window": ("varlen", trees.lower("varlen").with_window(6).lower("varlen")),
        "flex trees, chunks": ("flex", trees.in_chunks(5).lower("flex").lowered),
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
    """Compare this rank's part with a computation of the whole rows."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("cp",))
    rows_first = tuple(x.transpose(1, 2) for x in tensors)
    parts, sharded = cp_shard(mesh, rows_first, mask, balancer, rotate_method=method)
    mine = out_and_gradients(attn_type, sharded, [x.transpose(1, 2) for x in parts], **options)
    whole = out_and_gradients(attn_type, mask, tensors, **options)
    theirs = [sharded.part.shards.unshard(x, dim=2) for x in mine]
    own = parts[-1].clone().requires_grad_()
    (sharded.part.shards.unshard(own, dim=1) * rows_first[-1]).sum().backward()
    assert torch.equal(own.grad, parts[-1])  # not once per rank
    return max((a - b).abs().max().item() for a, b in zip(theirs, whole, strict=True))


def every_mask_and_balancer():
    differences, compare = {}, largest_difference_over_ranks
    cases = itertools.product(masks().items(), ("headtail", None), METHODS, (False, True))
    for (name, (attn_type, mask)), *how, with_lse in cases:
        if attn_type != "sdpa" or not with_lse:
            found = compare(attn_type, mask, *how, random_inputs(), return_lse=with_lse)
            differences[name, *how, with_lse] = found
    tensors = random_inputs(n_tokens=1024)
    documents = DocumentMask.from_documents(document_ids(1024))
    depths = (torch.arange(1024) % 300 + 100 * (torch.arange(1024) // 300)).expand(ROWS, -1).int()
    trees = DocumentMask.from_documents(document_ids(1024), depths=depths)
    for method in METHODS:
        for kind, mask in (("documents", documents), ("trees", trees)):
            found = compare("varlen", mask.lower("varlen"), "ptrr", method, tensors)
            differences["ptrr", kind, method] = found
    # One key head cannot be dealt to several ranks: each gets a copy.
    tensors = random_inputs(kv_heads=1)
    differences["one key head"] = compare("sdpa", None, "headtail", "alltoall", tensors)
    return differences


@pytest.mark.parametrize("world_size", [2, 4])
def test_attention_and_gradients_equal_one_process(world_size):
    for differences in run_ranks(every_mask_and_balancer, world_size):
        assert len(differences) == 65
        for case, difference in differences.items():
            assert difference < 1e-13, case


def test_chunks_are_dealt_back_and_forth_by_what_the_mask_lets_them_see():
    causal = torch.zeros(1, 4 * 128, dtype=torch.int64)
    assert deal_chunks("ptrr", 2, 4 * 128, causal).tolist() == [[0, 3], [1, 2]]
    # Tokens of the second chunk see themselves only: of [3, 2], [0, 1] it is the last.
    causal[:, 128:256] = torch.arange(128, 256)
    assert deal_chunks("ptrr", 2, 4 * 128, causal).tolist() == [[1, 3], [0, 2]]


def test_attention_layers_copy_no_order_of_chunks_to_the_device():
    # "meta" stands for the accelerator.
    group = SimpleNamespace(group_name="")
    axis = SimpleNamespace(device_type="meta", get_group=lambda: group, get_local_rank=lambda: 1)
    shards = TokenShards.from_chunks(torch.tensor([[0, 3], [1, 2]]), axis)
    x = torch.empty(8, 2, device="meta")
    with Calls() as calls:
        shards.in_order(x)
        shards.by_rank(x)
        shards.shard(x, dim=0)
    assert calls.count("index_select") == 3 and calls.count("_to_copy") == 0
