"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) beside frozen weights.

N outputs and K inputs of a linear layer, r rank, E experts. A layer with an adapter computes

    x W^T + scale * dropout(x) A^T B^T

The weight W [N, K] keeps its name in the state dict. The module has two more parameters:
lora_a = A [r, K] and lora_b = B [N, r]. Each expert has its own adapter: beside w1 [E, N, K] the
module has w1_lora_a [E, r, K] and w1_lora_b [E, N, r].

Under tensor parallelism, B is sharded if the weight is sharded along its outputs, and A is sharded
if the weight is sharded along its inputs (`models/tp_plan.py`).
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtitan.distributed.dtensor import (
    local_parameter,
    local_tensor,
    own_slices,
    whole_tensor,
    with_local,
)
from torchtitan.distributed.fsdp import reshard_model
from torchtitan.distributed.seeded_init import seeded_init
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.numerics.linear import Linear, linear
from torchtitan.numerics.low_rank import LowRank
from torchtitan.numerics.nf4 import dequantize
from torchtitan.tools.torch_parts import name_without_wrappers

# The config names a layer by one or more adjacent components of the layer's dotted name
# ("self_attn.q_proj"), in our spelling or PEFT's. This table maps our component to PEFT's names. Several of
# our components have the same PEFT name if Hugging Face's model joins their weights.
_SPELLINGS = {
    ours: names.split(",")
    for ours, names in (
        pair.split("=")
        for pair in (
            "attention=self_attn wq=q_proj,qkv_proj wk=k_proj,qkv_proj wv=v_proj,qkv_proj wo=o_proj wg=q_proj "
            "wq_a=q_a_proj wq_b=q_b_proj wkv_a=kv_a_proj_with_mqa wkv_b=kv_b_proj "
            "w1=gate_proj,gate_up_proj w3=up_proj,gate_up_proj w2=down_proj "
            "feed_forward=mlp,moe moe=mlp,feed_forward shared_experts=shared_expert output=lm_head "
            "attention_norm=input_layernorm ffn_norm=post_attention_layernorm "
            "tok_embeddings=embed_tokens"
        ).split()
    )
}
_LINEAR_ATTENTION = {
    "attention": ["linear_attn"],
    "wq": ["in_proj_qkv", "in_proj_qkvz"],
    "wk": ["in_proj_qkv", "in_proj_qkvz"],
    "wv": ["in_proj_qkv", "in_proj_qkvz"],
    "wz": ["in_proj_z", "in_proj_qkvz"],
    "wb": ["in_proj_b", "in_proj_ba"],
    "wa": ["in_proj_a", "in_proj_ba"],
    "wo": ["out_proj"],
}
_LINEAR = "linear_attn"


def name_of_layer(model: nn.Module, name: str) -> str:
    """Return a layer's name as `fits` takes it, with `linear_attn` for `attention` in linear attention."""
    head, found, tail = f"{name}.".partition(".attention.")
    is_linear = found and hasattr(model.get_submodule(head).attention, "conv_q")
    return f"{head}.{_LINEAR}.{tail}".removesuffix(".") if is_linear else name


def fits(pattern: str, name: str) -> bool:
    """True if the pattern is one or more adjacent dotted components of the layer's name."""
    wanted, parts = (x.removeprefix("model.").split(".") for x in (pattern, name))
    table = _LINEAR_ATTENTION if _LINEAR in parts else {}
    spellings = [
        {
            part,
            "attention" if part == _LINEAR else part,
            *(table.get(part) or _SPELLINGS.get(part, ())),
        }
        for part in parts
    ]
    return any(
        all(part in spelled for part, spelled in zip(wanted, spellings[i:], strict=False))
        for i in range(len(parts) - len(wanted) + 1)
    )


def first_fit(patterns: Iterable[str], name: str) -> str | None:
    """Return the first pattern that fits, or None."""
    return next((pattern for pattern in patterns if fits(pattern, name)), None)


class Adapted(NamedTuple):
    """State-dict names of a weight and of its adapter's A and B, and the scale of B A."""

    weight: str
    a: str
    b: str
    scale: float


class Adapters(NamedTuple):
    """The adapters of one module. scales: weight name -> scale. dropout: rate of all these adapters."""

    scales: dict[str, float]
    dropout: float


