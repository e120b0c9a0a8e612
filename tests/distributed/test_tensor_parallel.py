"""A decoder split over ranks computes what one process does: loss, gradients, norm, weights."""

import dataclasses
import re

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import _context_fn
from torchtitan.distributed.collectives import start_reduce_scatter
from torchtitan.distributed.seeded_init import seeded_init
from torchtitan.distributed.sequence_parallel import SequenceShards
from torchtitan.distributed.utils import clip_grad_norm_, get_train_context
from torchtitan.loss.cross_entropy import IGNORE_INDEX, cross_entropy_loss
from torchtitan.models.moe import MoEArgs
from torchtitan.models.parallelize import _op_sac_save_list, parallelize_decoder
from torchtitan.optim.optimizer import build_optimizers
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.testing.gloo import run_ranks

ROWS, VOCAB, STEPS = 4, 64, 3
# Summation order differs. fp32 has 6e-8 per operation; gradients of norms sum over all tokens.
TOLERANCE = 1e-5

_SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": VOCAB, "max_seq_len": 64}
_GQA = _SIZES | {"n_kv_heads": 2}
_EXPERTS = {"num_experts": 4, "top_k": 2}
_MODELS = {
    "llama3": ("llama3", _GQA | {"multiple_of": 16}),
    "llama3 with biases": (
        "llama3",
        _GQA | {"multiple_of": 16, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen3 tied": (
        "qwen3",
        _GQA | {"head_dim": 8, "hidden_dim": 48, "enable_weight_tying": True},
    ),
    "qwen2": (
        "qwen3",
        _GQA | {"head_dim": 8, "hidden_dim": 48, "qk_norm": False, "qkv_bias": True},
    ),
    "qwen3 moe": (
        "qwen3",
        _GQA
        | {"head_dim": 8, "moe_enabled": True, "moe_inter_dim": 16}
        | {"moe_args": MoEArgs(**_EXPERTS, num_shared_experts=0, score_before_experts=False)},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        _SIZES
        | {"inter_dim": 48, "moe_inter_dim": 16, "q_lora_rank": 12, "kv_lora_rank": 8}
        | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
        | {"moe_args": MoEArgs(**_EXPERTS, num_shared_experts=2, score_before_experts=False)},
    ),
    "llama4": (
        "llama4",
        _GQA
        | {"multiple_of": 16, "every_n_layers_nope": 2}
        | {"fixed_attn_block_size": 8, "attn_type": "flex"}
        | {"moe_args": MoEArgs(**_EXPERTS)},
    ),
    "gpt_oss": (
        "gpt_oss",
        _GQA
        | {"head_dim": 8, "moe_inter_dim": 16, "sliding_window_size": 4}
        | {"moe_args": MoEArgs(**_EXPERTS, num_shared_experts=0, gate_bias=True)},
    ),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """attention: the kernel for documents; None for the default kernel without documents.

    compiled: the compiler's backend.
    """

    model: str
    seq_len: int = 13  # tp divides neither it nor, with one row, the number of tokens
    attention: str | None = None
    loss_parallel: bool = True
    ac: str = "none"
    compiled: str | None = None
    async_tp: bool = False


def build(run, dims):
    family, sizes = _MODELS[run.model]
    spec = get_train_spec(family)
    if run.attention:
        documents = {"attn_type": run.attention, "attn_mask_type": "position_block_causal"}
        sizes = sizes | documents
    first = next(iter(spec.model_args.values()))
    config = JobConfig()
    config.activation_checkpoint.mode = run.ac
    config.activation_checkpoint.selective_ac_option = "op"
    if run.compiled:
        config.compile.enable, config.compile.backend = True, run.compiled
    config.parallelism.enable_async_tensor_parallel = run.async_tp
    config.training.mixed_precision_param = "float32"
    config.parallelism.disable_loss_parallel = not run.loss_parallel
    with torch.device("meta"):
        model = spec.model_cls(type(first)(**sizes))
    model = parallelize_decoder(model, dims, config)
    model.to_empty(device="cpu")
    with torch.no_grad(), seeded_init(model, 1):
        model.init_weights()
    return model


def batch(seq_len):
    """Tokens, labels with gaps, and positions that restart, differently in each row."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (ROWS, seq_len + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, :3] = IGNORE_INDEX
    labels[-1, -1] = IGNORE_INDEX
    starts = torch.rand((ROWS, seq_len), generator=generator) < 0.3
    columns = torch.arange(seq_len).expand(ROWS, -1)
    positions = columns - torch.where(starts, columns, 0).cummax(1).values
    return tokens[:, :-1], labels, positions


def named_whole(tensors):
    return {
        re.sub(r"_checkpoint_wrapped_module\.|_orig_mod\.", "", name): (
            t.full_tensor() if isinstance(t, DTensor) else t
        ).detach()
        for name, t in tensors
    }


def train(run, degrees=(1, 1, 1)):
    """Return losses and norms of each step, first weights and gradients, last weights."""
    replicate, shard, tp = degrees
    dims = ParallelDims(replicate, shard, 1, tp, 1, 1, 1, replicate * shard * tp)
    model = build(run, dims)
    first = {name: t.clone() for name, t in named_whole(model.named_parameters()).items()}
    tokens, labels, positions = batch(run.seq_len)
    num_valid = (labels != IGNORE_INDEX).sum()
    data_mesh = dims.get_mesh("batch") if dims.dp_enabled else None
    if data_mesh is not None:
        rank, size = data_mesh.get_local_rank(), data_mesh.size()
        tokens, labels, positions = (x.chunk(size)[rank] for x in (tokens, labels, positions))
    inputs = {}
    if run.attention or model.model_args.attn_type != "sdpa":
        inputs["attention_masks"] = model.get_attention_masks(
            tokens, None, {"positions": positions}
        )
    if run.attention:
        inputs["positions"] = positions
    optimizer = build_optimizers([model], JobConfig().optimizer, dims)
    history, grads = [], {}
    for step in range(STEPS):
        with get_train_context(tp > 1 and run.loss_parallel)():
            loss = cross_entropy_loss(model(tokens, **inputs), labels) / num_valid
            loss.backward()
        if step == 0:
            grads = {
                name: grad.clone()
                for name, grad in named_whole(
                    (name, p.grad) for name, p in model.named_parameters() if p.grad is not None
                ).items()
            }
        norm = clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        total = loss.detach().clone()
        if data_mesh is not None:
            torch.distributed.all_reduce(total, group=data_mesh.get_group())
        history.append((total.item(), norm.item()))
        optimizer.step()
        optimizer.zero_grad()
    return history, first, grads, named_whole(model.named_parameters())


def train_all(runs, all_degrees):
    return [train(run, degrees) for run in runs for degrees in all_degrees]


def assert_same(found, alone):
    history, first, grads, last = found
    history_alone, first_alone, grads_alone, last_alone = alone
    assert first.keys() == first_alone.keys() and grads.keys() == grads_alone.keys()
    for name in first:
        assert torch.equal(first[name], first_alone[name]), name
    for name, grad in grads.items():
        scale = grads_alone[name].norm()
        assert (grad - grads_alone[name]).norm() <= TOLERANCE * scale, name
    torch.testing.assert_close(
        torch.tensor(history), torch.tensor(history_alone), rtol=TOLERANCE, atol=0
    )
    for name in last:  # Adam turns a gradient of nearly nothing into a step of up to lr = 8e-4
        torch.testing.assert_close(last[name], last_alone[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("model", _MODELS)
def test_two_ranks_train_every_family_like_one_process(model):
    runs = [Run(model), Run(model, attention="flex")]
    for ranks in zip(*run_ranks(train_all, 2, runs, [(1, 1, 2)]), strict=True):
        run = runs.pop(0)
        for found in ranks:
            assert_same(found, train(run))


def pass_through_shards(overlap):
    """Return, for each length, the whole tensor, the results of two round trips, and their gradients."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    shards = SequenceShards(init_device_mesh("cpu", (size,)), overlap)
    results = []
    for seq_len in range(1, 6):
        whole = torch.arange(ROWS * seq_len * 2.0).reshape(ROWS, seq_len, 2).requires_grad_()
        joined = shards.join(shards.split(whole), seq_len)
        (joined_grad,) = torch.autograd.grad(joined.square().sum(), whole)
        # A different summand on each rank, and a different use of the result.
        summed = shards.gather(shards.reduce(whole * (rank + 1)), seq_len)
        (summed_grad,) = torch.autograd.grad((summed * (rank + 1)).sum(), whole)
        results.append((whole, joined, joined_grad, summed, summed_grad / (rank + 1)))
    return [tuple(x.detach() for x in result) for result in results]


@pytest.mark.parametrize("overlap", [False, True])
def test_shards_of_any_length_join_to_the_whole_with_its_gradients(overlap):
    for found in run_ranks(pass_through_shards, 3, overlap):
        for whole, joined, joined_grad, summed, summed_grad in found:
            assert torch.equal(joined, whole) and torch.equal(joined_grad, 2 * whole)
            assert torch.equal(summed, whole * (1 + 2 + 3))
            assert torch.equal(summed_grad, torch.full_like(whole, 1 + 2 + 3))


def sum_summands():
    """Return torch's sum, ours, ours compiled, and the bytes selective checkpointing keeps of ours."""
    torch.manual_seed(torch.distributed.get_rank())
    x, group = torch.randn(6, 5), torch.distributed.group.WORLD.group_name
    wait = torch.ops._c10d_functional.wait_tensor
    expected = wait(torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", 2, group))

    def own_sum(x):
        return wait(start_reduce_scatter(x, 2, group))

    forward, _ = _context_fn(_op_sac_save_list, frozenset())()
    with forward:
        out = own_sum(x)
    saved = tree_leaves(forward.storage)
    sizes = [value.val.nbytes for value in saved if hasattr(value, "val")]
    compiled = torch.compile(own_sum, backend="aot_eager", fullgraph=True)(x)
    return expected, out, compiled, sizes


def test_sum_over_ranks_is_torchs_and_checkpointing_keeps_no_summands():
    for expected, out, compiled, sizes in run_ranks(sum_summands, 2):
        assert torch.equal(out, expected) and torch.equal(compiled, expected)
        assert sizes == [expected.nbytes]
