"""The path under which programs that receive weights import these."""

from torchtitan.checkpoint.stream import WeightStream, digest_of

__all__ = ["WeightStream", "digest_of"]
