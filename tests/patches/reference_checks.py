"""What a copy of torchtitan 0.2.2 does, observed from outside; rehearse.py imports this in its processes."""

import contextlib
import dataclasses
import functools
import logging
import os
import typing
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

torch._utils._get_available_device_type = lambda: "cpu"  # 0.2.2 would take "cuda"

import torchtitan.train  # noqa: E402
from torchtitan.components import lr_scheduler  # noqa: E402
from torchtitan.config import Comm, JobConfig, LRScheduler  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.models import attention  # noqa: E402
from torchtitan.protocols import train_spec  # noqa: E402
from torchtitan.tools import utils  # noqa: E402
from torchtitan.tools.logging import logger  # noqa: E402


class Metrics:
    """Stands for the metrics processor, whose memory monitor needs an accelerator."""

    def __init__(self, job_config, parallel_dims, model_args=None, tag=None):
        self.color = SimpleNamespace(
            **dict.fromkeys("red blue yellow magenta green reset cyan".split(), "")
        )
        memory = SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
        self.device_memory_monitor = SimpleNamespace(
            get_peak_stats=lambda: memory, device_name="cpu", device_capacity_gib=1.0
        )
        self.gpu_peak_flops, self.num_flops_per_token, self.logged = 1.0, -1, {}

    def should_log(self, step):
        return True

    def log(self, step, loss, max_loss, grad_norm, extra_metrics=None):
        self.logged = {"loss": loss, "grad_norm": grad_norm}

    def close(self):
        pass


def make_trainer(family="llama3", args=None, **sections):
    spec = train_spec.get_train_spec(family)
    flavor = dataclasses.replace(spec.model_args["debugmodel"], **{"n_layers": 2} | (args or {}))
    spec = dataclasses.replace(
        spec,
        model_args={"tiny": flavor},
        build_dataloader_fn=None,
        build_tokenizer_fn=None,
        build_metrics_processor_fn=Metrics,
    )
    name = f"tiny{len(train_spec._extra_train_specs)}"
    train_spec.register_train_spec(name, spec)
    config = JobConfig()
    settings = {
        "model": {"name": name, "flavor": "tiny"},
        "training": {"seq_len": 32, "local_batch_size": 4, "mixed_precision_param": "float32"},
        "activation_checkpoint": {"mode": "none"},
        "optimizer": {"implementation": "for-loop"},
        "debug": {"seed": 1},
    }
    for section, values in [*settings.items(), *sections.items()]:
        for key, value in values.items():
            assert hasattr(getattr(config, section), key), f"{section}.{key}"
            setattr(getattr(config, section), key, value)
    trainer = torchtitan.train.Trainer(config)
    for module in (m for part in trainer.model_parts for m in part.modules()):
        if isinstance(module, FSDPModule):  # gloo lacks the reduction that NCCL would use
            module.set_force_sum_reduction_for_comms(True)
    return trainer


