"""One optimizer object over all model parts of this rank."""

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from torchtitan import distributed
from torchtitan.config import Optimizer as OptimizerConfig
from torchtitan.config.checks.layout import early_step_with
from torchtitan.distributed import ParallelDims, tied_copies
from torchtitan.distributed.dtensor import is_dtensor
from torchtitan.distributed.fault_tolerance import FTManager
from torchtitan.tools.logging import logger

T = TypeVar("T", bound=Optimizer)

_OPTIMIZER_CLASSES: dict[str, type[Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
}
_IMPLEMENTATIONS = ("for-loop", "foreach", "fused")


class OptimizersContainer(Optimizer, Generic[T]):
    """Steps, zeroes, saves and loads one optimizer per model part as if they were one.

    It is a torch Optimizer itself: step hooks registered on it fire once per `step()`. `state` and
    `param_groups` are those of the optimizers inside, live, so that a client may move optimizer
    state between devices through them.

    `state_dict()` is keyed by parameter name, not by position: pipeline ranks don't collide,
    and it loads on another layout. Raises AssertionError if parts and optimizers don't match.
    """

    optimizers: list[T]
    model_parts: list[nn.Module]

    def __init__(
        self,
        model_parts: list[nn.Module],
        optimizer_cls: type[T],
        optimizer_kwargs: dict[str, Any],
    ) -> None:
        self.model_parts = model_parts
        params_by_part = _trainable_params(model_parts)
        self.optimizers = [optimizer_cls(params, **optimizer_kwargs) for params in params_by_part]
        self._optimizers_by_part = [[optimizer] for optimizer in self.optimizers]
        self._validate_length(len(model_parts))
        self._post_init(_flatten(params_by_part), optimizer_kwargs)

    def __iter__(self) -> Iterator[T]:
        return iter(self.optimizers)

    def __len__(self) -> int:
        return len(self.optimizers)

    def __getattr__(self, name: str) -> Any:
        # Reached only for what the instance doesn't hold; see _post_init.
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
                # torch made the missing states by a step with zero gradients, and counted it.
                for state in (state for o in fresh for state in o.state.values()):
                    if "step" in state:
                        state["step"] = state["step"] * 0
                of_part = dcp.get_optimizer_state_dict(model, optimizers, options=options)
            if tied_copies.holds_second(model):  # the first one's state is the same, bit for bit
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
                    # The rank may hold the first copy too, and that one gets the tensor itself.
                    if isinstance(of_part[key], torch.Tensor):
                        of_part[key] = of_part[key].clone()
            dcp.set_optimizer_state_dict(model, optimizers, of_part, options=options)

    def init_cache_state_dict(self) -> None:
        """Nothing to do here; optimizers that serve their state from a cache fill it."""

    def _validate_length(self, expected_length: int) -> None:
        assert len(self.optimizers) == expected_length, (
            f"expected {expected_length} optimizers, got {len(self.optimizers)}"
        )

    def _post_init(self, all_params: list[nn.Parameter], optimizer_kwargs: dict[str, Any]) -> None:
        """Set up what makes this a torch Optimizer, hooks above all."""
        Optimizer.__init__(self, all_params, optimizer_kwargs)
        # The base class made an empty state and groups that are never stepped. Without them,
        # __getattr__ answers with the real ones.
        del self.state, self.param_groups

    def _resharded_parts(self) -> Iterator[tuple[nn.Module, list[T]]]:
        """Each model part with its optimizers, without gradients meanwhile.

        A forward without gradient leaves FSDP2 modules gathered, and their gathered parameters
        are not the ones the optimizers know.
        """
        for part in self.model_parts:
            distributed.reshard_model(part)
        for part, optimizers in zip(self.model_parts, self._optimizers_by_part, strict=True):
            # Torch makes no state for a fresh optimizer whose parameters have gradients.
            gradients = [(parameter, parameter.grad) for parameter in part.parameters()]
            for parameter, _ in gradients:
                parameter.grad = None
            try:
                yield part, optimizers
            finally:
                for parameter, gradient in gradients:
                    parameter.grad = gradient


class OptimizersInBackwardContainer(OptimizersContainer):
    """One optimizer per trainable parameter, stepped as soon as the gradient is complete.

    The gradient is freed at once, which saves its memory; so it can be neither clipped nor
    accumulated over microbatches. `step()` and `zero_grad()` have nothing left to do.
    """

    def __init__(
        self,
        model_parts: list[nn.Module],
        optimizer_cls: type[T],
        optimizer_kwargs: dict[str, Any],
    ) -> None:
        self.model_parts = model_parts
        optimizer_of: dict[nn.Parameter, T] = {}

        def step_now(param: nn.Parameter) -> None:
            optimizer_of[param].step()
            optimizer_of[param].zero_grad()

        params_by_part = _trainable_params(model_parts)
        for param in _flatten(params_by_part):
            optimizer_of[param] = optimizer_cls([param], **optimizer_kwargs)
            param.register_post_accumulate_grad_hook(step_now)
        by_part = [[optimizer_of[param] for param in params] for params in params_by_part]
        self._optimizers_by_part = by_part
        self.optimizers = _flatten(by_part)
        self._validate_length(sum(len(params) for params in params_by_part))
        self._post_init(_flatten(params_by_part), optimizer_kwargs)

    def step(self) -> None:
        pass

    def zero_grad(self) -> None:
        pass


def build_optimizers(
    model_parts: list[nn.Module],
    optimizer_config: OptimizerConfig,
    parallel_dims: ParallelDims,
    ft_manager: FTManager | None = None,
) -> OptimizersContainer:
    """Return the optimizers the config describes, for every model part of this rank.

    Raises NotImplementedError for an unknown name, for torchft, and for stepping in backward
    together with pipeline or expert parallelism; ValueError for an unknown implementation.
    """
    if ft_manager is not None and ft_manager.enabled:
        raise NotImplementedError(
            "optimizers under torchft are not available yet; set fault_tolerance.enable = false"
        )
    config = optimizer_config
    if config.name not in _OPTIMIZER_CLASSES:
        raise NotImplementedError(
            f"optimizer.name must be one of {sorted(_OPTIMIZER_CLASSES)}, got {config.name!r}"
        )
    if config.implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"optimizer.implementation must be one of {list(_IMPLEMENTATIONS)}, "
            f"got {config.implementation!r}"
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
    if not config.early_step_in_backward:
        return OptimizersContainer(model_parts, optimizer_cls, optimizer_kwargs)
    degrees = {
        "pipeline_parallel_degree": parallel_dims.pp,
        "expert_parallel_degree": parallel_dims.ep,
    }
    for problem in early_step_with(degrees):
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
    ft_manager: FTManager | None = None,
) -> OptimizersContainer:
    """Return `build_optimizers(...)` that also evens out the experts' load before each step.

    Nothing is added when the first MoE block has no `load_balance_coeff`.
    """
    optimizers = build_optimizers(model_parts, optimizer_config, parallel_dims, ft_manager)
    blocks = _moe_blocks(model_parts)
    if blocks and blocks[0].moe.load_balance_coeff:
        optimizers.register_step_pre_hook(
            lambda *_: _balance_expert_load(_moe_blocks(model_parts), parallel_dims)
        )
    return optimizers


