"""Ranks that only generate, beside the ranks that train: `rl.generator.ranks`.

Each role has a default process group of its own, in which everything works as in a job of only
these ranks. The trainer's rank 0 tells the generating ranks what to draw, in the order in which it
wants it, and sends them the weights in between. They receive on one thread and draw on another, so
the trainer waits for neither; which weights a draw uses follows from that order, not from how long
anything takes.
"""

import os
import pickle
import signal
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NamedTuple

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
from torchtitan.rl.checks import rescoring
from torchtitan.rl.generator import BufferedGenerator, PolicyModel, build_copy
from torchtitan.rl.job_config import JobConfig, batch_seq_len
from torchtitan.rl.rollout import Draws, LostGeneratorError, Request
from torchtitan.rl.tasks import Task, build_task
from torchtitan.rl.types import Episode
from torchtitan.rl.weight_sync import PolicyWeights, ReceivedWeights, send_weights
from torchtitan.tools import host
from torchtitan.tools.errors import ConfigError, RunError
from torchtitan.tools.logging import logger
from torchtitan.tools.signals import SIGNALS
from torchtitan.tools.utils import use_device

_CPU = torch.device("cpu")


class Role(NamedTuple):
    """generates: whether this rank draws, or trains. link: None on trainer ranks but the first.

    first_generator: number of the first generating rank in the whole job.
    """

    generates: bool
    link: "Link | None"
    first_generator: int


def join_role(job_config: JobConfig) -> Role:
    """Divide torchrun's ranks by `rl.generator.ranks`, and join the default group of this one's role.

    From then on RANK and WORLD_SIZE are those within the role. Collective over all ranks.
    Raises ConfigError if a process group exists already, or no ranks are left to train.
    """
    n_apart = job_config.rl.generator.ranks
    if dist.is_initialized():
        raise ConfigError(
            f"rl.generator.ranks = {n_apart} gives the roles process groups of their own, and there "
            "is one of all ranks already; start without it"
        )
    n_trainers = job_config.trainer_ranks(int(os.environ.get("WORLD_SIZE", "1")))
    timeout = timedelta(seconds=job_config.comm.init_timeout_seconds)
    store, rank, _ = find_peers(timeout)
    generates = rank >= n_trainers
    if generates:
        join_part("generators", rank - n_trainers, n_apart)
    else:
        join_part("trainers", rank, n_trainers)
    set_device()
    enable_cpu_backend = job_config.training.enable_cpu_offload
    init_distributed(job_config.comm, enable_cpu_backend, job_config.job.dump_folder)
    link = None
    if generates or rank == 0:
        link = Link(
            dist.PrefixStore("rl_link", store),
            rank - n_trainers + 1 if generates else 0,
            n_apart + 1,
            timeout,
        )
    return Role(generates, link, n_trainers)


class Link:
    """Between the trainer's rank 0, which is member 0, and the ranks that generate.

    timeout: how long member 0 waits for an answer; it notices at once if a rank dies.
    down: the group in which member 0 sends messages to all, one after another.
    """

    def __init__(self, store: dist.Store, member: int, size: int, timeout: timedelta):
        self.size = size
        # Between two messages the trainer may do anything.
        down, forever = dist.PrefixStore("down", store), timedelta(days=365)
        self.down = _gloo_group(down, member, size, forever)
        self._up = _gloo_group(dist.PrefixStore("up", store), member, size, timeout)
        self._unsent: deque[tuple[Any, Tensor]] = deque()

    def broadcast(self, message: Any = None) -> Any:
        """Member 0's message, on every member."""
        box = [message]
        with _errors_of_gloo():
            dist.broadcast_object_list(box, group=self.down, group_src=0)
        return box[0]

    def send_weights(self, weights: PolicyWeights) -> None:
        """Member 0's, which the others `receive_weights`."""
        with _errors_of_gloo():
            send_weights(weights, self.down, 0)

    def receive_weights(self, generator: BufferedGenerator, check_digest: bool) -> None:
        with _errors_of_gloo():
            weights = ReceivedWeights(self.down, 0, _CPU)
            generator.update_weights(weights, check_digest=check_digest)

    def send(self, answer: Any) -> None:
        """Send member 0 an answer, without waiting until it takes it."""
        data = torch.frombuffer(bytearray(pickle.dumps(answer)), dtype=torch.uint8)
        for tensor in (torch.tensor([len(data)]), data):
            self._unsent.append((self._up.send([tensor], 0, 0), tensor))
        while self._unsent and self._unsent[0][0].is_completed():
            self._unsent.popleft()

    def receive_from_all(self) -> list[Any]:
        """The next answer of each other member, on member 0."""
        answers = []
        for member in range(1, self.size):
            length = torch.zeros(1, dtype=torch.int64)
            self._up.recv([length], member, 0).wait()
            data = torch.empty(int(length), dtype=torch.uint8)
            self._up.recv([data], member, 0).wait()
            answers.append(pickle.loads(data.numpy().tobytes()))
        return answers


