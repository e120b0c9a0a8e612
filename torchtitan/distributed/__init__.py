"""How a model is spread over processes: meshes, data parallelism, checkpointed activations."""

from typing import Any

from torchtitan.distributed.parallel_dims import ParallelDims

__all__ = ["NoParallel", "ParallelDims"]


def __getattr__(name: str) -> Any:
    if name == "NoParallel":  # loads DTensor, which few importers of this package need
        from torchtitan.distributed.no_parallel import NoParallel

        return NoParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
