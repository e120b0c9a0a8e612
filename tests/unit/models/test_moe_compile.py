"""Compiled blocks with a mixture of experts equal eager ones."""

import copy

import pytest
import torch

from tests.unit.models.tiny import filled, sized
from torchtitan.config.job_config import ActivationCheckpoint, Compile
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.moe import MoEArgs
from torchtitan.models.parallelize import apply_compile
from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs

pytestmark = pytest.mark.long

# "eager" runs the graphs that dynamo traced, where a block would break; inductor is slow.
COMPILE = Compile(enable=True, backend="eager")


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()


def build(**changes):
    moe_args = MoEArgs(num_experts=4, top_k=2, num_shared_experts=1, **changes)
    experts = {"moe_enabled": True, "moe_inter_dim": 24, "moe_args": moe_args}
    args = sized(Qwen3ModelArgs, n_kv_heads=2, head_dim=16, **experts | {"n_layers": 1})
    return filled(Qwen3Model(args))


def results(model, replays=False):
    """(loss, gradients, tokens per expert) for two batches of different sizes."""
    losses = []
    for rows in (2, 3):
        tokens = torch.randint(0, 64, (rows, 7), generator=torch.Generator().manual_seed(rows))
        # The last two, and for some tokens the router's own.
        experts = torch.tensor([3, 2], dtype=torch.int16).repeat(rows, 7, 1, 1)
        experts[:, ::2] = -1
        losses.append(model(tokens, **{"routed_experts": experts} if replays else {}).pow(2).mean())
        losses[-1].backward()
    return losses, [p.grad for p in model.parameters()], model.layers["0"].moe.tokens_per_expert


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16]
)
def test_block_is_one_graph(dtype, replays):
    model = build().to(dtype)
    compiled = copy.deepcopy(model)
    apply_compile(compiled, COMPILE)
    assert isinstance(compiled.layers["0"], torch._dynamo.OptimizedModule)
    torch.testing.assert_close(results(compiled, replays), results(model, replays))


@pytest.mark.parametrize("ep_enabled, changes", [(True, {}), (False, {"use_grouped_mm": False})])
def test_block_whose_experts_wait_for_counts_is_compiled_around_them(ep_enabled, changes):
    model = build(**changes)
    compiled = copy.deepcopy(model)
    apply_ac(compiled, ActivationCheckpoint(mode="full"))
    for _ in range(2):  # the second call does nothing
        apply_compile(compiled, COMPILE, ep_enabled)
    block = compiled.layers["0"]._checkpoint_wrapped_module
    moe = block.moe
    pieces = (block.attention, moe.router, moe.shared_experts)
    assert all(piece._compiled_call_impl is not None for piece in pieces)
    assert not any(part._compiled_call_impl for part in (block, moe, moe.experts))
    losses, gradients, counts = results(compiled)
    moe.tokens_per_expert //= 2  # includes the tokens of the recomputation
    torch.testing.assert_close((losses, gradients, counts), results(model))
