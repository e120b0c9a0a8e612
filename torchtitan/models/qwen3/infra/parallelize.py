"""The shared plan under the name that Qwen 3 has for it."""

from torchtitan.models.parallelize import parallelize_decoder as parallelize_qwen3

__all__ = ["parallelize_qwen3"]
