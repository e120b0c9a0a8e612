"""The reference's path of the shared plan in `torchtitan.models.parallelize`."""

from torchtitan.models.parallelize import find_save_list as __getattr__  # noqa: F401
from torchtitan.models.parallelize import parallelize_decoder as parallelize_gptoss
from torchtitan.models.tp_plan import apply_tp as apply_non_moe_tp

__all__ = ["apply_non_moe_tp", "parallelize_gptoss"]
