"""One optimizer object over all model parts of this rank."""

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from torchtitan import distributed
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.config import Optimizer as OptimizerConfig
from torchtitan.config.checks.layout import early_step
from torchtitan.distributed import ParallelDims, tied_copies
from torchtitan.distributed.dtensor import is_dtensor
from torchtitan.optim.adam import RoundedAdam
from torchtitan.optim.groups import ParameterGroups
from torchtitan.optim.muon import Muon
from torchtitan.tools import torch_parts
from torchtitan.tools.logging import logger

T = TypeVar("T", bound=Optimizer)

_OPTIMIZER_CLASSES: dict[str, type[Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Muon": Muon,
}


class OptimizersContainer(Optimizer, Generic[T]):
    """Steps, zeroes, saves and loads one optimizer per model part as if they were one optimizer.

    It is a torch Optimizer itself: step hooks registered on it fire once per `step()`. `state` and
    `param_groups` hold the inner optimizers' own dicts. `state_dict()` is keyed by parameter name,
    so the state can be loaded with another parallel layout.
    groups_by_part: torch's parameter groups of each part; by default one with all trainable parameters.
    """

    optimizers: list[T]
    model_parts: list[nn.Module]

    def __init__(
        self,
        model_parts: list[nn.Module],
        optimizer_cls: type[T],
        optimizer_kwargs: dict[str, Any],
        groups_by_part: list[list[dict[str, Any]]] | None = None,
    ) -> None:
        # torch accepts an empty group (of a stage with only frozen parameters), but no empty list.
        groups_by_part = groups_by_part or [
            [{"params": _trainable_params(part)}] for part in model_parts
        ]
        by_part = [[optimizer_cls(groups, **optimizer_kwargs)] for groups in groups_by_part]
        self._adopt(model_parts, by_part, optimizer_kwargs)

    def __iter__(self) -> Iterator[T]:
        return iter(self.optimizers)

    def __len__(self) -> int:
        return len(self.optimizers)

    def __getattr__(self, name: str) -> Any:
        # Called for attributes that the instance lacks: `_post_init` deletes `state` and `param_groups`.
        if name == "state":
            return _JoinedState(self.optimizers)
        if name == "param_groups":
            return _flatten([optimizer.param_groups for optimizer in self.optimizers])
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def step(self, *args: Any, **kwargs: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.step(*args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        dcp = _dcp_state_dict()
        options = dcp.StateDictOptions(flatten_optimizer_state_dict=True)
        state_dict: dict[str, Any] = {}
        for model, optimizers in self._resharded_parts():
            fresh = [optimizer for optimizer in optimizers if not optimizer.state]
            of_part = dcp.get_optimizer_state_dict(model, optimizers, options=options)
            if fresh:
                # torch (2.13) creates missing states by a step with zero gradients: reset the step count.
                for state in (state for o in fresh for state in o.state.values()):
                    if "step" in state:
                        state["step"] = state["step"] * 0
                of_part = dcp.get_optimizer_state_dict(model, optimizers, options=options)
            if tied_copies.holds_second(model):  # save the state of a tied weight only once
                names = tied_copies.SECOND, tied_copies.FIRST
                of_part = {_renamed(key, *names): value for key, value in of_part.items()}
            state_dict.update(of_part)
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        dcp = _dcp_state_dict()
        options = dcp.StateDictOptions(flatten_optimizer_state_dict=True)
        for model, optimizers in self._resharded_parts():
            of_part = state_dict
            if tied_copies.holds_second(model):
                names = tied_copies.FIRST, tied_copies.SECOND
                of_part = {_renamed(key, *names): value for key, value in state_dict.items()}
                for key in of_part.keys() - state_dict.keys():
                    # Clone, because the first copy keeps the tensor itself, if it is on this rank, too.
                    if isinstance(of_part[key], torch.Tensor):
                        of_part[key] = of_part[key].clone()
            dcp.set_optimizer_state_dict(model, optimizers, of_part, options=options)

    def init_cache_state_dict(self) -> None:
        """Do nothing. Part of torchtitan 0.2.x's interface, for optimizers that cache their state."""

    def _adopt(
        self,
        model_parts: list[nn.Module],
        optimizers_by_part: list[list[T]],
        optimizer_kwargs: dict[str, Any],
    ) -> None:
        self.model_parts, self._optimizers_by_part = model_parts, optimizers_by_part
        self.optimizers = _flatten(optimizers_by_part)
        self._post_init(
            _flatten([_trainable_params(part) for part in model_parts]), optimizer_kwargs
        )

    def _validate_length(self, expected_length: int) -> None:
        assert len(self.optimizers) == expected_length, (
            f"expected {expected_length} optimizers, got {len(self.optimizers)}"
        )

    def _post_init(self, all_params: list[nn.Parameter], optimizer_kwargs: dict[str, Any]) -> None:
        """Initialise the base class, which holds the step hooks."""
        Optimizer.__init__(self, [{"params": all_params}], optimizer_kwargs)
        # The base class set `state` and `param_groups`. Delete both, so __getattr__ returns those
        # of the inner optimizers.
        del self.state, self.param_groups

    def _resharded_parts(self) -> Iterator[tuple[nn.Module, list[T]]]:
        """Yield (part, its optimizers) without gradients and empty groups, which are put back afterwards."""
        # A forward without gradient leaves FSDP2 modules gathered, and optimizers hold only shards.
        for part in self.model_parts:
            distributed.reshard_model(part)
        for part, optimizers in zip(self.model_parts, self._optimizers_by_part, strict=True):
            if not _trainable_params(part):
                continue  # torch (2.13) refuses an optimizer without parameters
            # torch (2.13) makes no state for a fresh optimizer whose parameters have gradients.
            gradients = [(parameter, parameter.grad) for parameter in part.parameters()]
            for parameter, _ in gradients:
                parameter.grad = None
            # torch (2.13) cannot save two groups without parameters.
            empty = [_take_empty_groups(optimizer) for optimizer in optimizers]
            try:
                yield part, optimizers
            finally:
                for optimizer, groups in zip(optimizers, empty, strict=True):
                    for place, group in groups:
                        optimizer.param_groups.insert(place, group)
                for parameter, gradient in gradients:
                    parameter.grad = gradient


class OptimizersInBackwardContainer(OptimizersContainer):
    """One optimizer per trainable parameter, stepped as soon as the gradient is complete.

    Each gradient is freed at once to save memory, so gradients can be neither clipped nor
    accumulated over microbatches. `step()` and `zero_grad()` do nothing.
    """

    def __init__(
        self,
        model_parts: list[nn.Module],
        optimizer_cls: type[T],
        optimizer_kwargs: dict[str, Any],
    ) -> None:
        def of_parameter(param: nn.Parameter) -> T:
            optimizer = optimizer_cls([param], **optimizer_kwargs)

            def step_now(_: nn.Parameter) -> None:
                optimizer.step()
                optimizer.zero_grad()

            param.register_post_accumulate_grad_hook(step_now)
            return optimizer

        by_part = [[of_parameter(p) for p in _trainable_params(part)] for part in model_parts]
        self._adopt(model_parts, by_part, optimizer_kwargs)

    def step(self) -> None:
        pass

    def zero_grad(self) -> None:
        pass


def build_optimizers(
    model_parts: list[nn.Module],
    optimizer_config: OptimizerConfig,
    parallel_dims: ParallelDims,
    ft_manager: Any = None,
) -> OptimizersContainer:
    """Return the config's optimizers for every model part of this rank.

    Raises NotImplementedError for an unknown name, for torchft, and for early_step_in_backward with a
    setting that excludes it.
    """
    if ft_manager is not None and ft_manager.enabled:
        raise NotImplementedError("torchft is not available; set fault_tolerance.enable = false")
    config = optimizer_config
    if config.name not in _OPTIMIZER_CLASSES:
        raise NotImplementedError(
            f"optimizer.name must be one of {sorted(_OPTIMIZER_CLASSES)}, got {config.name!r}"
        )
    if config.implementation not in (choices := ("for-loop", "foreach", "fused")):
        raise ValueError(
            f"optimizer.implementation must be one of {choices}, got {config.implementation!r}"
        )
    optimizer_cls = _OPTIMIZER_CLASSES[config.name]
    optimizer_kwargs = {
        "fused": config.implementation == "fused",
        "foreach": config.implementation == "foreach",
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    # A client's own config class may lack this field.
    state_dtype = getattr(config, "state_dtype", None)
    groups = ParameterGroups(model_parts, config)
    if config.name == "Muon" or state_dtype is not None:
        optimizer_kwargs["decoupled_weight_decay"] = config.name != "Adam"
        optimizer_kwargs["state_dtype"] = state_dtype and TORCH_DTYPE_MAP[state_dtype]
    if config.name == "Muon":
        optimizer_kwargs["options"] = config.muon
        optimizer_kwargs["matrices"] = groups.matrices()
        # The ranks that replicate unsharded parameters.
        optimizer_kwargs["replicas"] = parallel_dims.get_optional_mesh("dp_replicate")
    elif state_dtype is not None:
        optimizer_cls = RoundedAdam
    if not config.early_step_in_backward:
        by_part = [groups.of_part(part, optimizer_kwargs["betas"]) for part in model_parts]
        return OptimizersContainer(model_parts, optimizer_cls, optimizer_kwargs, by_part)
    for problem in early_step(config, parallel_dims.pp, parallel_dims.ep):
        raise NotImplementedError(problem)
    logger.warning(
        "optimizer.early_step_in_backward frees every gradient at once: training.max_norm and "
        "training.nonfinite_grad_norm have no effect, and the gradient norm is logged as 0"
    )
    return OptimizersInBackwardContainer(model_parts, optimizer_cls, optimizer_kwargs)


def build_optimizers_with_moe_load_balancing(
    model_parts: list[nn.Module],
    optimizer_config: OptimizerConfig,
    parallel_dims: ParallelDims,
    ft_manager: Any = None,
) -> OptimizersContainer:
    """Return `build_optimizers(...)` with a step hook that balances the load of the experts."""
    optimizers = build_optimizers(model_parts, optimizer_config, parallel_dims, ft_manager)
    blocks = _moe_blocks(model_parts)
    if blocks and blocks[0].moe.load_balance_coeff:
        optimizers.register_step_pre_hook(
            lambda *_: _balance_expert_load(_moe_blocks(model_parts), parallel_dims)
        )
    return optimizers


for _builder in (build_optimizers, build_optimizers_with_moe_load_balancing):
    _builder.optimizer_names = tuple(_OPTIMIZER_CLASSES)  # see `TrainSpec.optimizer_names`


def skips_on_device(optimizers: Iterable[Optimizer]) -> bool:
    """True if all optimizers support `skipped_where`; torch's "fused" implementations do."""
    return all(torch_parts.field_of(o, "skips_on_device") for o in optimizers)


@contextmanager
def skipped_where(optimizers: Iterable[Optimizer], skip: torch.Tensor) -> Iterator[None]:
    """A context in which optimizer steps change nothing if `skip`, a bool tensor on the device, is True."""
    for optimizer in optimizers:
        optimizer.found_inf = skip.to(torch.float32)  # the attribute that torch's GradScaler sets
    try:
        yield
    finally:
        for optimizer in optimizers:
            del optimizer.found_inf


class _JoinedState(MutableMapping[nn.Parameter, dict[str, Any]]):
    """The `state` mappings of several optimizers, read and written as one."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        # Built from the groups, because `state` has no entry for a parameter before its first step.
        self._state_with = {
            param: optimizer.state
            for optimizer in optimizers
            for group in optimizer.param_groups
            for param in group["params"]
        }

    def __getitem__(self, param: nn.Parameter) -> dict[str, Any]:
        return self._state_with[param][param]

    def __setitem__(self, param: nn.Parameter, value: dict[str, Any]) -> None:
        self._state_with[param][param] = value

    def __delitem__(self, param: nn.Parameter) -> None:
        del self._state_with[param][param]

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (param for param, state in self._state_with.items() if param in state)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, param: object) -> bool:
        # `state` is a defaultdict, so `state[param]` would add an entry.
        return param in self._state_with.get(param, ())


def _moe_blocks(model_parts: list[nn.Module]) -> list[Any]:
    return [
        block
        for part in model_parts
        for block in part.layers.values()
        if getattr(block, "moe_enabled", False)
    ]


@torch.no_grad()
def _balance_expert_load(blocks: list[Any], parallel_dims: ParallelDims) -> None:
    """Move each expert's routing bias towards an even load (Wang et al. 2024, arXiv:2408.15664), and
    reset the token counts. The changes of a block sum to zero, so the biases don't drift."""
    if any(block.moe.load_balance_coeff is None for block in blocks):
        return
    rows = []
    for block in blocks:
        tokens = block.moe.tokens_per_expert
        # Recomputing the block in backward counts every token twice, unless the block is compiled:
        # the compiler removes the second count.
        implementation = getattr(block, "checkpoint_impl", None)  # torch's CheckpointImpl
        recomputes = implementation is not None and implementation.name == "NO_REENTRANT"
        rows.append(tokens // 2 if recomputes and not torch_parts.is_compiled(block) else tokens)
    counts = torch.stack(rows)  # [blocks, experts]
    if is_dtensor(counts):
        counts = counts.full_tensor()
    elif (mesh := parallel_dims.get_optional_mesh("loss")) is not None:
        torch.distributed.all_reduce(counts, group=mesh.get_group())
    for block, tokens in zip(blocks, counts, strict=True):
        tokens = tokens.float()
        delta = block.moe.load_balance_coeff * torch.sign(tokens.mean() - tokens)
        block.moe.expert_bias.add_(delta - delta.mean())
        block.moe.tokens_per_expert.zero_()


def _renamed(key: str, old: str, new: str) -> str:
    """Replace the parameter `old` by `new` in a key `<kind>.<parameter>.<entry>`; keep other keys."""
    kind, _, rest = key.partition(".")
    return f"{kind}.{new}{rest.removeprefix(old)}" if rest.startswith(f"{old}.") else key


def _take_empty_groups(optimizer: Optimizer) -> list[tuple[int, dict[str, Any]]]:
    """Remove the groups without parameters from an optimizer; return (index, group) of each."""
    groups = optimizer.param_groups
    optimizer.param_groups = [group for group in groups if group["params"]]
    return [(i, group) for i, group in enumerate(groups) if not group["params"]]


def _dcp_state_dict() -> ModuleType:
    # Imported late, because DCP takes a second to import and config errors should not wait for it.
    from torch.distributed.checkpoint import state_dict

    return state_dict


def _trainable_params(part: nn.Module) -> list[nn.Parameter]:
    return [p for p in part.parameters() if p.requires_grad]


def _flatten(lists: list[list[Any]]) -> list[Any]:
    return [item for items in lists for item in items]
