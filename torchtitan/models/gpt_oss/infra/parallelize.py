"""The shared plan under the name that gpt-oss has for it."""

from torchtitan.models.parallelize import parallelize_decoder as parallelize_gptoss

__all__ = ["parallelize_gptoss"]
