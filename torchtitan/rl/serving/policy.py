"""The policy's half of the server: commands, which every rank carries out in the same order.

Rank 0 takes requests from HTTP, lays samples that wait together into one command, and tells the
other ranks; they follow. A command and what comes back are plain values, not requests.
"""

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torchtitan.rl.client import LocalSamplingClient, LocalTrainingClient
from torchtitan.rl.client_types import ModelInput, SamplingParams
from torchtitan.rl.job_config import JobConfig
from torchtitan.tools.errors import LostConnectionError, as_run_error
from torchtitan.tools.logging import logger

BASE = "base"
"""The sampler of the weights that the server started with."""

# A sample waits this long for others that were sent with it.
_SECONDS_TO_GATHER = 0.01
_SECONDS_TO_GATHER_AT_MOST = 0.1
_SECONDS_BETWEEN_SIGNS_OF_LIFE = 30


@dataclass(frozen=True)
class Command:
    """A method of `Policy` and its arguments, and whom to tell.

    answer: called with the result, or the exception that it raised.
    joins: commands of one key that wait together are carried out as one, with the `items` of all
        of them; its result has a value for each item. None for those without items.
    """

    method: str
    arguments: dict[str, Any]
    answer: Callable[[Any], None] = lambda _: None
    joins: Any = None
    items: list[Any] = field(default_factory=list)


class Policy:
    """A training client and its samplers, by name. Every rank makes the same calls.

    Raises ConfigError for a config that cannot run.
    """

    def __init__(self, client: LocalTrainingClient):
        self._client = client
        client.load_initial_state().result()
        base = client.save_weights_and_get_sampling_client(pinned=True).result()
        self._samplers: dict[str, LocalSamplingClient] = {BASE: base}

    def start_model(self) -> None:
        """Begin with the server's first weights, and an optimizer that knows nothing."""
        self._client.load_sampler_weights(self._samplers[BASE]).result()

    def load(self, path: str, with_optimizer: bool) -> None:
        load = self._client.load_state_with_optimizer if with_optimizer else self._client.load_state
        load(path).result()

    def save(self, path: str) -> None:
        self._client.save_state(path).result()

    def forward_backward(self, request: Any) -> Any:
        """What the client's `forward` or `forward_backward` returns."""
        client = self._client
        try:
            if request.problem is not None:
                raise ValueError(request.problem)
            if request.forward_only:
                return client.forward(request.data, request.loss_fn).result()
            config = request.loss_fn_config
            return client.forward_backward(request.data, request.loss_fn, config).result()
        except Exception as error:
            if not request.forward_only:
                client.fail_step(error).result()
            raise

    def optim_step(self, params: Any) -> dict[str, float]:
        return self._client.optim_step(params).result().metrics

    def snapshot(self, sampler: str) -> None:
        """Make a sampler of the weights as they are."""
        self._samplers[sampler] = self._client.save_weights_and_get_sampling_client().result()

    def open(self, sampler: str, path: str) -> None:
        """Make a sampler of a saved state."""
        self._samplers[sampler] = self._client.create_sampling_client(path).result()

    def forget(self, samplers: Sequence[str]) -> None:
        for sampler in samplers:
            self._samplers.pop(sampler, None)

    def sample(
        self, items: list[ModelInput], sampler: str, num_samples: int, params: SamplingParams
    ) -> list[Any]:
        return self._sampler(sampler).sample_all(items, num_samples, params).result()

    def logprobs(self, items: list[ModelInput], sampler: str) -> list[list[float | None]]:
        return self._sampler(sampler).compute_all_logprobs(items).result()

    def _sampler(self, name: str) -> LocalSamplingClient:
        if name not in self._samplers:
            raise ValueError(f"the sampler {name} was not made, or is long unused; make another")
        return self._samplers[name]


class CommandLoop:
    """Hands commands to a policy on all ranks, one after the other.

    job_config: its time limit for ranks that do not answer, and what errors name of it.
    """

    def __init__(self, policy: Policy, job_config: JobConfig):
        self._policy, self._config = policy, job_config
        # Reentrant, as a signal handler may call `stop` while this thread is in `get`.
        self._queue: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._taken: list[Command] = []  # from the queue, and not yet begun
        self._is_stopping = False
        self._group = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            # Its own, so that waiting for a command does not mix with what the policy sends.
            seconds = job_config.comm.init_timeout_seconds + 2 * _SECONDS_BETWEEN_SIGNS_OF_LIFE
            timeout = timedelta(seconds=seconds)
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    def put(self, command: Command) -> None:
        """Have a command carried out after those before it. From any thread of rank 0."""
        self._queue.put(command)

    def stop(self) -> None:
        """End `run` after the command that is being carried out. From any thread of rank 0."""
        self._is_stopping = True
        self._queue.put(None)  # wakes it

    def run(self) -> None:
        """Carry commands out until the end. Collective."""
        if self._group is not None and dist.get_rank(self._group) > 0:
            while (told := self._tell(None)) is not None:
                if told:
                    self._apply(*told)
            return
        while (batch := self._next()) is not None:
            if not batch:
                self._tell(())
                continue
            self._carry_out(batch)
        self._tell(None)

    def _carry_out(self, batch: list[Command]) -> None:
        first = batch[0]
        arguments = dict(first.arguments)
        if first.joins is not None:
            arguments["items"] = [item for command in batch for item in command.items]
        self._tell((first.method, arguments))
        result = self._apply(first.method, arguments)
        if isinstance(result, ValueError) and len(batch) > 1:
            for command in batch:  # the mistake is in one of them
                self._carry_out([command])
            return
        begin = 0
        for command in batch:
            end = begin + len(command.items)
            is_share = first.joins is not None and not isinstance(result, Exception)
            command.answer(result[begin:end] if is_share else result)
            begin = end

    def _tell(self, command: Any) -> Any:
        """What rank 0 says, on every rank."""
        if self._group is None:
            return command
        said = [command]
        dist.broadcast_object_list(said, src=0, group=self._group)
        return said[0]

    def _apply(self, method: str, arguments: dict[str, Any]) -> Any:
        """What the method returns or raises."""
        try:
            return getattr(self._policy, method)(**arguments)
        except Exception as error:
            if isinstance(told := as_run_error(error, self._config), LostConnectionError):
                raise told from error
            logger.warning("%s failed: %s: %s", method, type(error).__name__, error)
            return error

    def _next(self) -> list[Command] | None:
        """The commands to carry out at once: [] after a while without any, None at the end."""
        if not self._taken and not self._take(_SECONDS_BETWEEN_SIGNS_OF_LIFE):
            return []
        self._gather()
        if self._is_stopping:
            return None
        first, *others = self._taken
        batch, rest = [first], []
        for i, command in enumerate(others):
            if first.joins is None or command.joins is None:
                rest += others[i:]  # it may change what a sampler draws
                break
            (batch if command.joins == first.joins else rest).append(command)
        self._taken = rest
        return batch

    def _gather(self) -> None:
        """Take what waits, and for a moment what is sent together with samples."""
        until = time.monotonic() + _SECONDS_TO_GATHER_AT_MOST
        while self._take(0):
            pass
        while all(command.joins for command in self._taken) and not self._is_stopping:
            if time.monotonic() > until or not self._take(_SECONDS_TO_GATHER):
                return

    def _take(self, seconds: float) -> bool:
        """Whether a command, or the call to stop, came in this time."""
        try:
            command = self._queue.get(timeout=seconds) if seconds else self._queue.get_nowait()
        except queue.Empty:
            return False
        if command is not None:
            self._taken.append(command)
        return True
