"""Separate ranks for generation: `rl.generator.ranks`.

Trainer ranks and generating ranks have separate default process groups. The trainer's rank 0 sends requests
and weights as one sequence of messages, so the weights for a request do not depend on timing. A generating
rank receives on one thread and samples on another.
"""

import os
import signal
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.build import derive_model_args
from torchtitan.config.checks import check_tokenizer_fits
from torchtitan.config.checks.common import refuse
from torchtitan.distributed.processes.process_group import find_peers, init_distributed, join_part
from torchtitan.distributed.processes.ranks import from_rank_zero
from torchtitan.job import find_train_spec
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.rank_layout import parallel_dims_of, set_device
from torchtitan.rl.checks import weights_of_generator
from torchtitan.rl.generator import BufferedGenerator, PolicyModel, build_copy
from torchtitan.rl.job_config import JobConfig, longest_episode
from torchtitan.rl.rollout import Draws, LostGeneratorError, Request, Share, episodes_of
from torchtitan.rl.tasks import Task, build_task
from torchtitan.rl.types import Episode
from torchtitan.rl.weight_transport import (
    Pairs,
    PolicyWeights,
    ReceivedWeights,
    StagedWeights,
    WeightChanges,
    broadcast_object,
    hand_over,
    pickled,
    received_object,
    send_weights,
    unpickled,
)
from torchtitan.tools import host
from torchtitan.tools.errors import ConfigError
from torchtitan.tools.logging import logger
from torchtitan.tools.signals import SIGNALS
from torchtitan.tools.utils import use_device

T = TypeVar("T")


def join_role(job_config: JobConfig) -> tuple[bool, "Link | None", int]:
    """Split torchrun's ranks into trainers and generators, and join the default group of this rank's role.

    Returns whether this rank generates, this rank's link (None on trainer ranks other than rank 0), and the
    number of trainers, which is the first generator's global rank. Afterwards RANK and WORLD_SIZE count
    the ranks of this role only. Collective over all ranks. Raises ConfigError if a process group exists
    already, or if no rank is left to train.
    """
    n_apart = job_config.rl.generator.ranks
    if dist.is_initialized():
        raise ConfigError(
            f"rl.generator.ranks = {n_apart} makes a process group for each role, but a group of all "
            "ranks exists already; do not create that group"
        )
    n_trainers = job_config.trainer_ranks(int(os.environ.get("WORLD_SIZE", "1")))
    timeout = timedelta(seconds=job_config.comm.init_timeout_seconds)
    store, rank, _ = find_peers(timeout)
    generates, link = rank >= n_trainers, None
    if generates:
        join_part("generators", rank - n_trainers, n_apart)
    else:
        join_part("trainers", rank, n_trainers)
    set_device()
    enable_cpu_backend = job_config.training.enable_cpu_offload
    init_distributed(job_config.comm, enable_cpu_backend, job_config.job.dump_folder)
    if generates or rank == 0:
        member = rank - n_trainers + 1 if generates else 0
        link = Link(dist.PrefixStore("rl_link", store), member, n_apart + 1, timeout)
    return generates, link, n_trainers


class Link:
    """The connection between the trainer's rank 0, which is member 0, and the ranks that generate.

    Member 0 broadcasts messages and weights in the gloo group `down`; members answer in a second group.
    timeout: how long member 0 waits for a member. A dead rank is noticed at once.
    """

    def __init__(self, store: dist.Store, member: int, size: int, timeout: timedelta):
        self.size = size
        # Other members wait without a limit, because the trainer may take long between two messages.
        limit, gloo = timedelta(days=365), dist.distributed_c10d.ProcessGroupGloo
        down, up = (dist.PrefixStore(name, store) for name in ("down", "up"))
        self.down: Any = gloo(down, member, size, limit if member else timeout)
        self._up: Any = gloo(up, member, size, timeout)
        self._unsent: deque[tuple[Any, Tensor]] = deque()

    def broadcast(self, message: Any) -> None:
        broadcast_object(self.down, message)

    def send_weights(self, weights: StagedWeights, changes: WeightChanges | None) -> None:
        send_weights(weights, self.down, changes)

    def send(self, answer: Any) -> None:
        """Send member 0 an answer, without waiting until it is received."""
        for tensor in pickled(answer):
            self._unsent.append((self._up.send([tensor], 0, 0), tensor))
        while self._unsent and self._unsent[0][0].is_completed():
            self._unsent.popleft()

    def receive_from_all(self) -> list[Any]:
        """Return the next answer of each other member; called on member 0."""
        members = range(1, self.size)
        return [unpickled(lambda x, m=member: self._up.recv([x], m, 0)) for member in members]


