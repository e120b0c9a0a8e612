"""The contract with programs that embed the engine, beyond `torchtitan.testing.contract`.

Every function here with a parameter `kit` is a check, which raises if the contract is broken. All
ranks run all checks in the order of this file, one after the other in the same processes.

B rows, T tokens per row, V vocabulary entries.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import and_masks
from torch.testing import assert_close

from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.engine import TrainingEngine
from torchtitan.models.attention import VarlenMetadata, create_attention_mask, get_causal_mask_mod
from torchtitan.protocols import train_spec as train_spec_module
from torchtitan.testing.contract import (
    Check,
    Kit,
)
from torchtitan.testing.tiny_jobs import (
    Batch,
    PlainLoop,
    logprobs_of,
    make_documents,
    num_valid,
    pack,
    run_step,
)
from torchtitan.train import Trainer

# fp32, with sums in another order: losses and norms of about 4, and log-probabilities of about -4.
SAME_STEP = dict(rtol=1e-5, atol=0)
SAME_LOGPROBS = dict(rtol=0, atol=5e-6)


class ClientKit(Kit):
    """A kit with engines that checks share, and trainers as a client builds them."""

    def __init__(self, folder: str):
        super().__init__(folder)
        self._engines: dict[str, TrainingEngine] = {}

    def engine(self, layout: str = "fsdp", **options: Any) -> TrainingEngine:
        """Return an engine that all checks share, so they must not change its weights."""
        key = repr((layout, sorted(options.items())))
        if key not in self._engines:
            self._engines[key] = self.build(layout, **options)
        return self._engines[key]

    @contextlib.contextmanager
    def client_trainer(self, layout: str = "fsdp", **options: Any) -> Iterator[Trainer]:
        """Yield a `Trainer` as a client builds it: `get_train_spec` replaced, no dataloader."""
        with client_train_spec():
            trainer = Trainer(self.job(layout, **options))
        try:
            yield trainer
        finally:
            trainer.close()

    def close(self) -> None:
        """Close the shared engines; `engine` builds new ones."""
        while self._engines:
            self._engines.popitem()[1].close()


def run_checks_on_rank(checks: list[Check], folder: str) -> None:
    """Run checks until one fails, which the error names."""
    kit = ClientKit(folder)
    for check in checks:
        try:
            check.function(kit, *check.case)
        except BaseException as error:
            raise AssertionError(f"{check.name} does not hold: {check.holds}") from error
        dist.barrier()  # or a rank that is ahead would fail, or hang, in the next check
    kit.close()


# ---- a client's own code ----


@contextlib.contextmanager
def client_train_spec() -> Iterator[None]:
    """Replace `get_train_spec` by specs without a dataloader and, as there are no files, a tokenizer."""
    original = train_spec_module.get_train_spec

    def without_data(name: str) -> Any:
        spec = original(name)
        spec.build_dataloader_fn = None
        spec.build_tokenizer_fn = None
        return spec

    train_spec_module.get_train_spec = without_data
    try:
        yield
    finally:
        train_spec_module.get_train_spec = original


def client_masks(attn_type: str, positions: Tensor) -> Any:
    """Return a mask of documents, whose positions [B, T] count up by 1, as a client writes it."""
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


def client_logits(trainer: TrainingEngine, batch: Batch) -> Tensor:
    """Return the logits [B, T, V] of a client's own forward, as a plain tensor."""
    masks = client_masks(trainer.model_args.attn_type, batch["positions"])
    with trainer.train_context(), trainer.maybe_enable_amp:
        logits = trainer.model_parts[0](
            batch["input"], positions=batch["positions"], attention_masks=masks
        )
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def client_loss(trainer: TrainingEngine, seed: int = 0) -> Tensor:
    """Return the mean loss of documents, the same ones on every rank, by a client's own forward."""
    batch, labels = pack(make_documents(seed))
    logits = client_logits(trainer, batch)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)


def plain_logprobs(engine: TrainingEngine, documents: list[Tensor]) -> Tensor:
    """Return the log-probabilities of all documents' tokens but the first, by a plain loop."""
    plain = PlainLoop(engine)
    with torch.no_grad():
        return torch.cat([plain.logprobs(document) for document in documents])


# ---- a client's own forward, with its own masks ----


def forward_packed(kit: ClientKit, attn_type: str) -> None:
    """model(tokens [1, T], positions=, attention_masks=) with the client's own {} mask."""
    engine = kit.engine(attn_type=attn_type)
    documents = make_documents(1, (7, 1, 12, 30, 3))
    batch, labels = pack(documents)
    with torch.no_grad():
        ours = logprobs_of(client_logits(engine, batch), labels)[labels != IGNORE_INDEX]
    assert_close(ours, plain_logprobs(engine, documents), **SAME_LOGPROBS)


