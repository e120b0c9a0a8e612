"""Failures of one rank at random places and instants: `python -m tests.reliability.fail_anywhere`.

Per layout two ranks step a tiny engine. In each trial one of them, drawn at random, fails:

- loss_fn, output_fn, head: a function of the caller, in one of the microbatches. Both ranks raise at
  the end of the call, and the engine goes on: the next gradients are those of an engine to which
  nothing happened, bit for bit.
- inside: a layer, in forward or backward; also the head under tensor parallelism. Both ranks raise
  within 5 s, say "build a new engine", and refuse further steps; a new engine in the same processes
  has the expected gradients.
- interrupt: KeyboardInterrupt, as from Ctrl-C on one rank, at any instant of a loop of steps. Both
  ranks raise within 5 s, in one of the two ways.

Prints a line per trial with the seconds until the last rank had raised, and ends with exit code 1
if one fails.
"""

import _thread
import contextlib
import random
import sys
import tempfile
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from tests.reliability.jobs import options_of
from torchtitan.engine import TrainingEngine
from torchtitan.loss.logprobs import TokenLogProbs
from torchtitan.testing import tiny_jobs
from torchtitan.testing.gloo import run_ranks
from torchtitan.tools.errors import RunError

LAYOUTS = ["fsdp", "ddp", "tp", "pp", "cp"]
FUNCTIONS = ["loss_fn", "output_fn", "head"]
KINDS = [*FUNCTIONS, "inside", "interrupt"]
LIMIT_SECONDS = 5
N_MICROBATCHES = 3


class FailedOnPurpose(Exception):
    pass


ERRORS = (FailedOnPurpose, KeyboardInterrupt, torch.OutOfMemoryError, SystemExit)
DOCUMENTS = [tiny_jobs.make_documents(i, (9, 5)) for i in range(N_MICROBATCHES)]


class Trial:
    """What happens on one rank. The draws are the same on both."""

    def __init__(self, layout: str, kind: str, seed: str):
        self.layout, self.kind = layout, kind
        draw = random.Random(f"{layout} {kind} {seed}")
        # In a pipeline, functions run on the last stage.
        self.rank = 1 if layout == "pp" and kind in FUNCTIONS else draw.randrange(2)
        # Ranks that give one microbatch by itself do not ask each other for the number of theirs.
        self.is_single = draw.random() < 0.5
        self.microbatch = 0 if self.is_single else draw.randrange(N_MICROBATCHES)
        self.layer = draw.randrange(1 if layout == "pp" else 2)
        self.in_backward = draw.random() < 0.5
        self.delay = draw.uniform(0, 0.5)
        self.error = draw.choice(ERRORS)
        self.is_here = dist.get_rank() == self.rank
        self.is_late = draw.random() < 0.5  # the rank that fails, or the other one
        self.failed_at: float | None = None
        self.num_calls = 0

    def maybe_fail(self, *_: Any) -> None:
        """Called once per microbatch."""
        self.num_calls += 1
        if self.is_here and self.num_calls == self.microbatch + 1:
            self.failed_at = time.monotonic()
            raise self.error("on purpose")

    def run(self, engine: TrainingEngine) -> None:
        """A step that fails."""
        if self.is_here == self.is_late:
            time.sleep(0.2)
        if self.kind == "interrupt":
            if self.is_here:
                threading.Timer(self.delay, self.interrupt).start()
            while True:
                step(engine)
                engine.optim_step()
        if self.kind == "inside":
            layers = list(engine.model_parts[0].layers.values())
            hook = layers[self.layer].register_forward_pre_hook
            if self.in_backward:
                hook = layers[self.layer].register_full_backward_hook
            hook(self.maybe_fail)
            step(engine, self.is_single)
        if self.kind == "loss_fn":
            loss_fn = lambda *args: self.maybe_fail() or loss_of(*args)  # noqa: E731
            step(engine, self.is_single, loss_fn=loss_fn)
        if self.kind == "output_fn":
            score(engine, output_fn=lambda outputs, _: self.maybe_fail() or outputs)
        if self.kind == "head":
            score(
                engine,
                head=lambda *args, **more: self.maybe_fail() or TokenLogProbs()(*args, **more),
            )

    def interrupt(self) -> None:
        self.failed_at = time.monotonic()
        _thread.interrupt_main()


def loss_of(logits: torch.Tensor, labels: torch.Tensor, _: Any) -> torch.Tensor:
    return -tiny_jobs.logprobs_of(logits, labels).sum()


