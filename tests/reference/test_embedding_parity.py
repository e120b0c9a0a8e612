"""Five steps of SFT on packed documents: the engine in each layout against plain transformers.

The reference is a `transformers` model that sees one document at a time, and torch's AdamW. Both
start from the same weights and learn from the same documents in every step.
"""

import dataclasses
import functools

import pytest
import torch
from torch.nn import functional as F

from tests.tiny_hf import tiny_hf_model
from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.engine import TrainingEngine
from torchtitan.testing.gloo import run_ranks
from torchtitan.testing.tiny_jobs import (
    EPS,
    MAX_NORM,
    add_tiny_flavors,
    layout_of,
    make_documents,
    num_valid,
    pack,
    run_step,
    tiny_job,
)

STEPS = 5
LR = 1e-3
KERNELS = ["flex", "varlen"]
LAYOUTS = {1: ["fsdp"], 2: ["fsdp", "tp", "pp", "cp"]}
# The size of mistakes: a document that sees another document moves log-probabilities
# by 1e-2, a wrong denominator the loss by 1e-1.
MAX_LOGPROB, MAX_RELATIVE = 5e-6, 1e-5


def documents_of(step):
    return make_documents(100 + step, (5, 17, 9, 30, 2, 23, 11, 8))


@dataclasses.dataclass
class Record:
    """losses, norms: of every step. logprobs: per document, before the first step and after the last."""

    losses: list[float]
    norms: list[float]
    logprobs: list[torch.Tensor]


# ---- transformers ----


@functools.cache
def reference():
    """(weights in Hugging Face's names, record of the plain loop)."""
    model = tiny_hf_model("qwen3")
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0
    )

    def logprobs(document):
        logits = model(document[None, :-1]).logits[0]
        return -F.cross_entropy(logits, document[1:], reduction="none")

    def scores():
        with torch.no_grad():
            return [logprobs(document) for document in documents_of(0)]

    record = Record([], [], scores())
    for step in range(STEPS):
        documents = documents_of(step)
        total = 0.0
        for document in documents:
            loss = -logprobs(document).sum() / num_valid(documents)
            loss.backward()
            total += loss.item()
        record.losses.append(total)
        record.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    record.logprobs += scores()
    return weights, record


# ---- the engine ----


def scores_of_engine(engine):
    """Log-probabilities of each document, from packed rows; only on the last stage."""
    batch, labels = pack(documents_of(0))
    rows = engine.forward_step(
        [batch | {"labels": labels}],
        output_fn=lambda logits, batch: (
            -F.cross_entropy(
                logits.flatten(0, 1),
                batch["labels"].flatten(),
                ignore_index=IGNORE_INDEX,
                reduction="none",
            ).view(batch["labels"].shape)
        ),
    )
    if rows is None:
        return []
    lengths = [len(document) for document in documents_of(0)]
    return [part[:-1].clone() for part in rows[0][0].split(lengths)]


def train_in_layouts(folder, weights, layouts):
    """(layout, kernel) -> record, on every rank."""
    add_tiny_flavors()
    records = {}
    for layout in layouts:
        for attn_type in KERNELS:
            parallelism = layout_of(layout, torch.distributed.get_world_size())
            job = tiny_job(
                folder, attn_type=attn_type, parallelism=parallelism, optimizer={"lr": LR}
            )
            with TrainingEngine(job) as engine:
                own = engine.checkpointer.sd_adapter.from_hf(weights)
                for part in engine.model_parts:
                    load_whole(part, own)
                record = Record([], [], scores_of_engine(engine))
                for step in range(STEPS):
                    loss, norm = run_step(engine, documents_of(step))
                    record.losses.append(loss)
                    record.norms.append(norm)
                record.logprobs += scores_of_engine(engine)
            records[layout, attn_type] = record
    return records


def load_whole(part, weights):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(full_state_dict=True, strict=False)
    names = dict(part.named_parameters()).keys()
    set_model_state_dict(part, {name: weights[name] for name in names}, options=options)


def relative(ours, theirs):
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_five_steps_equal_plain_transformers(world_size, tmp_path):
    weights, expected = reference()
    ranks = run_ranks(
        train_in_layouts,
        world_size,
        str(tmp_path),
        weights,
        LAYOUTS[world_size],
        timeout_seconds=300,
    )
    assert torch.cat(expected.logprobs).std() > 0.2, "too alike for the tolerance to tell anything"
    for case in ranks[0]:
        # Under pipelines the rank of the last stage has the log-probabilities.
        record = next(r[case] for r in ranks if r[case].logprobs)
        differences = [
            (a - b).abs().max().item()
            for a, b in zip(record.logprobs, expected.logprobs, strict=True)
        ]
        half = len(differences) // 2
        before, after = max(differences[:half]), max(differences[half:])
        losses = relative(record.losses, expected.losses)
        norms = relative(record.norms, expected.norms)
        print(
            f"{world_size} {case}: log-probs {before:.1e} before, {after:.1e} after {STEPS} steps, "
            f"losses {losses:.1e}, norms {norms:.1e}"
        )
        assert max(before, after) <= MAX_LOGPROB, case
        assert losses <= MAX_RELATIVE, case
        assert norms <= MAX_RELATIVE, case
