"""The checks of the engine's contract with programs that embed it; see `conformance.py`.

Each is a function of a `Kit` that raises if the contract is broken. All ranks run all checks in the
same order. The row says where a check comes from:

    1a  what a client imports             1d  what it does with the trainer
    1b  what it configures                1e  what spares it work of its own
    1c  what it does with a train spec    3   what used to go wrong silently
    api the engine's own interface

B rows, T tokens per row, V vocabulary entries.
"""

import contextlib
import dataclasses
import functools
import gc
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.testing import assert_close

from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import job_config as sections
from torchtitan.distributed.utils import dist_sum
from torchtitan.engine import TrainingEngine
from torchtitan.protocols import train_spec as train_spec_module
from torchtitan.testing.tiny_jobs import (
    FAMILY,
    SEQ_LEN,
    VOCAB,
    Batch,
    PlainLoop,
    add_tiny_flavors,
    layout_of,
    make_documents,
    num_valid,
    pack,
    run_step,
    tiny_job,
    whole_weights,
)
from torchtitan.tools.logging import logger

COLLECTIVE_TIMEOUT_SECONDS = 60


class Kit:
    """What checks share on one rank: the client's process group, a folder, engines in layouts."""

    def __init__(self, folder: str):
        torch.set_num_threads(1)
        logger.setLevel(logging.ERROR)
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS)
        dist.init_process_group("gloo", timeout=timeout)
        add_tiny_flavors()
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._folder = folder
        self._engines: dict[str, TrainingEngine] = {}
        self.state_without_engines = _GlobalState.now()

    def folder(self, name: str) -> str:
        """The same on every rank; not made yet."""
        return str(Path(self._folder) / name)

    def job(self, layout: str = "fsdp", **options: Any) -> sections.JobConfig:
        """A `tiny_job` in a layout for as many ranks as there are."""
        parallelism = layout_of(layout, self.world_size) | options.pop("parallelism", {})
        folder = options.pop("folder", "outputs")
        return tiny_job(self.folder(folder), parallelism=parallelism, **options)

    def engine(self, layout: str = "fsdp", **options: Any) -> TrainingEngine:
        """One engine for all checks that leave its weights alone."""
        key = repr((layout, sorted(options.items())))
        if key not in self._engines:
            self._engines[key] = TrainingEngine(self.job(layout, **options))
        return self._engines[key]

    @contextlib.contextmanager
    def own_engine(self, layout: str = "fsdp", **options: Any) -> Iterator[TrainingEngine]:
        engine = TrainingEngine(self.job(layout, **options))
        try:
            yield engine
        finally:
            engine.close()

    @contextlib.contextmanager
    def client_trainer(self, layout: str = "fsdp", **options: Any) -> Iterator[Any]:
        """A `Trainer` as a client builds it: `get_train_spec` replaced, no dataloader."""
        from torchtitan.train import Trainer

        with client_train_spec():
            trainer = Trainer(self.job(layout, **options))
        try:
            yield trainer
        finally:
            trainer.close()

    def close(self) -> None:
        """Close the shared engines; who asks for one again gets a new one."""
        while self._engines:
            self._engines.popitem()[1].close()


@dataclasses.dataclass(frozen=True)
class Check:
    """name: of the function. holds: what it checks, in a sentence. min_ranks: fewer skip it."""

    name: str
    row: str
    holds: str
    min_ranks: int
    function: Callable[[Kit], None]


CHECKS: dict[str, Check] = {}


def check(row: str, min_ranks: int = 1) -> Callable[[Callable[[Kit], None]], Callable[[Kit], None]]:
    """Register a function as a check; the first line of its docstring is what it holds."""

    def register(function: Callable[[Kit], None]) -> Callable[[Kit], None]:
        _register(function.__name__, row, function.__doc__, min_ranks, function)
        return function

    return register


def _register(
    name: str, row: str, holds: str, min_ranks: int, function: Callable[[Kit], None]
) -> None:
    assert name not in CHECKS, name
    CHECKS[name] = Check(name, row, holds.split("\n")[0], min_ranks, function)


# ---- 1a: imports ----

IMPORTS = {
    "torchtitan.config.job_config": (
        "Checkpoint Compile JobConfig LRScheduler Model Optimizer Parallelism Training"
    ),
    "torchtitan.distributed.utils": "clip_grad_norm_",
    "torchtitan.distributed.context_parallel": "prepare_context_parallel_input",
    "torchtitan.distributed.parallel_dims": "ParallelDims",
    "torchtitan.train": "Trainer",
    "torchtitan.protocols.train_spec": "get_train_spec",
    "torchtitan.models.attention": "VarlenMetadata create_attention_mask get_causal_mask_mod",
    "torchtitan.protocols.model": "AttentionMasksType",
}


def _check_import(module: str, names: str, kit: Kit) -> None:
    loaded = importlib.import_module(module)
    missing = [name for name in names.split() if not hasattr(loaded, name)]
    assert not missing, f"{module} has no {missing}"


for _module, _names in IMPORTS.items():
    _register(
        f"import_{_module.removeprefix('torchtitan.').replace('.', '_')}",
        "1a",
        f"from {_module} import {_names.replace(' ', ', ')}",
        1,
        functools.partial(_check_import, _module, _names),
    )

# ---- 1b: sections of the config, by keywords alone ----

SECTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # class: (keywords that clients pass, defaults that they count on)
    "Model": (dict(name=FAMILY, flavor="tiny", hf_assets_path="assets"), {}),
    "Optimizer": (
        dict(name="AdamW", lr=1e-5, eps=1e-8, beta1=0.9, beta2=0.95, weight_decay=0.1),
        dict(implementation="fused"),
    ),
    "LRScheduler": (dict(warmup_steps=2, decay_type="cosine", min_lr_factor=0.1), {}),
    "Parallelism": (
        dict(
            data_parallel_replicate_degree=1,
            data_parallel_shard_degree=1,
            fsdp_reshard_after_forward="default",
            tensor_parallel_degree=1,
            pipeline_parallel_degree=1,
            context_parallel_degree=1,
            expert_parallel_degree=1,
            expert_tensor_parallel_degree=1,
        ),
        {},
    ),
    "Checkpoint": (
        dict(
            enable=True,
            initial_load_in_hf=True,
            initial_load_model_only=True,
            initial_load_path="weights",
        ),
        dict(interval=500, keep_latest_k=10, folder="checkpoint"),
    ),
    "Compile": (dict(enable=False), {}),
    "Training": (
        dict(enable_cpu_offload=True),
        dict(
            seq_len=2048,
            steps=10000,
            max_norm=1.0,
            mixed_precision_param="bfloat16",
            local_batch_size=8,
        ),
    ),
}


def _check_section(name: str, kit: Kit) -> None:
    keywords, defaults = SECTIONS[name]
    section = getattr(sections, name)(**keywords)
    for key, value in (keywords | defaults).items():
        assert getattr(section, key) == value, f"{name}.{key} is {getattr(section, key)!r}"


for _name in SECTIONS:
    _register(
        f"config_{_name.lower()}",
        "1b",
        f"{_name}(...) takes its keywords and has the known defaults",
        1,
        functools.partial(_check_section, _name),
    )


