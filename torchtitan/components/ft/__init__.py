from torchtitan.components.ft.manager import FTManager, has_torchft, maybe_semi_sync_training

__all__ = ["FTManager", "has_torchft", "maybe_semi_sync_training"]
