"""For `experimental.custom_import`: `llama3` gets a flavor `tiny`, with checkpoints of 0.2 MB."""

import dataclasses

from torchtitan.models.llama3 import llama3_args

llama3_args["tiny"] = dataclasses.replace(
    llama3_args["debugmodel"], dim=16, n_layers=2, n_heads=2, n_kv_heads=2
)
