"""The loss on preference pairs and its gradients are those of TRL's `DPOTrainer`."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tests.tiny_hf import VOCAB, tiny_hf_model
from torchtitan.data.tokenizer import HuggingFaceTokenizer
from torchtitan.loss.logprobs import token_logprobs
from torchtitan.loss.preference import dpo

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

TOKENS, N_PAIRS = 14, 3
ON_CPU = dict(report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False)
TOKENIZER = "tests/assets/tokenizer/tokenizer.json"


@pytest.fixture(scope="module")
def models():
    """A policy and a reference with other weights."""
    return tiny_hf_model("llama3", seed=0), tiny_hf_model("llama3", seed=1)


def rows_of_pairs(n_pairs):
    """TRL's batch: chosen rows, then rejected ones, with prompts and answers of any length."""
    generator = torch.Generator().manual_seed(1)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    n_rows = 2 * n_pairs
    ids = torch.randint(1, VOCAB, (n_rows, TOKENS), generator=generator)
    attention, completion = torch.zeros_like(ids), torch.zeros_like(ids)
    for pair in range(n_pairs):
        n_prompt = draw(2, 6)
        for row in (pair, pair + n_pairs):
            ids[row, :n_prompt] = ids[pair, :n_prompt]
            end = n_prompt + draw(1, TOKENS - n_prompt + 1)
            attention[row, :end] = 1
            completion[row, n_prompt:end] = 1
    return {"input_ids": ids, "attention_mask": attention, "completion_mask": completion}


def trls_loss(models, rows, folder, loss_type, beta, label_smoothing):
    policy, reference = map(copy.deepcopy, models)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=TOKENIZER)
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
    trainer = trl.DPOTrainer(
        policy,
        reference,
        args=trl.DPOConfig(
            str(folder),
            loss_type=[loss_type],
            **(ON_CPU | {"beta": beta, "label_smoothing": label_smoothing}),
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
        processing_class=tokenizer,
    )
    loss = trainer.compute_loss(policy, rows)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in policy.named_parameters()}


PAIRS = {
    "texts": {"prompt": "1 + 2 =", "chosen": " 3", "rejected": " 40"},
    "chats": {
        "prompt": [{"role": "user", "content": "1 + 2?"}],
        "chosen": [{"role": "assistant", "content": "It is 3."}],
        "rejected": [{"role": "assistant", "content": "No idea"}],
    },
}
TEMPLATE = (
    "{% for m in messages %}<|begin_of_text|>{{ m.role }}\n{{ m.content }}<|end_of_text|>{% endfor %}"
    "{% if add_generation_prompt %}<|begin_of_text|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("kind", PAIRS)
def test_labels_of_the_example_are_the_completions_of_trl(models, kind, tmp_path):
    theirs = PreTrainedTokenizerFast(tokenizer_file=TOKENIZER, eos_token="<|end_of_text|>")
    theirs.chat_template, theirs.pad_token = TEMPLATE, "<|end_of_text|>"
    theirs.save_pretrained(tmp_path / "tokenizer")
    trainer = trl.DPOTrainer(
        *map(copy.deepcopy, models),  # TRL freezes some of their parameters
        args=trl.DPOConfig(str(tmp_path), **ON_CPU),
        train_dataset=datasets.Dataset.from_list([PAIRS[kind]]),
        processing_class=theirs,
    )
    (expected,) = trainer.train_dataset
    beginning = Path("examples/preference/dpo.py").read_text().partition("pairs = read_pairs")[0]
    example: dict = {}
    exec(compile(beginning, "dpo.py", "exec"), example)
    tokenizer = HuggingFaceTokenizer(str(tmp_path / "tokenizer"))
    batch = example["microbatch"]([PAIRS[kind]], tokenizer)
    for row, (sign, answer) in enumerate([(1, "chosen_ids"), (-1, "rejected_ids")]):
        is_answer = batch["pair_ids"][row] == sign
        assert batch["labels"][row][is_answer].tolist() == expected[answer]
        n_prompt = len(expected["prompt_ids"])
        assert batch["input"][row][:n_prompt].tolist() == expected["prompt_ids"]


def our_loss(models, rows, **settings):
    policy, reference = map(copy.deepcopy, models)
    inputs, labels = rows["input_ids"][:, :-1], rows["input_ids"][:, 1:]
    n_pairs = len(inputs) // 2
    numbers = torch.arange(1, n_pairs + 1)
    pair_ids = torch.cat((numbers, -numbers))[:, None] * rows["completion_mask"][:, 1:]
    attention = rows["attention_mask"][:, :-1]

    def outputs_of(model):
        return token_logprobs(model(input_ids=inputs, attention_mask=attention).logits, labels)

    with torch.no_grad():
        batch = {"pair_ids": pair_ids, "ref_logprobs": outputs_of(reference).logprobs}
    loss, metrics = dpo(outputs_of(policy), labels, batch, **settings)
    (loss / n_pairs).backward()
    gradients = {name: p.grad for name, p in policy.named_parameters()}
    return loss.item() / n_pairs, gradients, metrics


@pytest.mark.parametrize(
    "loss_type, n_pairs, settings",
    [
        ("sigmoid", N_PAIRS, {"beta": 0.3}),
        ("sigmoid_norm", N_PAIRS, {"beta": 5.0, "length_normalized": True}),
        # TRL smooths the labels of its sorted loss, which is plain DPO where there is one pair.
        ("aot", 1, {"beta": 0.3, "label_smoothing": 0.2}),
    ],
)
def test_loss_and_gradients_are_those_of_trl(models, loss_type, n_pairs, settings, tmp_path):
    rows = rows_of_pairs(n_pairs)
    smoothing = settings.get("label_smoothing", 0.0)
    expected, gradients = trls_loss(models, rows, tmp_path, loss_type, settings["beta"], smoothing)
    loss, ours, metrics = our_loss(models, rows, **settings)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert set(metrics) == {"margin", "accuracy"}
    for name, gradient in gradients.items():
        assert (ours[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name
