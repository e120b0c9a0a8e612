"""Steps on packed documents: the engine in each layout against plain transformers.

The reference is a `transformers` model that sees one document at a time, and torch's AdamW: for
labels, and for a squared error on values, where it is `AutoModelForTokenClassification` with one
label. The engine reads its files, and transformers reads the engine's.
"""

import copy
import dataclasses
import functools
import json
import shutil
from typing import NamedTuple

import pytest
import torch
import transformers

from tests.tiny_hf import tiny_hf_config, tiny_hf_model
from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.engine import TrainingEngine
from torchtitan.models.hf_config import from_hf_config
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.testing.gloo import run_ranks
from torchtitan.testing.tiny_jobs import (
    EPS,
    MAX_NORM,
    layout_of,
    logprobs_of,
    make_documents,
    num_valid,
    pack,
    run_step,
    tiny_job,
    whole_weights,
)

STEPS, LR = 3, 1e-3
# A document that sees another one moves log-probabilities and values by 1e-2; a score or a label
# that is counted twice moves norms and losses by 1e-1.
TOLERANCE = 5e-6


class Case(NamedTuple):
    """What is trained: labels or, with `is_critic`, values."""

    family: str
    is_critic: bool
    attn_type: str
    layouts: tuple[str, ...]  # on two ranks


CASES = {
    "labels, flex": Case("qwen3", False, "flex", ("fsdp", "tp", "pp", "cp")),
    "labels, varlen": Case("qwen3", False, "varlen", ("fsdp", "tp", "pp", "cp")),
    "values, llama3": Case("llama3", True, "varlen", ("fsdp", "tp", "pp", "cp", "ddp")),
}


def documents_of(step):
    return make_documents(100 + step)


def target_of(tokens):
    return tokens.float().sin()


@dataclasses.dataclass
class Record:
    """losses, norms: of every step. before, after: log-probs or values [T] of the documents of step 0.

    after_load: those of the layout before this one, from its DCP checkpoint. initial: a weight.
    """

    losses: list[float]
    norms: list[float]
    before: torch.Tensor
    after: torch.Tensor
    after_load: torch.Tensor | None = None
    initial: torch.Tensor | None = None


# ---- transformers ----


def auto_class(case):
    name = "TokenClassification" if case.is_critic else "CausalLM"
    return getattr(transformers, f"AutoModelFor{name}")


def scores_of_transformers(model, case, documents):
    """Log-probs of each document's tokens but the first, or values of all its tokens."""
    if case.is_critic:
        return torch.cat([model(d[None]).logits[0, :, 0] for d in documents])
    of_documents = (logprobs_of(model(d[None, :-1]).logits, d[None, 1:]) for d in documents)
    return torch.cat([scores[0] for scores in of_documents])


@functools.cache
def reference(case):
    """(the model before the first step, record of the plain loop)."""
    # Tied like small models; without an output the embedding has nothing to be tied to.
    options = {"is_critic": case.is_critic, "tie_word_embeddings": case.is_critic}
    start, model = (tiny_hf_model(case.family, **options) for _ in range(2))
    betas = (0.9, 0.95)
    optimizer = torch.optim.AdamW(model.parameters(), LR, betas, EPS, weight_decay=0.0)

    def scores():
        with torch.no_grad():
            return scores_of_transformers(model, case, documents_of(0))

    before, losses, norms = scores(), [], []
    for step in range(STEPS):
        documents, total = documents_of(step), 0.0
        for document in documents:
            if case.is_critic:
                values = scores_of_transformers(model, case, [document[:-1]])
                loss = (values - target_of(document[:-1])).square().sum()
            else:
                loss = -scores_of_transformers(model, case, [document]).sum()
            loss = loss / num_valid(documents)
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return start, Record(losses, norms, before, scores())


# ---- the engine ----


def squared_error(values, labels, batch):
    errors = values.squeeze(-1) - target_of(batch["input"])
    return (errors.square() * (labels != IGNORE_INDEX)).sum()


def scores_of_engine(engine, is_critic):
    """Those of transformers, from one row with all documents; None on ranks without the last stage."""
    batch, labels = pack(documents_of(0))
    rows = engine.forward_step([batch])
    if rows is None:
        return None
    assert rows[0].shape[:2] == batch["input"].shape and type(rows[0]) is torch.Tensor
    if is_critic:
        return rows[0][0, :, 0].clone()
    return logprobs_of(rows[0], labels)[labels != IGNORE_INDEX]


