"""For `experimental.custom_import`: the flavor `debugmodel` of `llama3` has checkpoints of 0.2 MB."""

import dataclasses

from torchtitan.models.llama3 import llama3_args

llama3_args["debugmodel"] = dataclasses.replace(
    llama3_args["debugmodel"], dim=16, n_layers=2, n_heads=2, n_kv_heads=2
)
