"""Direct preference optimization with two engines and a loop of one's own.

    python examples/preference/dpo.py [pairs.jsonl]      also under torchrun, on any number of ranks

A job needs no program: see `loss.name = "dpo"` in docs/datasets.md, also for the format of the file.
Without a file the pairs are sums with a right and a wrong result.
"""

import random
import sys
from functools import partial

import torch

from torchtitan.config import job_config as config
from torchtitan.data.chat_samples import load_pairs
from torchtitan.data.chats import ChatEncoder
from torchtitan.data.preference import PairTokens
from torchtitan.data.row_streams import Packing
from torchtitan.data.tokenizer import build_hf_tokenizer
from torchtitan.engine import TrainingEngine
from torchtitan.loss.logprobs import TokenLogProbs
from torchtitan.loss.preference import METRICS, dpo

job = config.JobConfig(
    model=config.Model(name="llama3", flavor="debugmodel"),
    training=config.Training(mixed_precision_param="float32", seq_len=256),
    optimizer=config.Optimizer(lr=1e-3),
    lr_scheduler=config.LRScheduler(warmup_steps=0, total_steps=100),
    debug=config.Debug(seed=0),  # the reference begins with the same weights
)
PAIRS_PER_STEP, PAIRS_PER_MICROBATCH, STEPS = 8, 2, 4


def read_pairs(path):
    if path is not None:
        return list(load_pairs(path))
    draw = random.Random(0)
    sums = [(draw.randint(0, 99), draw.randint(0, 99)) for _ in range(64)]
    return [
        {"prompt": f"{a} + {b} =", "chosen": f" {a + b}", "rejected": f" {a + b + 1}"}
        for a, b in sums
    ]


def microbatch(pairs, tokenizer):
    """Two rows for each pair; the labels of an answer have the pair's number and the answer's sign."""
    seq_len = job.training.seq_len
    encode = PairTokens(ChatEncoder.of_tokenizer(tokenizer), 2 * seq_len, too_long="error")
    parts = [part for pair in pairs for part in encode(pair).halves()]
    rows, labels = zip(*(Packing("none", seq_len).row([], [part]) for part in parts), strict=True)
    labels = torch.stack(labels)
    numbers = [sign * number for number in range(1, len(pairs) + 1) for sign in (1, -1)]
    pair_ids = torch.tensor(numbers)[:, None] * (labels != -100)
    return {
        "input": torch.stack([r["input"] for r in rows]),
        "labels": labels,
        "pair_ids": pair_ids,
    }


pairs = read_pairs(sys.argv[1] if len(sys.argv) > 1 else None)
tokenizer = build_hf_tokenizer(job)
head = TokenLogProbs()
with TrainingEngine(job) as engine, TrainingEngine(job, forward_only=True) as reference:
    for step in range(STEPS):
        start = step * PAIRS_PER_STEP
        mine = [pairs[i % len(pairs)] for i in range(start, start + PAIRS_PER_STEP)]
        mine = mine[engine.dp_rank :: engine.dp_size]
        batches = [
            microbatch(mine[i : i + PAIRS_PER_MICROBATCH], tokenizer)
            for i in range(0, len(mine), PAIRS_PER_MICROBATCH)
        ]
        outputs = reference.from_last_stage(reference.forward_step(batches, head=head))
        for batch, output in zip(batches, outputs, strict=True):
            batch["ref_logprobs"] = output.logprobs
        output = engine.forward_backward_step(
            input_dict=batches,
            loss_fn=partial(dpo, beta=0.1),
            head=head,
            metrics=METRICS,
            whole_rows=True,  # a pair's sums need all tokens of a row
            global_valid_tokens=PAIRS_PER_STEP,
        )
        engine.optim_step()
        margin, accuracy = (output.metrics[name] / PAIRS_PER_STEP for name in METRICS)
        print(f"step {step + 1}: loss {output.loss:.5f}, margin {margin:.4f}, right {accuracy:.2f}")