def add_adapter(
    module: nn.Module, weight_name: str, rank: int, scale: float, dropout: float
) -> None:
    """Add an uninitialised adapter to `GroupedExperts` or to any subclass of nn.Linear."""
    weight = module.get_parameter(weight_name)
    *experts, n_outputs, n_inputs = weight.shape
    for which, shape in (("a", (rank, n_inputs)), ("b", (n_outputs, rank))):
        empty = torch.empty(*experts, *shape, dtype=weight.dtype, device=weight.device)
        module.register_parameter(_parameter_name(weight_name, which), nn.Parameter(empty))
    if not hasattr(module, "lora"):
        module.lora, module.lora_is_on = Adapters({}, dropout), True
        module.lora_n_off = 0  # number of open `adapters_off` contexts
        module.lora_stacked = None  # a `multi_lora.Stacked` to use in place of the adapter
        if isinstance(module, GroupedExperts):
            module.__class__ = AdaptedExperts
            del module._feed_forward  # the attribute would hide the new class's method
        elif isinstance(module, Linear):
            module.low_rank = _low_rank
        else:  # another linear class, such as torchao's
            module.register_forward_hook(_add_product)
    module.lora.scales[weight_name] = scale


def _parameter_name(weight_name: str, which: str) -> str:
    prefix = "" if weight_name == "weight" else f"{weight_name}_"
    return f"{prefix}lora_{which}"


