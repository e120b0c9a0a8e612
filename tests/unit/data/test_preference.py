"""Preference pairs from files to rows: both answers whole, apart, and in one row."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.unit.data.chats import PAIRS, SHORT, write_tokenizer
from torchtitan.batch.batch import TokenBatch
from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.config import ConfigManager
from torchtitan.config.checks import ConfigError
from torchtitan.config.job_config import MixtureSource
from torchtitan.data.chat_samples import load_pairs, parse_keys
from torchtitan.data.chats import ChatEncoder
from torchtitan.data.preference import PairTokens
from torchtitan.data.text_datasets import build_text_dataloader
from torchtitan.data.tokenizer import HuggingFaceTokenizer
from torchtitan.job import resolve_job
from torchtitan.objective.preference import PreferenceObjective

TEXTS, CHATS = PAIRS["texts"], PAIRS["chats"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return HuggingFaceTokenizer(str(write_tokenizer(tmp_path_factory.mktemp("t"), SHORT)))


def encoder(tokenizer, seq_len=256, too_long="error", *keys):
    chats = ChatEncoder.of_tokenizer(tokenizer, keys=parse_keys(keys))
    return PairTokens(chats, seq_len, too_long)


def texts_of(tokenizer, pair):
    """Return (whole text, trained text) of both parts."""
    parts = pair.halves()
    texts = [(part.ids, part.ids[part.trained]) for part in parts]
    return [[tokenizer.decode(x.tolist(), skip_special_tokens=False) for x in t] for t in texts]


QUESTION = "<|im_start|>user\n1 + 2?<|im_end|><|im_start|>assistant\n"
WHOLE = [CHATS["prompt"] + CHATS[key] for key in ("chosen", "rejected")]


@pytest.mark.parametrize(
    "sample",
    [
        CHATS,
        {"chosen": WHOLE[0], "rejected": WHOLE[1]},
        {"prompt": "1 + 2?", "chosen": WHOLE[0], "rejected": WHOLE[1]},
        {"prompt": CHATS["prompt"], "chosen": WHOLE[0], "rejected": WHOLE[1]},
        {"prompt": CHATS["prompt"], "chosen": "It is 3.", "rejected": "No idea"},
    ],
    ids=["prompt", "whole chats", "... beside a text", "... beside messages", "answers as texts"],
)
def test_each_answer_follows_the_prompt_and_ends_with_its_control_token(tokenizer, sample):
    answers = "It is 3.<|im_end|>", "No idea<|im_end|>"
    expected = [[QUESTION + answer, answer] for answer in answers]
    assert texts_of(tokenizer, encoder(tokenizer)(sample)) == expected


def test_answers_that_are_texts_end_with_end_of_text(tokenizer):
    expected = [[f"<|begin|>1 + 2 ={x}<|im_end|>", f"{x}<|im_end|>"] for x in (" 3", " 40")]
    assert texts_of(tokenizer, encoder(tokenizer)(TEXTS)) == expected


def test_keys_and_roles_of_a_file_can_be_renamed(tokenizer, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"q": "1 + 2?", "good": "It is 3.", "bad": "No idea"}) + "\n")
    keys = ["q=user", "good=chosen", "bad=rejected"]
    encode = encoder(tokenizer, 256, "error", *keys)
    (sample,) = load_pairs(str(path), parse_keys(keys))
    expected = texts_of(tokenizer, encoder(tokenizer)(CHATS))
    whole = {"q": "1 + 2?", "good": WHOLE[0], "bad": WHOLE[1]}
    assert texts_of(tokenizer, encode(sample)) == texts_of(tokenizer, encode(whole)) == expected
    path.write_text(json.dumps(whole | {"prompt": "1 + 2?"}))
    message = "training.chat_keys puts the turns of user before 'prompt', .* got '1 \\+ 2"
    with pytest.raises(ValueError, match=message):
        encode(load_pairs(str(path), parse_keys(keys))[0])
    path.write_text(json.dumps(whole))
    message = "need an object with 'chosen' and 'rejected', .* got the keys"
    with pytest.raises(ValueError, match=message):
        encoder(tokenizer)(load_pairs(str(path))[0])


@pytest.mark.parametrize(
    "sample, message",
    [
        ({"chosen": "a", "rejected": "b"}, "got the prompt None and answers of the types str and str"),
        ({"prompt": "p", "chosen": "a", "rejected": WHOLE[0]}, "answers of the types str and list"),
        ({"chosen": WHOLE[0], "rejected": WHOLE[0]}, "list and list that begin with 2 equal entries"),
        ({"chosen": CHATS["chosen"], "rejected": WHOLE[0]}, "that begin with 0 equal entries"),
    ],
)  # fmt: skip
def test_pair_without_a_prompt_or_two_answers_is_refused(tokenizer, sample, message):
    with pytest.raises(ValueError, match=message):
        encoder(tokenizer)(sample)


def test_answer_of_more_than_half_a_row_is_cut_left_out_or_refused(tokenizer):
    longest = len(encoder(tokenizer)(TEXTS).halves()[1].ids)  # 1 more than the other
    seq_len = 2 * longest - 1
    chosen, rejected = encoder(tokenizer, seq_len, "cut")(TEXTS).halves()
    assert (len(chosen.ids), len(rejected.ids)) == (longest - 1, longest - 1)
    assert rejected.trained.sum() == 3  # of " 40" and the end
    skip = encoder(tokenizer, seq_len, "skip")
    assert len(skip(TEXTS).ids) == 0 and skip.count(TEXTS) == (0, 0, 2 * longest - 1)
    sentence = f"an answer with its prompt has {longest} tokens, and half of training.seq_len is"
    with pytest.raises(ValueError, match=sentence):
        encoder(tokenizer, seq_len)(TEXTS)


def test_answer_whose_only_token_is_no_label_leaves_out_its_pair():
    """The first token of a document has no token before it that could predict it."""
    one_token = np.array([7]), np.array([True])
    encode = PairTokens(SimpleNamespace(keys={}, key="", encode=lambda _: one_token), 8, "error")
    assert len(encode(TEXTS).ids) == 0


def test_pairs_without_labels_are_not_counted():
    ids = torch.tensor([[0, 1, -1, 2, -2, 0]])
    labels = torch.where(ids == 0, IGNORE_INDEX, 5)
    objective = object.__new__(PreferenceObjective)
    for n, own in ((2, labels), (0, torch.full_like(labels, IGNORE_INDEX))):
        assert objective.denominator(TokenBatch(labels, own, entries={"pair_ids": ids})) == n


def rows_of(tokenizer, path, *flags):
    fixed = f"""
        model.attn_type=varlen model.attn_mask_type=block_causal loss.name=dpo
        training.dataset=preference training.dataset_path={path} training.local_batch_size=1
        training.seq_len=64
    """.split()
    config = ConfigManager().parse_args([f"--{flag}" for flag in (*fixed, *flags)])
    loader = build_text_dataloader(1, 0, tokenizer, resolve_job(config).config, infinite=False)
    return [({key: x[0] for key, x in batch.items()}, labels[0]) for batch, labels in loader]


def write_pairs(tmp_path, n):
    """Write pairs of which pair i has i more characters in its rejected answer."""
    path = tmp_path / "pairs.jsonl"
    with open(path, "w") as file:
        for i in range(n):
            pair = {"prompt": f"{i}", "chosen": "yes", "rejected": "n" * (i + 1)}
            pair |= {"ref_chosen_logps": -1.5 - i, "ref_rejected_logps": -i}
            file.write(json.dumps(pair) + "\n")
    return path


@pytest.mark.parametrize("packing", ["fit", "none"])
def test_both_answers_of_a_pair_are_documents_of_one_row(tokenizer, packing, tmp_path):
    path = write_pairs(tmp_path, 9)
    flags = [f"training.packing={packing}", "loss.reference=precomputed"]
    found = {}
    for row, labels in rows_of(tokenizer, path, *flags):
        ids, documents, tokens = row["pair_ids"], row["document_ids"], row["input"]
        for pair in range(1, int(ids.max()) + 1):
            sums, texts = [], []
            for sign in (1, -1):
                (places,) = (ids == sign * pair).nonzero(as_tuple=True)
                (document,) = documents[places].unique()
                (own,) = (documents == document).nonzero(as_tuple=True)
                text = tokenizer.decode(tokens[own].tolist(), skip_special_tokens=False)
                texts.append(text.removeprefix("<|begin|>").removesuffix("<|im_end|>"))
                # Labels are the answer's tokens, and stay in their document.
                assert torch.equal(labels[places], tokens[places + 1])
                assert places[-1] + 1 == own[-1] and labels[own[-1]] == IGNORE_INDEX
                sums.append(float(row["ref_logprobs"][places].sum()))
            assert texts[0][0] == texts[1][0] and texts[0][1:] == "yes"
            found[int(texts[0][0])] = (sums, len(texts[1]) - 1)
        assert ((ids != 0) == (labels != IGNORE_INDEX)).all()
    assert found == {i: ([-1.5 - i, -i], i + 1) for i in range(9)}
    num_rows = len(rows_of(tokenizer, path, *flags))
    assert num_rows == 9 if packing == "none" else num_rows < 9


def test_numbers_of_the_reference_are_needed_where_they_are_named(tokenizer, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(TEXTS | {"ref_chosen_logps": float("nan")}) + "\n")
    message = "line 1: loss.reference = 'precomputed' needs the numbers ref_"
    with pytest.raises(ValueError, match=message):
        rows_of(tokenizer, path, "training.packing=fit", "loss.reference=precomputed")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["training.packing=concat"], "'concat' splits preference pairs over rows; set it to 'fit'"),
        (["loss.name="], "training.dataset = 'preference' does not go with loss.name = ''"),
        (["training.dataset=chat"], "training.dataset = 'chat' does not go with loss.name = 'dpo'"),
        (["model.attn_mask_type=causal"], "must keep the two answers of a pair apart, got 'causal'"),
        (["loss.reference=nowhere"], "must be initial, .* or a folder .* got 'nowhere'"),
        (["loss.reference=adapters_off"], "'adapters_off' needs adapters"),
        (["loss.reference=precomputed", "training.too_long=cut"], "'cut' truncates answers"),
        (["checkpoint.enable"], "'initial' with random weights, .* needs debug.seed, got None"),
    ],
)  # fmt: skip
def test_config_that_cannot_train_on_pairs_is_refused(tokenizer, flags, message, tmp_path):
    path = write_pairs(tmp_path, 2)
    flags = ["training.packing=fit", f"job.dump_folder={tmp_path}", *flags]
    with pytest.raises(ConfigError, match=message):
        rows_of(tokenizer, path, *flags)


def test_mixture_of_pairs_and_other_data_is_refused(tmp_path):
    config = ConfigManager().parse_args(["--loss.name=dpo", "--training.packing=fit"])
    pairs = MixtureSource("preference", str(write_pairs(tmp_path, 2)))
    config.training.mixture = [pairs, MixtureSource("c4_test")]
    with pytest.raises(ConfigError, match=r"training.mixture\[1\].dataset = 'c4_test' does not go"):
        resolve_job(config)
