"""Three steps of a squared error on values: the engine in each layout against transformers.

The reference is `AutoModelForTokenClassification` with one label, which sees one document at a time,
and torch's AdamW. The engine reads its files, and transformers reads the engine's.
"""

import dataclasses
import functools
import json
import shutil

import pytest
import torch

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
    make_documents,
    num_valid,
    pack,
    run_step,
    tiny_job,
    whole_weights,
)

STEPS = 3
LR = 1e-3
LAYOUTS = {1: ["fsdp"], 2: ["fsdp", "tp", "pp", "cp", "ddp"]}
# A document that sees another moves values by 1e-2; a score counted twice moves the norm by 1.
TOLERANCE = 5e-6


def documents_of(step):
    return make_documents(100 + step)


def target_of(tokens):
    return tokens.float().sin()


@dataclasses.dataclass
class Record:
    """losses, norms: of every step. before, after: values [T] of the documents of step 0.

    after_load: values of the layout before this one, from its DCP checkpoint.
    """

    losses: list[float]
    norms: list[float]
    before: torch.Tensor
    after: torch.Tensor
    after_load: torch.Tensor | None = None
    score: torch.Tensor | None = None


# ---- transformers ----


def values_of_transformers(model):
    with torch.no_grad():
        return torch.cat([model(d[None]).logits[0, :, 0] for d in documents_of(0)])


@functools.cache
def reference(family):
    """(the model before the first step, record of the plain loop)."""
    # Tied like small models; without an output the embedding has nothing to be tied to.
    start, model = (
        tiny_hf_model(family, is_critic=True, tie_word_embeddings=True) for _ in range(2)
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0
    )
    before, losses, norms = values_of_transformers(model), [], []
    for step in range(STEPS):
        documents, total = documents_of(step), 0.0
        for document in documents:
            values = model(document[None, :-1]).logits[0, :, 0]
            loss = (values - target_of(document[:-1])).square().sum() / num_valid(documents)
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return start, Record(losses, norms, before, values_of_transformers(model))


# ---- the engine ----


def squared_error(values, labels, batch):
    errors = values.squeeze(-1) - target_of(batch["input"])
    return (errors.square() * (labels != IGNORE_INDEX)).sum()


def values_of_engine(engine):
    """[T], from one row with all documents; None on ranks without the last stage."""
    batch, _ = pack(documents_of(0))
    rows = engine.forward_step([batch])
    if rows is None:
        return None
    assert rows[0].shape == (*batch["input"].shape, 1)
    assert type(rows[0]) is torch.Tensor
    return rows[0][0, :, 0].clone()


def train_in_layouts(folder, family, hf_folder, layouts):
    """layout -> record, on every rank; leaves Hugging Face files of each in `folder`."""
    # The config's key, not these args, has to give the model its head and untie it.
    args = dataclasses.replace(from_hf_config(hf_folder).model_args, value_head=False)
    args.enable_weight_tying = True
    get_train_spec(family).model_args["tiny"] = args
    records, earlier = {}, None
    for layout in layouts:
        job = tiny_job(
            folder,
            model={"name": family, "value_head": True},
            parallelism=layout_of(layout, torch.distributed.get_world_size()),
            optimizer={"lr": LR},
        )
        with TrainingEngine(job) as engine:
            score = whole_weights(engine)["score.weight"]
            engine.load(hf_folder)
            before, losses, norms = values_of_engine(engine), [], []
            for step in range(STEPS):
                loss, norm = run_step(engine, documents_of(step), loss_fn=squared_error)
                losses.append(loss)
                norms.append(norm)
            after = values_of_engine(engine)
            engine.save(f"{folder}/{layout}")
            engine.save_hf(f"{folder}/hf_{layout}")
            after_load = None
            if earlier is not None:
                engine.load(f"{folder}/{earlier}")
                after_load = values_of_engine(engine)
            earlier = layout
        records[layout] = Record(losses, norms, before, after, after_load, score)
    return records


def relative(ours, theirs):
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def distance(ours, theirs):
    return (ours - theirs).abs().max().item()


@pytest.mark.parametrize("family", [pytest.param("qwen3", marks=pytest.mark.slow), "llama3"])
@pytest.mark.parametrize("world_size", LAYOUTS)
def test_three_steps_on_values_equal_plain_transformers(world_size, family, tmp_path):
    from transformers import AutoModelForTokenClassification

    start, expected = reference(family)
    start.save_pretrained(tmp_path / "hf")
    match = from_hf_config(tmp_path / "hf")
    assert (match.family, match.model_args.value_head) == (family, True)
    ranks = run_ranks(
        train_in_layouts,
        world_size,
        str(tmp_path),
        family,
        str(tmp_path / "hf"),
        LAYOUTS[world_size],
        timeout_seconds=300,
    )
    assert expected.before.std() > 0.2, "too alike for the tolerance to tell anything"
    assert distance(expected.before, expected.after) > 0.01, "nothing was learned"
    last = None
    for layout in LAYOUTS[world_size]:
        # Under pipelines the rank of the last stage has the values.
        record = next(r[layout] for r in ranks if r[layout].after is not None)
        before = distance(record.before, expected.before)
        after = distance(record.after, expected.after)
        losses, norms = (
            relative(getattr(record, what), getattr(expected, what)) for what in ("losses", "norms")
        )
        shutil.copy(tmp_path / "hf" / "config.json", tmp_path / f"hf_{layout}")
        folder = tmp_path / f"hf_{layout}"
        exported = AutoModelForTokenClassification.from_pretrained(
            folder, attn_implementation="eager"
        )
        in_files = distance(values_of_transformers(exported), record.after)
        print(
            f"{family} {world_size} {layout}: values {before:.1e} before, {after:.1e} after "
            f"{STEPS} steps, losses {losses:.1e}, norms {norms:.1e}, exported {in_files:.1e}"
        )
        assert max(before, after, in_files, losses, norms) <= TOLERANCE, layout
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == dict(exported.named_parameters()).keys()
        first = ranks[0][LAYOUTS[world_size][0]].score
        assert torch.equal(record.score, first), "the layout changes initial weights"
        if last is not None:
            assert distance(record.after_load, last.after) <= 1e-6, layout
        last = record


def test_reward_model_of_transformers_scores_the_last_token(tmp_path):
    """`AutoModelForSequenceClassification`, whose score has no bias."""
    from transformers import AutoModelForSequenceClassification

    # No padding: each document is a row of its own.
    config = tiny_hf_config(tie_word_embeddings=True, num_labels=1, pad_token_id=-1)
    model = AutoModelForSequenceClassification.from_config(config).float().eval()
    with torch.no_grad():
        model.score.weight.mul_(10)
        expected = torch.cat([model(d[None]).logits[0] for d in documents_of(0)])
    model.save_pretrained(tmp_path / "hf")
    job = tiny_job(str(tmp_path))  # config.json describes a value model
    with TrainingEngine.from_hf(tmp_path / "hf", job) as engine:
        values = values_of_engine(engine)
    last = torch.tensor([len(d) for d in documents_of(0)]).cumsum(0) - 1
    assert expected.std() > 0.1
    assert distance(values[last], expected) <= TOLERANCE
