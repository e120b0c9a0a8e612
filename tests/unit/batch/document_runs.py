"""Training on packed documents.

In fp32, except "varlen" on an accelerator, whose kernel takes only 16-bit numbers: in bf16.
"""

import json
import random
from pathlib import Path

from tests.reliability.jobs import flags_in
from torchtitan.config import ConfigManager
from torchtitan.tools.utils import get_device_type
from torchtitan.trainer import Trainer


def short_documents(folder) -> list[str]:
    """Write a thousand documents of 1 to 60 words to `folder`; returns flags that select them."""
    words = "the model reads one token after another and forgets what came before it".split()
    draw = random.Random(0)
    texts = [" ".join(draw.choices(words, k=draw.randint(1, 60))) for _ in range(1000)]
    path = Path(folder) / "short.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return ["--training.dataset=local", f"--training.dataset_path={path}"]


def dtype_of(attn_type: str) -> str:
    return "bfloat16" if attn_type == "varlen" and get_device_type() != "cpu" else "float32"


def make_trainer(
    dump_folder, attn_type: str, *overrides: str, trainer_class: type[Trainer] = Trainer
) -> Trainer:
    """Return a trainer of the debug model; documents end with the end-of-text token."""
    flags = flags_in(f"""
        model.attn_type={attn_type} model.attn_mask_type=block_causal training.local_batch_size=2
        training.seq_len=128 training.mixed_precision_param={dtype_of(attn_type)} debug.seed=1
        activation_checkpoint.mode=none lr_scheduler.warmup_steps=2 metrics.log_freq=1
    """)
    flags += [f"--job.dump_folder={dump_folder}", *overrides]
    return trainer_class(ConfigManager().parse_args(flags))
