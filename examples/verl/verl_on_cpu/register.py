"""Imported by verl in each of its processes (VERL_USE_EXTERNAL_MODULES), at the end of `import verl`.

Adds the CPU platform at once, and the rollout when verl imports its own rollouts.
"""

import importlib
from types import ModuleType

from verl.plugin.platform import PlatformRegistry

from torchtitan.integrations.verl.plugin import after_import
from verl_on_cpu.platform import CPUPlatform, mend_process_groups


def register_replica(rollout_replica: ModuleType) -> None:
    """Register the rollout's server as `actor_rollout_ref.rollout.name=torchtitan`."""

    def load() -> type:  # imports Ray
        return importlib.import_module("verl_on_cpu.rollout").Replica

    rollout_replica.RolloutReplicaRegistry.register("torchtitan", load)


def register_weight_sender(rollout_base: ModuleType) -> None:
    """Register the training ranks' side of the rollout.

    Private to verl: 0.9.1 has no function that adds to this table.
    """
    rollout_base._ROLLOUT_REGISTRY["torchtitan", "async"] = "verl_on_cpu.rollout.WeightSender"


PlatformRegistry.register("cpu")(CPUPlatform)
mend_process_groups()
after_import("verl.workers.rollout.base", register_weight_sender)
after_import("verl.workers.rollout.replica", register_replica)
