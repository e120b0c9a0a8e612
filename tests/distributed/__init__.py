import math

from torchtitan.distributed import ParallelDims


def parallel_dims(**degrees: int) -> ParallelDims:
    """Degrees that are not given are 1; the world size is their product unless it is given."""
    ones = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp"), 1)
    degrees = ones | degrees
    ranks = math.prod(degrees[name] for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp"))
    return ParallelDims(**{"world_size": ranks} | degrees)