# ---- on the ranks that train ----


class RemoteGenerator:
    """The trainer ranks' side of the link; rank 0 sends in the background. Arguments are from `join_role`."""

    policy_version = -1
    weight_names: Literal["shared", "ours", "hf", "adapters"] = "ours"
    weight_dtype: torch.dtype | None = None

    def __init__(self, link: Link | None, first_generator: int):
        self._link, self._first_generator = link, first_generator
        self._thread = None if link is None else ThreadPoolExecutor(1, "messages")
        self._weights_sent: Future | None = None
        self._changes: WeightChanges | None = None
        self._n_requests = self._n_received = 0
        self._answers: dict[int, list[Share]] = {}  # request number -> unread answers
        self._failure: Exception | None = None  # after a failure, nothing is sent or received

    def take_policy(self, policy: PolicyModel) -> None:
        """Set the naming scheme and dtype of the weights to send. Raises ConfigError if
        `rl.generator.rescore` is set and the generators' policy would differ from the trainer's.
        """
        rl = policy.job_config.rl
        refuse(weights_of_generator(rl, policy.compute_dtype_name))
        self._changes = WeightChanges() if rl.weight_sync.delta else None
        self.weight_dtype = policy.generator_dtype
        if rl.generator.backend == "local":
            self.weight_dtype = self.weight_dtype or policy.compute_dtype
        else:
            self.weight_names = "adapters" if rl.generator.adapters else "hf"

    def update_weights(self, weights: PolicyWeights, *, check_digest: bool = True) -> None:
        """Wait until the last update is sent; copy the weights to the host and send them. Collective.

        If sending fails, the next wait for episodes raises.
        """
        if self._weights_sent is not None:
            self._weights_sent.result()

        def stage(pairs: Pairs) -> None:
            if self._link is not None and self._failure is None:
                staged = StagedWeights(weights, pairs, torch.device("cpu"))
                self._weights_sent = self._send(("weights", check_digest), staged)

        if (failure := hand_over(weights, stage)) is not None:
            raise failure
        self.policy_version = weights.version

    def begin(self, request: Request) -> Callable[[], list[Episode]]:
        """Send a request to all generating ranks; see `rollout.DrawsEpisodes`. The returned function
        raises LostGeneratorError if a generating rank is gone, RunError if one failed.
        """
        self._n_requests += 1
        number, sent = self._n_requests, self._send(("draw", request))

        def episodes() -> list[Episode]:
            # Wait for the send in a separate collective with its own timeout, as weights may be sent first.
            from_rank_zero(lambda: sent.result())
            return from_rank_zero(partial(self._answer, number))

        return episodes

    def _answer(self, number: int) -> list[Episode]:
        """Wait for the episodes of a request; called on rank 0."""
        while number not in self._answers:
            of_ranks = self._unless_failed(self._link.receive_from_all)
            if self._failure is not None:
                raise self._failure
            self._n_received += 1
            self._answers[self._n_received] = of_ranks
        return episodes_of(self._answers.pop(number), self._first_generator)

    def close(self) -> None:
        """Tell the generating ranks to end. Safe to call twice."""
        if self._thread is not None:
            self._send(None)
            self._thread.shutdown()
            self._thread = None

    def _send(self, message: Any, weights: StagedWeights | None = None) -> Future | None:
        """Send a message, then the weights, on the thread "messages"; return None on ranks without a link."""
        if self._thread is None:
            return None

        def send() -> None:
            self._link.broadcast(message)
            if weights is not None:
                self._link.send_weights(weights, self._changes)

        return self._thread.submit(self._unless_failed, send)

    def _unless_failed(self, communicate: Callable[[], T]) -> T | None:
        if self._failure is None:
            try:
                return communicate()
            except RuntimeError as error:
                # gloo raises RuntimeError if it loses a connection.
                cause = str(error).partition("\n")[0]
                self._failure = LostGeneratorError(
                    f"a rank that generates (rank {self._first_generator} or a later rank) is gone or "
                    f"does not answer: {cause}"
                )
            except Exception as error:
                self._failure = error
        return None