def forward_under_autocast(kit: ClientKit) -> None:
    """A client's own bf16 autocast around maybe_enable_amp: fp32's log-probabilities to 5e-2."""
    documents = make_documents(46)
    batch, labels = pack(documents)
    for layout, attn_type in (("fsdp", "flex"), ("tp", "varlen")):  # the same on one rank
        training = {"mixed_precision_param": "bfloat16"}
        with kit.client_trainer(layout, attn_type=attn_type, training=training) as trainer:
            expected = plain_logprobs(trainer, documents)
            with torch.autocast("cpu", torch.bfloat16):
                logits = client_logits(trainer, batch)
            assert logits.dtype == torch.bfloat16
            logprobs = logprobs_of(logits.float(), labels)[labels != IGNORE_INDEX]
            assert_close(logprobs, expected, rtol=0, atol=5e-2)
            (-logprobs.sum()).backward()
            for name, parameter in trainer.model_parts[0].named_parameters():
                assert parameter.grad is not None and parameter.grad.isfinite().all(), name


# ---- a client's own step: optimizers, schedules, replicas ----


def replicas_of_a_client(kit: ClientKit) -> None:
    """A client's own backward has the mean over replicas, as under DDP; engine steps have sums."""
    documents = make_documents(47)
    with kit.client_trainer("ddp", training={"max_norm": 1e9}) as trainer:
        (model,) = trainer.model_parts
        _, expected = PlainLoop(trainer).run_step(documents)
        client_loss(trainer, seed=47).backward()
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        trainer.optimizers.zero_grad()
        assert_close([norm, run_step(trainer, documents)[1]], [expected] * 2, **SAME_STEP)


def numbers_of_the_global_batch(kit: ClientKit, layout: str) -> None:
    """Under {}, losses, metrics, outputs, and a client's own forward, equal those of a plain loop."""
    documents = make_documents(46)
    n = num_valid(documents)

    def loss_fn(logits: Tensor, labels: Tensor, batch: Batch) -> tuple[Tensor, dict, Tensor]:
        logprobs = logprobs_of(logits.float(), labels)
        metrics = {"worst": -logprobs.min(), "tokens": (labels != IGNORE_INDEX).sum()}
        return -logprobs.sum() / n, metrics, logprobs

    with kit.build(layout) as engine:
        last = engine.pp_has_last_stage
        assert last is (None if layout != "pp" else kit.rank >= kit.world_size // 2)
        assert engine.has_outputs is (last is not False)
        parts = [
            documents[engine.dp_rank + i * engine.dp_size :: 2 * engine.dp_size] for i in (0, 1)
        ]
        packed = [pack(part) for part in parts]
        batches = [batch | {"labels": labels} for batch, labels in packed]
        expected = [plain_logprobs(engine, part) for part in parts]
        worst = -plain_logprobs(engine, documents).min()
        plain = PlainLoop(engine)

        step = engine.forward_backward_step(
            input_dict=batches, loss_fn=loss_fn, metrics={"tokens": "sum", "worst": "max"}
        )
        assert (step.outputs is None) is not engine.has_outputs
        outputs = engine.from_last_stage(step.outputs)
        for ours, (_, labels), theirs in zip(outputs, packed, expected, strict=True):
            assert_close(ours[labels != IGNORE_INDEX], theirs, **SAME_LOGPROBS)
        assert list(step.metrics) == ["tokens", "worst"] and step.metrics["tokens"] == n
        assert_close(step.metrics["worst"], worst, **SAME_STEP)
        norm = engine.optim_step().grad_norm
        assert_close((step.loss.item(), float(norm)), plain.run_step(documents), **SAME_STEP)

        if layout == "pp":
            for call, argument in ((engine.prepare, batches[0]), (engine.backward, step.loss)):
                with pytest.raises(ValueError, match="give forward_backward_step a loss_fn"):
                    call(argument)
            return
        loss = torch.zeros(())
        for batch in batches:
            microbatch = engine.prepare(batch)
            with engine.train_context(), engine.maybe_enable_amp:
                logits = engine.model_parts[0](microbatch.inputs, **microbatch.kwargs)
                logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
                share, *_ = loss_fn(logits, microbatch.labels, microbatch.batch)
            engine.backward(share)
            loss += share.detach()
        if engine.loss_group is not None:
            dist.all_reduce(loss, group=engine.loss_group)
        norm = engine.optim_step().grad_norm
        assert_close((loss.item(), float(norm)), plain.run_step(documents), **SAME_STEP)


_CASES = {
    forward_packed: ("flex", "varlen"),
    numbers_of_the_global_batch: ("fsdp", "ddp", "tp", "cp", "pp"),
}
_ON_SEVERAL_RANKS = {replicas_of_a_client, numbers_of_the_global_batch}
_FUNCTIONS = [f for f in globals().values() if "kit" in getattr(f, "__annotations__", ())]
_ALL = [
    Check(function, 2 if function in _ON_SEVERAL_RANKS else 1, case)
    for function in _FUNCTIONS
    for case in ([(name,) for name in _CASES[function]] if function in _CASES else [()])
]
CHECKS = {check.name: check for check in _ALL}
