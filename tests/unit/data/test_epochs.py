"""After `epochs = k`, every document has been read k times, and nothing else."""

import json
import shutil
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.data.test_row_streams import TOKENIZER, source, tokens_of
from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.config import ConfigManager
from torchtitan.config.job_config import MixtureSource
from torchtitan.data import row_plan
from torchtitan.data.document_sources import Source
from torchtitan.data.packed_dataset import PackedDataset
from torchtitan.data.row_streams import Packing
from torchtitan.data.text_datasets import build_text_dataloader
from torchtitan.data.token_files import write_pair
from torchtitan.data.tokenizer import HuggingFaceTokenizer
from torchtitan.train import Trainer

METHODS = ["concat", "fit", "none"]


def loader_of(folder, rows, *flags, name="local", begins_documents=True):
    """Return the data loader of one rank for a file of texts, or of chats."""
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    flags = [f"--training.dataset={name}", f"--training.dataset_path={folder}/rows.jsonl", *flags]
    tokenizer = HuggingFaceTokenizer("tests/assets/tokenizer")
    tokenizer.begins_documents = begins_documents
    config = ConfigManager().parse_args(["--training.seq_len=32", "--training.epochs=1", *flags])
    return build_text_dataloader(1, 0, tokenizer, config)


def test_documents_that_begin_with_no_token_are_counted_as_they_are_read(tmp_path):
    rows = [{"text": text} for text in ("a story", "another one", "x")]
    loader = loader_of(tmp_path, rows, begins_documents=False)
    assert len(list(islice(loader, loader.dataset.num_steps_left))) == 1


def test_chats_that_are_left_out_have_no_rows_in_an_epoch(tmp_path):
    turn = {"role": "user", "content": "hi"}
    answers = [{"role": "assistant", "content": "yes " * n} for n in (2, 90, 3, 90, 4)]
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}<|end_of_text|>{% endfor %}")
    flags = [f"--training.chat_template={template}", "--training.too_long=skip"]
    chats = [{"messages": [turn, answer]} for answer in answers]
    loader = loader_of(tmp_path, chats, *flags, name="chat")
    loader.dataset.log_chats()
    rows = list(islice(loader, loader.dataset.num_steps_left))
    assert sum(labels.ne(IGNORE_INDEX).sum().item() for _, labels in rows) > 0


def test_learning_rate_lasts_for_the_steps_left_after_a_resume_with_more_rows(tmp_path):
    text = '{"text": "the fox and the crow met at the well again"}\n' * 32
    (tmp_path / "t.jsonl").write_text(text)

    def run(rows):
        flags = f"""
            training.global_batch_size={rows} training.local_batch_size=2 training.epochs=1
            training.dataset=local training.dataset_path={tmp_path}/t.jsonl training.seq_len=32
            training.packing=none checkpoint.enable checkpoint.interval=4 checkpoint.keep_latest_k=0
            checkpoint.no-last-save-model-only job.dump_folder={tmp_path}
            model.args=dim=32,n_layers=1,n_heads=2 activation_checkpoint.mode=none
            lr_scheduler.warmup_steps=1
        """.split()
        with Trainer(ConfigManager().parse_args([f"--{flag}" for flag in flags])) as trainer:
            trainer.train()
            assert trainer.job_config.training.steps == 10000  # nobody writes to the config
            assert trainer.num_steps == trainer.metrics_processor.num_steps == trainer.step
            return trainer.step, next(iter(trainer.lr_schedulers)).lr_lambdas[0]

    assert run(2)[0] == 16
    for step in (8, 12, 16):
        shutil.rmtree(tmp_path / f"checkpoint/step-{step}")
    steps, factor = run(4)  # 8 rows were read, 24 are left
    assert steps == 4 + 6
    assert factor(steps - 1) > 0


def tokens_in(batches, method, padding_id=0):
    """Return each token that was read and how often, without padding.

    The last token of a row of "concat" is only a label.
    """
    read = Counter()
    for inputs, labels in batches:
        ids = inputs.flatten().tolist()
        if method == "concat":
            ids += [label for label in labels[:, -1].tolist() if label != IGNORE_INDEX]
        read.update(i for i in ids if i != padding_id)
    return read


