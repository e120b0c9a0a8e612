"""The checks of the engine's contract with programs that embed it; see `conformance.py`.

A check is a function that takes a `Kit`. All ranks run the function; it raises if the contract is
broken. Most checks compare the engine with a plain loop over one document at a time.
"""

import gc
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.config.job_config import JobConfig
from torchtitan.engine import TrainingEngine
from torchtitan.testing import tiny_jobs
from torchtitan.testing.tiny_jobs import (
    PlainLoop,
    logprobs_of,
    make_documents,
    num_valid,
    pack,
    run_step,
    whole_weights,
)
from torchtitan.tools.logging import logger


class Kit:
    """Gives a check a folder, the same on every rank, and engines of any parallel layout."""

    def __init__(self, folder: str):
        logger.setLevel(logging.ERROR)
        tiny_jobs.add_tiny_flavors()
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.folder = Path(folder)

    def job(self, layout: str = "fsdp", folder: str = "outputs", **options: Any) -> JobConfig:
        """Return a `tiny_job` with a parallel layout for this world size."""
        parallelism = tiny_jobs.layout_of(layout, self.world_size) | options.pop("parallelism", {})
        return tiny_jobs.tiny_job(str(self.folder / folder), parallelism=parallelism, **options)

    def build(self, layout: str = "fsdp", **options: Any) -> TrainingEngine:
        """Return an engine for a `job`. The caller closes the engine."""
        return TrainingEngine(self.job(layout, **options))


class Check(NamedTuple):
    """A check. function: called with a `Kit` and `*case`. min_ranks: skip the check on fewer ranks."""

    function: Callable[..., None]
    min_ranks: int = 1
    case: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "_".join((self.function.__name__, *self.case))

    @property
    def holds(self) -> str:
        """The sentence to check: first line of the function's docstring, formatted with the case."""
        sentence = self.function.__doc__.split("\n")[0]
        return sentence.format(*self.case) if self.case else sentence


def run_on_rank(check: Check, folder: str) -> None:
    check.function(Kit(folder), *check.case)


# ---- helpers of checks ----


def assert_same_weights(engine: TrainingEngine, expected: dict[str, Tensor]) -> None:
    for name, tensor in whole_weights(engine).items():
        assert torch.equal(tensor, expected[name]), name