@check("1b")
def config_job(kit: Kit) -> None:
    """JobConfig(model=..., optimizer=..., ...) of seven sections; the rest is defaulted."""
    given = {
        "model": sections.Model(),
        "optimizer": sections.Optimizer(),
        "lr_scheduler": sections.LRScheduler(),
        "parallelism": sections.Parallelism(),
        "checkpoint": sections.Checkpoint(),
        "compile": sections.Compile(),
        "training": sections.Training(),
    }
    job = sections.JobConfig(**given)
    assert all(getattr(job, name) is section for name, section in given.items())
    assert job.activation_checkpoint.mode == "selective"
    assert job.job.dump_folder == "./outputs"


# ---- 1c: the train spec ----


@contextlib.contextmanager
def client_train_spec(**changes: Any) -> Iterator[None]:
    """Replace `get_train_spec` as clients do; `build_tokenizer_fn` too, as there are no assets."""
    original = train_spec_module.get_train_spec

    def without_data(name: str) -> Any:
        spec = original(name)
        spec.build_dataloader_fn = None
        spec.build_tokenizer_fn = None
        for key, value in changes.items():
            setattr(spec, key, value)
        return spec

    train_spec_module.get_train_spec = without_data
    try:
        yield
    finally:
        train_spec_module.get_train_spec = original


FAMILIES = ("qwen3", "llama3", "llama4", "deepseek_v3", "gpt_oss")


@check("1c")
def train_spec_names(kit: Kit) -> None:
    """get_train_spec knows qwen3, llama3, llama4, deepseek_v3 and gpt_oss."""
    for name in FAMILIES:
        assert train_spec_module.get_train_spec(name).model_args


@check("1c")
def train_spec_replaced(kit: Kit) -> None:
    """A get_train_spec put into its module is the one that Trainer asks; wrappers may nest."""
    with client_train_spec(), kit.client_trainer() as trainer:
        assert trainer.dataloader is None and trainer.train_spec.build_dataloader_fn is None


def _has_experts(args: Any) -> bool:
    return getattr(args, "moe_enabled", hasattr(args, "moe_args"))


@check("1c")
def train_spec_flavors(kit: Kit) -> None:
    """model_args is a mapping; the first flavor of a dim, depth and vocabulary is the dense one."""
    flavors = train_spec_module.get_train_spec(FAMILY).model_args
    sizes = (32, 2, VOCAB)
    found = [n for n, a in flavors.items() if (a.dim, a.n_layers, a.vocab_size) == sizes]
    assert found[0] == "tiny" and set(found) <= set(flavors.keys())
    assert flavors.get("tiny") is flavors["tiny"] and flavors.get("no such flavor") is None
    for family in FAMILIES:
        first: dict[tuple[int, ...], Any] = {}
        for name, args in train_spec_module.get_train_spec(family).model_args.items():
            found_args = first.setdefault((args.dim, args.n_layers, args.vocab_size), args)
            assert _has_experts(args) or not _has_experts(found_args), f"{family} {name}"
            if family == "qwen3" and not name.startswith(("debugmodel", "tiny")):
                assert found_args is args, f"{name} is not the first of its sizes"


@check("1c")
def train_spec_attn_type_in_place(kit: Kit) -> None:
    """attn_type set on the registry's own args before Trainer() is what the trainer runs."""
    args = train_spec_module.get_train_spec(FAMILY).model_args["tiny"]
    before = args.attn_type
    try:
        for attn_type in ("flex", "varlen"):
            args.attn_type = attn_type
            with kit.client_trainer(attn_type=None, attn_mask_type=None) as trainer:
                assert trainer.model_args.attn_type == attn_type
    finally:
        args.attn_type = before


# ---- 1d: the trainer ----


@check("1d")
def trainer_reuses_process_group(kit: Kit) -> None:
    """Trainer() goes on with the process group that exists, and leaves it there."""
    group = dist.group.WORLD
    with kit.client_trainer() as trainer:
        assert trainer.parallel_dims.world_size == kit.world_size
    assert dist.is_initialized() and dist.group.WORLD is group


@check("1d")
def trainer_model_parts(kit: Kit) -> None:
    """model_parts is a list of one module, with train, eval, parameters and modules."""
    (model,) = kit.engine().model_parts
    model.eval()
    assert not any(module.training for module in model.modules())
    model.train()
    assert all(parameter.requires_grad for parameter in model.parameters())


@check("1d")
def trainer_fsdp_modules(kit: Kit) -> None:
    """Without a dataloader the model is an FSDPModule on any number of ranks, one included."""
    from torch.distributed.fsdp import FSDPModule

    for layout in {1: ("fsdp",), 2: ("fsdp", "ddp", "tp"), 4: ("ddp", "tp")}[kit.world_size]:
        with kit.client_trainer(layout) as trainer:
            (model,) = trainer.model_parts
            assert isinstance(model, FSDPModule), layout
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)
            _client_loss(trainer, model).backward()
            model.reshard()


@check("1d", min_ranks=2)
def replicas_of_a_client(kit: Kit) -> None:
    """A client's own backward has the mean over replicas, as under DDP; engine steps have sums."""
    documents = make_documents(47)
    with kit.client_trainer("ddp", training={"max_norm": 1e9}) as trainer:
        (model,) = trainer.model_parts
        plain = PlainLoop(trainer)
        _, expected = plain.run_step(documents)
        _client_loss(trainer, model, seed=47).backward()  # the same documents on all ranks
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        trainer.optimizers.zero_grad()
        norms = [norm, run_step(trainer, documents)[1]]
        assert_close(norms, [expected] * 2, rtol=1e-5, atol=0)


def client_masks(attn_type: str, positions: Tensor) -> Any:
    """The mask of documents told apart by positions [B, T], as a client writes it itself."""
    from torch.nn.attention.flex_attention import and_masks

    from torchtitan.models.attention import (
        VarlenMetadata,
        create_attention_mask,
        get_causal_mask_mod,
    )

    n_rows, seq_len = positions.shape
    is_start = torch.ones_like(positions, dtype=torch.bool)
    is_start[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    if attn_type == "varlen":
        starts = is_start.flatten().nonzero().flatten()
        cu_seqlens = torch.cat((starts, torch.tensor([n_rows * seq_len]))).to(torch.int32)
        longest = int(cu_seqlens.diff().max())
        return VarlenMetadata(cu_seqlens, cu_seqlens, longest, longest)
    ids = is_start.cumsum(1)

    def same_document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ids[b, q_idx] == ids[b, kv_idx]

    mask_mod = and_masks(get_causal_mask_mod(), same_document)
    return create_attention_mask(mask_mod, n_rows, None, seq_len, seq_len)


def _client_logits(trainer: Any, model: torch.nn.Module, batch: Batch) -> Tensor:
    masks = client_masks(trainer.model_args.attn_type, batch["positions"])
    with trainer.train_context(), trainer.maybe_enable_amp:
        logits = model(batch["input"], positions=batch["positions"], attention_masks=masks)
    return logits.full_tensor() if hasattr(logits, "full_tensor") else logits


def _client_loss(trainer: Any, model: torch.nn.Module, seed: int = 0) -> Tensor:
    batch, labels = pack(make_documents(seed))
    logits = _client_logits(trainer, model, batch)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)


