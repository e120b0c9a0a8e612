"""Activation checkpointing: store fewer activations in forward, recompute the rest in backward."""

import functools
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

import torchtitan.numerics.low_rank  # noqa: F401  registers linear_with_low_rank
from torchtitan.config.job_config import ActivationCheckpoint
from torchtitan.distributed.device_reads import reading_contexts
from torchtitan.numerics import nf4
from torchtitan.tools import host, torch_parts
from torchtitan.tools.logging import logger

# (in_features, out_features) of the linear layers whose products are always recomputed.
_Shapes = frozenset[tuple[int, int]]

# Matrix-product op -> index of its right operand. Mode "op" keeps the output of every second product.
_PRODUCTS = {
    torch.ops.aten.mm.default: 1,
    torch.ops.aten.addmm.default: 2,
    torch.ops.torchtitan.mm.default: 1,
    torch.ops.torchtitan.linear_with_low_rank.default: 1,
    torch.ops.torchtitan.nf4_mm.default: 1,
} | {packet.default: 1 for packet in torch_parts.members("low_precision_products")}


def apply_ac(
    model: nn.Module,
    ac_config: ActivationCheckpoint,
    *,
    model_compile_enabled: bool = False,
    op_sac_save_list: set[Any] | None = None,
    base_folder: str = "",
    reads_device: bool = False,
) -> None:
    """Checkpoint the blocks in `model.layers`, in place. The mode is `ac_config.mode`:

    full: every block keeps only its input. memory_budget: the compiler decides what to keep.
    selective: if selective_ac_option is a number n, every n-th block keeps only its input. If it is
    "op", every block keeps the outputs of the ops in `op_sac_save_list`, except every second matrix product.

    reads_device: True if blocks call `read_once`; such blocks are not compiled as a whole.
    """
    # Dynamo (torch 2.13) moves a block's last used compiled variant to the front of its list, so
    # forward and recomputation could pick different variants. This setting keeps the order.
    host.change(False, torch_parts.reorder_compiled, before=True)

    mode, option = ac_config.mode, ac_config.selective_ac_option
    if mode == "memory_budget":
        _set_memory_budget(ac_config, model_compile_enabled, base_folder)
        return
    if mode not in ("full", "selective"):
        raise ValueError(
            f"activation_checkpoint.mode must be full or selective to wrap blocks, got {mode!r}"
        )
    by_op = mode == "selective" and option == "op"
    if mode == "selective" and not by_op and not option.isdecimal():
        raise ValueError(
            f"activation_checkpoint.selective_ac_option must be 'op' or a number n (every n-th "
            f"block), got {option!r}"
        )
    every = max(int(option), 1) if mode == "selective" and not by_op else 1
    # Torch dispatches overloads, so an overload packet in the list stands for all of its overloads.
    saved_ops = frozenset(
        op if overload is None else getattr(op, overload)
        for op in op_sac_save_list or ()
        for overload in (op.overloads() if hasattr(op, "overloads") else [None])
    )
    layers = model.get_submodule("layers")
    for position, (layer_id, block) in enumerate(list(layers.named_children()), start=1):
        # Number blocks as in the whole model, so that any split into stages wraps the same blocks.
        number = int(layer_id) + 1 if layer_id.isdecimal() else position
        if number % every:
            continue
        options: dict[str, Any] = {"context_fn": reading_contexts} if reads_device else {}
        if by_op:
            names = ac_config.per_op_sac_force_recompute_mm_shapes_by_fqns
            shapes = _linear_shapes(block, f"layers.{layer_id}", names)
            context_fn = _context_fn(saved_ops, shapes)
            if reads_device:
                context_fn = partial(reading_contexts, context_fn)
            options = {"context_fn": context_fn}
        wrapped = torch_parts.checkpoint_wrapper(
            block,
            preserve_rng_state=ac_config.preserve_rng_state,
            determinism_check=ac_config.determinism_check,
            early_stop=ac_config.early_stop,
            debug=ac_config.debug,
            **options,
        )
        layers.register_module(layer_id, wrapped)
    logger.info("activation checkpointing: %s", mode)


