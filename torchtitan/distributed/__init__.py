"""How a model is spread over processes: meshes, data parallelism, checkpointed activations."""

from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.tools.lazy_names import load_on_access

__all__ = ["NoParallel", "ParallelDims"]
# Loads DTensor, which few importers of this package need.
__getattr__ = load_on_access(__name__, {"NoParallel": "torchtitan.distributed.no_parallel"})
