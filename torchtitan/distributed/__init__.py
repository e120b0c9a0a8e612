"""How a model is spread over processes: meshes, data parallelism, checkpointed activations."""

from typing import TYPE_CHECKING, Any

from torchtitan.distributed.parallel_dims import ParallelDims

if TYPE_CHECKING:
    from torchtitan.distributed.no_parallel import NoParallel

__all__ = ["NoParallel", "ParallelDims"]


def __getattr__(name: str) -> Any:
    if name == "NoParallel":  # loads DTensor, which few importers of this package need
        from torchtitan.distributed.no_parallel import NoParallel

        return NoParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