@contextmanager
def _errors_of_gloo() -> Iterator[None]:
    """Raise what a lost connection raises: torch looks a failed group up where ours are not listed,
    and raises that in its place."""
    try:
        yield
    except ValueError as error:
        first: BaseException = error
        while first.__context__ is not None:
            first = first.__context__
        raise first from None


def _gloo_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """A group of ranks that have no default group in common."""
    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    backend = dist.ProcessGroupGloo(store, rank, size, timeout)
    group._register_backend(_CPU, kind, backend)
    group._set_default_backend(kind)
    return group


# ---- on the ranks that train ----


class RemoteGenerator:
    """The generating ranks, for the ranks that train; `weight_sync.WeightSync` gives it weights.

    link, first_generator: of this rank's `Role`.
    """

    policy_version = -1
    weight_names: Literal["shared", "ours", "hf"] = "ours"
    weight_dtype: torch.dtype | None = None

    def __init__(self, link: Link | None, first_generator: int):
        self._link, self._first_generator = link, first_generator
        self._n_asked = self._n_received = 0
        # Answers that came before they were wanted: number of the question -> what each rank said
        self._answers: dict[int, list[tuple[list[Episode], str | None]]] = {}
        self._loss: str | None = None  # why the connection is gone
        self._is_closed = False

    def take_policy(self, policy: PolicyModel) -> None:
        """Learn in what form the generating ranks want the weights.

        Raises ConfigError if they would not draw what `rl.generator.rescore` stands for.
        """
        refuse(rescoring(policy.job_config.rl, policy.compute_dtype_name))
        self.weight_dtype = policy.generator_dtype
        if policy.job_config.rl.generator.backend != "local":
            self.weight_names = "hf"
        else:
            self.weight_dtype = self.weight_dtype or policy.compute_dtype

    def update_weights(self, weights: PolicyWeights, *, check_digest: bool = True) -> None:
        """Send the weights; the next draws that are asked for use them. Collective.

        If a generating rank is gone, the next `answer` says so.
        """
        pairs = _OnHost(weights)
        if self._link is not None:
            self._say(("weights", check_digest))
            self._unless_lost(lambda: self._link.send_weights(pairs))
        for _ in pairs:  # what was not sent: gathering it is collective
            pass
        self.policy_version = weights.version

    def ask(self, request: Request) -> int:
        """Have all generating ranks draw and grade; returns the question's number."""
        self._n_asked += 1
        self._say(("draw", request))
        return self._n_asked

    def answer(self, number: int) -> list[Episode]:
        """The episodes that a question asked for, on rank 0.

        Raises LostGeneratorError if a generating rank is gone, RunError if it could not draw.
        """
        while number not in self._answers:
            of_ranks = self._unless_lost(self._link.receive_from_all)
            if self._loss is not None:
                raise LostGeneratorError(
                    f"a rank that generates, one from rank {self._first_generator} on, is gone or "
                    f"does not answer: {self._loss}"
                )
            self._n_received += 1
            self._answers[self._n_received] = of_ranks
        answers = self._answers.pop(number)
        for rank, (_, failure) in enumerate(answers, start=self._first_generator):
            if failure is not None:
                raise RunError(f"rank {rank} could not draw or grade its episodes: {failure}")
        return [episode for episodes, _ in answers for episode in episodes]

    def close(self) -> None:
        """Have the generating ranks end. Safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            self._say(None)

    def _say(self, message: Any) -> None:
        if self._link is not None:
            self._unless_lost(lambda: self._link.broadcast(message))

    def _unless_lost(self, communicate: Callable[[], Any]) -> Any:
        if self._loss is None:
            try:
                return communicate()
            except RuntimeError as error:  # gloo's, of a connection
                self._loss = str(error).partition("\n")[0]
        return None


class _OnHost:
    """Weights whose tensors come on the CPU; an iteration goes on where one before has stopped."""

    def __init__(self, weights: PolicyWeights):
        self._weights, self._pairs = weights, iter(weights)

    @property
    def version(self) -> int:
        return self._weights.version

    @property
    def digest(self) -> str | None:
        return self._weights.digest

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._pairs:
            yield name, tensor.cpu()


class RemoteDraws(Draws):
    """Has the generating ranks complete and grade prompts."""

    def __init__(self, generator: RemoteGenerator):
        self._remote = generator

    def begin(self, request: Request) -> Callable[[], list[Episode]]:
        return partial(self._remote.answer, self._remote.ask(request))

    def of_all_ranks(self, share: Callable[[], list[Episode]]) -> list[Episode]:
        return from_rank_zero(share)

    def close(self) -> None:
        self._remote.close()


# ---- on a rank that generates ----


class GeneratorRank:
    """Draws and grades what the trainer asks for, until it ends; in the place of a `Controller`.

    Raises ConfigError for a config that cannot run.
    """

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
        try:
            generator, in_flight = build_copy(policy), job_config.rl.generator.in_flight
            self.generator = BufferedGenerator(generator, in_flight=in_flight)
        except ImportError as error:
            raise ConfigError(str(error)) from error
        # What it begins is drawn on the thread below.
        self._draws = Draws(task, self.generator, device, ahead=False)
        self._thread = ThreadPoolExecutor(1, "draws", initializer=use_device, initargs=(device,))

    def train(self) -> None:
        """Serve until the trainer is done.

        Signals that ask a run to end are left to the ranks that train: they still need episodes for
        their checkpoint. Raises RuntimeError if the trainer is gone.
        """
        before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
        logger.info("generating for the ranks that train")
        try:
            while (message := self._link.broadcast()) is not None:
                kind, argument = message
                if kind == "weights":
                    self._link.receive_weights(self.generator, argument)
                else:
                    self._thread.submit(self._answer, self._draws.begin(argument))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _answer(self, draw: Callable[[], list[Episode]]) -> None:
        try:
            answer: tuple[list[Episode], str | None] = draw(), None
        except Exception as error:  # the trainer raises it
            answer = [], repr(error)
        with suppress(RuntimeError):  # the trainer is gone, which the other thread notices, too
            self._link.send(answer)

    def close(self) -> None:
        """Finish what is being drawn, and the task's processes. Safe to call twice."""
        self._thread.shutdown(cancel_futures=True)
        self._draws.close()
        host.move_out(self)


def task_of_job(
    job_config: JobConfig, spec: TrainSpec, model_args: Any, task: Task | None = None
) -> Task:
    """The job's task, or the given one in its place.

    Raises ConfigError if its tokenizer does not fit the model, or it never replies and
    `rl.task.max_turns` says that it does.
    """
    if task is None:
        build_tokenizer = spec.build_tokenizer_fn
        tokenizer = None if build_tokenizer is None else build_tokenizer(job_config)
        longest_prompt = batch_seq_len(job_config) + 1 - job_config.rl.sampling.max_tokens
        task = build_task(job_config.rl, tokenizer, longest_prompt)
    check_tokenizer_fits(task.tokenizer, model_args)
    if job_config.rl.task.max_turns > 1 and not task.replies:
        raise ConfigError(
            f"rl.task.max_turns = {job_config.rl.task.max_turns} is for tasks that reply to the "
            f"policy, got {type(task).__name__}, which never does; set it to 1, or write the task's "
            "`reply`"
        )
    return task