def _add_product(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    adapter = _low_rank(module, inputs[0])
    return output if adapter is None else adapter.add_to(output)


def _low_rank(module: nn.Module, x: Tensor) -> LowRank | None:
    """Return what the adapter adds to the output for x [..., K]; None while adapters are off."""
    if not module.lora_is_on:
        return None
    scales, dropout = module.lora
    x = F.dropout(x, dropout, module.training) if dropout else x
    product = getattr(module, "product", linear)
    if module.lora_stacked is not None:
        return module.lora_stacked.low_rank(x, scales["weight"], product)
    a, b = local_parameter(module.lora_a)[None], local_parameter(module.lora_b)[None]
    sizes = [x.shape[:-1].numel()]
    return LowRank(x, a, b, sizes, scales["weight"], None, product)


class AdaptedExperts(GroupedExperts):
    """`GroupedExperts` with one adapter per expert, applied by the same matmul function as the weights."""

    lora: Adapters
    lora_is_on: bool
    lora_stacked: Any

    def groups(self, selected: Tensor) -> tuple[Tensor, int]:
        """Return the groups as the base class does; under multi-LoRA, each expert has one group per model."""
        if self.lora_stacked is None or not self.lora_is_on:
            return super().groups(selected)
        models, n_models = self.lora_stacked.models_of_tokens(len(selected))
        return selected * n_models + models[:, None], self.num_experts * n_models

    def local_parameters(self) -> tuple[Tensor, ...]:
        weights = super().local_parameters()
        if not self.lora_is_on:
            return weights
        if self.lora_stacked is not None:
            # [m, E, ...] -> [E * m, ...], in the order of the groups.
            pairs = (stack for name in self.lora.scales for stack in self.lora_stacked.pairs[name])
            return (*weights, *(stack.transpose(0, 1).flatten(0, 1) for stack in pairs))
        names = (_parameter_name(name, which) for name in self.lora.scales for which in "ab")
        return (*weights, *(local_parameter(getattr(self, name)) for name in names))

    def _feed_forward(
        self, linear: Any, x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, *pairs: Tensor
    ) -> Tensor:
        """Return the experts' output. pairs: A, B of each adapted weight; empty while adapters are off."""
        scales, dropout = self.lora
        pair_of = dict(zip(scales, zip(pairs[::2], pairs[1::2], strict=True), strict=False))

        def product(name: str, x: Tensor, weight: Tensor) -> Tensor:
            out = linear(x, weight)
            if name not in pair_of:
                return out
            a, b = pair_of[name]
            x = F.dropout(x, dropout, self.training) if dropout else x
            return out + linear(scales[name] * linear(x, a), b)

        return product("w2", F.silu(product("w1", x, w1)) * product("w3", x, w3), w2)


def adapted_weights(parts: Iterable[nn.Module]) -> Iterator[Adapted]:
    """Yield the adapters of model parts, in the order of their modules."""
    for part in parts:
        for long_name, module in part.named_modules():
            scales = module.lora.scales if hasattr(module, "lora") else {}
            for weight_name, scale in scales.items():
                prefix = f"{name_without_wrappers(f'{long_name}.')}"
                a, b = (_parameter_name(weight_name, which) for which in "ab")
                yield Adapted(prefix + weight_name, prefix + a, prefix + b, scale)


def quantized_weights(parts: Iterable[nn.Module]) -> Iterator[tuple[str, torch.dtype]]:
    """Yield (name, compute dtype) of each 4-bit weight."""
    for part in parts:
        for long_name, module in part.named_modules():
            for name in getattr(module, "in_4_bits", ()):
                yield name_without_wrappers(f"{long_name}.") + name, module.dtype_of_4_bits


def adapter_names(adapted: Iterable[Adapted]) -> set[str]:
    """Return the names of all A and B matrices."""
    return {name for one in adapted for name in (one.a, one.b)}


def init_adapters(part: nn.Module) -> None:
    """Fill A from U(-K^-0.5, K^-0.5), as `peft` does (Kaiming with a = sqrt(5)), and B with zeros."""
    parameters = {name_without_wrappers(name): p for name, p in part.named_parameters()}
    for adapted in adapted_weights([part]):
        a = parameters[adapted.a]
        bound = a.shape[-1] ** -0.5
        nn.init.uniform_(a, -bound, bound)
        nn.init.zeros_(parameters[adapted.b])


@torch.no_grad()
def redraw_adapters(
    parts: Iterable[nn.Module], seed: int, rank: int, layers: Collection[str]
) -> None:
    """Initialise the adapters again, with rank `rank`. The values do not depend on the parallel layout.

    layers: names, as in `lora.target_modules`; the adapters of all other layers become zero. Rows of A from
    index `rank` on become zero; these rows, and the same columns of B, stay zero in training.
    """
    for part in parts:
        reshard_model(part)
        with seeded_init(part, seed):
            init_adapters(part)
        parameters = {name_without_wrappers(name): p for name, p in part.named_parameters()}
        for adapted in adapted_weights([part]):
            name = name_of_layer(part, adapted.weight.removesuffix(".weight"))
            is_chosen = first_fit(layers, name) is not None
            a = parameters[adapted.a]
            local, dim = local_tensor(a), a.ndim - 2
            first_row = own_slices(a)[dim].start
            n_kept = min(max((rank if is_chosen else 0) - first_row, 0), local.shape[dim])
            local.narrow(dim, n_kept, local.shape[dim] - n_kept).zero_()


@contextlib.contextmanager
def adapters_off(parts: Iterable[nn.Module]) -> Iterator[None]:
    """A context in which the parts compute without adapters. Contexts may overlap in any order."""
    modules = [m for part in parts for m in part.modules() if hasattr(m, "lora")]

    def count(change: int) -> None:
        for module in modules:
            module.lora_n_off += change
            module.lora_is_on = module.lora_n_off == 0

    count(1)
    try:
        yield
    finally:
        count(-1)


@torch.no_grad()
def merged(
    entries: Mapping[str, Any], parts: Iterable[nn.Module], dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """Return a state dict without adapters, with W + scale * B A in place of W.

    entries: the parts' state dict. Collective: A and B are gathered.
    dtype: dtype of the merged weights, to which the sum is rounded once. None keeps each weight's dtype; a
        4-bit weight then gets the dtype that its products are computed in.
    """
    result, parts = dict(entries), list(parts)
    if not any("lora_a" in name for name in entries):  # faster than looking at all modules
        return result
    in_4_bits = dict(quantized_weights(parts))
    for weight_name, a_name, b_name, scale in adapted_weights(parts):
        a, b = (whole_tensor(result.pop(name)) for name in (a_name, b_name))
        weight = result[weight_name]
        own_dtype = in_4_bits.pop(weight_name, weight.dtype)
        if weight.dtype == torch.uint8:
            weight = with_local(weight, dequantize(local_tensor(weight)))
        local, (*experts, rows, columns) = local_tensor(weight), own_slices(weight)
        kind = torch.promote_types(local.dtype, torch.float32)
        product = b[(*experts, rows)].to(kind) @ a[(*experts, ..., columns)].to(kind)
        total = (local.to(kind) + scale * product).to(dtype or own_dtype)
        result[weight_name] = with_local(weight, total)
    for name, own_dtype in in_4_bits.items():
        numbers = dequantize(local_tensor(result[name]), dtype or own_dtype)
        result[name] = with_local(result[name], numbers)
    return result
