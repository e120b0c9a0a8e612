import pytest
import torch
import torch.nn.attention.varlen
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from torchtitan.config.job_config import ActivationCheckpoint
from torchtitan.distributed.activation_checkpoint import _context_fn, apply_ac
from torchtitan.distributed.device_reads import read_once
from torchtitan.models import parallelize

SIZE = 512
FLOPS_UNIT = SIZE**3 * 2

SAVED_OPS = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops.aten.max.default,
    torch.ops.torch_attn._varlen_attn,  # a packet, as clients pass it
}


class Block(nn.Module):
    def __init__(self, size=SIZE):
        super().__init__()
        self.moe = nn.Module()
        self.moe.router = nn.Module()
        self.moe.router.gate = nn.Linear(size, size, bias=False)
        self.attention = nn.Module()
        self.attention.wq = nn.Linear(size, size, bias=False)
        self.output = nn.Linear(size, 2 * size, bias=False)

    def forward(self, x):
        return self.output(self.attention.wq(self.moe.router.gate(x)))


class Model(nn.Module):
    def __init__(self, num_blocks=1, size=SIZE, first=0):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({str(first + i): Block(size) for i in range(num_blocks)})

    def forward(self, x):
        (block,) = self.layers.values()
        return block(x)


def op_config(*recomputed):
    config = ActivationCheckpoint(mode="selective", selective_ac_option="op")
    config.per_op_sac_force_recompute_mm_shapes_by_fqns = list(recomputed)
    return config


CASES = {
    "none": (None, 8),
    "op": (op_config(), 9),
    "op, gate recomputed": (op_config("moe.router.gate"), 10),
    "op, output recomputed": (op_config("output"), 11),
    "full": (ActivationCheckpoint(mode="full"), 12),
}


def build(config, **kwargs):
    model = Model(**kwargs)
    if config is not None:
        apply_ac(model, config, op_sac_save_list=SAVED_OPS)
    return model


@pytest.mark.parametrize("config, n_products", CASES.values(), ids=CASES)
def test_backward_recomputes_what_was_not_saved_and_gradients_stay(config, n_products):
    """Products of [512, 512] matrices in backward: 8 for gradients, the rest recomputed."""
    model, batch, results = build(config), torch.randn(SIZE, SIZE), []
    model(batch).sum().backward()  # each forward counts its products from 0
    for m in (Model(), model):
        x = batch.clone().requires_grad_()
        m.zero_grad()
        out = m(x)
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        results.append([out, x.grad, *(p.grad for p in m.parameters())])
    assert counter.get_total_flops() / FLOPS_UNIT == n_products
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    "option, expected", [("0", "0123"), ("1", "0123"), ("2", "13"), ("3", "2"), ("9", "")]
)
def test_every_nth_block_is_wrapped(option, expected):
    config = ActivationCheckpoint(mode="selective", selective_ac_option=option)
    for _ in range(2):  # a model before it in the process makes no difference
        blocks = build(config, num_blocks=4, size=4).layers
        wrapped = [name for name, block in blocks.items() if isinstance(block, CheckpointWrapper)]
        assert wrapped == list(expected)


# ---- what the project's own list keeps on an accelerator ----

aten, collectives = torch.ops.aten, torch.ops._c10d_functional


def _offsets(x):
    return torch.tensor([2, 4], dtype=torch.int32, device=x.device)


def _to_8_bits(x):
    return x.to(torch.float8_e4m3fn)


def _scale(x):
    return torch.ones((), device=x.device)