def train_in_layouts(folder, cases):
    """(case, layout) -> record, on every rank; leaves Hugging Face files of each in `folder`."""
    world_size, records = torch.distributed.get_world_size(), {}
    for name, case in cases.items():
        # The config's key, not these args, has to give a model its value head and untie it.
        args = from_hf_config(f"{folder}/{name}/hf").model_args
        args = dataclasses.replace(args, value_head=False, enable_weight_tying=case.is_critic)
        get_train_spec(case.family).model_args["tiny"] = args
        options = {"loss_fn": squared_error} if case.is_critic else {}
        earlier = None
        for layout in case.layouts if world_size > 1 else ("fsdp",):
            job = tiny_job(
                folder,
                attn_type=case.attn_type,
                model={"name": case.family, "value_head": case.is_critic},
                parallelism=layout_of(layout, world_size),
                optimizer={"lr": LR},
            )
            with TrainingEngine(job) as engine:
                initial = whole_weights(engine)[
                    "score.weight" if case.is_critic else "tok_embeddings.weight"
                ]
                engine.load(f"{folder}/{name}/hf")
                before = scores_of_engine(engine, case.is_critic)
                steps = [run_step(engine, documents_of(i), **options) for i in range(STEPS)]
                after, after_load = scores_of_engine(engine, case.is_critic), None
                engine.save(f"{folder}/{name}/{layout}")
                engine.save_hf(f"{folder}/{name}/hf_{layout}")
                if earlier is not None:
                    engine.load(f"{folder}/{name}/{earlier}")
                    after_load = scores_of_engine(engine, case.is_critic)
                earlier = layout
            losses, norms = map(list, zip(*steps, strict=True))
            records[name, layout] = Record(losses, norms, before, after, after_load, initial)
    return records


def relative(ours, theirs):
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def distance(ours, theirs):
    return (ours - theirs).abs().max().item()


@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_in_every_layout_equal_plain_transformers(world_size, tmp_path):
    for name in CASES:
        start, expected = reference(CASES[name])
        start.save_pretrained(tmp_path / name / "hf")
        match = from_hf_config(tmp_path / name / "hf")
        is_critic = CASES[name].is_critic
        assert (match.family, match.model_args.value_head) == (CASES[name].family, is_critic)
        assert expected.before.std() > 0.2, "too alike for the tolerance to tell anything"
        assert distance(expected.before, expected.after) > 0.01, "nothing was learned"
    ranks = run_ranks(train_in_layouts, world_size, str(tmp_path), CASES, timeout_seconds=300)
    last: dict[str, Record] = {}
    for name, layout in ranks[0]:
        case, (_, expected) = CASES[name], reference(CASES[name])
        # Under pipelines the rank of the last stage has the scores.
        record = next(r[name, layout] for r in ranks if r[name, layout].after is not None)
        folder = tmp_path / name / f"hf_{layout}"
        shutil.copy(tmp_path / name / "hf/config.json", folder)
        exported = auto_class(case).from_pretrained(folder, attn_implementation="eager")
        with torch.no_grad():
            of_files = scores_of_transformers(exported, case, documents_of(0))
        found = {
            "before": distance(record.before, expected.before),
            "after": distance(record.after, expected.after),
            "exported": distance(of_files, record.after),
            "losses": relative(record.losses, expected.losses),
            "norms": relative(record.norms, expected.norms),
        }
        print(f"{world_size}, {name}, {layout}:", *(f"{k} {v:.1e}" for k, v in found.items()))
        assert max(found.values()) <= TOLERANCE, (name, layout)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == dict(exported.named_parameters()).keys()
        first = ranks[0][name, case.layouts[0]].initial
        assert torch.equal(record.initial, first), "the layout changes initial weights"
        if record.after_load is not None:
            assert distance(record.after_load, last[name].after) <= 1e-6, (name, layout)
        last[name] = record


def test_reward_model_of_transformers_scores_the_last_token(tmp_path):
    """`AutoModelForSequenceClassification`, whose score has no bias."""
    # No padding: each document is a row of its own.
    config = tiny_hf_config(tie_word_embeddings=True, num_labels=1, pad_token_id=-1)
    model = transformers.AutoModelForSequenceClassification.from_config(config).float().eval()
    with torch.no_grad():
        model.score.weight.mul_(10)
        expected = torch.cat([model(d[None]).logits[0] for d in documents_of(0)])
    model.save_pretrained(tmp_path / "hf")
    job = tiny_job(str(tmp_path))
    before = copy.deepcopy(job)
    # config.json describes a value model
    with TrainingEngine.from_hf(tmp_path / "hf", job) as engine:
        values = scores_of_engine(engine, is_critic=True)
    assert job == before, "the caller's config was written to"
    last = torch.tensor([len(d) for d in documents_of(0)]).cumsum(0) - 1
    assert expected.std() > 0.1
    assert distance(values[last], expected) <= TOLERANCE