def step(engine: TrainingEngine, is_single: bool = False, **options: Any) -> None:
    batches, labels = zip(*map(tiny_jobs.pack, DOCUMENTS), strict=True)
    engine.forward_backward_step(
        input_dict=batches[0] if is_single else [*batches],
        labels=labels[0] if is_single else [*labels],
        global_valid_tokens=10.0,
        **{"loss_fn": loss_of} | options,
    )


def score(engine: TrainingEngine, **options: Any) -> None:
    packed = map(tiny_jobs.pack, DOCUMENTS)
    engine.forward_step([batch | {"labels": labels} for batch, labels in packed], **options)


def gradients(engine: TrainingEngine) -> list[torch.Tensor]:
    """Of one step, on this rank."""
    engine.optimizers.zero_grad()
    step(engine)
    grads = [p.grad for part in engine.model_parts for p in part.parameters()]
    grads = [(g.to_local() if hasattr(g, "to_local") else g).clone() for g in grads]
    engine.optimizers.zero_grad()
    return grads


def build(layout: str, folder: str) -> TrainingEngine:
    parallelism = tiny_jobs.layout_of(layout, 2)
    return TrainingEngine(tiny_jobs.tiny_job(folder, parallelism=parallelism))


def on_rank(layout: str, kinds: list[str], seed: int, folder: str, is_guest: bool) -> list[Any]:
    """Run the trials one after the other; for each (when it failed or None, when raised, where)."""
    tiny_jobs.add_tiny_flavors()
    if is_guest:
        dist.init_process_group("gloo")
    outcomes = []
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(build(layout, folder))
        expected = gradients(engine)
        for number, kind in enumerate(kinds):
            trial = Trial(layout, kind, f"{seed} {number}")
            try:
                trial.run(engine)
                raise AssertionError(f"{kind}: nothing was raised")
            except (RuntimeError, *ERRORS) as error:
                raised_at = time.monotonic()
                said = " ".join([str(error), *getattr(error, "__notes__", ())])
                is_lost = "build a new engine" in said
                if kind != "interrupt":
                    # Ranks of tensor parallelism compute a head together.
                    expected_loss = kind == "inside" or (layout, kind) == ("tp", "head")
                    assert is_lost == expected_loss, said
                    # Torch's pipeline stages wrap what goes wrong in them.
                    cause = error.__cause__ if type(error) is RuntimeError else error
                    its_own = type(cause) is trial.error
                    assert its_own == trial.is_here, f"{type(error).__name__}: {said}"
                if not trial.is_here:
                    assert said.startswith(f"rank {trial.rank} failed in "), said
            outcomes.append((trial.failed_at, raised_at, f"rank {trial.rank}", is_lost))
            if is_lost:
                try:
                    step(engine)
                    raise AssertionError("a lost engine made a step")
                except RunError as error:
                    assert "build a new engine" in str(error), error
            if is_lost or kind == "interrupt":
                stack.close()
                engine = stack.enter_context(build(layout, folder))
            for ours, theirs in zip(gradients(engine), expected, strict=True):
                assert torch.equal(ours, theirs), f"{kind}: another gradient afterwards"
    if is_guest:
        dist.barrier()  # the host's own group is as it was
        dist.destroy_process_group()
    return outcomes


def run(layout: str, kinds: list[str], seed: int = 0, is_guest: bool = False) -> list[float]:
    """Seconds of each trial from the failure until the last rank had raised.

    is_guest: the process group is the host's, not the engine's.
    """
    with tempfile.TemporaryDirectory(prefix="fail_anywhere_") as folder:
        ranks = run_ranks(
            on_rank,
            2,
            *(layout, kinds, seed, folder, is_guest),
            init_process_group=False,
            timeout_seconds=60 + 15 * len(kinds),
        )
    seconds = []
    for kind, *outcome in zip(kinds, *ranks, strict=True):
        (failed_at,) = (at for at, *_ in outcome if at is not None)
        seconds.append(max(raised_at for _, raised_at, *_ in outcome) - failed_at)
        _, _, where, is_lost = outcome[0]
        assert is_lost == outcome[1][3], "the ranks disagree on whether the engine is lost"
        what = "a new engine" if is_lost else "the engine goes on"
        print(f"{layout:4}  {kind:9}  {where}  {seconds[-1]:6.3f} s  {what}", flush=True)
    return seconds


def main() -> None:
    options = options_of(__doc__, trials=30, layouts=LAYOUTS, kinds=KINDS, guest=False)
    slowest = 0.0
    for layout in options.layouts:
        kinds = [options.kinds[i % len(options.kinds)] for i in range(options.trials)]
        slowest = max(slowest, *run(layout, kinds, options.seed, options.guest))
    print(f"the slowest took {slowest:.2f} s")
    sys.exit(1 if slowest > LIMIT_SECONDS else 0)


if __name__ == "__main__":
    main()