# ---- on a rank that generates ----


class GeneratorRank:
    """A generating rank's counterpart of `Controller`: draws and grades episodes for the trainer."""

    def __init__(
        self, job_config: JobConfig, link: Link, n_trainers: int, task: Task | None = None
    ):
        self._link = link
        host.move_in(self)
        spec, device = find_train_spec(job_config), set_device()
        dims = parallel_dims_of(job_config, spec, device, n_trainers)
        model_args = derive_model_args(job_config, spec)
        task = task_of_job(job_config, spec, model_args, task)
        policy = PolicyModel(job_config, spec, model_args, dims, device)
        generator, in_flight = build_copy(policy), job_config.rl.generator.in_flight
        self.generator = BufferedGenerator(generator, in_flight=in_flight)
        self._changes = WeightChanges()
        # `Draws` needs no thread, because sampling runs on `_thread`.
        self._draws = Draws(task, self.generator, device, ahead=False)
        self._thread = ThreadPoolExecutor(1, "draws", initializer=use_device, initargs=(device,))

    def train(self) -> None:
        """Serve until the trainer ends; raises RuntimeError if the connection to the trainer is lost.

        Ignores stop signals, because the trainer still needs episodes for its checkpoint.
        """
        before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
        logger.info("generating for the ranks that train")
        try:
            while (message := received_object(self._link.down)) is not None:
                kind, argument = message
                if kind == "weights":
                    weights = ReceivedWeights(self._link.down, self._changes)
                    self.generator.update_weights(weights, check_digest=argument)
                else:
                    self._thread.submit(self._answer, self._draws.begin_share(argument))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _answer(self, draw: Callable[[], list[Episode]]) -> None:
        try:
            answer: Share = draw()
        except Exception as error:
            # Send the error to the trainer, which raises it.
            answer = repr(error)
        # Ignore a lost connection here, because `train` raises for it.
        with suppress(RuntimeError):
            self._link.send(answer)

    def close(self) -> None:
        """Finish the current request and close the task. Safe to call twice."""
        self._thread.shutdown(cancel_futures=True)
        self._draws.close()
        host.move_out(self)


def task_of_job(
    job_config: JobConfig, spec: TrainSpec, model_args: Any, task: Task | None = None
) -> Task:
    """Return the given task, or build the config's.

    Raises ConfigError if the task's tokenizer does not fit the model, or if max_turns > 1 and the task
    never replies.
    """
    if task is None:
        build_tokenizer = spec.build_tokenizer_fn
        tokenizer = None if build_tokenizer is None else build_tokenizer(job_config)
        longest_prompt = longest_episode(job_config) - job_config.rl.sampling.max_tokens
        task = build_task(job_config.rl, tokenizer, longest_prompt)
    check_tokenizer_fits(task.tokenizer, model_args)
    if job_config.rl.task.max_turns > 1 and not task.replies:
        raise ConfigError(
            f"rl.task.max_turns = {job_config.rl.task.max_turns} is for tasks that reply to the policy, "
            f"got {type(task).__name__}; set it to 1, or write the task's `reply`"
        )
    return task
