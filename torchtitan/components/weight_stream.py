"""Import path of `torchtitan.checkpoint.stream`, for programs that receive weights."""
# ruff: noqa: F401

from torchtitan.checkpoint.stream import WeightStream, digest_of
