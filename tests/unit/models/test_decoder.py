"""The shared decoder through llama3: initial weights, masks, ties, shards."""

from types import SimpleNamespace

import pytest
import torch

from tests.torch_alone import run_with_torch_alone
from tests.unit.models.tiny import filled, on_meta, sized
from torchtitan.batch.mask import DocumentMask
from torchtitan.distributed import collectives, context_parallel
from torchtitan.distributed.context_parallel import ContextPart, TokenShards
from torchtitan.models.decoder import Attention
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.rope import precompute_freqs_cis
from torchtitan.numerics.norm import RMSNorm

EOS = 2


def meta_model(args):
    return on_meta(Transformer, args)


def tiny_args(**changes):
    sizes = {"n_kv_heads": 2, "multiple_of": 16, "rope_theta": 500000}
    return sized(TransformerModelArgs, **sizes | changes)


def tiny_model(**changes):
    return filled(Transformer(tiny_args(**changes)))


def test_initial_weights_have_the_spread_of_the_table():
    model = tiny_model(dim=128, vocab_size=512, attention_bias=True)
    expected = {"tok_embeddings.weight": 1.0, "output.weight": 128**-0.5}
    for layer in range(2):
        residual = 0.02 / (2 * (layer + 1)) ** 0.5
        for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1"):
            expected[f"layers.{layer}.{name}.weight"] = 0.02
        for name in ("attention.wo", "feed_forward.w2", "feed_forward.w3"):
            expected[f"layers.{layer}.{name}.weight"] = residual
    for name, parameter in model.named_parameters():
        if name in expected:
            # 8,000 draws or more: 4 standard errors of a std are 4 / sqrt(16,000) = 3.2 %
            assert parameter.std().item() == pytest.approx(expected[name], rel=0.032), name
        elif "norm" in name:
            assert torch.all(parameter == 1), name
        else:
            assert name.endswith("bias") and torch.all(parameter == 0), name
    assert model.output.weight.abs().max() <= 3 * 128**-0.5


def test_depth_init_off_scales_every_block_by_the_whole_depth():
    model = meta_model(tiny_args(depth_init=False, n_layers=3))
    assert [b.weight_init_std for b in model.layers.values()] == [0.02 / 6**0.5] * 3


def test_tied_embedding_is_one_parameter_also_after_allocation():
    model = meta_model(tiny_args(enable_weight_tying=True)).to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    assert model.output.weight is model.tok_embeddings.weight
    assert model.output.weight.std().item() == pytest.approx(32**-0.5, rel=0.1)
    n_params, _ = model.model_args.get_nparams_and_flops(model, 16)
    n_untied, _ = tiny_args().get_nparams_and_flops(meta_model(tiny_args()), 16)
    assert n_params == n_untied - 2 * 64 * 32
    assert "output.weight" in model.state_dict()


@pytest.mark.parametrize("attn_type", ["flex", "varlen"])
def test_document_mask_itself_is_a_mask(attn_type):
    model = tiny_model(attn_type=attn_type, attn_mask_type="position_block_causal")
    tokens = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 2, 2]])
    masks = model.get_attention_masks(tokens, None, {"document_ids": ids})
    documents = DocumentMask.from_documents(ids)
    assert torch.equal(model(tokens, documents), model(tokens, masks))
    # A chunk of 2 tokens equals a window of 2 only for the second token.
    chunks, window = (model(tokens, m) for m in (documents.in_chunks(2), documents.with_window(2)))
    assert torch.equal(chunks[0, :2], window[0, :2])
    assert not torch.allclose(chunks[0, 2], window[0, 2])


def test_sdpa_with_a_document_mask_names_both_ways_out():
    with pytest.raises(ValueError, match="'flex' or 'varlen'.*'causal'"):
        meta_model(tiny_args(attn_mask_type="block_causal"))


def test_sdpa_forward_and_backward_load_no_compiler():
    code = (
        "import torch\n"
        "from torchtitan.models.llama3 import Transformer, llama3_args\n"
        "with torch.device('meta'): model = Transformer(llama3_args['debugmodel'])\n"
        "model.model_args.max_seq_len = 64\n"
        "model.to_empty(device='cpu')\n"
        "with torch.no_grad(): model.init_weights()\n"
        "model(torch.ones(1, 8, dtype=torch.long)).sum().backward()\n"
        "import sys; print([m for m in ('torch._dynamo', 'torch._inductor') if m in sys.modules])"
    )
    assert run_with_torch_alone(code).strip() == "[]"


class HalfOfRows:
    """The second of two context-parallel ranks."""

    device_type = "cpu"

    def get_local_rank(self):
        return 1


@pytest.mark.parametrize("n_tokens", [12, 24])
def test_shared_rows_longer_than_the_table_lengthen_it_on_an_accelerator(n_tokens):
    # "meta" stands for the accelerator, where positions are read only if rows are long.
    model = meta_model(tiny_args(max_seq_len=16))
    for name in ("norm", "output"):
        setattr(model, name, None)
    model.layers.clear()
    chunks = torch.arange(2)[:, None]
    shards = TokenShards(chunks, chunks.flatten(), HalfOfRows(), "")
    mask = DocumentMask(part=ContextPart(shards, "allgather"))
    tokens = torch.zeros(1, n_tokens // 2, dtype=torch.int64, device="meta")
    model(tokens, attention_masks=mask)
    assert len(model.freqs_cis) == max(16, n_tokens)


def test_keys_travel_while_queries_and_their_gradients_are_made(monkeypatch):
    events = []

    def recorded(event, result_of=lambda x: x):
        return lambda x, *_: events.append(event) or result_of(x)

    def reduced(x):
        return x.unflatten(0, (2, -1)).sum(0)

    wait, gather = recorded("wait"), recorded("gather", lambda x: x.detach().repeat(2, 1, 1))
    monkeypatch.setattr(context_parallel, "OPS", SimpleNamespace(wait_tensor=wait))
    monkeypatch.setitem(collectives.OPERATIONS, "wait", wait)
    monkeypatch.setattr(context_parallel, "start_all_gather", gather)
    monkeypatch.setattr(context_parallel, "start_reduce_scatter", recorded("reduce", reduced))
    group = SimpleNamespace(group_name="")
    axis = SimpleNamespace(
        device_type="cpu", get_group=lambda: group, get_local_rank=lambda: 1, size=lambda: 2
    )
    (x,), mask = context_parallel.cp_shard(
        axis, (torch.randn(1, 8, 16),), rotate_method="allgather"
    )
    attention = Attention(16, 4, 2, qk_norm=lambda n_heads, size: RMSNorm(size, 1e-6))
    attention.wq.register_forward_hook(lambda *_: events.append("queries"))
    attention.wq.weight.register_hook(lambda _: events.append("gradient of queries"))
    attention.wk.weight.register_hook(lambda _: events.append("gradient of keys"))

    out = attention(x, precompute_freqs_cis(4, 4, scaling_args=None)[None], mask)
    assert events == ["gather", "queries", "wait"]
    events.clear()
    out.sum().backward()
    assert events == ["reduce", "gradient of queries", "wait", "gradient of keys"]
    assert all(p.grad.isfinite().all() for p in attention.parameters())
