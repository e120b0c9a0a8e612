"""A tiny job with any parallel layout, random documents, and a plain training loop to compare with.

B rows, T tokens per row, V vocabulary entries.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.config.job_config import JobConfig
from torchtitan.distributed.processes.ranks import all_ranks
from torchtitan.engine import TrainingEngine
from torchtitan.models.qwen3 import qwen3_args

FAMILY = "qwen3"
VOCAB, SEQ_LEN = 64, 64
LR, MAX_NORM = 1e-2, 0.5
# With a smaller eps, AdamW would take full-size steps for gradients that are only rounding errors.
EPS = 1e-3

Batch = dict[str, Any]


def add_tiny_flavors() -> None:
    """Register the flavors `tiny`, `tiny_tied` and `tiny_moe` in this process."""
    sizes = dict(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, vocab_size=VOCAB)
    dense = dataclasses.replace(qwen3_args["debugmodel"], hidden_dim=64, **sizes)
    qwen3_args["tiny"] = dataclasses.replace(dense, enable_weight_tying=False)
    qwen3_args["tiny_tied"] = dense
    moe = qwen3_args["debugmodel_moe_small"]
    qwen3_args["tiny_moe"] = dataclasses.replace(moe, moe_inter_dim=16, **sizes)


def tiny_job(
    folder: str,
    flavor: str = "tiny",
    attn_type: str | None = "varlen",
    attn_mask_type: str | None = "position_block_causal",
    *,
    seed: int | None = 0,
    **sections: dict[str, Any],
) -> JobConfig:
    """Return an fp32 job. flavor: see `add_tiny_flavors`. sections: such as `training={"steps": 3}`."""
    model = dict(name=FAMILY, flavor=flavor, attn_type=attn_type, attn_mask_type=attn_mask_type)
    values: dict[str, dict[str, Any]] = {
        "job": dict(dump_folder=folder),
        "model": model,
        "optimizer": dict(lr=LR, eps=EPS, weight_decay=0.0),
        "lr_scheduler": dict(warmup_steps=0, min_lr_factor=1.0),
        "training": dict(seq_len=SEQ_LEN, mixed_precision_param="float32", max_norm=MAX_NORM),
        "activation_checkpoint": dict(mode="none"),
        "debug": dict(seed=seed),
    }
    job = JobConfig()
    for name in values | sections:
        keywords = values.get(name, {}) | sections.get(name, {})
        setattr(job, name, dataclasses.replace(getattr(job, name), **keywords))
    return job


def layout_of(name: str, world_size: int) -> dict[str, int]:
    """Return the parallel degrees of a layout for `world_size` ranks; {} for a single rank.

    name: "fsdp", "ddp", or a mesh axis of size 2 with FSDP over the rest: "hsdp" (replicas), "tp",
        "pp", "cp", "ep".
    """
    if world_size == 1 or name == "fsdp":
        return {}
    if name == "ddp":
        return {"data_parallel_replicate_degree": world_size, "data_parallel_shard_degree": 1}
    axes = dict(hsdp="data_parallel_replicate", tp="tensor_parallel", pp="pipeline_parallel")
    axes |= dict(cp="context_parallel", ep="expert_parallel")
    return {f"{axes[name]}_degree": 2}


def make_documents(
    seed: int, lengths: Sequence[int] = (5, 17, 9, 30, 2, 23, 11, 8)
) -> list[Tensor]:
    """Return documents of random tokens, each [length]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths]


def pack(documents: Sequence[Tensor]) -> tuple[Batch, Tensor]:
    """Return (batch, labels [1, T]): all documents in one row [1, T], with positions."""
    tokens = torch.cat(list(documents))
    positions = torch.cat([torch.arange(len(d)) for d in documents])
    ignored = torch.tensor([IGNORE_INDEX])
    labels = torch.cat([torch.cat((d[1:], ignored)) for d in documents])
    return {"input": tokens[None], "positions": positions[None]}, labels[None]


def num_valid(documents: Sequence[Tensor]) -> int:
    return sum(len(d) - 1 for d in documents)


def logprobs_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the labels' log-probabilities [B, T], 0 for ignored labels. logits: [B, T, V]."""
    losses = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    return -losses.view(labels.shape)


def run_step(
    engine: TrainingEngine, documents: Sequence[Tensor], num_microbatches: int = 2, **options: Any
) -> tuple[float, float]:
    """Run an optimizer step on documents, split over ranks; return (loss, gradient norm)."""
    own = documents[engine.dp_rank :: engine.dp_size]
    parts = [own[i::num_microbatches] for i in range(num_microbatches)]
    packed = [pack(part) for part in parts if part]
    step = engine.forward_backward_step(
        input_dict=[batch for batch, _ in packed],
        labels=[labels for _, labels in packed],
        global_valid_tokens=num_valid(documents),
        metrics={},
        **options,
    )
    return step.loss.item(), float(engine.optim_step().grad_norm)


def whole_weights(engine: TrainingEngine) -> dict[str, Tensor]:
    """Return name -> unsharded parameter, for all pipeline stages. Collective over all ranks."""
    own = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for part in engine.model_parts
        for name, p in part.named_parameters(remove_duplicate=False)
    }
    if not engine.parallel_dims.pp_enabled:
        return own
    return {name: tensor for part in all_ranks(own) for name, tensor in part.items()}


class PlainLoop:
    """Trains the engine's weights one document at a time, with torch's causal attention and AdamW."""

    def __init__(self, engine: TrainingEngine):
        args = dataclasses.replace(
            engine.model_args,
            attn_type="sdpa",
            attn_mask_type="causal",
            max_seq_len=max(engine.model_args.max_seq_len, 256),
        )
        self.model: nn.Module = engine.train_spec.model_cls(args)
        with torch.no_grad():
            # Fills the RoPE table.
            self.model.init_weights()
        self.model.load_state_dict(whole_weights(engine), strict=False)
        optimizer = engine.job_config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )
        self.max_norm = engine.job_config.training.max_norm

    def logprobs(self, document: Tensor) -> Tensor:
        """Return the log-probability of each token but the first, [T - 1]."""
        return logprobs_of(self.model(document[None, :-1]).float(), document[None, 1:])[0]

    def run_step(self, documents: Sequence[Tensor]) -> tuple[float, float]:
        """Run an optimizer step; returns (loss, gradient norm)."""
        total = 0.0
        for document in documents:
            loss = -self.logprobs(document).sum() / num_valid(documents)
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, norm.item()
