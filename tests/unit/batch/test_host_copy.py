"""Masks are made from the host's copy of a batch, which is never read back from the device.

"meta" stands for the accelerator, because code that reads a number from it fails.
"""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from torchtitan.batch.context import cp_shard
from torchtitan.batch.documents import boundaries_on_host, document_ids_from_lengths
from torchtitan.batch.mask import DocumentMask, VarlenMetadata, map_masks
from torchtitan.batch.policy import DocumentPolicy
from torchtitan.config.job_config import Training
from torchtitan.models.gpt_oss import GptOssModel, gptoss_configs
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.llama4 import Transformer as Llama4
from torchtitan.models.llama4 import TransformerModelArgs as Llama4Args
from torchtitan.step import runner as step_runner
from torchtitan.tools import host_copy
from torchtitan.tools.host_copy import fetch, on_host, remember_host, to_device

EOS = 0
TOKENS = torch.tensor([[5, 6, EOS, 7, 8, 9, EOS, 4], [3] * 8])
LENGTHS = torch.tensor([[3, 4, 1], [8, 0, 0]])
PACKED = {
    "eos": {},
    "positions": {"positions": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0], [*range(8)]])},
    "seq_lens": {"seq_lens": LENGTHS},
    "cu_seqlens": {"cu_seqlens": torch.tensor([[0, 3, 7, 8], [0, 8, 8, 8]])},
    "document_ids": {"document_ids": document_ids_from_lengths(LENGTHS, 8)},
    "padding": {"attention_masks": torch.tensor([[1] * 3 + [0] * 5, [0, 0, *[1] * 6]])},
}


def moved(batch):
    return {key: to_device(value, "meta") for key, value in batch.items()}


def test_copy_leads_back_until_one_of_the_two_changes():
    source = torch.arange(3)
    copy = to_device(source, "meta")
    assert copy.device.type == "meta" and on_host(copy) is source
    copy.add_(1)
    assert on_host(copy) is copy

    copy = to_device(source, "meta")
    source.add_(1)
    assert on_host(copy) is copy
    assert on_host(copy + 1).device.type == "meta"


def test_entry_of_every_row_is_pinned(monkeypatch):
    """torch pins by a copy with the strides of the source, which must not share memory."""

    def pin(x):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)

    monkeypatch.setattr(host_copy, "get_device_type", lambda: "cuda")
    monkeypatch.setattr(Tensor, "is_pinned", lambda x: False)
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    positions = torch.arange(3).expand(2, 3)
    assert torch.equal(host_copy.pinned(positions), positions)


def test_what_did_not_come_from_the_host_leads_nowhere():
    x = torch.empty(3, device="meta")
    assert on_host(x) is x
    assert on_host(remember_host(x, torch.empty(3, device="meta"))) is x
    host = torch.arange(3)
    assert on_host(host) is host and to_device(host, "cpu") is host and fetch(host) is host
    with torch.inference_mode():  # which has no version counter
        assert on_host(to_device(torch.arange(3), "meta")).device.type == "meta"


def test_sources_of_two_devices_are_read_where_they_are():
    batch = {"input": to_device(TOKENS, "meta"), "positions": torch.zeros(2, 8, device="meta")}
    assert boundaries_on_host(batch) is batch
    batch["positions"] = to_device(torch.zeros(2, 8), "meta")
    assert {x.device.type for x in boundaries_on_host(batch).values()} == {"cpu"}


MODELS = {
    "llama3": (Transformer, TransformerModelArgs(dim=16, n_heads=2)),
    "llama4": (Llama4, Llama4Args(dim=16, n_heads=2, fixed_attn_block_size=2)),
    "gpt_oss": (GptOssModel, gptoss_configs["debugmodel"]),
}


def build(name, attn_type, mask_type):
    cls, args = MODELS[name]
    sizes = dict(n_layers=1, vocab_size=32, attn_type=attn_type, attn_mask_type=mask_type)
    with torch.device("meta"):
        return cls(dataclasses.replace(args, **sizes))


def numbers_of(masks):
    """Return the host's numbers of a mask, or of each mask in a dict."""
    if isinstance(masks, dict):
        return {name: numbers_of(mask) for name, mask in masks.items()}
    mask = DocumentMask.from_mask(masks)
    if isinstance(mask.lowered, VarlenMetadata):
        lengths = mask.lowered
        return on_host(lengths.cu_seq_q).tolist(), lengths.max_q, lengths.max_k
    starts = on_host(mask.boundaries(TOKENS.shape[1]))
    return starts.tolist(), mask.window, mask.lowered.seq_lengths