def _logprobs_of(logits: Tensor, labels: Tensor) -> Tensor:
    """[B, T], 0 where the label is ignored."""
    losses = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    return -losses.view(labels.shape)


def _check_packed_forward(attn_type: str, kit: Kit) -> None:
    engine = kit.engine(attn_type=attn_type)
    plain = PlainLoop(engine)
    documents = make_documents(1, (7, 1, 12, 30, 3))
    batch, labels = pack(documents)
    with torch.no_grad():
        ours = _logprobs_of(_client_logits(engine, engine.model_parts[0], batch), labels)
        theirs = torch.cat([plain.logprobs(d) for d in documents])
    assert_close(ours[labels != IGNORE_INDEX], theirs, rtol=0, atol=5e-6)


for _attn_type in ("flex", "varlen"):
    _register(
        f"forward_packed_{_attn_type}",
        "1d",
        f"model(tokens [1, T], positions=, attention_masks=) with the client's own {_attn_type} mask",
        1,
        functools.partial(_check_packed_forward, _attn_type),
    )


def _check_padded_forward(attn_type: str, kit: Kit) -> None:
    engine = kit.engine(attn_type=attn_type, attn_mask_type="causal")
    plain = PlainLoop(engine)
    documents = make_documents(2, (9, 4, 12))
    tokens = torch.stack([F.pad(d, (0, 12 - len(d))) for d in documents])
    mask = torch.stack([F.pad(torch.ones_like(d), (0, 12 - len(d))) for d in documents])
    with torch.no_grad():
        logits = engine.model_parts[0](tokens, attention_masks=mask.to(torch.int32))
        for row, document in enumerate(documents):
            labels = document[None, 1:]
            ours = _logprobs_of(logits[row : row + 1, : len(document) - 1], labels)
            assert_close(ours[0], plain.logprobs(document), rtol=0, atol=5e-6)


for _attn_type in ("sdpa", "flex", "varlen"):
    _register(
        f"forward_padded_{_attn_type}",
        "1d",
        f"attention_masks may be a padding mask int32 [B, T] under {_attn_type}",
        1,
        functools.partial(_check_padded_forward, _attn_type),
    )


@check("1d", min_ranks=2)
def forward_logits_of_tensor_parallel(kit: Kit) -> None:
    """pred.full_tensor() is the whole vocabulary on every TP rank, for odd lengths, with gradient."""
    with kit.own_engine("tp") as engine:
        (model,) = engine.model_parts
        plain = PlainLoop(engine)
        documents = make_documents(3, (5, 8))
        batch, labels = pack(documents)
        masks = client_masks(engine.model_args.attn_type, batch["positions"])
        with engine.train_context(), engine.maybe_enable_amp:
            pred = model(batch["input"], positions=batch["positions"], attention_masks=masks)
        assert isinstance(pred, DTensor)
        logits = pred.full_tensor()
        assert logits.shape == pred.shape == (1, 13, VOCAB)
        loss = -_logprobs_of(logits, labels).sum()
        assert_close(loss, -sum(plain.logprobs(d).sum() for d in documents), rtol=1e-5, atol=0)
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


@check("1d")
def rope_grows(kit: Kit) -> None:
    """A document longer than training.seq_len goes through the model, with the right positions."""
    with kit.own_engine(training={"seq_len": 16}) as engine:
        plain = PlainLoop(engine)
        (document,) = make_documents(4, (41,))
        batch, labels = pack([document])
        with torch.no_grad():
            logits = _client_logits(engine, engine.model_parts[0], batch)
            ours = _logprobs_of(logits, labels)[labels != IGNORE_INDEX]
            assert_close(ours, plain.logprobs(document), rtol=0, atol=5e-6)


@check("1d")
def checkpointer_loads_what_it_saved(kit: Kit) -> None:
    """save(curr_step=N) and load(step=N), load(step=-1), load(); weights and optimizer come back."""
    folder = "checkpointer_loads"
    with kit.own_engine(checkpoint={"enable": True, "interval": 1}, folder=folder) as engine:
        run_step(engine, make_documents(5))
        saved = whole_weights(engine)
        engine.checkpointer.save(curr_step=3)
        first = run_step(engine, make_documents(6))
        for load in (lambda c: c.load(step=3), lambda c: c.load(step=-1), lambda c: c.load()):
            assert load(engine.checkpointer) is True
            for name, tensor in whole_weights(engine).items():
                assert torch.equal(tensor, saved[name]), name
        assert run_step(engine, make_documents(6)) == first


@check("1d")
def checkpointer_folder_is_writable(kit: Kit) -> None:
    """checkpointer.folder and keep_latest_k may be set at run time."""
    with kit.own_engine(checkpoint={"enable": True, "interval": 1}, folder="one") as engine:
        engine.checkpointer.folder = kit.folder("another")
        engine.checkpointer.keep_latest_k = 2
        engine.checkpointer.save(curr_step=1)
        assert os.path.exists(kit.folder("another/step-1/.metadata"))


@check("1d")
def optimizers_state_is_live(kit: Kit) -> None:
    """optimizers.state and param_groups are those of the optimizers inside, so offloaders see them."""
    with kit.own_engine() as engine:
        assert len(engine.optimizers.state) == 0
        run_step(engine, make_documents(7))
        params = [p for group in engine.optimizers.param_groups for p in group["params"]]
        assert params and all("exp_avg" in engine.optimizers.state[p] for p in params)
        for state in engine.optimizers.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = value.to("cpu", non_blocking=True)
        run_step(engine, make_documents(8))


@check("1d")
def optimizers_step_and_zero_grad(kit: Kit) -> None:
    """A client's own step: backward outside the contexts, clip, step, schedule, zero_grad."""
    from torchtitan.distributed import utils as dist_utils

    with kit.client_trainer() as trainer:
        (model,) = trainer.model_parts
        before = whole_weights(trainer)
        _client_loss(trainer, model).backward()
        norm = dist_utils.clip_grad_norm_(
            list(model.parameters()),
            trainer.job_config.training.max_norm,
            foreach=True,
            pp_mesh=trainer.parallel_dims.get_optional_mesh("pp"),
            ep_enabled=trainer.parallel_dims.ep_enabled,
        )
        assert type(norm) is Tensor and torch.isfinite(norm) and norm.item() > 0
        trainer.optimizers.step()
        trainer.lr_schedulers.step()
        trainer.optimizers.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        after = whole_weights(trainer)
        assert any(not torch.equal(after[name], before[name]) for name in before)


@check("1d")
def lr_schedulers_tell_the_rate(kit: Kit) -> None:
    """lr_schedulers.schedulers[0].get_last_lr()[0] is the rate of the next step."""
    with kit.own_engine(lr_scheduler={"warmup_steps": 4}, optimizer={"lr": 0.4}) as engine:
        rates = []
        for _ in range(3):
            rates.append(engine.lr_schedulers.schedulers[0].get_last_lr()[0])
            engine.lr_schedulers.step()
        assert_close(rates, [0.1, 0.2, 0.3])


