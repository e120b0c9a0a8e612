"""The policy's half of the server: commands that all ranks run in the same order.

Rank 0 takes commands from a queue, merges commands that may run as one, and broadcasts them to the
other ranks. Arguments and results of a command are plain values without HTTP.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torchtitan.integrations.tinker.client import LocalSamplingClient, LocalTrainingClient
from torchtitan.integrations.tinker.request_queue import Command, RequestQueue
from torchtitan.integrations.tinker.shared_passes import Call, SharedPasses
from torchtitan.integrations.tinker.states import WaitingStates
from torchtitan.integrations.tinker.types import (
    AdamParams,
    ForwardBackwardOutput,
    ModelInput,
    SampleResponse,
)
from torchtitan.integrations.tinker.wire import ForwardBackwardRequest
from torchtitan.rl.job_config import JobConfig
from torchtitan.tools.errors import LostConnectionError, as_run_error
from torchtitan.tools.logging import logger

BASE = "base"
"""The name of the sampler for the weights that the server started with."""

MOST_SAMPLERS = 4096

# Temporary name of a model that is being initialised or loaded.
_NEW = "new model"

# How long a command waits for further commands that can run together with it.
_SECONDS_TO_GATHER = 0.01
_SECONDS_TO_GATHER_AT_MOST = 0.1
_SECONDS_BETWEEN_SIGNS_OF_LIFE = 30


class Policy:
    """A training client and its named sampling clients. Every rank makes the same calls.

    With adapters there are several models, each with its own weights, optimizer and gradients.
    Without adapters there is one model, whose name is "".
    """

    def __init__(self, client: LocalTrainingClient, job_config: JobConfig):
        self._client, self._config = client, job_config
        client.load_state_with_optimizer(None).result()
        base = client.save_weights_and_get_sampling_client(pinned=True).result()
        self._samplers: dict[str, LocalSamplingClient] = {BASE: base}
        self._passes = SharedPasses(client) if client.shares_passes else None
        self._model = ""  # the model that the policy holds; "" has the initial weights
        self._ranks: dict[str, int] = {}  # model -> LoRA rank
        folder = os.path.join(job_config.job.dump_folder, "waiting_models")
        self._waiting = WaitingStates(client.limits, folder)
        self.close = self._waiting.close

    def _use(self, model: str) -> None:
        """Swap a model's state into the policy, and store the state of the previous model."""
        if model == self._model:
            return
        self._check_waits(model)
        state = self._waiting.pop(model)
        self._client.exchange_state(state).result()
        earlier, self._model = self._model, model
        self._waiting.add(earlier, state)

    def _check_waits(self, model: str) -> None:
        if model not in self._waiting:
            raise ValueError(f"model {model} was dropped after its session ended; create another")

    @contextlib.contextmanager
    def _replacing(self, model: str, rank: int | None) -> Iterator[None]:
        """Wrap code that initialises or loads a new model; on success, the new model replaces `model`.

        rank: LoRA rank; None for a policy without adapters, whose only model is changed in place.
        """
        if rank is None:
            yield
            return
        self._waiting.add(_NEW, self._client.new_state().result())
        try:
            self._use(_NEW)
            yield
        except BaseException:
            self.drop_models([_NEW])
            raise
        self._waiting.drop(model)
        self._model, self._ranks[model] = model, rank

    def drop_models(self, models: Sequence[str]) -> None:
        if self._model in models:
            self._use("")
        for model in models:
            self._waiting.drop(model)
            self._ranks.pop(model, None)

    def start_model(self, adapters: dict[str, Any] | None = None, model: str = "") -> None:
        """Start a model from the initial weights. adapters: arguments of `start_adapters`, or None."""
        with self._replacing(model, None if adapters is None else adapters["rank"]):
            self._client.load_sampler_weights(self._samplers[BASE]).result()
            if adapters is not None:
                self._client.start_adapters(**adapters).result()

    def load(self, path: str, optimizer: bool, model: str = "", rank: int | None = None) -> None:
        """Load a saved state into a model, which may be new. rank: LoRA rank of the saved adapters."""
        with self._replacing(model, rank):
            self._client.load_state(path, optimizer=optimizer).result()

    def forward_backward(
        self, items: list[tuple[str, ForwardBackwardRequest]]
    ) -> list[ForwardBackwardOutput | Exception]:
        """Return each item's output or exception; either all requests are forward-only or none is."""
        if len(items) == 1 or self._passes is None:
            return self._each(self._forward_backward, items)
        # Store the current model's state, because a shared pass zeroes the policy's gradients.
        self._use("")
        problems = self._each(lambda model, _: self._check_waits(model), items)
        good = [item for item, problem in zip(items, problems, strict=True) if problem is None]
        states = self._waiting.get([model for model, _ in good])
        calls = [Call(state, request) for state, (_, request) in zip(states, good, strict=True)]
        found = iter(self._passes.run(calls).result())
        return [next(found) if problem is None else problem for problem in problems]

    def _each(self, call: Callable[..., Any], items: list[tuple[str, Any]]) -> list[Any]:
        return [attempt(lambda item=item: call(*item), self._config) for item in items]

    def _forward_backward(
        self, model: str, request: ForwardBackwardRequest
    ) -> ForwardBackwardOutput:
        self._use(model)
        client, config = self._client, request.loss_fn_config
        try:
            if request.problem is not None:
                raise ValueError(request.problem)
            if request.forward_only:
                return client.forward(request.data, request.loss_fn).result()
            return client.forward_backward(request.data, request.loss_fn, config).result()
        except Exception as error:
            if not request.forward_only:
                client.fail_step(error).result()
            raise

    def optim_step(self, items: list[tuple[str, AdamParams]]) -> list[dict[str, float] | Exception]:
        def step(model: str, params: AdamParams) -> dict[str, float]:
            self._use(model)
            return self._client.optim_step(params).result().metrics

        return self._each(step, items)

    def save(self, name: str, external: bool, model: str = "") -> None:
        """Save a model's state. external: save only files for other programs."""
        self._use(model)
        rank = self._ranks.get(model)
        self._client.save_state(name, rank=rank, external=external).result()

    def snapshot(self, sampler: str, model: str = "") -> None:
        """Create a sampler for the model's current weights."""
        self._use(model)
        self._samplers[sampler] = self._client.save_weights_and_get_sampling_client().result()
        drop_oldest(self._samplers, MOST_SAMPLERS)

    def open(self, sampler: str, path: str) -> None:
        """Create a sampler for a saved state."""
        self._samplers[sampler] = self._client.create_sampling_client(path).result()
        drop_oldest(self._samplers, MOST_SAMPLERS)

    def sample(
        self, items: list[tuple[ModelInput, int | None]], sampler: str, settings: tuple
    ) -> list[SampleResponse]:
        """Sample with a named sampler. items, settings: see `LocalSamplingClient.sample_all`."""
        if sampler not in self._samplers:
            raise ValueError(f"the sampler {sampler} does not exist or was dropped; make another")
        return self._samplers[sampler].sample_all(items, *settings).result()