def outcome(function, *args, **kwargs):
    """Return what a function returns, or the name and the text of its error."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def warnings_logged():
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


# ---- 1: a process group that exists ----


def group():
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    comm, environment = Comm(init_timeout_seconds=7, trace_buf_size=0), dict(os.environ)
    with warnings_logged() as lines:
        size = dist_utils.init_distributed(comm)
    utils.device_type = "cuda"
    other_device = outcome(dist_utils.init_distributed, comm)
    utils.device_type = "cpu"
    dist.destroy_process_group()
    return {
        "size": size,
        "warnings": lines,
        "variables": sorted(os.environ.items() ^ environment.items()),
        "other device": other_device,
    }


# ---- 2: no dataloader ----


def dataloader():
    trainer = make_trainer()
    hint = typing.get_type_hints(train_spec.TrainSpec)["build_dataloader_fn"]
    return {
        "None is in the type": type(None) in typing.get_args(hint),
        "train": outcome(trainer.train),
        "batch_generator": outcome(next, trainer.batch_generator(None)),
        "own batch": step(trainer, tokens(4, 32)),
    }


def tokens(rows, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 200, (rows, length), generator=generator)


def step(trainer, rows, labels=None):
    """Train for one step on rows of tokens, in microbatches of the configured size."""
    labels = rows.roll(-1, 1) if labels is None else labels
    size = trainer.job_config.training.local_batch_size
    batches = zip(rows.split(size), labels.split(size), strict=True)
    trainer.step += 1
    trainer.train_step(({"input": x}, y) for x, y in batches)
    return trainer.metrics_processor.logged


# ---- 3: documents ----

EOS, NEWLINE = 2, 9
TOKENIZER = SimpleNamespace(eos_id=EOS)
PACKED = {
    # A prefill that goes on, a whole document, one of which the row has only the end.
    "mixed": [[4, 5, 6, 0, 1, 2, 3, 7, 8, 9, 10]],
    "padding": [[0, 1, 2, 3, 4, 0, 1, 2, -1, -1, -1]],
    "one dimension": [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2],
}
FAMILIES = {"llama3": "flex varlen", "qwen3": "flex varlen", "deepseek_v3": "flex"}


def dense(mask, shape):
    rows, length = shape
    if isinstance(mask, attention.VarlenMetadata):
        return {"cu_seqlens": mask.cu_seq_q.tolist(), "longest": int(mask.max_q)}
    index = torch.arange(length)
    grid = [index[:, None], index[None, :]]
    seen = [mask.mask_mod(torch.tensor(b), torch.tensor(0), *grid) for b in range(rows)]
    return {"seen": torch.stack(seen).int().tolist(), "shape": list(mask.shape)}


def documents():
    """Masks of every family, kernel and mask type; without compiling."""
    attention._compiled_create_block_mask = functools.partial(create_block_mask, device="cpu")
    attention.FlexAttentionWrapper._compiled_flex_attn = flex_attention
    found = {}
    rows = tokens(2, 11)
    rows[0, 3] = rows[1, 7] = rows[1, 10] = EOS
    for family, kernels in FAMILIES.items():
        spec = train_spec.get_train_spec(family)
        for kernel in kernels.split():
            for kind in ("causal", "block_causal", "position_block_causal"):
                flavor = dataclasses.replace(
                    spec.model_args["debugmodel"], n_layers=1, attn_type=kernel, attn_mask_type=kind
                )
                with torch.device("meta"):
                    model = spec.model_cls(flavor)

                def masks(rows, tokenizer, extra, model=model):
                    got = model.get_attention_masks(rows, tokenizer, extra)
                    return dense(got, rows.shape)

                name = f"{family} {kernel} {kind}"
                if kind != "position_block_causal":
                    found[name] = outcome(masks, rows, TOKENIZER, {})
                    continue
                for case, positions in PACKED.items():
                    extra = {"positions": torch.tensor(positions)}
                    found[f"{name} {case}"] = outcome(masks, rows[:1], None, extra)
                found[f"{name} without"] = outcome(masks, rows[:1], None, {})
    return found | separators_that_disagree()


def separators_that_disagree():
    """Two batches with both separators, which differ, per mask type, through the trainer."""
    batch = {
        "input": torch.tensor([[5, 6, EOS, NEWLINE, 5, 6, 7]]),
        "positions": torch.tensor([[0, 1, 2, 3, 0, 1, 2]]),
    }
    found = {}
    for kind in ("block_causal", "position_block_causal"):
        trainer = make_trainer(args={"attn_type": "flex", "attn_mask_type": kind})
        prepare = functools.partial(trainer.post_dataloading_process, batch, batch["input"])
        trainer.tokenizer = TOKENIZER
        with warnings_logged() as found[kind]:
            outcome(prepare), outcome(prepare)
        trainer.tokenizer = None
        found[f"{kind} without a tokenizer"] = outcome(
            lambda prepare: sorted(prepare()[3]), prepare
        )
    return found


# ---- 4: the trainer's forward ----


def forward():
    torch.manual_seed(0)
    rows, labels = tokens(2, 32), tokens(2, 32, seed=1)
    calls = []

    class Watching(torchtitan.train.Trainer):
        def forward_step(self, **batch):
            calls.append(sorted(batch))
            return super().forward_step(**batch)

    torchtitan.train.Trainer, original = Watching, torchtitan.train.Trainer
    trainer = make_trainer()
    torchtitan.train.Trainer = original
    loss = trainer.forward_backward_step(
        input_dict={"input": rows}, labels=labels, global_valid_tokens=64
    )
    model = trainer.model_parts[0]
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    plain = F.cross_entropy(model(rows).flatten(0, 1), labels.flatten())
    plain.backward()
    oracle = torch.cat([p.grad.flatten() for p in model.parameters()])

    @torch.no_grad()
    def score():
        logits, own_labels = trainer.forward_step(input_dict={"input": rows}, labels=labels)
        return torch.equal(logits, model(rows)) and own_labels is labels

    return {
        "calls in training": len(calls),
        "loss": loss.item() - plain.item(),
        "gradient": (gradient - oracle).abs().max().item(),
        "score": outcome(score),
    }


# ---- 5 and 6, on two ranks: gradients against one plain model ----


def oracle_of(trainer, rows, labels, loss_of):
    """Return the gradients of the loss as one process computes them, by name."""
    weights = {
        name: (w.full_tensor() if isinstance(w, DTensor) else w).detach().clone()
        for part in trainer.model_parts
        for name, w in part.state_dict().items()
    }
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, weights)
    model = trainer.train_spec.model_cls(trainer.model_args)
    with torch.no_grad():
        model.init_weights()  # for its RoPE table
    model.load_state_dict({name: w for other in everyone for name, w in other.items()})
    losses = []
    for x, y in zip(rows, labels, strict=True):  # one sequence each
        of_tokens = F.cross_entropy(model(x)[0], y.flatten(), reduction="none")
        losses.append(of_tokens[y.flatten() != -100])
    loss = loss_of(losses)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def lists():
    """Lists of microbatches of these lengths on two pipeline stages: worst gradient, and loss."""
    found = {}
    for name, layers, lengths in (
        ("1F1B", 2, [8, 5, 8, 3, 5]),
        ("1F1B", 2, [7]),
        ("Interleaved1F1B", 4, [8, 8, 8, 8]),
        ("Interleaved1F1B", 4, [8, 5, 8, 3, 5]),
    ):
        trainer = make_trainer(
            args={"n_layers": layers},
            parallelism={
                "pipeline_parallel_degree": 2,
                "pipeline_parallel_schedule": name,
                "pipeline_parallel_layers_per_stage": 1,
                "pipeline_parallel_first_stage_less_layers": 0,
                "pipeline_parallel_last_stage_less_layers": 0,
            },
        )
        rows = [tokens(1, n, seed=i) for i, n in enumerate(lengths)]
        labels = [x.roll(-1, 1) for x in rows]
        loss = outcome(
            trainer.forward_backward_step,
            input_dict=[{"input": x} for x in rows],
            labels=labels,
            global_valid_tokens=float(sum(lengths)),
        )
        if isinstance(loss, str):
            found[f"{name} {lengths}"] = loss.partition(":")[0]
            continue
        expected, gradients = oracle_of(trainer, rows, labels, lambda x: torch.cat(x).sum())
        errors = [
            (p.grad - gradients[n]).abs().max() / gradients[n].abs().max()
            for part in trainer.model_parts
            for n, p in part.named_parameters()
        ]
        values = torch.stack([max(errors), loss.clamp(min=0).squeeze()])  # -1: not the last stage
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        error, loss = values.tolist()
        found[f"{name} {lengths}"] = [error, loss / (expected / sum(lengths))]
    batches = {"input_dict": [{"input": rows[0]}], "labels": [rows[0]] * 2}
    found["one and two"] = outcome(
        trainer.forward_backward_step, **batches, global_valid_tokens=1.0
    )
    return found


def compare_step(trainer, labels, loss_of, own):
    """Train on eight rows, `own` of them here; return norm and loss over those of one process."""
    rows = tokens(8, 32)
    loss, gradients = oracle_of(trainer, rows[:, None], labels, loss_of)
    logged = step(trainer, rows[own], labels[own])
    norm = torch.cat([g.flatten().double() for g in gradients.values()]).norm().item()
    return [logged["grad_norm"] / norm, logged["loss"] / loss]


def layouts():
    """Gradient norm and loss of a step, over those of one process, in each layout of two ranks."""
    found = {}
    for layout in (
        {"data_parallel_replicate_degree": 2},
        {"data_parallel_shard_degree": 2},
        {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 2},
    ):
        trainer = make_trainer(parallelism=layout, training={"global_batch_size": 8})
        labels = tokens(8, 32).roll(-1, 1)
        labels[:3, 5:] = -100  # the ranks have unequal numbers of tokens
        own = slice(0, 8) if "pipeline_parallel_degree" in layout else own_half()
        values = compare_step(trainer, labels, AGGREGATIONS["token-mean"], own)
        ratios = torch.tensor(values).clamp(min=0)  # the loss is -1 without the last stage
        dist.all_reduce(ratios, op=dist.ReduceOp.MAX)
        found[next(iter(layout))] = ratios.tolist()
    return found


def own_half():
    return slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)


AGGREGATIONS = {
    "token-mean": lambda losses: torch.cat(losses).mean(),
    "seq-mean-token-mean": lambda losses: torch.stack([x.mean() for x in losses]).mean(),
    "seq-mean-token-sum": lambda losses: torch.stack([x.sum() for x in losses]).mean(),
    "seq-mean-token-sum-norm": lambda losses: torch.stack([x.sum() for x in losses]).mean() / 32,
}


def aggregation():
    """Every mode in two splits of eight rows on two ranks, over the value of one plain model."""
    found = {}
    for mode, loss_of in AGGREGATIONS.items():
        for size in (1, 4):
            trainer = outcome(
                make_trainer,
                training=dict(local_batch_size=size, global_batch_size=8, loss_aggregation=mode),
                parallelism={"data_parallel_shard_degree": 2},
            )
            if isinstance(trainer, str):
                found[mode] = trainer
                continue
            labels = tokens(8, 32).roll(-1, 1)
            for row in range(8):
                labels[row, 4 * row + 1 :] = -100
            found[f"{mode} {size}"] = compare_step(trainer, labels, loss_of, own_half())
    return found


# ---- 7: the schedule ----


def schedule():
    """Learning rates at steps 1 to 11 of a peak of 1, ten steps, four of warm-up, linear decay."""
    found = {}
    for offset in (0, -1, -5):
        config = LRScheduler(warmup_steps=4)
        if not hasattr(config, "step_offset") and offset:
            found[str(offset)] = "no key"
            continue
        config.step_offset = offset
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        schedulers = outcome(lr_scheduler.build_lr_schedulers, [optimizer], config, 10)
        if isinstance(schedulers, str):
            found[str(offset)] = schedulers
            continue
        rates = []
        for _ in range(11):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedulers.step()
        found[str(offset)] = rates
    return found