@check("1d")
def train_context_around_forward_only(kit: Kit) -> None:
    """Backward may run outside train_context, whose calls give a fresh context each."""
    layout = "tp" if kit.world_size > 1 else "fsdp"
    with kit.own_engine(layout) as engine:
        (model,) = engine.model_parts
        for seed in (1, 2):
            _client_loss(engine, model, seed).backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())


@check("1d")
def maybe_enable_amp_is_reusable(kit: Kit) -> None:
    """One maybe_enable_amp object can be entered for every microbatch; products are in bf16 then."""
    batch, _ = pack(make_documents(11))
    positions = batch["positions"]
    for parallelism in ({}, {"always_fsdp": True}):
        engine = kit.engine(parallelism=parallelism, training={"mixed_precision_param": "bfloat16"})
        (model,), amp, logits = engine.model_parts, engine.maybe_enable_amp, []
        for _ in range(2):
            with torch.no_grad(), amp:
                masks = client_masks("varlen", positions)
                logits.append(model(batch["input"], positions=positions, attention_masks=masks))
        assert logits[0].dtype == torch.bfloat16
        assert torch.equal(logits[0], logits[1])


@check("1d")
def forward_under_autocast(kit: Kit) -> None:
    """A client's own bf16 autocast around maybe_enable_amp: fp32's log-probabilities to 5e-2."""
    batch, labels = pack(make_documents(46))
    for layout, attn_type in (("fsdp", "flex"), ("tp", "varlen")):  # of one rank, the same
        training = {"mixed_precision_param": "bfloat16"}
        with kit.client_trainer(layout, attn_type=attn_type, training=training) as trainer:
            (model,) = trainer.model_parts
            with torch.no_grad():
                plain = PlainLoop(trainer)
                expected = torch.cat([plain.logprobs(d) for d in make_documents(46)])
            with torch.autocast("cpu", torch.bfloat16):
                logits = _client_logits(trainer, model, batch)
            assert logits.dtype == torch.bfloat16
            logprobs = _logprobs_of(logits.float(), labels)[labels != IGNORE_INDEX]
            assert_close(logprobs, expected, rtol=0, atol=5e-2)
            (-logprobs.sum()).backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None and parameter.grad.isfinite().all(), name


@check("1d")
def model_args_are_read_back(kit: Kit) -> None:
    """trainer.model_args.attn_type, device and the load balancer can be read."""
    engine = kit.engine(attn_type="flex")
    assert engine.model_args.attn_type == "flex"
    assert engine.device.type == "cpu"
    assert engine.job_config.parallelism.context_parallel_load_balancer == "headtail"


@check("1d")
def second_parallel_dims(kit: Kit) -> None:
    """A client may build its own ParallelDims beside the engine's, and use its meshes."""
    from torchtitan.distributed.parallel_dims import ParallelDims

    kit.engine()
    dims = ParallelDims(
        dp_shard=kit.world_size,
        dp_replicate=1,
        cp=1,
        tp=1,
        pp=1,
        ep=1,
        etp=1,
        world_size=kit.world_size,
    )
    dims.build_mesh()
    for names in ("tp", "pp", "cp", "dp_replicate", ["dp_replicate", "fsdp"]):
        assert dims.get_optional_mesh(names) is None, names
    assert (dims.tp, dims.pp, dims.cp) == (1, 1, 1)
    assert not (dims.pp_enabled or dims.cp_enabled or dims.ep_enabled)
    mesh = dims.get_optional_mesh("fsdp")
    if kit.world_size == 1:
        assert mesh is None
    else:
        assert mesh.get_local_rank() == kit.rank
        assert dist.get_world_size(mesh.get_group()) == kit.world_size


def _check_context_parallel_input(attn_type: str, kit: Kit) -> None:
    from torchtitan.distributed.context_parallel import prepare_context_parallel_input

    engine = kit.engine("cp", attn_type=attn_type)
    (model,) = engine.model_parts
    plain = PlainLoop(engine)
    documents = make_documents(9, (5, 3, 20, 4))
    batch, labels = pack(documents)
    extra_inputs = {"positions": batch["positions"]}
    inputs, labels, extra_kwargs = prepare_context_parallel_input(
        batch["input"],
        labels,
        {"attention_masks": client_masks(attn_type, batch["positions"])},
        engine.parallel_dims.get_mesh("cp"),
        engine.device,
        engine.job_config.parallelism.context_parallel_load_balancer,
    )
    with torch.no_grad(), engine.train_context(), engine.maybe_enable_amp:
        logits = model(inputs, **extra_inputs, **extra_kwargs)
        total = _logprobs_of(logits, labels).sum()
        dist.all_reduce(total, group=engine.parallel_dims.get_mesh("cp").get_group())
        expected = sum(plain.logprobs(d).sum() for d in documents)
    assert_close(total, expected, rtol=1e-5, atol=0)


for _attn_type in ("flex", "varlen"):
    _register(
        f"context_parallel_input_{_attn_type}",
        "1d",
        f"prepare_context_parallel_input with a client's {_attn_type} mask; positions given besides",
        2,
        functools.partial(_check_context_parallel_input, _attn_type),
    )