# Without a kernel, on the meta device. x: [4, 16], h: [1, 1, 4, 16] of the same values.
KEPT = {
    "mm": lambda x, h: aten.mm(x, x.t()),
    "addmm": lambda x, h: aten.addmm(x[:, 0], x, x.t()),
    "_scaled_mm": lambda x, h: aten._scaled_mm(
        *(_to_8_bits(x), _to_8_bits(x.repeat(4, 1)).t(), _scale(x), _scale(x)),
        out_dtype=torch.bfloat16,
    ),
    "_grouped_mm": lambda x, h: aten._grouped_mm(x, x.t().repeat(2, 1, 2), _offsets(x)),
    "grouped_mm": lambda x, h: torch.ops.torchtitan.grouped_mm(
        x, x.t().repeat(2, 1, 1), _offsets(x)
    ),
    "_scaled_dot_product_flash_attention": lambda x, h: aten._scaled_dot_product_flash_attention(
        h, h, h
    )[0],
    "_scaled_dot_product_efficient_attention": lambda x, h: (
        aten._scaled_dot_product_efficient_attention(h, h, h, None, True)[0]
    ),
    "_scaled_dot_product_cudnn_attention": lambda x, h: aten._scaled_dot_product_cudnn_attention(
        h, h, h, None, True
    )[0],
    "_varlen_attn": lambda x, h: torch.ops.torch_attn._varlen_attn(
        *(h[0], h[0], h[0], _offsets(x), _offsets(x), 2, 2)
    )[0],
    "reduce_scatter_tensor": lambda x, h: collectives.reduce_scatter_tensor(x, "sum", 2, "group"),
    "reduce_scatter": lambda x, h: torch.ops.torchtitan.reduce_scatter(x, 2, "group"),
    "all_to_all_single": lambda x, h: collectives.all_to_all_single(x, [1, 1], [2, 2], "group"),
}


class Calls(TorchDispatchMode):
    """Records the names of the ops that really run, without those that checkpointing replays."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name() if callable(func.name) else func.name)
        return func(*args, **(kwargs or {}))

    def count(self, name):
        return sum(seen.partition("::")[2].partition(".")[0] == name for seen in self.names)


@pytest.fixture
def saved_ops(monkeypatch):
    monkeypatch.setattr(parallelize, "get_device_type", lambda: "cuda")
    return frozenset(parallelize._ops_saved_by_selective_checkpointing(compile_blocks=False))


@pytest.mark.parametrize("name", KEPT)
def test_recomputation_on_an_accelerator_does_not_run_expensive_op_again(name, saved_ops):
    x = torch.empty(4, 16, dtype=torch.bfloat16, device="meta")
    forward, recompute = _context_fn(saved_ops, frozenset())()
    for contexts, expected in ((forward, 1), (recompute, 0)):
        with Calls() as calls, contexts:
            KEPT[name](x, x[None, None])
        assert calls.count(name) == expected, calls.names


class ReadsDevice(nn.Module):
    """Multiplies by the results of two reads, which return different numbers each time."""

    def __init__(self):
        super().__init__()
        self.num_reads = 0

    def read(self):
        self.num_reads += 1
        return self.num_reads

    def forward(self, x):
        return (x * read_once(self.read)).sin() * read_once(self.read)


@pytest.mark.parametrize("config", [ActivationCheckpoint(mode="full"), op_config()])
def test_recomputation_takes_what_forward_has_read(config):
    model = nn.Module()
    model.layers = nn.ModuleDict({"0": ReadsDevice()})
    apply_ac(model, config, op_sac_save_list=set(), reads_device=True)
    (block,) = model.layers.values()
    x = torch.ones(1, requires_grad=True)
    outs = [block(x), block(x)]  # two microbatches in flight
    assert block.num_reads == 4
    for (first, second), out in zip(((1, 2), (3, 4)), outs, strict=True):
        (gradient,) = torch.autograd.grad(out, x)
        torch.testing.assert_close(gradient, first * second * torch.tensor(first).cos()[None])
    assert block.num_reads == 4
    with torch.no_grad():
        block(x)
    assert block.num_reads == 6


def test_no_mode_and_a_module_that_is_no_linear_are_refused():
    with pytest.raises(ValueError, match="must be full or selective.*got 'none'"):
        build(ActivationCheckpoint(mode="none"), size=4)
    with pytest.raises(ValueError, match="'moe.router' matches layers.0.moe.router, a Module"):
        build(op_config("moe.router"), size=4)
