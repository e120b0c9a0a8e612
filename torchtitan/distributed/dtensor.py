"""Telling DTensors apart without loading them."""

import sys
from typing import Any


def is_dtensor(x: Any) -> bool:
    """Whether `x` is a DTensor.

    None can exist before its module is loaded; importing that module takes as long as a third
    of `import torch`, which a run of one process need not spend.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)