@dataclasses.dataclass
class _GlobalState:
    """What a guest must leave as it was."""

    gc_enabled: bool
    default_dtype: torch.dtype
    grad_enabled: bool
    multithreaded_backward: bool
    deterministic: bool
    num_threads: int
    handlers: list[Any]
    root_handlers: list[Any]
    environment: dict[str, str]

    @classmethod
    def now(cls) -> "_GlobalState":
        return cls(
            gc.isenabled(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.autograd.is_multithreading_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_num_threads(),
            list(logger.handlers),
            list(logging.getLogger().handlers),
            # Torch's compiler notes there where its cache is.
            {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"},
        )


@check("1d")
def guest_leaves_global_state(kit: Kit) -> None:
    """After close(), collector, dtype, autograd, logging handlers and environment are as before."""
    kit.close()  # what engines changed comes back with the last of them
    before = kit.state_without_engines
    with kit.client_trainer() as trainer:
        assert gc.isenabled() == before.gc_enabled
        run_step(trainer, make_documents(10))
    after = _GlobalState.now()
    for field in dataclasses.fields(before):
        was, now = getattr(before, field.name), getattr(after, field.name)
        assert was == now, f"{field.name} changed: {was} -> {now}"


@check("1d")
def guest_leaves_random_numbers(kit: Kit) -> None:
    """Without debug.seed a caller's torch generator draws the same numbers as before."""
    torch.manual_seed(11)
    state = torch.get_rng_state()
    with kit.own_engine(seed=None):
        pass
    assert torch.equal(torch.get_rng_state(), state)


# ---- 1e: what spares a client work of its own ----


@check("1e")
def engine_builds_no_data(kit: Kit) -> None:
    """TrainingEngine(config) has no tokenizer, dataloader or validator and needs no files for them."""
    engine = kit.engine()
    assert engine.tokenizer is None and engine.dataloader is None
    assert not hasattr(engine, "validator")


@check("1e")
def attn_type_of_one_job(kit: Kit) -> None:
    """model.attn_type of a job changes its own copy of the args, not the registry's."""
    flavor = train_spec_module.get_train_spec(FAMILY).model_args["tiny"]
    before = dataclasses.replace(flavor)
    assert kit.engine(attn_type="flex").model_args.attn_type == "flex"
    assert kit.engine(attn_type="varlen").model_args.attn_type == "varlen"
    assert flavor == before


@check("1e")
def flavor_from_hf_config(kit: Kit) -> None:
    """from_hf_config compares all of a config.json, and makes args for sizes without a flavor."""
    from torchtitan.models.hf_config import from_hf_config

    config = {
        "model_type": "qwen3",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    }
    assert from_hf_config(config).flavor == "tiny"
    assert from_hf_config(config | {"tie_word_embeddings": True}).flavor == "tiny_tied"
    other = from_hf_config(config | {"rope_theta": 5e5})
    assert other.flavor is None and other.model_args.rope_theta == 5e5


def _scores(engine: TrainingEngine, documents: list[Tensor], **options: Any) -> list[Tensor] | None:
    """Log-probabilities by `forward_step`, one microbatch for each document; None off the last stage."""
    packed = [pack([document]) for document in documents]
    batches = [batch | {"labels": labels} for batch, labels in packed]
    return engine.forward_step(
        batches,
        output_fn=lambda logits, batch: _logprobs_of(logits.float(), batch["labels"]),
        **options,
    )


@check("1e")
def masks_from_positions(kit: Kit) -> None:
    """The engine derives masks from positions; packing and order of documents change nothing."""
    documents = make_documents(12)
    batch, labels = pack(documents)
    for attn_type in ("flex", "varlen"):
        engine = kit.engine(attn_type=attn_type)
        (logits,) = engine.forward_step([batch])
        packed = _logprobs_of(logits, labels)[labels != IGNORE_INDEX]
        alone = torch.cat([row[0, :-1] for row in _scores(engine, documents)])
        assert_close(packed, alone, rtol=0, atol=5e-6)


@check("1e")
def masks_from_model(kit: Kit) -> None:
    """model.get_attention_masks(tokens, None, {"positions": ...}) is the mask for a client's call."""
    engine = kit.engine(attn_type="flex")
    (model,) = engine.model_parts
    batch, _ = pack(make_documents(12))
    masks = model.get_attention_masks(batch["input"], None, {"positions": batch["positions"]})
    with torch.no_grad():
        ours = model(batch["input"], attention_masks=masks, positions=batch["positions"])
    assert_close(ours, engine.forward_step([batch])[0])


@check("1e")
def padded_batches_by_the_engine(kit: Kit) -> None:
    """A padding mask in a batch of forward_step and forward_backward_step is the kernel's."""
    engine = kit.engine()
    document = make_documents(13, (7,))[0]
    tokens = F.pad(document, (0, 4))[None]
    mask = (torch.arange(11) < 7).int()[None]
    (logits,) = engine.forward_step([{"input": tokens, "attention_masks": mask}])
    ours = _logprobs_of(logits[:, :6], document[None, 1:])[0]
    assert_close(ours, PlainLoop(engine).logprobs(document).detach(), rtol=0, atol=5e-6)

    documents = make_documents(13, (7, 11))
    batch = {
        "input": torch.stack([F.pad(d, (0, 11 - len(d))) for d in documents]),
        "attention_masks": torch.stack([(torch.arange(11) < len(d)).int() for d in documents]),
    }
    labels = torch.stack([F.pad(d[1:], (0, 12 - len(d)), value=IGNORE_INDEX) for d in documents])
    for attn_type in ("sdpa", "flex", "varlen"):
        with kit.own_engine(attn_type=attn_type, attn_mask_type="causal") as engine:
            plain = PlainLoop(engine)
            loss = engine.forward_backward_step(
                input_dict=batch,
                labels=labels,
                global_valid_tokens=num_valid(documents) * engine.dp_size,
            )
            loss = dist_sum(loss, engine.parallel_dims.get_optional_mesh("loss"))
            ours = loss, float(engine.optim_step().grad_norm)
            assert_close(ours, plain.run_step(documents), rtol=1e-5, atol=0)


@check("1e")
def gradient_reduction_mean(kit: Kit) -> None:
    """training.gradient_reduction = "mean" divides by the data-parallel degree: FSDP, DDP, HSDP."""
    norms = {}
    for layout in ("fsdp", "ddp", "hsdp") if kit.world_size > 2 else ("fsdp", "ddp"):
        for reduction in ("sum", "mean"):
            training = {"gradient_reduction": reduction}
            with kit.own_engine(layout, training=training) as engine:
                norms[layout, reduction] = run_step(engine, make_documents(14))[1] * (
                    engine.dp_size if reduction == "mean" else 1
                )
    assert_close(list(norms.values()), [norms["fsdp", "sum"]] * len(norms), rtol=1e-5, atol=0)


@check("1e")
def accessors_of_ranks(kit: Kit) -> None:
    """parallel_dims, dp_rank, dp_size and dp_group say where a rank stands."""
    engine = kit.engine()
    assert (engine.dp_rank, engine.dp_size) == (kit.rank, kit.world_size)
    assert engine.parallel_dims.dp_shard == kit.world_size
    if kit.world_size == 1:
        assert engine.dp_group is None
    else:
        assert dist.get_world_size(engine.dp_group) == kit.world_size
        beside = kit.engine("tp")
        assert beside.dp_size == kit.world_size // 2


@check("1e", min_ranks=2)
def pipelines_take_lists(kit: Kit) -> None:
    """Pipelines take lists of microbatches with unequal, odd lengths, forward-only too."""
    documents = make_documents(15, (5, 21, 9, 2, 13))
    with kit.own_engine("pp") as engine:
        plain = PlainLoop(engine)
        with torch.no_grad():
            expected = [plain.logprobs(d) for d in documents]
        scores = _scores(engine, documents)
        assert (scores is not None) == engine.pp_has_last_stage
        for score, one in zip(scores or [], expected, strict=False):
            assert_close(score[0, :-1], one, rtol=0, atol=5e-6)
        loss, norm = run_step(engine, documents, num_microbatches=3)
        assert_close((loss, norm), plain.run_step(documents), rtol=1e-5, atol=0)


@check("1e", min_ranks=2)
def loss_function_gets_whole_logits(kit: Kit) -> None:
    """A loss_fn of the caller's gets logits [B, T, V] as plain tensors under tensor parallelism."""
    seen = []

    def loss_fn(logits: Tensor, labels: Tensor, batch: Batch) -> Tensor:
        seen.append((type(logits), logits.shape))
        return -_logprobs_of(logits, labels).sum()

    with kit.own_engine("tp") as engine:
        plain = PlainLoop(engine)
        documents = make_documents(16)
        ours = run_step(engine, documents, loss_fn=loss_fn)
        assert_close(ours, plain.run_step(documents), rtol=1e-5, atol=0)
    assert all(kind is Tensor and shape[2] == VOCAB for kind, shape in seen)


@check("1e")
def save_and_load_by_path(kit: Kit) -> None:
    """engine.save(path) writes there, whatever the interval; engine.load(path) reads it."""
    folder = kit.folder("given/global_step_7")
    with kit.own_engine() as engine:
        run_step(engine, make_documents(17))
        engine.step = 7
        engine.save(folder)
        saved = whole_weights(engine)
        first = run_step(engine, make_documents(18))
    with kit.own_engine(seed=5) as other:
        other.load(folder)
        assert other.step == 7
        for name, tensor in whole_weights(other).items():
            assert torch.equal(tensor, saved[name]), name
        assert run_step(other, make_documents(18)) == first


@check("1e")
def offload_and_reload(kit: Kit) -> None:
    """engine.to(device, model=, optimizer=, grad=) keeps parameters' objects and all numbers.

    Without an accelerator nothing has to move; a device that the engine does not know is refused.
    """
    kinds = ("model", "optimizer", "grad")
    batch, labels = pack(make_documents(20))
    with kit.own_engine() as engine, kit.own_engine() as other:
        for one in (engine, other):
            run_step(one, make_documents(19))
            one.forward_backward_step(input_dict=batch, labels=labels, global_valid_tokens=99.0)
        parameters = list(engine.model_parts[0].parameters())
        weights = whole_weights(engine)
        for target in (torch.device("cpu"), engine.device):
            for moved in kinds:
                engine.to(target, **{kind: kind == moved for kind in kinds})
            places = {
                t.device
                for p in parameters
                for t in (p, p.grad, engine.optimizers.state[p]["exp_avg"])
            }
            assert places == {target}
        for before, now in zip(parameters, engine.model_parts[0].parameters(), strict=True):
            assert before is now
        for name, tensor in whole_weights(engine).items():
            assert torch.equal(tensor, weights[name]), name
        assert engine.optim_step().grad_norm == other.optim_step().grad_norm
        assert run_step(engine, make_documents(20)) == run_step(other, make_documents(20))
        try:
            engine.to("meta")
        except ValueError as error:
            assert "meta" in str(error)
        else:
            raise AssertionError("an engine was sent to another device than its own")


@check("1e")
def export_of_weights(kit: Kit) -> None:
    """iter_hf_weights streams every HF name, whole, with a version and a digest to compare."""
    from torchtitan.checkpoint.stream import digest_of

    with kit.own_engine() as engine:
        first = engine.iter_hf_weights()
        received = dict(first)
        adapter = engine.checkpointer.sd_adapter
        expected = adapter.to_hf(whole_weights(engine))
        assert set(received) == set(expected)
        for name, tensor in received.items():
            assert torch.equal(tensor, expected[name]), name
        assert first.digest == digest_of(received.items())
        run_step(engine, make_documents(21))
        second = engine.iter_hf_weights()
        assert second.version == first.version + 1
        assert digest_of(second) != first.digest


@check("1e")
def export_of_tied_weights(kit: Kit) -> None:
    """A tied head is in the export under its own name."""
    received = dict(kit.engine(flavor="tiny_tied").iter_hf_weights())
    assert torch.equal(received["lm_head.weight"], received["model.embed_tokens.weight"])


# ---- 3: what used to go wrong silently ----


@check("3")
def save_regardless_of_interval(kit: Kit) -> None:
    """Without a dataloader checkpointer.save(curr_step=3) writes, though interval is 500."""
    with kit.client_trainer(checkpoint={"enable": True}, folder="regardless") as trainer:
        trainer.checkpointer.save(curr_step=3)
    assert os.path.exists(kit.folder("regardless/checkpoint/step-3/.metadata"))


@check("3")
def retention_set_at_run_time(kit: Kit) -> None:
    """keep_latest_k = 0 in the config and 1 at run time keeps one checkpoint and raises nothing."""
    checkpoint = {"enable": True, "keep_latest_k": 0}
    with kit.client_trainer(checkpoint=checkpoint, folder="retention") as trainer:
        trainer.checkpointer.keep_latest_k = 1
        for step in (1, 2):
            trainer.checkpointer.save(curr_step=step)
    dist.barrier()
    folder = Path(kit.folder("retention/checkpoint"))
    assert [path.name for path in folder.iterdir()] == ["step-2"]


@check("3")
def rate_of_one_step(kit: Kit) -> None:
    """optim_step(lr=...) uses this rate for the one step, and the schedule goes on."""
    with kit.own_engine(lr_scheduler={"warmup_steps": 10}) as engine:
        before = engine.lr
        engine.forward_backward_step(
            input_dict=(packed := pack(make_documents(22)))[0],
            labels=packed[1],
            global_valid_tokens=1.0,
        )
        result = engine.optim_step(lr=0.125)
        assert result.lr == 0.125
        assert_close(engine.lr, 2 * before)


@check("3")
def max_norm_of_one_step(kit: Kit) -> None:
    """optim_step(max_norm=...) clips to the caller's bound."""
    weights = []
    for max_norm in (1e-9, None):
        with kit.own_engine(optimizer={"eps": 1.0}) as engine:
            before = whole_weights(engine)["norm.weight"]
            batch, labels = pack(make_documents(22))
            engine.forward_backward_step(input_dict=batch, labels=labels, global_valid_tokens=1.0)
            engine.optim_step(max_norm=max_norm)
            weights.append((whole_weights(engine)["norm.weight"] - before).abs().max().item())
    assert weights[0] < 1e-6 < weights[1]


@check("3")
def schedule_offset(kit: Kit) -> None:
    """lr_scheduler.step_offset = -1 starts the warm-up at 0, as other frameworks do."""
    scheduler = {"warmup_steps": 4, "step_offset": -1}
    with kit.own_engine(lr_scheduler=scheduler, optimizer={"lr": 0.4}) as engine:
        assert engine.lr == 0.0
        engine.lr_schedulers.step()
        assert_close(engine.lr, 0.1)


@check("3")
def load_says_whether_it_did(kit: Kit) -> None:
    """load() is False where there is nothing; an empty folder does not keep initial weights out."""
    os.makedirs(kit.folder("empty/checkpoint"), exist_ok=True)
    with kit.own_engine(checkpoint={"enable": True}, folder="empty") as engine:
        assert engine.checkpointer.load() is False
        run_step(engine, make_documents(23))
        weights = whole_weights(engine)
        engine.save(kit.folder("initial/step-1"))
    checkpoint = {"enable": True, "initial_load_path": kit.folder("initial/step-1")}
    with kit.own_engine(checkpoint=checkpoint, folder="empty", seed=9) as engine:
        assert engine.checkpointer.load() is True
        for name, tensor in whole_weights(engine).items():
            assert torch.equal(tensor, weights[name]), name


@check("3")
def tied_embeddings(kit: Kit) -> None:
    """A tied model trains under FSDP, its table in one unit, and equals the plain loop."""
    with kit.own_engine(flavor="tiny_tied") as engine:
        _check_steps_equal_plain_loop(engine, make_documents(24))


@check("3")
def grouped_query_attention(kit: Kit) -> None:
    """flex and varlen take fewer key heads than query heads."""
    for attn_type in ("flex", "varlen"):
        args = kit.engine(attn_type=attn_type).model_args
        assert args.n_kv_heads < args.n_heads
        assert kit.engine(attn_type=attn_type).forward_step([pack(make_documents(25))[0]])


@check("3")
def two_engines_share_nothing(kit: Kit) -> None:
    """A second engine (a reference model) keeps its weights and length while one trains, and its
    checkpoints if it was given a folder of its own."""
    options = {"checkpoint": {"enable": True}}
    with (
        kit.own_engine(folder="actor", training={"seq_len": 48}, **options) as actor,
        kit.own_engine(
            folder="reference", training={"seq_len": 40}, seed=3, **options
        ) as reference,
    ):
        before = whole_weights(reference)
        reference.checkpointer.save(curr_step=1)
        run_step(actor, make_documents(26))
        actor.checkpointer.save(curr_step=1)
        reference.checkpointer.load()
        _scores(reference, make_documents(26))
        for name, tensor in whole_weights(reference).items():
            assert torch.equal(tensor, before[name]), name
        assert (actor.model_args.max_seq_len, reference.model_args.max_seq_len) == (48, 40)


@check("3")
def save_after_evaluation(kit: Kit) -> None:
    """After a client's own forward without gradient, saving works, and training goes on."""
    with kit.own_engine(checkpoint={"enable": True, "interval": 1}, folder="eval") as engine:
        run_step(engine, make_documents(27))
        (model,) = engine.model_parts
        model.eval()
        with torch.no_grad():
            _client_loss(engine, model)
        model.reshard() if hasattr(model, "reshard") else None
        engine.checkpointer.save(curr_step=1)
        model.train()
        run_step(engine, make_documents(28))


@check("3")
def cpu_offload_on_a_cpu(kit: Kit) -> None:
    """training.enable_cpu_offload does no harm where there is no accelerator."""
    with kit.client_trainer(training={"enable_cpu_offload": True}) as trainer:
        assert _scores(trainer, make_documents(29))


@check("3")
def misfit_of_mask_and_kernel(kit: Kit) -> None:
    """The wrong kind of mask is a TypeError that names both, before anything is computed."""
    engine = kit.engine(attn_type="flex")
    batch, _ = pack(make_documents(30))
    metadata = client_masks("varlen", batch["positions"])
    try:
        with torch.no_grad():
            engine.model_parts[0](
                batch["input"], positions=batch["positions"], attention_masks=metadata
            )
    except TypeError as error:
        assert "flex" in str(error) and "VarlenMetadata" in str(error)
    else:
        raise AssertionError("a VarlenMetadata went through flex attention")


# ---- the engine's own interface ----


@check("api")
def api_version(kit: Kit) -> None:
    """torchtitan.engine.ENGINE_API_VERSION is a whole number."""
    from torchtitan.engine import ENGINE_API_VERSION

    assert isinstance(ENGINE_API_VERSION, int) and ENGINE_API_VERSION >= 1


def _check_steps_equal_plain_loop(engine: TrainingEngine, *steps: list[Tensor]) -> None:
    plain = PlainLoop(engine)
    for documents in steps:
        assert_close(run_step(engine, documents), plain.run_step(documents), rtol=1e-5, atol=0)
    theirs = plain.model.state_dict()
    for name, tensor in whole_weights(engine).items():
        assert_close(tensor, theirs[name], rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def _check_layout(layout: str, attn_type: str, kit: Kit) -> None:
    with kit.own_engine(layout, attn_type=attn_type) as engine:
        _check_steps_equal_plain_loop(engine, make_documents(31), make_documents(32))


for _layout, _attn_type, _min_ranks in (
    ("fsdp", "flex", 1),
    ("ddp", "varlen", 2),
    ("tp", "flex", 2),
    ("pp", "varlen", 2),
    ("cp", "varlen", 2),
    ("cp", "flex", 2),
):
    _register(
        f"steps_{_layout}_{_attn_type}",
        "api",
        f"two steps on packed documents under {_layout}, {_attn_type}: those of a plain loop",
        _min_ranks,
        functools.partial(_check_layout, _layout, _attn_type),
    )


@check("api")
def split_changes_nothing(kit: Kit) -> None:
    """Loss and gradient norm are the same for 1, 2 and 4 microbatches."""
    results = []
    for num_microbatches in (1, 2, 4):
        with kit.own_engine() as engine:
            results.append(run_step(engine, make_documents(33, (9,) * 16), num_microbatches))
    assert_close(results, [results[0]] * 3, rtol=1e-5, atol=0)


@check("api")
def unequal_microbatches(kit: Kit) -> None:
    """Ranks may have unequal numbers of microbatches, none too, and experts count no empty ones."""
    documents = make_documents(34, (9, 5, 12))
    for flavor in ("tiny", "tiny_moe"):
        results = []
        for skewed in (False, True):
            with kit.own_engine(flavor=flavor) as engine:
                own = documents[engine.dp_rank :: engine.dp_size]
                if skewed:  # all of them on the first rank
                    own = documents if engine.dp_rank == 0 else []
                packed = [pack([document]) for document in own]
                loss = engine.forward_backward_step(
                    input_dict=[batch for batch, _ in packed],
                    labels=[labels for _, labels in packed],
                    global_valid_tokens=num_valid(documents),
                )
                dist.all_reduce(loss)
                results.append((loss.item(), float(engine.optim_step().grad_norm)))
        assert_close(results[1], results[0], rtol=1e-5, atol=0)


@check("api")
def unequal_microbatches_forward_only(kit: Kit) -> None:
    """forward_step returns as many outputs as this rank gave microbatches, however many others."""
    documents = make_documents(35, (9, 5, 12))[: kit.rank]
    assert len(_scores(kit.engine(), documents)) == len(documents)


@check("api")
def loss_function_of_the_caller(kit: Kit) -> None:
    """loss_fn(logits, labels, batch) returns a sum, which is divided by the denominator once."""

    def half(logits: Tensor, labels: Tensor, batch: Batch) -> Tensor:
        return -(_logprobs_of(logits, labels) * batch["loss_weights"]).sum()

    documents = make_documents(36)
    batch, labels = pack(documents)
    with kit.own_engine() as engine:
        step = dict(labels=labels, global_valid_tokens=num_valid(documents))
        whole = engine.forward_backward_step(input_dict=batch, **step)
        weights = torch.full(labels.shape, 0.5)
        halved = engine.forward_backward_step(
            input_dict=batch | {"loss_weights": weights}, loss_fn=half, **step
        )
        assert_close(halved, whole / 2, rtol=1e-5, atol=0)


@check("api")
def gradients_accumulate(kit: Kit) -> None:
    """Gradients add up over calls of forward_backward_step and are gone after optim_step."""
    batch, labels = pack(make_documents(37))
    norms = []
    for num_calls in (1, 2):
        with kit.own_engine() as engine:
            for _ in range(num_calls):
                engine.forward_backward_step(
                    input_dict=batch, labels=labels, global_valid_tokens=100.0
                )
            norms.append(float(engine.optim_step().grad_norm))
            assert all(p.grad is None for p in engine.model_parts[0].parameters())
    assert_close(norms[1], 2 * norms[0], rtol=1e-5, atol=0)


@check("api")
def deferred_denominator(kit: Kit) -> None:
    """optim_step(denominator=...) divides by the sum over ranks, as if it had been known before."""
    documents = make_documents(38)
    norms = []
    for deferred in (False, True):
        with kit.own_engine() as engine:
            own = documents[engine.dp_rank :: engine.dp_size]
            batch, labels = pack(own)
            engine.forward_backward_step(
                input_dict=batch,
                labels=labels,
                global_valid_tokens=1.0 if deferred else num_valid(documents),
            )
            share = num_valid(own) if deferred else None
            norms.append(float(engine.optim_step(denominator=share).grad_norm))
    assert_close(norms[1], norms[0], rtol=1e-5, atol=0)


@check("api")
def step_without_finite_gradient(kit: Kit) -> None:
    """A step whose gradient norm is not finite changes no weight, and says so."""
    with kit.own_engine() as engine:
        before = whole_weights(engine)
        for parameter in engine.model_parts[0].parameters():
            parameter.grad = torch.full_like(parameter, float("nan"))
        assert engine.optim_step().skipped
        for name, tensor in whole_weights(engine).items():
            assert torch.equal(tensor, before[name]), name


@check("api")
def head_of_logprobs(kit: Kit) -> None:
    """forward_step(head=TokenLogProbs()) is the log-softmax of the logits, without logits."""
    from torchtitan.components.logprobs import TokenLogProbs

    documents = make_documents(39)
    batch, labels = pack(documents)
    for layout in ("fsdp", "tp", "cp") if kit.world_size > 1 else ("fsdp",):
        engine = kit.engine(layout)
        (outputs,) = engine.forward_step(
            [batch | {"labels": labels}], head=TokenLogProbs(entropy=True, chunk_tokens=16)
        )
        (logits,) = engine.forward_step([batch])
        logprobs = logits.log_softmax(-1)
        assert_close(outputs.logprobs, _logprobs_of(logits, labels), rtol=0, atol=5e-6)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        assert_close(outputs.entropy, entropy, rtol=0, atol=5e-6)


@check("api")
def head_in_training(kit: Kit) -> None:
    """forward_backward_step(head=...) without loss_fn is minus the sum of log-probabilities."""
    from torchtitan.components.logprobs import TokenLogProbs

    documents = make_documents(40)
    layouts = ("fsdp", "tp", "pp", "cp") if kit.world_size > 1 else ("fsdp",)
    for layout in layouts:
        with kit.own_engine(layout) as engine:
            plain = PlainLoop(engine)
            ours = run_step(engine, documents, head=TokenLogProbs(chunk_tokens=16))
            assert_close(ours, plain.run_step(documents), rtol=1e-5, atol=0)


@check("api")
def aggregation_of_losses(kit: Kit) -> None:
    """Weights of every aggregation, dealt over ranks, are those of the whole step."""
    from torchtitan.components.loss import LOSS_AGGREGATIONS, aggregation_weights

    masks = [torch.arange(9) < n for n in (3, 0, 7, 9, 1, 2)]
    prompts = [0, 0, 1, 1, 2, 2]
    group = dist.group.WORLD if kit.world_size > 1 else None
    mine = slice(kit.rank, None, kit.world_size)
    for mode in LOSS_AGGREGATIONS:
        norm = 9.0 if mode == "seq-mean-token-sum-norm" else None
        whole = aggregation_weights(masks, mode, norm=norm, prompt_ids=prompts)
        own = aggregation_weights(
            masks[mine], mode, norm=norm, prompt_ids=prompts[mine], group=group
        )
        for ours, expected in zip(own, whole[mine], strict=True):
            assert torch.equal(ours, expected), mode


@check("api")
def training_and_evaluation_mode(kit: Kit) -> None:
    """train_mode() and eval_mode() switch at once, and back at the end of a with block."""
    engine = kit.engine()
    (model,) = engine.model_parts
    engine.train_mode()
    assert model.training
    with engine.eval_mode():
        assert not model.training
    assert model.training


@check("api")
def engine_closes(kit: Kit) -> None:
    """An engine is a context manager; close() may come twice, and leaves the caller's group."""
    with TrainingEngine(kit.job()) as engine:
        run_step(engine, make_documents(41))
    engine.close()
    assert dist.is_initialized()
    dist.barrier()


@check("api")
def config_is_only_read(kit: Kit) -> None:
    """The caller's JobConfig is never written to."""
    job = kit.job(folder="read")
    before = job.to_dict()
    with TrainingEngine(job) as engine:
        run_step(engine, make_documents(42))
    assert job.to_dict() == before


@check("api")
def bad_config_is_refused_early(kit: Kit) -> None:
    """A config that cannot run is a ValueError that names the key, before any group is made."""
    try:
        TrainingEngine(kit.job(parallelism={"tensor_parallel_degree": 3 * kit.world_size}))
    except ValueError as error:
        assert "tensor_parallel_degree" in str(error)
    else:
        raise AssertionError("a tensor_parallel_degree that does not fit was accepted")


@check("api")
def long_rows_of_odd_length(kit: Kit) -> None:
    """Rows longer than seq_len and of odd length run in every layout, if documents are shorter."""
    documents = make_documents(43, (33, 21, 11, 30, 2, 18))
    for layout in ("fsdp", "tp", "pp", "cp") if kit.world_size > 1 else ("fsdp",):
        with kit.own_engine(layout) as engine:
            assert sum(len(d) for d in documents) > SEQ_LEN
            plain = PlainLoop(engine)
            loss, norm = run_step(engine, documents * engine.dp_size, num_microbatches=1)
            assert_close((loss, norm), plain.run_step(documents), rtol=1e-5, atol=0)


@check("api")
def padding_between_documents(kit: Kit) -> None:
    """Negative positions are padding: no document sees it and no loss counts it."""
    engine = kit.engine()
    documents = make_documents(44, (6, 9))
    batch, labels = pack(documents)
    padding, ignored = torch.full((1, 3), -1), torch.full((1, 3), IGNORE_INDEX)
    padded = {
        "input": torch.cat((batch["input"][:, :6], padding.abs(), batch["input"][:, 6:]), dim=1),
        "positions": torch.cat((batch["positions"][:, :6], padding, batch["positions"][:, 6:]), 1),
    }
    padded_labels = torch.cat((labels[:, :6], ignored, labels[:, 6:]), dim=1)
    losses = [
        _logprobs_of(engine.forward_step([one])[0], y).sum()
        for one, y in ((batch, labels), (padded, padded_labels))
    ]
    assert_close(losses[1], losses[0], rtol=1e-5, atol=0)


@check("api", min_ranks=2)
def experts_on_ranks(kit: Kit) -> None:
    """Experts dealt to two ranks give the steps of one process."""
    documents = make_documents(45)
    results = []
    for layout in ("fsdp", "ep"):
        with kit.own_engine(layout, flavor="tiny_moe") as engine:
            results.append([run_step(engine, documents), run_step(engine, documents)])
    assert_close(results[1], results[0], rtol=1e-5, atol=0)
