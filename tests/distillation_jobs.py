"""Tiny jobs that distil one Hugging Face folder into another, and the same by a plain loop."""

import json
import re
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F

from tests.tiny_hf import tiny_hf_model
from torchtitan.batch.documents import IGNORE_INDEX, positions_from_document_ids
from torchtitan.config import ConfigManager
from torchtitan.tools.files import find_shipped
from torchtitan.trainer import Trainer

VOCAB, PADDED_VOCAB, SEQ_LEN, STEPS = 2048, 2064, 32, 5


def make_folders(folder: Path) -> None:
    """Write a student, a teacher of another family, size and padded vocabulary, texts and chats."""
    student = tiny_hf_model("llama3", seed=0, vocab_size=VOCAB)
    larger = dict(vocab_size=PADDED_VOCAB, hidden_size=48, num_hidden_layers=3)
    teacher = tiny_hf_model("qwen3", seed=1, **larger)
    for name, model in {"student": student, "teacher": teacher}.items():
        with torch.no_grad():
            model.lm_head.weight.mul_(8)  # otherwise both are close to uniform
        model.save_pretrained(folder / name)
        for file in Path(find_shipped("tests/assets/tokenizer")).iterdir():
            shutil.copy(file, folder / name)
    texts = [f"{i} and {i * i} are numbers. " * (1 + i % 4) for i in range(60)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    turns = [(f"What is {i} + {i}?", f"It is {2 * i}.") for i in range(60)]
    chats = [
        [{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in turns
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": c}) + "\n" for c in chats))


def other_tokenizer(folder: Path) -> str:
    """Swap two ids in the teacher's tokenizer; return what a refusal says of them."""
    file = folder / "teacher/tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content))
    ids = f"{vocabulary[first]}, and the job's tokenizer {vocabulary[second]}"
    return f"gives {first!r} the id {ids}"


def job(folder: Path, out: Path, **settings):
    """Return the config of a job on packed texts. settings: with __ in place of the dots."""
    # With a smaller eps, AdamW takes full-size steps for gradients that are rounding errors.
    flags = f"""
        model.name=llama3 model.hf_config={folder}/student model.hf_assets_path={folder}/student model.attn_type=varlen
        model.attn_mask_type=block_causal checkpoint.initial_load_in_hf loss.name=distillation
        loss.teacher={folder}/teacher training.dataset=local
        training.dataset_path={folder}/texts.jsonl training.seq_len={SEQ_LEN}
        training.local_batch_size=2 training.global_batch_size=4 training.steps={STEPS}
        training.mixed_precision_param=float32 optimizer.lr=1e-3 optimizer.eps=1e-3
        lr_scheduler.warmup_steps=0 lr_scheduler.min_lr_factor=1.0 activation_checkpoint.mode=none
        metrics.log_freq=1 debug.seed=0
    """.split()
    flags.append(f"job.dump_folder={out}")  # which may have blanks
    for key, value in settings.items():
        flags.append(key.replace("__", ".") + ("" if value is True else f"={value}"))
    return ConfigManager().parse_args([f"--{flag}" for flag in flags])


def train_job_of_page(loss: str, changes: dict[str, object], out: Path):
    """Train the job of docs/datasets.md for a loss. changes: text of the job -> text in its place.

    Returns the folder that the job saves, random tokens [1, 16] and the trained model's logits for them.
    """
    blocks = re.findall(r"```toml\n(.*?)```", Path("docs/datasets.md").read_text(), re.DOTALL)
    (job,) = (block for block in blocks if f'name = "{loss}"' in block)
    assert len(job.splitlines()) <= 25
    for old, new in changes.items():
        assert old in job
        job = job.replace(old, str(new))
    (out / "job.toml").write_text(job)
    with Trainer(ConfigManager().parse_args([f"--job.config_file={out}/job.toml"])) as trainer:
        trainer.train()
        tokens = torch.randint(0, 260, (1, 16))
        trainer.eval_mode()
        (logits,) = trainer.forward_step({"input": tokens})
    (saved,) = out.glob("checkpoint/step-*")
    return saved, tokens, logits


def curves(out: Path, validation: bool = False) -> list[dict]:
    """Return loss, kl and label_loss of each logged step, and of each validation after the steps."""
    lines = list(map(json.loads, (out / "metrics.jsonl").read_text().splitlines()))
    found = []
    for prefix, loss in (("loss_metrics", "global_avg_loss"), ("validation_metrics", "loss")):
        names = {"loss": f"{prefix}/{loss}"}
        names |= {name: f"{prefix}/{name}" for name in ("kl", "label_loss")}
        if prefix == "loss_metrics" or validation:
            rows = [line for line in lines if names["kl"] in line]
            found += [{name: line[key] for name, key in names.items()} for line in rows]
    return found


class Recorded:
    """Wraps a trainer's `next_step` to keep what it read."""

    def __init__(self, trainer):
        self.steps, self._next = [], trainer.next_step
        trainer.next_step = self

    def __call__(self, iterator):
        step = self._next(iterator)
        self.steps.append(step.batches)
        return step


def logits_of(model, batch):
    """Return transformers' logits for packed rows: a token sees the earlier ones of its document."""
    ids = batch.document_ids
    visible = (ids[:, :, None] == ids[:, None, :]).tril()
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    positions = positions_from_document_ids(ids).long()
    return model(batch.tokens, attention_mask=mask[:, None], position_ids=positions).logits


def sums_of(logits, of_teacher, labels, loss):
    """Return (loss, KL, cross entropy) summed over labels, by torch.nn.functional.kl_div.

    logits: by the student, of_teacher: by the teacher. loss: the section `[loss]`.
    """
    counted = labels != IGNORE_INDEX
    n_common = min(logits.shape[-1], of_teacher.shape[-1])
    log_p, log_q = (
        F.log_softmax(x[counted][:, :n_common].double() / loss.temperature, -1)
        for x in (logits, of_teacher)
    )
    if loss.top_k:
        ids = log_q.topk(loss.top_k).indices
        rest = torch.ones_like(log_q, dtype=torch.bool).scatter(-1, ids, False)
        of_rest = (x.masked_fill(~rest, -torch.inf).logsumexp(-1, True) for x in (log_p, log_q))
        log_p, log_q = (
            torch.cat((x.gather(-1, ids), r), -1)
            for x, r in zip((log_p, log_q), of_rest, strict=True)
        )
    pair = (log_p, log_q) if loss.divergence == "forward" else (log_q, log_p)
    kl = F.kl_div(*pair, log_target=True, reduction="sum")
    ce = F.cross_entropy(logits[counted].double(), labels[counted], reduction="sum")
    total = loss.kl_weight * loss.temperature**2 * kl + loss.label_weight * ce
    return total, kl.detach(), ce.detach()


def plain_loop(student, teacher, steps, config) -> list[dict]:
    """Train a transformers model on recorded batches; return the same curves as the trainer's."""
    settings, trained = config.optimizer, [p for p in student.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained,
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    logged = []
    for batches in steps:
        num_tokens = sum(batch.num_valid for batch in batches)
        means = torch.zeros(3, dtype=torch.float64)
        for batch in batches:
            with torch.no_grad():
                of_teacher = logits_of(teacher, batch)
            sums = sums_of(logits_of(student, batch), of_teacher, batch.labels, config.loss)
            (sums[0] / num_tokens).backward()
            means += torch.stack(sums).detach() / num_tokens
        torch.nn.utils.clip_grad_norm_(trained, config.training.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        logged.append(dict(zip(("loss", "kl", "label_loss"), means.tolist(), strict=True)))
    return logged
