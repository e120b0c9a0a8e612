"""The reference's path of `torchtitan.quantization.utils`."""
# ruff: noqa: F401

from torchtitan.quantization.utils import import_torchao, keep_state_dicts_plain, module_filter_fn
