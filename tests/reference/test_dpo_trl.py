"""The loss on preference pairs, and a run's metrics on them, are those of TRL's `DPOTrainer`."""

import json
from pathlib import Path

import pytest
import torch

from tests.tiny_hf import tiny_hf_model
from tests.unit.data.chats import PAIRS, SHORT, write_tokenizer
from torchtitan.config import ConfigManager
from torchtitan.data.tokenizer import HuggingFaceTokenizer
from torchtitan.trainer import Trainer

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

STEPS, ACCUMULATION = 6, 2
LR, EPS = 3e-4, 1e-4  # a smaller eps makes full-size steps of rounding errors


@pytest.fixture
def folder(tmp_path):
    """A model and its tokenizer.

    TRL also trains on what a template writes behind the last control token: here it is nothing.
    """
    tiny_hf_model("llama3", vocab_size=260).save_pretrained(tmp_path / "model")
    return write_tokenizer(tmp_path / "model", SHORT, pad_token="<|im_end|>")


class RecordingTrainer(trl.DPOTrainer):
    """Keeps the loss, accuracy and margin of each microbatch in `seen`."""

    def __init__(self, folder, pairs, output, **options):
        self.seen = []
        options |= dict(report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False)
        super().__init__(
            transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"),
            args=trl.DPOConfig(str(output), **options),
            train_dataset=datasets.Dataset.from_list(pairs),
            processing_class=transformers.AutoTokenizer.from_pretrained(folder),
        )

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        names = ("rewards/accuracies", "rewards/margins")
        self.seen.append((loss.item(), *(self._metrics["train"][name][-1] for name in names)))
        return loss


@pytest.mark.parametrize("kind", PAIRS)
def test_labels_of_the_example_are_the_completions_of_trl(kind, folder, tmp_path):
    (expected,) = RecordingTrainer(folder, [PAIRS[kind]], tmp_path).train_dataset
    beginning = Path("examples/preference/dpo.py").read_text().partition("pairs = read_pairs")[0]
    example: dict = {}
    exec(compile(beginning, "dpo.py", "exec"), example)
    batch = example["microbatch"]([PAIRS[kind]], HuggingFaceTokenizer(str(folder)))
    for row, (sign, answer) in enumerate([(1, "chosen_ids"), (-1, "rejected_ids")]):
        is_answer = batch["pair_ids"][row] == sign
        assert batch["labels"][row][is_answer].tolist() == expected[answer]
        n_prompt = len(expected["prompt_ids"])
        assert batch["input"][row][:n_prompt].tolist() == expected["prompt_ids"]


def samples(kind: str, n_pairs: int) -> list[dict]:
    """Return pairs of answers of different lengths; those of "chats" repeat the prompt."""
    pairs = []
    for n in range(n_pairs):
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


@pytest.mark.parametrize(
    "kind, at_once, loss_type, settings, names",
    [
        ("texts", 2, "sigmoid", {"beta": 0.2}, ("accuracy", "margin")),
        ("chats", 2, "sigmoid", {"beta": 0.2}, ("accuracy", "margin")),
        # TRL's metrics are not of the normalized sums.
        ("texts", 2, "sigmoid_norm", {"beta": 5.0, "length_normalized": True}, ()),
        # TRL smooths the labels of its sorted loss, which is plain DPO where there is one pair.
        ("texts", 1, "aot", {"beta": 0.3, "label_smoothing": 0.2}, ("accuracy", "margin")),
    ],
)
def test_loss_accuracy_and_margin_of_each_step_are_those_of_trl(
    kind, at_once, loss_type, settings, names, folder, tmp_path
):
    pairs = samples(kind, STEPS * at_once * ACCUMULATION)
    options = {key: value for key, value in settings.items() if key != "length_normalized"}
    trainer = RecordingTrainer(
        folder,
        pairs,
        tmp_path / "trl",
        loss_type=[loss_type],
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=ACCUMULATION,
        max_steps=STEPS,
        train_sampling_strategy="sequential",
        learning_rate=LR,
        adam_epsilon=EPS,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        max_length=None,
        disable_dropout=True,
        **options,
    )
    trainer.train()
    expected = torch.tensor(trainer.seen).view(STEPS, ACCUMULATION, 3).mean(1).tolist()

    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    flags = f"""
        job.dump_folder={tmp_path} model.name=llama3 model.hf_config={folder}
        model.hf_assets_path={folder} checkpoint.initial_load_in_hf
        model.attn_type=varlen model.attn_mask_type=block_causal activation_checkpoint.mode=none
        loss.name=dpo training.dataset=preference training.dataset_path={data}
        training.packing=none training.seq_len=384 training.mixed_precision_param=float32
        training.local_batch_size={at_once} training.steps={STEPS} metrics.log_freq=1
        training.global_batch_size={at_once * ACCUMULATION} lr_scheduler.warmup_steps=0
        lr_scheduler.min_lr_factor=1 optimizer.lr={LR} optimizer.eps={EPS} optimizer.weight_decay=0
        optimizer.beta1=0.9 optimizer.beta2=0.999
    """.split()
    flags += [f"loss.{key}" if x is True else f"loss.{key}={x}" for key, x in settings.items()]
    got = []

    def log(step, loss, max_loss, grad_norm, extra_metrics):
        got.append((loss, *(extra_metrics[f"loss_metrics/{name}"] for name in names)))

    with Trainer(ConfigManager().parse_args([f"--{flag}" for flag in flags])) as trainer:
        trainer.metrics_processor.log = log
        trainer.train()
    margins = [margin for _, _, margin in expected]
    assert margins[0] == 0 and abs(margins[-1]) > 0.1
    wanted = [step[: 1 + len(names)] for step in expected]
    assert got == [pytest.approx(step, abs=1e-5, rel=1e-5) for step in wanted]