class CommandLoop:
    """Runs one command after another on a policy; all ranks run each command together."""

    def __init__(self, policy: Policy, job_config: JobConfig):
        self._policy, self._config = policy, job_config
        self._waiting = RequestQueue(job_config.rl.serve.max_datums_per_pass)
        # Guards `_waiting` and `_is_stopping`.
        self._changed = threading.Condition()
        self._is_stopping = False
        self._group = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            # A separate group, because broadcasts must not mix with the policy's own collectives.
            seconds = job_config.comm.init_timeout_seconds + 2 * _SECONDS_BETWEEN_SIGNS_OF_LIFE
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))

    def put(self, command: Command) -> None:
        """Queue a command. Call on rank 0, from any thread."""
        with self._changed:
            self._waiting.add(command)
            self._changed.notify()

    def stop(self) -> None:
        """End `run` after the running command. Call on rank 0, from any thread."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()

    def run(self) -> None:
        """Run commands until `stop`. Collective."""
        if self._group is not None and dist.get_rank(self._group) > 0:
            while (call := self._broadcast(None)) is not None:
                if call:
                    self._apply(*call)
        else:
            while (batch := self._next()) is not None:
                if batch:
                    self._carry_out(batch)
                else:
                    # Keep the other ranks' broadcast from timing out.
                    self._broadcast(())
            self._broadcast(None)
        self._policy.close()

    def _carry_out(self, batch: list[Command]) -> None:
        first, arguments = batch[0], dict(batch[0].arguments)
        if first.items:
            arguments["items"] = [item for command in batch for item in command.items]
        self._broadcast((first.method, arguments))
        result = self._apply(first.method, arguments)
        if isinstance(result, Exception) and len(batch) > 1:
            # Run the commands one by one, so that only the bad command fails.
            for command in batch:
                self._carry_out([command])
        elif not first.items or isinstance(result, Exception):
            first.answer(result)
        else:
            results = iter(result)
            for command in batch:
                own = [next(results) for _ in command.items]
                failure = next((item for item in own if isinstance(item, Exception)), None)
                command.answer(failure or own)

    def _broadcast(self, call: Any) -> Any:
        """Return rank 0's argument on every rank."""
        if self._group is None:
            return call
        received = [call]
        dist.broadcast_object_list(received, src=0, group=self._group)
        return received[0]

    def _apply(self, method: str, arguments: dict[str, Any]) -> Any:
        return attempt(lambda: getattr(self._policy, method)(**arguments), self._config)

    def _next(self) -> list[Command] | None:
        """Return the commands to run as one; [] if none arrived before a timeout, None after `stop`."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._waiting.has_commands or self._is_stopping,
                _SECONDS_BETWEEN_SIGNS_OF_LIFE,
            ):
                return []
            # Wait briefly for commands that can be merged with the waiting commands.
            until = time.monotonic() + _SECONDS_TO_GATHER_AT_MOST
            while self._waiting.may_gather() and not self._is_stopping:
                if time.monotonic() > until or not self._changed.wait(_SECONDS_TO_GATHER):
                    break
            return None if self._is_stopping else self._waiting.next_batch()


def drop_oldest(entries: dict[str, Any], most: int) -> None:
    """Drop the oldest entries of a dict that threads share; keep BASE and the newest `most` entries."""
    for name in list(entries)[:-most]:
        if name != BASE:
            entries.pop(name, None)


def attempt(call: Callable[[], Any], job_config: JobConfig) -> Any:
    """Return the call's result or exception. Raises only if a connection between ranks is lost."""
    try:
        return call()
    except Exception as error:
        if isinstance(lost := as_run_error(error, job_config), LostConnectionError):
            raise lost from error
        logger.warning("a request failed: %s: %s", type(error).__name__, error)
        return error