def planned(lengths, method, rank=0, ranks=1, rows=1, **fields):
    packing = Packing(method, 16, padding_id=-7, positions=True, document_ids=True)
    return PackedDataset([source(lengths, **fields)], packing, rank, ranks, True, rows, True)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=40),
    st.sampled_from(METHODS),
    st.sampled_from([(1, 1), (3, 1), (2, 2), (1, 4)]),
    st.integers(1, 3),
    st.sampled_from([None, 5]),
)
def test_each_pass_reads_every_document_once_and_the_rest_is_padding(
    lengths, method, rows_and_ranks, k, seed
):
    if not any(lengths):
        return
    rows, ranks = rows_and_ranks
    of_ranks = [
        list(planned(lengths, method, rank, ranks, rows, limit=k, seed=seed))
        for rank in range(ranks)
    ]
    assert len({len(of_rank) for of_rank in of_ranks}) == 1
    steps = len(of_ranks[0]) // rows
    in_order = [
        row for s in range(steps) for r in of_ranks for row in r[s * rows : s * rows + rows]
    ]
    everything = tokens_of(lengths)
    read, num_read = Counter(), 0
    for x, labels in in_order:
        own = tokens_in([(x["input"][None], labels[None])], method, -7)
        if num_read % len(everything) + own.total() > len(everything):
            raise AssertionError("a row has documents of two passes")
        read, num_read = read + own, num_read + own.total()
        assert all(n <= -(-num_read // len(everything)) for n in own.values())
        is_padding = x["input"] == -7
        assert labels[is_padding].eq(IGNORE_INDEX).all()
        for key in ("positions", "document_ids"):
            assert x[key][is_padding].eq(-1).all() and x[key][~is_padding].ge(0).all()
    assert read == Counter(everything * k)
    whole_steps = sum((x["input"] != -7).any().item() for x, _ in in_order)
    assert steps == -(-whole_steps // (rows * ranks))


def write_documents(folder, n, name="tokens", first_id=100):
    """Write n documents of 8 to 79 tokens; document i has the token first_id + i only. Returns lengths."""
    lengths = np.random.default_rng(4).integers(8, 80, n).tolist()
    documents = [[first_id + i] * length for i, length in enumerate(lengths)]
    write_pair(str(folder / name), documents, np.dtype("<u2"))
    return lengths


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_mixture", [False, True])
def test_resuming_on_other_ranks_workers_and_batches_reads_every_token_once(
    method, is_mixture, tmp_path
):
    lengths = write_documents(tmp_path, 150)
    write_documents(tmp_path, 150, "other", first_id=300)
    tokenizer = HuggingFaceTokenizer("tests/assets/tokenizer")
    states, batches = {}, []
    phases = [(2, 2, 8), (1, 2, 8), (4, 0, 8), (1, 0, 6), (2, 1, 10)]
    for number, (ranks, workers, rows) in enumerate(phases):  # ranks, workers, global batch
        flags = f"""
            dataset=tokens dataset_path={tmp_path}/tokens seq_len=64 packing={method} shuffle
            global_batch_size={rows} local_batch_size={rows // ranks} dataloader.num_workers={workers}
        """.split()
        config = ConfigManager().parse_args([f"--training.{flag}" for flag in flags])
        config.training.epochs = None if is_mixture else 2
        if is_mixture:
            config.training.mixture = [
                MixtureSource("tokens", str(tmp_path / "tokens"), weight=0.3, epochs=0.5),
                MixtureSource("tokens", str(tmp_path / "other"), weight=0.7, epochs=1.5),
            ]
        n_steps = 3 if number + 1 < len(phases) else None
        merged, steps_left = {}, set()
        for rank in range(ranks):
            loader = build_text_dataloader(ranks, rank, tokenizer, config)
            loader.load_state_dict(states)
            steps_left.add(loader.dataset.num_steps_left)
            read = [(x["input"], labels) for x, labels in islice(loader, n_steps)]
            batches += read
            merged |= loader.state_dict()
        assert len(steps_left) == 1  # otherwise a rank would wait for the others
        states = merged
    read = tokens_in(batches, method, tokenizer.eos_id)
    if not is_mixture:
        assert read == {100 + i: 2 * length for i, length in enumerate(lengths)}
    else:
        for first_id, n_passes in ((100, 0.5), (300, 1.5)):
            times = [read[first_id + i] / length for i, length in enumerate(lengths)]
            assert sum(times) == n_passes * 150 and set(times) == {n_passes - 0.5, n_passes + 0.5}


def test_finished_run_goes_on_with_another_epoch():
    lengths = [5, 9, 30, 2, 11]
    first = planned(lengths, "concat", rows=3, limit=1)
    read = list(first)
    more = planned(lengths, "concat", rows=3, limit=2)
    more.load_state_dict(first.state_dict())
    assert more.num_steps_left == 2
    read += list(more)
    as_batches = [(x["input"][None], labels[None]) for x, labels in read]
    assert tokens_in(as_batches, "concat", -7) == Counter(tokens_of(lengths) * 2)


def test_position_in_other_rows_is_refused():
    state = planned([5, 9, 30], "fit", limit=1).state_dict()
    for dataset in (
        planned([5, 9, 30], "concat", limit=1),
        planned([5, 9, 31], "fit", limit=1),
        PackedDataset([source([5, 9, 30])], Packing("fit", 16), infinite=True, rows=1),
    ):
        with pytest.raises(ValueError, match="another training.epochs, .*exclude_from"):
            dataset.load_state_dict(state)


def test_planned_rows_are_99_8_percent_full():
    lengths = np.random.default_rng(0).lognormal(np.log(300) - 0.5, 1, 40_000).astype(int) + 1
    lengths = np.minimum(lengths, 2048)
    filled = np.bincount(row_plan.fitted(lengths, 2048), weights=lengths)
    assert filled.max() <= 2048 and filled.mean() / 2048 >= 0.998


def test_fitted_rows_are_those_of_a_slow_best_fit():
    generator = np.random.default_rng(1)
    for _ in range(20):
        sizes = generator.integers(1, 17, generator.integers(1, 60))
        spaces, own = [], {}
        for piece in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            fitting = [row for row, space in enumerate(spaces) if space >= sizes[piece]]
            if not fitting:
                spaces.append(16)
            row = min(fitting, key=lambda r: (spaces[r], r), default=len(spaces) - 1)
            spaces[row] -= sizes[piece]
            own.setdefault(row, []).append(piece)
        rows = row_plan.fitted(sizes, 16)
        planned_rows = [np.flatnonzero(rows == r).tolist() for r in range(rows.max() + 1)]
        assert sorted(planned_rows) == sorted(sorted(row) for row in own.values())
        longest = [max(row, key=lambda i: (sizes[i], -i)) for row in planned_rows]
        assert longest == sorted(longest)


def test_second_start_counts_and_plans_nothing_and_a_damaged_file_is_made_again(
    cache, monkeypatch, caplog
):
    texts = [{"text": " 7" * n} for n in np.random.default_rng(2).integers(1, 90, 300)]

    def num_steps():
        numbers = Source("texts", texts, lambda sample: sample["text"], TOKENIZER, limit=3, seed=1)
        return PackedDataset([numbers], Packing("fit", 16), planned=True).num_steps_left

    first = num_steps()
    monkeypatch.setattr(row_plan, "_count", None)
    for name in ("_planned", "_documents_of"):
        monkeypatch.setattr(row_plan.Plan, name, None)
    assert num_steps() == first > 0

    shutil.rmtree(cache / "torchtitan")
    numbers = row_plan.kept("key", lambda: np.arange(5))
    (file,) = (cache / "torchtitan").iterdir()
    content = file.read_bytes()
    place = content.index(bytes([4] + [0] * 7)) if content else 0  # the last number
    for damaged in (content[:place] + b"\x05" + content[place + 1 :], content[:-9], b"", b"x" * 99):
        assert row_plan.kept("key", lambda: 1 / 0).tolist() == numbers.tolist() and not caplog.text
        file.write_bytes(damaged)
        assert row_plan.kept("key", lambda: np.arange(5)).tolist() == numbers.tolist()
        assert (
            f"the counts of tokens in {file} are damaged, so the tokens are counted again"
            in caplog.text
        )
        caplog.clear()
