"""Training on packed documents with flex, varlen and a dense mask.

In fp32, except "varlen" on an accelerator, whose kernel takes only 16-bit numbers: in bf16.
"""

import json
import random
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from torch.nn import functional as F

from torchtitan.config import ConfigManager
from torchtitan.models import decoder
from torchtitan.tools.utils import get_device_type
from torchtitan.trainer import Trainer

KERNELS = ("flex", "varlen", "dense")


def short_documents(folder) -> list[str]:
    """Write a thousand documents of 1 to 60 words to `folder`; returns flags that select them."""
    words = "the model reads one token after another and forgets what came before it".split()
    draw = random.Random(0)
    path = Path(folder) / "short.jsonl"
    with open(path, "w") as file:
        for _ in range(1000):
            text = " ".join(draw.choices(words, k=draw.randint(1, 60)))
            file.write(json.dumps({"text": text}) + "\n")
    return ["--training.dataset=local", f"--training.dataset_path={path}"]


def dtype_of(attn_type: str) -> str:
    return "bfloat16" if attn_type == "varlen" and get_device_type() != "cpu" else "float32"


def make_trainer(
    dump_folder, attn_type: str, *overrides: str, trainer_class: type[Trainer] = Trainer
) -> Trainer:
    """Return a trainer of the debug model; documents end with the end-of-text token."""
    return trainer_class(
        ConfigManager().parse_args(
            [
                f"--job.dump_folder={dump_folder}",
                f"--model.attn_type={attn_type}",
                "--model.attn_mask_type=block_causal",
                "--training.local_batch_size=2",
                "--training.seq_len=128",
                f"--training.mixed_precision_param={dtype_of(attn_type)}",
                "--activation_checkpoint.mode=none",
                "--lr_scheduler.warmup_steps=2",
                "--metrics.log_freq=1",
                "--debug.seed=1",
                *overrides,
            ]
        )
    )


@contextmanager
def dense_masks():
    """Replace attention by plain sdpa with a boolean mask [B, 1, T, T] made from the tokens."""

    def pairs(self, input_batch, tokenizer, extra_inputs=None):
        after_eos = (input_batch == tokenizer.eos_id).cumsum(1)
        document = after_eos - (input_batch == tokenizer.eos_id).long()
        return (document[:, :, None] == document[:, None]).tril()[:, None]

    def attend(inner_attention, q, k, v, mask, *unused):
        gqa = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, mask.lowered, enable_gqa=gqa)
        return out.transpose(1, 2)

    with (
        mock.patch.object(decoder.Decoder, "get_attention_masks", pairs),
        mock.patch.object(decoder.Decoder, "makes_document_masks", False),
        mock.patch.object(decoder, "attend", attend),
    ):
        yield


def train(dump_folder, kernel: str, steps: int, *overrides: str) -> tuple[list[float], int]:
    """Return (loss of each step, number of documents that ended in the text read) of a run."""
    if kernel == "dense":
        with dense_masks():
            return _train(dump_folder, "flex", steps, *overrides)
    return _train(dump_folder, kernel, steps, *overrides)


def _train(dump_folder, attn_type, steps, *overrides) -> tuple[list[float], int]:
    trainer = make_trainer(dump_folder, attn_type, f"--training.steps={steps}", *overrides)
    losses, n_ends = [], 0
    fetch = trainer.next_step

    def counting(data_iterator):
        nonlocal n_ends
        step = fetch(data_iterator)
        n_ends += sum(int((b.tokens == trainer.tokenizer.eos_id).sum()) for b in step.batches)
        return step

    trainer.next_step = counting
    trainer.metrics_processor.log = lambda step, loss, *_args, **_kwargs: losses.append(loss)
    trainer.train()
    trainer.close()
    return losses, n_ends


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    assert len(ours) == len(theirs) > 0
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
