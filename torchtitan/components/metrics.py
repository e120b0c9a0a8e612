"""The reference's path of `torchtitan.listeners.metrics`."""
# ruff: noqa: F401

from torchtitan.listeners.metrics import (
    BaseLogger,
    DeviceMemoryMonitor,
    DeviceMemStats,
    JsonlLogger,
    LoggerContainer,
    MetricsProcessor,
    TensorBoardLogger,
    WandBLogger,
    build_device_memory_monitor,
    build_metrics_processor,
    ensure_pp_loss_visible,
    memory_metrics,
)