for _builder in (build_optimizers, build_optimizers_with_moe_load_balancing):
    _builder.optimizer_names = tuple(_OPTIMIZER_CLASSES)  # see TrainSpec


def skips_on_device(optimizers: Iterable[Optimizer]) -> bool:
    """Whether `skipped_where` has an effect on all of them: torch's "fused" ones let it."""
    return all(getattr(o, "_step_supports_amp_scaling", False) for o in optimizers)


@contextmanager
def skipped_where(optimizers: Iterable[Optimizer], skip: torch.Tensor) -> Iterator[None]:
    """Inside, steps change nothing if `skip`, a bool on the device that stays there, is True."""
    for optimizer in optimizers:
        optimizer.found_inf = skip.to(torch.float32)  # as torch's GradScaler says it
    try:
        yield
    finally:
        for optimizer in optimizers:
            del optimizer.found_inf


class _JoinedState(MutableMapping[nn.Parameter, dict[str, Any]]):
    """The `state` mappings of several optimizers, read and written as one."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        # A parameter that was never stepped has no state yet, but belongs to an optimizer.
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
        # Without a look-up: an optimizer's state is a defaultdict, which would grow an entry.
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
    """Move each expert's routing bias towards an even load, and start counting again.

    Auxiliary-loss-free balancing (Wang et al. 2024, arXiv:2408.15664), with the sum of the
    changes kept at zero so that the biases don't drift. Counts: one row of E experts per block.
    """
    if any(block.moe.load_balance_coeff is None for block in blocks):
        return
    rows = []
    for block in blocks:
        tokens = block.moe.tokens_per_expert
        # Recomputing the block in backward has counted every token a second time; the compiler,
        # which sees both, drops the second.
        implementation = getattr(block, "checkpoint_impl", None)  # torch's CheckpointImpl
        recomputes = implementation is not None and implementation.name == "NO_REENTRANT"
        rows.append(tokens // 2 if recomputes and not hasattr(block, "_orig_mod") else tokens)
    counts = torch.stack(rows)
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
    """The key `state.<parameter>.<entry>` or `param_groups.<parameter>.<entry>`, with `new` as the
    parameter if that is `old`."""
    kind, _, rest = key.partition(".")
    return f"{kind}.{new}{rest.removeprefix(old)}" if rest.startswith(f"{old}.") else key


def _dcp_state_dict() -> ModuleType:
    # Late: FSDP and DCP take a second each to import, which config errors do not wait for.
    from torch.distributed.checkpoint import state_dict

    return state_dict


def _trainable_params(model_parts: list[nn.Module]) -> list[list[nn.Parameter]]:
    return [[p for p in part.parameters() if p.requires_grad] for part in model_parts]


def _flatten(lists: list[list[Any]]) -> list[Any]:
    return [item for items in lists for item in items]
