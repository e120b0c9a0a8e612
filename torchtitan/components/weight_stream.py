"""The path under which programs that receive weights import `torchtitan.checkpoint.stream`."""
# ruff: noqa: F401

from torchtitan.checkpoint.stream import WeightStream, digest_of