@pytest.mark.parametrize("source", PACKED)
@pytest.mark.parametrize("attn_type", ["flex", "varlen"])
@pytest.mark.parametrize("name", MODELS)
def test_masks_of_a_batch_from_the_host_read_nothing_back(name, attn_type, source):
    mask_type = "position_block_causal" if source == "positions" else "block_causal"
    model = build(name, attn_type, mask_type)
    tokenizer = SimpleNamespace(eos_id=EOS)
    packing = DocumentPolicy.from_job(Training(), model.model_args, tokenizer)
    batch = {"input": TOKENS, **PACKED[source]}

    def model_inputs(batch):
        return step_runner.model_inputs(packing, packing.token_batch(batch), model)

    inputs, _, extra_inputs, extra_kwargs = model_inputs(moved(batch))
    assert inputs.device.type == "meta"
    masks = extra_kwargs["attention_masks"]
    for lowered in (mask.lowered for mask in as_list(map_masks(DocumentMask.from_mask, masks))):
        tensor = lowered.cu_seq_q if isinstance(lowered, VarlenMetadata) else lowered.kv_indices
        assert tensor.device.type == "meta"
    _, _, on_cpu_inputs, on_cpu_kwargs = model_inputs(batch)
    assert numbers_of(masks) == numbers_of(on_cpu_kwargs["attention_masks"])
    if "positions" in on_cpu_inputs:
        assert extra_inputs["positions"].device.type == "meta"
        assert torch.equal(on_host(extra_inputs["positions"]), on_cpu_inputs["positions"])

    # A client's own loop gets the mask from the model.
    if source != "padding":
        extra = {key: value for key, value in moved(batch).items() if key != "input"}
        asked = model.get_attention_masks(to_device(TOKENS, "meta"), tokenizer, extra)
        assert numbers_of(asked) == numbers_of(masks)


def axis(device_type, rank):
    axis = SimpleNamespace(device_type=device_type, get_local_rank=lambda: rank, size=lambda: 2)
    axis.get_group = lambda: SimpleNamespace(group_name="")
    return axis


def masks_on(device, n_tokens):
    ids = to_device(document_ids_from_lengths(LENGTHS * (n_tokens // 8), n_tokens), device)
    documents = DocumentMask.from_documents(ids)
    causal = DocumentMask.from_rows(2, n_tokens, torch.device(device))
    return {
        "none": None,
        "causal": causal.lower("flex"),
        "documents": documents.lower("flex").lowered,
        "varlen": documents.lower("varlen").lowered,
        "dict": {"all": documents.lower("flex"), "w": documents.with_window(3).lower("flex")},
    }


@pytest.mark.parametrize("balancer", ["headtail", "ptrr", None])
@pytest.mark.parametrize("rank", [0, 1])
def test_context_parallelism_reads_nothing_back_from_masks_of_the_host(balancer, rank):
    n_tokens = 512 if balancer == "ptrr" else 8
    tokens = torch.arange(2 * n_tokens).view(2, -1)
    on_cpu_masks = masks_on("cpu", n_tokens)
    for name, mask in masks_on("meta", n_tokens).items():
        if name == "none" and balancer == "ptrr":
            continue  # refused
        _, sharded = cp_shard(axis("meta", rank), (to_device(tokens, "meta"),), mask, balancer)
        _, expected = cp_shard(axis("cpu", rank), (tokens,), on_cpu_masks[name], balancer)
        for ours, theirs in zip(*map(as_list, (sharded, expected)), strict=True):
            pairs = [(ours.part.shards.chunks, theirs.part.shards.chunks)]
            pairs += zip(ours.part.keys, theirs.part.keys, strict=True)
            for on_device, on_cpu in pairs:
                if isinstance(on_device, int):
                    assert on_device == on_cpu
                else:
                    assert on_device.device.type == "meta"
                    assert torch.equal(on_host(on_device), on_cpu)


def as_list(masks):
    return list(masks.values()) if isinstance(masks, dict) else [masks]


def test_masks_that_nobody_asks_for_their_documents_are_not_read():
    ids = torch.zeros(2, 8, dtype=torch.int32, device="meta")
    tokens = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    mask = DocumentMask.from_documents(ids).lower("flex").lowered
    _, sharded = cp_shard(axis("meta", 0), (tokens,), mask, rotate_method="alltoall")
    assert sharded.lowered is mask


def test_masks_from_the_device_alone_are_read_once(monkeypatch):
    reads = []

    def read(self):
        reads.append(self.shape)
        return torch.zeros(self.shape, dtype=self.dtype)

    monkeypatch.setattr(torch.Tensor, "cpu", read)
    ids = torch.zeros(2, 8, dtype=torch.int32, device="meta")
    tokens = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    one, other = DocumentMask.from_documents(ids), DocumentMask.from_documents(ids + 0)
    cp_shard(axis("meta", 0), (tokens,), {"a": one.lower("flex"), "b": None})
    masks = {"a": one.lower("flex"), "b": other.lower("flex")}
    cp_shard(axis("meta", 0), (tokens,), masks)
    assert reads == [(2, 8), (2, 8)]

    reads.clear()
    model = build("llama4", "varlen", "block_causal")
    masks = model.get_attention_masks(tokens, None, {"document_ids": ids})
    cp_shard(axis("meta", 0), (tokens,), masks)
    assert reads == [(2, 8)]
