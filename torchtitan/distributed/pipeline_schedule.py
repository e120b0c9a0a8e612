"""Running torch's pipeline schedules on any number of microbatches, of any shapes.

The caller splits the batch: each microbatch has its own positions and masks, and its own number of
rows and tokens. No microbatch is padded. Torch's schedules only provide the order of actions (see
`pipeline_order`); the stages (`pipeline_stage`) and the messages between them are ours.

B rows, T tokens of a microbatch's input.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    get_schedule_class,
)
from torch.profiler import record_function

from torchtitan.distributed import pipeline_order, tied_copies
from torchtitan.distributed.fsdp import (
    reduce_accumulated_gradients,
    reshard_model,
    sum_gradients,
)
from torchtitan.distributed.pipeline_order import Action
from torchtitan.distributed.pipeline_stage import ContextFactory, InputShape, PipelineStage
from torchtitan.tools import torch_parts

LossFunction = Callable[[Any, Any], Any]
"""(output of the last stage, target) -> loss"""

# Number of cached orders. Each number of microbatches has its own order.
_MAX_ORDERS = 16


class PipelineSchedule:
    """Runs a schedule of torch on microbatches of any shapes. All ranks of the pipeline call `step` and
    `eval` together, with the same number of microbatches, which may change from call to call.

    name: the name of torch's schedule, in upper or lower case.
    stages: this rank's stages, in the order of the model.
    loss_fn: (output, target) -> loss, a sum over tokens; the default of calls without a loss_fn.
    n_microbatches: the number of microbatches that a whole batch is split into.
    csv_path: a file with an order of actions, which replaces the named schedule's order.

    replicas: a mesh of ranks that hold the same stages unsharded; each `step` sums gradients over it.
    """

    def __init__(
        self,
        name: str,
        stages: Sequence[PipelineStage],
        loss_fn: LossFunction | None,
        n_microbatches: int,
        csv_path: str = "",
    ):
        self.schedule_class = get_schedule_class(name)
        self.stages = list(stages)
        self.loss_fn = loss_fn
        self.n_microbatches = n_microbatches
        self.csv_path = csv_path
        self.replicas: DeviceMesh | None = None
        self.group = self.stages[0].group
        self.num_stages = self.stages[0].num_stages
        self.has_first_stage = any(stage.is_first for stage in self.stages)
        self.has_last_stage = any(stage.is_last for stage in self.stages)
        self._is_connected = False
        # If torch's schedule refuses these stages, it raises here.
        self.rank_of = pipeline_order.rank_of_stages(self._order(n_microbatches))
        self._rank = self.stages[0].group_rank
        ours = sorted(stage for stage, rank in self.rank_of.items() if rank == self._rank)
        held = [stage.stage_index for stage in self.stages]
        if ours != held:
            raise ValueError(
                f"parallelism.pipeline_parallel_schedule_csv = {csv_path!r} assigns stages {ours} to "
                f"rank {self._rank}, which owns {held}; rank r of p must have stages r, r + p, r + 2p, "
                "... (or r and its mirror image with a V-shaped schedule's name)"
            )
        self._actions = functools.lru_cache(_MAX_ORDERS)(self._make_actions)

    def step(self, *args: Any, **kwargs: Any) -> list[Any] | Any | None:
        """Forward and backward of all microbatches; gradients accumulate in the parameters.

        Gradients are reduced over data-parallel ranks once, after the last microbatch of the call.

        Call it with lists, where entry i of each list belongs to microbatch i:

            step(arg_mbs=[(inputs,), ...], kwarg_mbs=[{...}, ...], target_mbs=[...], losses=[])

        arg_mbs: inputs [B, T]; only the rank of the first stage reads them.
        kwarg_mbs: keywords of the model's forward, on every rank.
        target_mbs: targets of the loss function, any objects; on the rank of the last stage.
        losses: a list, filled with the losses on the rank of the last stage.
        return_outputs: return the outputs, in order, on the rank of the last stage (the default).
        loss_fn: replaces the schedule's loss function in this call.
        input_shapes: (B, T) of every microbatch, on all ranks or on none. If missing, the first
            stage's rank broadcasts the shapes, and the other ranks wait for them.
        context_mbs: per microbatch, a factory of context managers for its forwards and backwards.

        Or call it with a whole batch, `step(inputs, target=labels, losses=[], **keywords)`, which is
        split into `n_microbatches`; the outputs are concatenated.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("step() computes gradients, but gradients are disabled; call eval()")
        return self._run(False, *args, **kwargs)

    @torch.no_grad()
    def eval(self, *args: Any, **kwargs: Any) -> list[Any] | Any | None:
        """Run only the forward of all microbatches, with `step`'s arguments; no loss without targets."""
        return self._run(True, *args, **kwargs)

    def broadcast_from_last_stage(self, tensor: Tensor) -> Tensor:
        """Broadcast the tensor of the last stage's rank to the pipeline's ranks, in place."""
        dist.broadcast(tensor, self._global_rank_of(self.num_stages - 1), group=self.group)
        return tensor

    def tree_from_last_stage(self, tree: Any) -> Any:
        """Return the tree of the last stage's rank on all ranks of the pipeline. Collective.

        tree: a tree of tensors and other objects that can be pickled; ignored on the other ranks.
        Tensors are returned on this rank's device, detached.
        """
        device, tree_map_only = self.stages[0].device, torch_parts.pytree.tree_map_only
        box = [None]
        if self.has_last_stage:
            tree = tree_map_only(Tensor, lambda x: x.detach().to(device).contiguous(), tree)
            box = [tree_map_only(Tensor, lambda x: x.to("meta"), tree)]
        dist.broadcast_object_list(
            box, self._global_rank_of(self.num_stages - 1), group=self.group, device=device
        )
        if not self.has_last_stage:
            tree = tree_map_only(Tensor, lambda x: torch.empty_like(x, device=device), box[0])
        return tree_map_only(Tensor, self.broadcast_from_last_stage, tree)

    # ---- one call ----

    def _run(
        self,
        forward_only: bool,
        *args: Any,
        target: Tensor | None = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_fn: LossFunction | None = None,
        input_shapes: list[InputShape] | None = None,
        context_mbs: Sequence[ContextFactory] | None = None,
        **kwargs: Any,
    ) -> list[Any] | Any | None:
        is_split = not (arg_mbs is None and kwarg_mbs is None and target_mbs is None)
        if is_split and (args or kwargs or target is not None):
            raise ValueError(
                "give a pipeline either lists of microbatches or a whole batch, got lists together with "
                f"{len(args)} positional argument(s), keywords {sorted(kwargs)} and "
                f"{'no' if target is None else 'a'} target"
            )
        if not is_split:
            n = self.n_microbatches
            if args or kwargs:
                arg_mbs, kwarg_mbs = split_args_kwargs_into_chunks(args, kwargs, n)
            else:
                kwarg_mbs = [{}] * n
            target_mbs = None if target is None else list(torch.tensor_split(target, n))
        lists = {"arg_mbs": arg_mbs, "kwarg_mbs": kwarg_mbs, "target_mbs": target_mbs}
        lists |= {"input_shapes": input_shapes, "context_mbs": context_mbs}
        loss_fn = loss_fn or self.loss_fn
        n = self._check_lists(lists, needs_loss=not forward_only, loss_fn=loss_fn)

        if not self._is_connected:
            # All ranks have to create NCCL's communicator of the group, but a send involves only two ranks.
            dist.all_reduce(torch.zeros(1, device=self.stages[0].device), group=self.group)
            self._is_connected = True
        if input_shapes is None:
            input_shapes = self._exchange_input_shapes(arg_mbs, n)
        for stage in self.stages:
            stage.begin_step(input_shapes, not forward_only, context_mbs)
        call = _Call(self, arg_mbs, kwarg_mbs or [{}] * n, target_mbs, loss_fn, return_outputs)
        try:
            with self._summed(forward_only):
                call.run(self._actions(n, forward_only))
        finally:
            for stage in self.stages:
                stage.end_step()
                if forward_only:
                    # Without backward, parameters stay gathered; optimizers need the shards.
                    reshard_model(stage.submod)
        if losses is not None:
            losses[:] = call.losses
        if not (return_outputs and self.has_last_stage):
            return None
        return call.outputs if is_split else torch.cat(call.outputs)

    def _check_lists(
        self, lists: dict[str, Sequence[Any] | None], needs_loss: bool, loss_fn: LossFunction | None
    ) -> int:
        """Return the number of microbatches. Raises ValueError for lists that this rank cannot use."""
        lengths = {name: len(entries) for name, entries in lists.items() if entries is not None}
        if len(set(lengths.values())) != 1 or 0 in lengths.values():
            raise ValueError(
                f"a pipeline step needs lists of equal length, at least 1, got {lengths}; give every "
                "microbatch one entry in each list"
            )
        needed = {"arg_mbs": lists["arg_mbs"]} if self.has_first_stage else {}
        if self.has_last_stage and needs_loss:
            needed |= {"target_mbs": lists["target_mbs"], "loss_fn": loss_fn}
        if missing := [name for name, value in needed.items() if value is None]:
            raise ValueError(
                f"this pipeline rank needs {', '.join(missing)} for its stages, got None; pass them"
            )
        return next(iter(lengths.values()))

    def _exchange_input_shapes(
        self, arg_mbs: Sequence[tuple[Any, ...]] | None, n: int
    ) -> list[InputShape]:
        device = self.stages[0].device
        shapes = torch.zeros(n, 2, dtype=torch.int64, device=device)
        if self.has_first_stage:
            shapes = torch.tensor([mb[0].shape[:2] for mb in arg_mbs], device=device)
        dist.broadcast(shapes, self._global_rank_of(0), group=self.group)
        return [(rows, tokens) for rows, tokens in shapes.tolist()]

    def _global_rank_of(self, stage: int) -> int:
        return dist.get_global_rank(self.group or dist.group.WORLD, self.rank_of[stage])

    @contextmanager
    def _summed(self, forward_only: bool) -> Iterator[None]:
        """Sum new gradients over `replicas`, and a tied embedding's gradient over its two copies.

        Gradients of earlier `step` calls are summed already, so they are set aside and added at the end.
        """
        parts = [stage.submod for stage in self.stages]
        parameters = copies = tied_copies.trained_copies_in(parts)
        if self.replicas is not None:
            parameters = [p for part in parts for p in part.parameters() if p.requires_grad]
        if forward_only or not parameters:
            yield
            return
        earlier = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
            if self.replicas is not None:
                sum_gradients(parameters, self.replicas)
            if copies:
                other = self.num_stages - 1 if self.has_first_stage else 0
                tied_copies.sum_gradients(copies, self.group, self.rank_of[other])
        except BaseException:
            # Drop the gradients of the failed call, and keep those of the calls before it.
            for parameter, gradient in zip(parameters, earlier, strict=True):
                parameter.grad = gradient
            raise
        for parameter, gradient in zip(parameters, earlier, strict=True):
            if gradient is not None:
                parameter.grad += gradient

    # ---- the order of actions ----

    def _make_actions(self, n: int, forward_only: bool) -> list[Action]:

        order = pipeline_order.select(self._order(n), n, forward_only)
        order[self._rank] = pipeline_order.with_reductions(order[self._rank])
        actions = pipeline_order.with_messages(order, self.rank_of)[self._rank]
        return pipeline_order.with_resharding(actions)

    def _order(self, n: int) -> pipeline_order.Order:
        """Return the order of n microbatches, or of the next larger number that torch's schedule accepts."""
        planned = n
        if issubclass(self.schedule_class, ScheduleDualPipeV):
            planned = max(n, self.num_stages)
        if issubclass(self.schedule_class, ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble):
            # Torch needs rounds of equal size: it runs max(1, n // num_ranks) rounds.
            num_ranks = self.stages[0].group_size
            if n % max(1, n // num_ranks):
                planned = -(-n // num_ranks) * num_ranks
        order = pipeline_order.compute_order(
            self.schedule_class, self.stages, planned, self.csv_path
        )
        ordered = 1 + max((a.microbatch for row in order.values() for a in row), default=-1)
        if n > ordered:
            raise ValueError(
                f"parallelism.pipeline_parallel_schedule_csv = {self.csv_path!r} orders {ordered} "
                f"microbatches, got {n}; give fewer, or a longer file"
            )
        return order


@dataclass
class _Call:
    """One call of `step` or `eval` on this rank. `run` fills the last stage's losses and outputs."""

    _schedule: PipelineSchedule
    _args: Sequence[tuple[Any, ...]] | None
    _kwargs: Sequence[dict[str, Any]]
    _targets: Sequence[Any] | None
    _loss_fn: LossFunction | None
    _keeps_outputs: bool

    def __post_init__(self) -> None:
        self.losses: list[Any] = []
        self.outputs: list[Any] = []
        self._stages = {stage.stage_index: stage for stage in self._schedule.stages}
        # (F or B, stage, microbatch) -> the stage's incoming hidden states (F) or gradient (B).
        self._hidden: dict[tuple[str, int, int], Tensor] = {}
        self._receiving: dict[tuple[str, int, int], dist.Work] = {}
        # Keeps tensors alive until they are sent.
        self._sending: list[tuple[dist.Work, Tensor]] = []

    def run(self, actions: list[Action]) -> None:
        for action in actions:
            name = f"{action.kind} of stage {action.stage}, microbatch {action.microbatch}"
            with record_function(name):
                self._do(*action)
            # gloo completes a send only while this rank waits for it. The receiving rank starts the receive
            # before any action that depends on later actions of this rank, so the wait can't deadlock.
            longest = 4 * self._schedule.num_stages
            sending = self._sending
            while sending and (sending[0][0].is_completed() or len(sending) > longest):
                # Raises if the message got lost.
                sending.pop(0)[0].wait()
        for work, _ in self._sending:
            work.wait()

    def _do(self, kind: str, index: int, microbatch: int) -> None:
        stage = self._stages[index]
        following, preceding = ("F", index + 1, microbatch), ("B", index - 1, microbatch)
        match kind:
            case "F":
                output = self._forward(stage, microbatch)
                if not stage.is_last:
                    self._hidden[following] = output.detach()
                elif self._keeps_outputs:
                    self.outputs.append(output)
            case "B" | "I":
                backward = stage.backward if kind == "B" else stage.backward_input
                gradient = backward(microbatch, self._take("B", index, microbatch))
                if gradient is not None:
                    self._hidden[preceding] = gradient
            case "W":
                stage.backward_weight(microbatch)
            case "REDUCE":
                reduce_accumulated_gradients(stage.submod)
            case "RESHARD":
                reshard_model(stage.submod)
            case "SEND_F" | "SEND_B":
                target = following if kind == "SEND_F" else preceding
                tensor = self._hidden.pop(target).contiguous()
                self._sending.append((self._message(dist.isend, tensor, target[1]), tensor))
            case "RECV_F" | "RECV_B":
                key = kind[-1], index, microbatch
                source = index - 1 if kind == "RECV_F" else index + 1
                self._hidden[key] = stage.empty_hidden(microbatch)
                self._receiving[key] = self._message(dist.irecv, self._hidden[key], source)

    def _forward(self, stage: PipelineStage, microbatch: int) -> Any:
        def compute_loss(output: Any) -> Any:
            self.losses.append(self._loss_fn(output, self._targets[microbatch]))
            return self.losses[-1]

        if stage.is_first:
            args = self._args[microbatch]
        else:
            args = (self._take("F", stage.stage_index, microbatch),)
        computes_loss = stage.is_last and self._loss_fn is not None and self._targets is not None
        loss = compute_loss if computes_loss else None
        return stage.forward(microbatch, args, self._kwargs[microbatch], loss)

    def _take(self, *key: Any) -> Tensor | None:
        if key in self._receiving:
            self._receiving.pop(key).wait()
        return self._hidden.pop(key, None)

    def _message(self, operation: Callable[..., Any], tensor: Tensor, stage: int) -> dist.Work:
        """Start to send to, or receive from, the rank of another stage."""
        peer = self._schedule.rank_of[stage]
        message = dist.P2POp(operation, tensor, group=self._schedule.group, group_peer=peer)
        (work,) = dist.batch_isend_irecv([message])
        return work
