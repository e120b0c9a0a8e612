"""The loss on preference pairs, its gradients and a run's metrics are those of TRL's `DPOTrainer`."""

import copy
import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tests.tiny_hf import VOCAB, tiny_hf_model
from tests.unit.data.chats import PAIRS, SHORT, write_tokenizer
from torchtitan.config import ConfigManager
from torchtitan.data.tokenizer import HuggingFaceTokenizer
from torchtitan.loss.logprobs import token_logprobs
from torchtitan.loss.preference import dpo
from torchtitan.trainer import Trainer

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


@pytest.mark.parametrize("kind", PAIRS)
def test_labels_of_the_example_are_the_completions_of_trl(models, kind, tmp_path):
    theirs = PreTrainedTokenizerFast(tokenizer_file=TOKENIZER, eos_token="<|end_of_text|>")
    theirs.pad_token = "<|end_of_text|>"
    template = SHORT.replace("<|im_start|>", "<|begin_of_text|>")
    theirs.chat_template = template.replace("<|im_end|>", "<|end_of_text|>")
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


# ---- a run ----

STEPS, PAIRS_AT_ONCE, ACCUMULATION = 6, 2, 2
LR, EPS = 3e-4, 1e-4  # a smaller eps makes full-size steps of rounding errors


def samples(kind: str) -> list[dict]:
    """Return pairs of answers of different lengths; those of "chats" repeat the prompt."""
    pairs = []
    for n in range(STEPS * PAIRS_AT_ONCE * ACCUMULATION):
        answers = [f" {2 * n}", f" not {n % 7 * 'so '}{n}"]
        chosen, rejected = answers if n % 3 else answers[::-1]  # no simple rule is right
        texts = {"prompt": f"{n} + {n} =", "chosen": chosen, "rejected": rejected}
        turn = {"role": "user", "content": texts["prompt"]}
        chats = {
            key: [turn, {"role": "assistant", "content": texts[key]}]
            for key in ("chosen", "rejected")
        }
        pairs.append(texts if kind == "texts" else chats)
    return pairs


def trls_run(folder, pairs, output) -> list[tuple[float, float, float]]:
    transformers = pytest.importorskip("transformers")
    seen: list[tuple] = []

    class Recording(trl.DPOTrainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            metrics = self._metrics["train"]
            names = ("rewards/accuracies", "rewards/margins")
            seen.append((loss.item(), *(metrics[name][-1] for name in names)))
            return loss

    trainer = Recording(
        transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"),
        args=trl.DPOConfig(
            output_dir=str(output),
            per_device_train_batch_size=PAIRS_AT_ONCE,
            gradient_accumulation_steps=ACCUMULATION,
            max_steps=STEPS,
            train_sampling_strategy="sequential",
            learning_rate=LR,
            adam_epsilon=EPS,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            beta=0.2,
            max_length=None,
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_dropout=True,
        ),
        train_dataset=datasets.Dataset.from_list(pairs),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )
    trainer.train()
    steps = torch.tensor(seen).view(STEPS, ACCUMULATION, 3).mean(1)
    return [tuple(step) for step in steps.tolist()]


@pytest.mark.parametrize("kind", ["texts", "chats"])
def test_loss_accuracy_and_margin_of_each_step_are_those_of_trl(kind, tmp_path):
    folder, pairs = tmp_path / "model", samples(kind)
    # TRL also trains on what a template writes behind the last control token: here it is nothing.
    write_tokenizer(folder, SHORT, pad_token="<|im_end|>")
    tiny_hf_model("llama3", vocab_size=260).save_pretrained(folder)
    expected = trls_run(folder, pairs, tmp_path / "trl")

    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    flags = f"""
        job.dump_folder={tmp_path} model.name=llama3 model.hf_config={folder}
        model.hf_assets_path={folder} checkpoint.initial_load_in_hf
        model.attn_type=varlen model.attn_mask_type=block_causal activation_checkpoint.mode=none
        loss.name=dpo loss.beta=0.2 training.dataset=preference training.dataset_path={data}
        training.packing=none training.seq_len=384 training.mixed_precision_param=float32
        training.local_batch_size={PAIRS_AT_ONCE} training.steps={STEPS} metrics.log_freq=1
        training.global_batch_size={PAIRS_AT_ONCE * ACCUMULATION} lr_scheduler.warmup_steps=0
        lr_scheduler.min_lr_factor=1 optimizer.lr={LR} optimizer.eps={EPS} optimizer.weight_decay=0
        optimizer.beta1=0.9 optimizer.beta2=0.999
    """
    got = []

    def log(step, loss, max_loss, grad_norm, extra_metrics):
        names = ("loss_metrics/accuracy", "loss_metrics/margin")
        got.append((loss, *(extra_metrics[name] for name in names)))

    config = ConfigManager().parse_args([f"--{flag}" for flag in flags.split()])
    with Trainer(config) as trainer:
        trainer.metrics_processor.log = log
        trainer.train()
    margins = [margin for _, _, margin in expected]
    assert margins[0] == 0 and abs(margins[-1]) > 0.1
    assert got == [pytest.approx(step, abs=1e-5, rel=1e-5) for step in expected]
