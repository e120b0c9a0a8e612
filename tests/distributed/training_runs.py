"""Trainers of the layouts' small llama3, on rows that are dealt to ranks and microbatches."""

from tests.distributed.layout_matrix import SHALLOW, config_of

FOUR_LAYERS = "--model.flavor=tiny"


def make_trainer(dump_folder: str, overrides: list[str]):
    """In fp32, with 2 layers, or with a flag 4 (`FOUR_LAYERS`), and a warm-up; it logs every step."""
    from torchtitan.train import Trainer

    flags = [SHALLOW, "--metrics.log_freq=1", "--lr_scheduler.warmup_steps=5"]
    return Trainer(config_of("llama3", [*flags, *overrides], dump_folder))
