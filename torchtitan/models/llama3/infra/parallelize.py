"""The reference's path of `torchtitan.models.parallelize`."""
# ruff: noqa: F401 (names of the reference)

from torchtitan.distributed.fsdp import apply_ddp, apply_fsdp, disable_fsdp_gradient_division
from torchtitan.models.parallelize import apply_compile
from torchtitan.models.parallelize import find_save_list as __getattr__
from torchtitan.models.parallelize import parallelize_decoder as parallelize_llama
from torchtitan.models.tp_plan import apply_tp