def global_state() -> dict[str, Any]:
    """Return settings of the process that an engine must not leave changed."""
    return {
        "garbage collection": gc.isenabled(),
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "multithreaded backward": torch.autograd.is_multithreading_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "number of threads": torch.get_num_threads(),
        "logging handlers": list(logger.handlers) + logging.getLogger().handlers,
        # torch's compiler sets the path of its cache.
        "environment": {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"},
    }


# ---- checks ----


def guest_leaves_what_it_found(kit: Kit) -> None:
    """The engine uses the caller's process group; group, process state and config stay unchanged."""
    group, before = dist.group.WORLD, global_state()
    torch.manual_seed(11)
    random_state = torch.get_rng_state()
    job = kit.job(seed=None)
    given = job.to_dict()
    with TrainingEngine(job) as engine:
        assert engine.parallel_dims.world_size == kit.world_size
        assert torch.equal(torch.get_rng_state(), random_state)
        run_step(engine, make_documents(10))
    engine.close()  # a second close does nothing
    assert job.to_dict() == given
    assert dist.is_initialized() and dist.group.WORLD is group
    for name, after in global_state().items():
        assert before[name] == after, f"{name} changed: {before[name]} -> {after}"


def steps(kit: Kit, layout: str, attn_type: str) -> None:
    """Two steps on packed documents under {}, {} equal those of a plain loop."""
    with kit.build(layout, attn_type=attn_type) as engine:
        plain = PlainLoop(engine)
        for documents in (make_documents(31), make_documents(32)):
            ours = run_step(engine, documents)
            assert_close(ours, plain.run_step(documents), rtol=1e-5, atol=0)
        theirs = plain.model.state_dict()
        for name, tensor in whole_weights(engine).items():
            assert_close(tensor, theirs[name], rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def split(kit: Kit, flavor: str) -> None:
    """Loss and gradient norm of {} are the same for any split into calls, ranks and microbatches."""
    documents = make_documents(33, (9,) * 8)
    results = []
    for num_microbatches in (1, 2, 4):
        with kit.build(flavor=flavor) as engine:
            results.append(run_step(engine, documents, num_microbatches))
    with kit.build(flavor=flavor) as engine:
        loss = torch.zeros(())
        for batch, labels in (pack(documents[:3]), pack(documents[3:])):
            here = engine.dp_rank == 0  # only ranks with dp_rank 0 have a microbatch
            loss += engine.forward_backward_step(
                input_dict=[batch] if here else [],
                labels=[labels] if here else [],
                global_valid_tokens=num_valid(documents),
            )
        dist.all_reduce(loss)
        results.append((loss.item(), float(engine.optim_step().grad_norm)))
    assert_close(results, [results[0]] * 4, rtol=1e-5, atol=0)


def forward_step(kit: Kit, layout: str, attn_type: str) -> None:
    """Under {}, {} log-probabilities of packed documents equal those of each document alone."""

    def logprobs_of_labels(logits: Tensor, batch: tiny_jobs.Batch) -> Tensor:
        labels = batch["labels"]
        return logprobs_of(logits.float(), labels)[labels != IGNORE_INDEX]

    documents = make_documents(15, (5, 21, 9, 2, 13))
    packed = [pack(documents), *(pack([document]) for document in documents)]
    batches = [batch | {"labels": labels} for batch, labels in packed]
    with kit.build(layout, attn_type=attn_type) as engine:
        plain = PlainLoop(engine)
        outputs = engine.forward_step(batches, output_fn=logprobs_of_labels)
        assert (outputs is None) is not engine.has_outputs
        if outputs is not None:
            expected = torch.cat([plain.logprobs(d) for d in documents]).detach()
            alone = torch.cat(outputs[1:])
            assert_close((outputs[0], alone), (expected, expected), rtol=0, atol=5e-6)


def optim_step(kit: Kit) -> None:
    """optim_step applies lr= and max_norm= to one step, zeroes gradients, and skips a step with nan.

    optim_step raises ValueError on all ranks if no rank has a gradient.
    """
    batch, labels = pack(make_documents(22))
    moved = []
    for max_norm in (1e-9, None):
        with kit.build(lr_scheduler={"warmup_steps": 10}, optimizer={"eps": 1.0}) as engine:
            parameters = list(engine.model_parts[0].parameters())
            rate, before = engine.lr, whole_weights(engine)["norm.weight"]
            engine.forward_backward_step(input_dict=batch, labels=labels, global_valid_tokens=1.0)
            assert engine.optim_step(lr=0.125, max_norm=max_norm).lr == 0.125
            assert_close(engine.lr, 2 * rate)
            assert all(p.grad is None for p in parameters)
            weights = whole_weights(engine)
            moved.append((weights["norm.weight"] - before).abs().max().item())

            for p in parameters:
                p.grad = torch.full_like(p, float("nan"))
            assert engine.optim_step().skipped
            assert_same_weights(engine, weights)
            refused = False
            try:
                engine.optim_step()
            except ValueError as error:
                refused = "found no gradient on any rank" in str(error)
            assert refused
    assert moved[0] < 1e-6 < moved[1]


def save_and_load(kit: Kit) -> None:
    """engine.save(path) saves at once, whatever the interval; engine.load(path) continues from it."""
    folder = str(kit.folder / "given/global_step_7")
    with kit.build() as engine:
        run_step(engine, make_documents(17))
        engine.step = 7
        engine.save(folder)
        saved = whole_weights(engine)
        first = run_step(engine, make_documents(18))
    with kit.build(seed=5) as other:
        other.load(folder)
        assert other.step == 7
        assert_same_weights(other, saved)
        assert run_step(other, make_documents(18)) == first


def experts_on_ranks(kit: Kit) -> None:
    """Two steps with experts on two ranks equal those without expert parallelism."""
    results = []
    for layout in ("fsdp", "ep"):
        with kit.build(layout, flavor="tiny_moe") as engine:
            results.append([run_step(engine, make_documents(45)) for _ in range(2)])
    assert_close(results[1], results[0], rtol=1e-5, atol=0)


_ALL = [
    Check(guest_leaves_what_it_found),
    Check(steps, 1, ("fsdp", "flex")),
    Check(steps, 2, ("ddp", "varlen")),
    Check(steps, 2, ("tp", "flex")),
    Check(steps, 2, ("pp", "varlen")),
    Check(steps, 2, ("cp", "flex")),
    Check(steps, 2, ("cp", "varlen")),
    Check(experts_on_ranks, 2),
    Check(split, 1, ("tiny",)),
    Check(split, 1, ("tiny_moe",)),
    Check(forward_step, 1, ("fsdp", "flex")),
    Check(forward_step, 1, ("fsdp", "varlen")),
    Check(forward_step, 2, ("tp", "flex")),
    Check(forward_step, 2, ("pp", "varlen")),
    Check(optim_step),
    Check(save_and_load),
]
CHECKS = {check.name: check for check in _ALL}