def _set_memory_budget(
    ac_config: ActivationCheckpoint, model_compile_enabled: bool, base_folder: str
) -> None:
    if not model_compile_enabled:
        raise ValueError(
            "activation_checkpoint.mode = 'memory_budget' needs the compiler; set "
            "compile.enable = true with 'model' among compile.components, or choose another mode"
        )
    if ac_config.visualize_memory_budget_pareto:
        folder = os.path.join(base_folder, "memory_budget_pareto")
        os.makedirs(folder, exist_ok=True)
        host.change_attribute(torch_parts.memory_budget, "memory_budget_pareto_dir", folder)
        host.change_attribute(torch_parts.memory_budget, "visualize_memory_budget_pareto", True)
    host.change_attribute(
        torch_parts.memory_budget, "activation_memory_budget", ac_config.memory_budget
    )
    logger.info("activation memory budget: %s", ac_config.memory_budget)


def _linear_shapes(block: nn.Module, base_fqn: str, fqn_parts: list[str]) -> _Shapes:
    shapes = set()
    for name, module in block.named_modules():
        fqn = f"{base_fqn}.{name}"
        matched = [part for part in fqn_parts if part in fqn]
        if not matched:
            continue
        if not isinstance(module, nn.Linear):
            raise ValueError(
                f"activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns must name "
                f"Linear modules, but {matched[0]!r} matches {fqn}, a {type(module).__name__}"
            )
        shapes.add((module.in_features, module.out_features))
    return frozenset(shapes)


# Cached, because dynamo recompiles for every new factory.
@functools.cache
def _context_fn(
    saved_ops: frozenset[Any], recomputed_shapes: _Shapes
) -> Callable[[], tuple[Any, Any]]:
    """Return a factory of (forward context, recomputation context), for `checkpoint(context_fn=...)`."""
    copy = torch_parts.copy_operator.default

    def make_contexts() -> tuple[Any, Any]:
        # ctx.is_recompute -> number of matrix products so far.
        num_products: Counter[bool] = Counter()

        def policy(
            ctx: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
        ) -> CheckpointPolicy:
            if op is copy and args[0].device.type != "cpu" and kwargs.get("device") is not None:
                if torch.device(kwargs["device"]).type == "cpu":
                    # Recomputing the copy would wait for the device again.
                    return CheckpointPolicy.MUST_SAVE
            if op not in saved_ops:
                return CheckpointPolicy.PREFER_RECOMPUTE
            if op in _PRODUCTS:
                right = args[_PRODUCTS[op]]
                shape = tuple(right.shape)
                # A 4-bit weight is stored as bytes.
                if right.dtype == torch.uint8:
                    shape = nf4.count(shape[-1]), shape[-2]
                if shape in recomputed_shapes:
                    return CheckpointPolicy.PREFER_RECOMPUTE
                num_products[ctx.is_recompute] += 1
                if num_products[ctx.is_recompute] % 2 == 0:
                    return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE

        forward, _ = create_selective_checkpoint_contexts(policy)
        recompute = _recompute_mode()(policy, forward.storage, False)
        recompute.maybe_saved_ops = saved_ops | {copy}
        return forward, recompute

    return make_contexts


@functools.cache
def _recompute_mode() -> type:
    """Return a subclass of torch's dispatch mode for recomputation that accepts ops not run in forward.

    FLOP counters run such ops.
    """

    class RecomputeMode(torch_parts.RecomputeMode):
        # Flex attention and compiled regions are higher-order operators. Torch registers these for its own
        # mode, not for subclasses.
        supports_higher_order_operators = True
        maybe_saved_ops: frozenset[Any]

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func in self.maybe_saved_ops:
                return super().__torch_dispatch__(func, types, args, kwargs)
            return func(*args, **(kwargs or {}))

    return RecomputeMode
