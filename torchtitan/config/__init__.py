import torch

from torchtitan.config.job_config import (
    ActivationCheckpoint,
    Checkpoint,
    Comm,
    Debug,
    FaultTolerance,
    Job,
    JobConfig,
    LRScheduler,
    Metrics,
    Model,
    Optimizer,
    Parallelism,
    Profiling,
    Quantize,
    Training,
    Validation,
)
from torchtitan.tools.lazy_names import load_on_access

TORCH_DTYPE_MAP: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}

# Lists ConfigManager too, which is loaded on first access, so that `import *` includes it.
__all__ = [
    "JobConfig",
    "ConfigManager",
    "TORCH_DTYPE_MAP",
    "Job",
    "Model",
    "Optimizer",
    "LRScheduler",
    "Metrics",
    "Checkpoint",
    "ActivationCheckpoint",
    "FaultTolerance",
    "Quantize",
    "Parallelism",
    "Comm",
    "Profiling",
    "Training",
    "Validation",
    "Debug",
]

# Loaded on first use, because a program that builds its own JobConfig needs no command-line parser.
__getattr__ = load_on_access(__name__, {"ConfigManager": ".manager"})
