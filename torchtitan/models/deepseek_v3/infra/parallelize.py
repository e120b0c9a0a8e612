"""The reference's path of `torchtitan.models.parallelize`."""
# ruff: noqa: F401 (names of the reference)

from torchtitan.models.parallelize import find_save_list as __getattr__
from torchtitan.models.parallelize import parallelize_decoder as parallelize_deepseekv3
from torchtitan.models.tp_plan import apply_tp as apply_non_moe_tp
