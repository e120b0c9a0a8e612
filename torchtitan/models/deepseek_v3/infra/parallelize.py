"""The shared plan under the name that DeepSeek-V3 has for it."""

from torchtitan.models.parallelize import parallelize_decoder as parallelize_deepseekv3

__all__ = ["parallelize_deepseekv3"]
