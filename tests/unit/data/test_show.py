"""The program that shows training data: its rows are the trainer's, its labels worked out by hand."""

import dataclasses
import sys

import numpy as np
import pytest
import torch

from tests.unit.data.chats import write_tokenizer
from torchtitan.batch.batch import TokenBatch
from torchtitan.batch.policy import DocumentPolicy
from torchtitan.data import show
from torchtitan.data.chats import ChatEncoder
from torchtitan.data.tokenizer import HuggingFaceTokenizer
from torchtitan.protocols import train_spec

DEBUG = "--job.config_file=torchtitan/models/llama3/train_configs/debug_model.toml"
BY_POSITIONS = DocumentPolicy("flex", "position_block_causal", 257, True, True)
CAUSAL = DocumentPolicy("sdpa", "causal", None, True, False)
MARKS = ("[", "]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tokenizer(tmp_path_factory.mktemp("model")))


def run(monkeypatch, capsys, *flags):
    """Return (exit code, stdout, stderr) of the program."""
    monkeypatch.setattr(sys, "argv", ["show", DEBUG, *flags])
    code = 0
    try:
        show.main()
    except SystemExit as exit:
        code = exit.code
    return code, *capsys.readouterr()


def packed_row(tokenizer):
    """Return a batch of one row: two pairs laid end to end, and padding."""
    encode = ChatEncoder(tokenizer, None)
    tokens, labels, positions = [], [], []
    for prompt, completion in (("2+2=", "4"), ("ü", " é\n!")):
        ids, trained = encode({"prompt": prompt, "completion": completion})
        # The label of a token is the next one, if that is trained.
        labels += [*np.where(trained, ids, -100)[1:], -100]
        tokens, positions = [*tokens, *ids], [*positions, *range(len(ids))]
    row = (tokens + [0] * 3, labels + [-100] * 3, positions + [-1] * 3)
    tokens, labels, positions = (torch.tensor(np.array([values])) for values in row)
    return {"input": tokens, "positions": positions}, labels


def test_parts_of_a_pair_are_named(folder, monkeypatch, capsys, tmp_path):
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "2+2=", "chosen": "4", "rejected": "22"}\n')
    flags = f"""
        model.hf_assets_path={folder} model.attn_type=varlen model.attn_mask_type=block_causal
        loss.name=dpo training.dataset=preference training.dataset_path={tmp_path}/pairs.jsonl
        training.packing=fit training.seq_len=32 show.rows=1 training.epochs=1
    """
    code, out, _ = run(monkeypatch, capsys, *(f"--{flag}" for flag in flags.split()))
    assert code == 0 and "  pair 1, chosen, tokens 0 to 6, positions 0 to 6, labels: 2\n" in out
    assert "  pair 1, rejected, tokens 7 to 14, positions 0 to 7, labels: 3\n" in out
    assert "    <|begin|>2+2=⟦22<|im_end|>⟧\n" in out


SHOWN = """row 1, tokens: 19, documents: 2, padding: 3, labels: 8 (42.1%)
  document 1, tokens 0 to 6, positions 0 to 6, labels: 2
    <|begin|>2+2=[4<|im_end|>]
  document 2, tokens 7 to 15, positions 0 to 8, labels: 6
    <|begin|>ü[ é
    !<|im_end|>]
"""


@pytest.mark.parametrize("policy", [BY_POSITIONS, CAUSAL])
def test_documents_positions_and_labels_of_a_packed_row_are_shown(folder, policy):
    tokenizer = HuggingFaceTokenizer(folder)
    batch = policy.training_batch(*packed_row(tokenizer))
    lines = show.describe_row(batch, 0, policy, tokenizer, MARKS, "row 1")
    seen = "(42.1%), every token sees the whole row before it" if policy is CAUSAL else "(42.1%)"
    assert "\n".join(lines) + "\n" == SHOWN.replace("(42.1%)", seen)


def test_program_prints_the_rows_of_the_job_s_own_data(folder, monkeypatch, capsys):
    def build(*, dp_world_size, dp_rank, tokenizer, job_config):
        assert (dp_world_size, dp_rank) == (1, 0)
        yield packed_row(tokenizer)

    spec = dataclasses.replace(train_spec.get_train_spec("llama3"), build_dataloader_fn=build)
    monkeypatch.setattr(train_spec, "_extra_train_specs", {"llama3": spec})
    flags = ["--model.attn_type=flex", "--model.attn_mask_type=position_block_causal"]
    # The layout is of no concern, and so are rows that the data do not have.
    flags += [f"--model.hf_assets_path={folder}", "--parallelism.tensor_parallel_degree=8"]
    code, out, err = run(monkeypatch, capsys, *flags, "--show.rows=5")
    assert (code, err) == (0, ""), err
    assert out == SHOWN.replace("[", "⟦").replace("]", "⟧")


def test_labels_that_are_not_the_next_token_and_escapes_are_told(folder):
    tokenizer = HuggingFaceTokenizer(folder)
    tokens = torch.tensor([tokenizer.encode("a\x1bb", add_special_tokens=False)])
    labels = torch.tensor([[5, int(tokens[0, 2]), 4]])
    batch = TokenBatch(tokens, labels, sample_ids=torch.tensor([[3, 4]]))
    lines = list(show.describe_row(batch, 0, CAUSAL, tokenizer, MARKS, "row 1"))
    assert lines[0].endswith("samples: 3 to 4, every token sees the whole row before it")
    assert lines[1:] == [
        "  labels that are not the row's next token: 1",
        "  document 1, tokens 0 to 2, positions 0 to 2, labels: 2",
        "    a[\\x1bb]",
        f"  label behind the row: [{tokenizer.decode([4])}]",
    ]


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--show.rows=0"], "config error: show.rows must be 1 or more, got 0; correct it\n"),
        (["--training.dataset=c5"], "config error: "),
        (["--job.config_file=none.toml"], "config error: job.config_file names a TOML file"),
        (["--show.row=1"], ""),
    ],
)
def test_config_that_cannot_run_is_refused_in_a_sentence(flags, sentence, monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys, *flags)
    assert (code, out) == (2, "")
    assert err.startswith(sentence) and err.count("\n") == 1


def test_data_that_cannot_be_read_end_with_1_and_a_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.jsonl").write_text("{}\n")
    flags = ["--training.dataset=local", f"--training.dataset_path={tmp_path}"]
    code, _, err = run(monkeypatch, capsys, *flags)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith(f"error: {tmp_path}/a.jsonl, line 1: need an object with a string under")
