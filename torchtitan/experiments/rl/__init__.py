"""The name that the reference had for `torchtitan.rl`: the same modules, as attributes.

`from torchtitan.experiments.rl import types` is the module `torchtitan.rl.types`.
"""

from torchtitan.rl import (  # noqa: F401
    batcher,
    controller,
    generator,
    job_config,
    losses,
    rollout,
    tasks,
    train,
    trainer,
    types,
    weight_sync,
)
