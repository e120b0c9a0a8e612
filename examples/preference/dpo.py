"""Direct preference optimization: pairs of answers, a forward-only reference, a loop of one's own.

    python examples/preference/dpo.py [pairs.jsonl]      also under torchrun, on any number of ranks

Each line of the file is {"prompt": ..., "chosen": ..., "rejected": ...}, all of them texts or all lists
of chat messages. Without a file the pairs are sums with a right and a wrong result.
"""

import json
import random
import sys
from functools import partial

import torch

from torchtitan.config import job_config as config
from torchtitan.data.chats import ChatEncoder
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
        with open(path) as lines:
            return [json.loads(line) for line in lines]
    draw = random.Random(0)
    sums = [(draw.randint(0, 99), draw.randint(0, 99)) for _ in range(64)]
    return [
        {"prompt": f"{a} + {b} =", "chosen": f" {a + b}", "rejected": f" {a + b + 1}"}
        for a, b in sums
    ]


def microbatch(pairs, tokenizer):
    """Two rows for each pair, padded at the end; only labels of the answers have a pair's number.

    An answer's last label is the token that ends it.
    """
    encode, rows = ChatEncoder.of_tokenizer(tokenizer), []
    for number, pair in enumerate(pairs, start=1):
        for sign, answer in ((1, pair["chosen"]), (-1, pair["rejected"])):
            tokens, is_answer = encode({"prompt": pair["prompt"], "completion": answer})
            rows.append((tokens.tolist(), (sign * number * is_answer[1:]).tolist()))
    length = max(len(tokens) for tokens, _ in rows) - 1
    batch = {
        name: torch.zeros(len(rows), length, dtype=torch.int64) for name in ("input", "pair_ids")
    }
    batch["labels"] = torch.full((len(rows), length), -100)
    for row, (tokens, ids) in enumerate(rows):
        batch["input"][row, : len(ids)] = torch.tensor(tokens[:-1])
        batch["labels"][row, : len(ids)] = torch.tensor(tokens[1:])
        batch["pair_ids"][row, : len(ids)] = torch.tensor(ids)
    return batch


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
