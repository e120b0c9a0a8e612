"""Running torch's pipeline schedules on any number of microbatches, of any shapes.

Any schedule of torch.distributed.pipelining runs here. The caller splits the batch: each microbatch
has its own positions and masks, and its own number of rows and tokens. No microbatch is padded, and
stages don't negotiate shapes (see `pipeline_stage`). Torch gives the order of the work, as a table
(see `pipeline_order`); stages and messages are ours, on every version of torch.

B rows, T tokens of a microbatch's input.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

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

from torchtitan.distributed import tied_copies
from torchtitan.distributed.fsdp import reshard_model, sum_gradients
from torchtitan.distributed.pipeline_order import (
    Action,
    Order,
    compute_order,
    rank_of_stages,
    select,
    with_messages,
    with_reductions,
    with_resharding,
)
from torchtitan.distributed.pipeline_stage import ContextFactory, InputShape, PipelineStage
from torchtitan.tools import torch_parts

LossFunction = Callable[[Any, Any], Any]
"""(output of the last stage, target) -> loss"""

_MAX_ORDERS = 16  # cached, one per number of microbatches


class Microbatches(NamedTuple):
    """What one call computes: entry i of each list belongs to microbatch i.

    targets: None on ranks without the last stage, and in calls that compute no loss.
    """

    args: Sequence[tuple[Any, ...]]
    kwargs: Sequence[dict[str, Any]]
    targets: Sequence[Any] | None


class PipelineSchedule:
    """Runs a schedule of torch on microbatches of any number and any shapes.

    All ranks of the pipeline call `step` and `eval` together, with the same number of
    microbatches. That number may change from call to call.

    name: the name of torch's schedule, in upper or lower case.
    stages: this rank's stages, in the order of the model.
    loss_fn: (output, target) -> loss, a sum over tokens: gradients are not scaled here. Used by calls
        without a loss_fn of their own, as clients of 0.2.x make them.
    n_microbatches: the number of microbatches that a whole batch is split into; only clients of 0.2.x
        call with a whole batch.
    csv_path: a file with an order of actions, which replaces the named schedule's order.

    Attribute, set after construction:
    replicas: a mesh of ranks that hold the same stages unsharded and read different data. Each `step`
        sums gradients over it. None by default.
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
        self._rank_of = rank_of_stages(self._compute_order(n_microbatches))
        ours = sorted(stage for stage, rank in self._rank_of.items() if rank == self._rank)
        held = [stage.stage_index for stage in self.stages]
        if ours != held:
            raise ValueError(
                f"parallelism.pipeline_parallel_schedule_csv = {csv_path!r} assigns stages {ours} to "
                f"rank {self._rank}, which owns {held}; rank r must have stages r, r + p, r + 2p, "
                "... (or r and its mirror image with a V-shaped schedule's name)"
            )
        self._actions = functools.lru_cache(_MAX_ORDERS)(self._make_actions)

    def step(self, *args: Any, **kwargs: Any) -> list[Any] | Any | None:
        """Forward and backward of all microbatches; gradients accumulate in the parameters.

        They are reduced over data-parallel ranks once, after the last microbatch of the call: by FSDP,
        or over `replicas`.

        Call it with lists, where entry i of each list belongs to microbatch i:

            step(arg_mbs=[(inputs,), ...], kwarg_mbs=[{...}, ...], target_mbs=[...], losses=[])

        arg_mbs: inputs [B, T]; only the rank of the first stage reads them.
        kwarg_mbs: keywords of the model's forward, on every rank.
        target_mbs: targets of the loss function, any objects; on the rank of the last stage.
        losses: a list, to which the rank of the last stage appends the losses.
        return_outputs: keep the outputs, and return them in order, on the rank of the last stage.
            True by default, as in torch. Logits are large.
        loss_fn: replaces the schedule's loss function in this call.
        input_shapes: (B, T) of every microbatch, on all ranks or on none. If it is missing, the
            rank of the first stage broadcasts it, and the other ranks wait.
        context_mbs: a factory of context managers per microbatch. On each stage, the microbatch's
            forward and backward each run in a new context.

        Or call it with a whole batch, `step(inputs, target=labels, losses=[], **keywords)`, as clients of
        0.2.x do. The batch is split into `n_microbatches`, and the outputs are concatenated.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("step() computes gradients and they are disabled here; call eval()")
        return self._run(False, *args, **kwargs)

    @torch.no_grad()
    def eval(self, *args: Any, **kwargs: Any) -> list[Any] | Any | None:
        """Run only the forward of all microbatches; arguments and results are those of `step`.

        Computes no loss if there are no targets.
        """
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
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_fn: LossFunction | None = None,
        input_shapes: list[InputShape] | None = None,
        context_mbs: Sequence[ContextFactory] | None = None,
        **inputs: Any,
    ) -> list[Any] | Any | None:
        lists = {"input_shapes": input_shapes, "context_mbs": context_mbs}
        is_split, microbatches = self._microbatches(forward_only, args, lists, **inputs)
        if self.has_last_stage and not forward_only and (loss_fn or self.loss_fn) is None:
            raise ValueError(
                "a pipeline's step needs a loss function, got None; give loss_fn to this call or to the "
                "schedule"
            )
        self._connect()
        n = len(microbatches.args)
        if input_shapes is None:
            input_shapes = self._exchange_input_shapes(microbatches.args, n)
        for stage in self.stages:
            stage.begin_step(input_shapes, not forward_only, context_mbs)
        computed: list[Any] = []
        outputs: list[Any] | None = [] if return_outputs and self.has_last_stage else None
        try:
            with self._summed(forward_only):
                self._run_actions(
                    self._actions(n, forward_only),
                    microbatches,
                    loss_fn or self.loss_fn,
                    computed,
                    outputs,
                )
        finally:
            for stage in self.stages:
                stage.end_step()
                if forward_only:
                    # Without backward, parameters stay gathered, and neither the optimizer nor a
                    # checkpoint knows gathered parameters.
                    reshard_model(stage.submod)
        if losses is not None:
            losses[:] = computed
        return outputs if is_split or outputs is None else torch.cat(outputs)

    def _microbatches(
        self,
        forward_only: bool,
        args: tuple[Any, ...],
        more_lists: dict[str, Sequence[Any] | None],
        *,
        target: Tensor | None = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> tuple[bool, Microbatches]:
        """Return (did the caller split the batch?, the microbatches), after checks of their number."""
        is_split = not (arg_mbs is None and kwarg_mbs is None and target_mbs is None)
        if is_split and (args or kwargs or target is not None):
            raise ValueError(
                f"give a pipeline either lists of microbatches or a whole batch, got lists together "
                f"with {len(args)} positional argument(s), keywords {sorted(kwargs)} or target"
            )
        if not is_split:
            n = self.n_microbatches
            kwarg_mbs = [{}] * n
            if args or kwargs:
                arg_mbs, kwarg_mbs = split_args_kwargs_into_chunks(args, kwargs, n)
            target_mbs = None if target is None else list(torch.tensor_split(target, n))
        lists = {"arg_mbs": arg_mbs, "kwarg_mbs": kwarg_mbs, "target_mbs": target_mbs} | more_lists
        lengths = {name: len(entries) for name, entries in lists.items() if entries is not None}
        if not lengths or len(set(lengths.values())) > 1 or 0 in lengths.values():
            raise ValueError(
                f"a pipeline step needs lists of equal length, at least 1, got {lengths}; give every "
                "microbatch one entry in each list"
            )
        n = next(iter(lengths.values()))
        if self.has_first_stage and arg_mbs is None:
            raise ValueError("the rank with a pipeline's first stage needs arg_mbs, got None")
        if self.has_last_stage and target_mbs is None and not forward_only:
            raise ValueError("the rank with a pipeline's last stage needs target_mbs, got None")
        return is_split, Microbatches(
            [()] * n if arg_mbs is None else arg_mbs,
            [{}] * n if kwarg_mbs is None else kwarg_mbs,
            target_mbs if self.has_last_stage else None,
        )

    def _run_actions(
        self,
        actions: list[Action],
        microbatches: Microbatches,
        loss_fn: LossFunction | None,
        losses: list[Any],
        outputs: list[Any] | None,
    ) -> None:
        """Carry out this rank's actions; append the last stage's losses, and outputs unless None."""
        stages = {stage.stage_index: stage for stage in self.stages}
        # (F or B, stage, microbatch) -> the hidden states, or their gradient, that the stage needs.
        hidden: dict[tuple[str, int, int], Tensor] = {}
        receiving: dict[tuple[str, int, int], dist.Work] = {}
        sending: list[tuple[dist.Work, Tensor]] = []  # tensors have to live until they are sent

        def take(direction: str, index: int, microbatch: int) -> Tensor | None:
            key = direction, index, microbatch
            if key in receiving:
                receiving.pop(key).wait()
            return hidden.pop(key, None)

        def compute_loss(output: Any) -> Any:
            losses.append(loss_fn(output, microbatches.targets[microbatch]))
            return losses[-1]

        computes_loss = loss_fn is not None and microbatches.targets is not None
        for kind, index, microbatch in actions:
            stage = stages[index]
            following = ("F", index + 1, microbatch)
            preceding = ("B", index - 1, microbatch)
            with record_function(f"{kind} of stage {index}, microbatch {microbatch}"):
                if kind == "F":
                    args = microbatches.args[microbatch]
                    args = args if stage.is_first else (take("F", index, microbatch),)
                    loss = compute_loss if stage.is_last and computes_loss else None
                    output = stage.forward(microbatch, args, microbatches.kwargs[microbatch], loss)
                    if not stage.is_last:
                        hidden[following] = output.detach()
                    elif outputs is not None:
                        outputs.append(output)
                    del output
                elif kind in ("B", "I"):
                    backward = stage.backward if kind == "B" else stage.backward_input
                    gradient = backward(microbatch, take("B", index, microbatch))
                    if gradient is not None:
                        hidden[preceding] = gradient
                elif kind == "W":
                    stage.backward_weight(microbatch)
                elif kind == "REDUCE":
                    stage.reduce_gradients()
                elif kind == "RESHARD":
                    reshard_model(stage.submod)
                elif kind.startswith("SEND"):
                    target = following if kind == "SEND_F" else preceding
                    tensor = hidden.pop(target).contiguous()
                    sending.append((self._message(dist.isend, tensor, target[1]), tensor))
                else:
                    key = kind[-1], index, microbatch
                    source = index - 1 if kind == "RECV_F" else index + 1
                    hidden[key] = stage.empty_hidden(microbatch)
                    receiving[key] = self._message(dist.irecv, hidden[key], source)
            # gloo completes a send only when it is waited for. All receives precede what follows, so
            # waiting for an old send ends.
            while sending and (sending[0][0].is_completed() or len(sending) > 4 * self.num_stages):
                sending.pop(0)[0].wait()  # raises if the message got lost
        for work, _ in sending:
            work.wait()

    def _message(self, operation: Callable[..., Any], tensor: Tensor, stage: int) -> dist.Work:
        """Start to send to, or receive from, the rank of another stage."""
        message = dist.P2POp(operation, tensor, group=self.group, group_peer=self._rank_of[stage])
        (work,) = dist.batch_isend_irecv([message])
        return work

    def _connect(self) -> None:
        """Make the group's communicator, with all ranks taking part.

        NCCL makes it when the group is first used. Without this call that would be by a send to one
        neighbour, while the other ranks still wait for their first input.
        """
        if not self._is_connected:
            dist.all_reduce(torch.zeros(1, device=self.stages[0].device), group=self.group)
            self._is_connected = True

    def _exchange_input_shapes(
        self, arg_mbs: Sequence[tuple[Any, ...]], n: int
    ) -> list[InputShape]:
        device = self.stages[0].device
        shapes = torch.zeros(n, 2, dtype=torch.int64, device=device)
        if self.has_first_stage:
            shapes = torch.tensor([mb[0].shape[:2] for mb in arg_mbs], device=device)
        dist.broadcast(shapes, self._global_rank_of(0), group=self.group)
        return [(rows, tokens) for rows, tokens in shapes.tolist()]

    def _global_rank_of(self, stage: int) -> int:
        group = self.group or dist.group.WORLD
        return dist.get_global_rank(group, self._rank_of[stage])

    @contextmanager
    def _summed(self, forward_only: bool) -> Iterator[None]:
        """Sum the gradients computed inside: over replicas, and a tied embedding's over its copies.

        Gradients of earlier calls of `step` are summed already: they are set aside and added at the end.
        """
        parts = [stage.submod for stage in self.stages]
        copies = tied_copies.trained_copies_in(parts)
        parameters = copies
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
                other_rank = self._rank_of[other]
                tied_copies.sum_gradients(copies, self.group, other_rank)
        except BaseException:
            # Drop the gradients of the failed call, and keep those of the calls before it.
            for parameter, gradient in zip(parameters, earlier, strict=True):
                parameter.grad = gradient
            raise
        for parameter, gradient in zip(parameters, earlier, strict=True):
            if gradient is not None:
                parameter.grad += gradient

    # ---- the order of actions ----

    @property
    def _rank(self) -> int:
        return self.stages[0].group_rank

    def _make_actions(self, n: int, forward_only: bool) -> list[Action]:
        """Return this rank's actions for n microbatches.

        Torch's table is made for the next number of microbatches that its schedule accepts, and
        actions of microbatches that don't exist are removed.
        """
        order = select(self._compute_order(n), n, forward_only)
        order[self._rank] = with_reductions(order[self._rank])
        return with_resharding(with_messages(order, self._rank_of)[self._rank])

    def _compute_order(self, n: int) -> Order:
        planned = self._num_to_plan_for(n)
        order = compute_order(self.schedule_class, self.stages, planned, self.csv_path)
        if self.csv_path:
            ordered = 1 + max((a.microbatch for row in order.values() for a in row), default=-1)
            if n > ordered:
                raise ValueError(
                    f"parallelism.pipeline_parallel_schedule_csv = {self.csv_path!r} orders "
                    f"{ordered} microbatches, got {n}; give fewer, or a longer file"
                )
        return order

    def _num_to_plan_for(self, n: int) -> int:
        """Return the smallest number of microbatches, n or more, that torch's schedule accepts."""
        if issubclass(self.schedule_class, ScheduleDualPipeV):
            return max(n, self.num_stages)
        if issubclass(self.schedule_class, ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble):
            # Torch runs microbatches in equal rounds of about one microbatch per rank.
            num_ranks = self.stages[0].group_size
            return n if n % max(1, n // num_ranks) == 0 else -(-n // num_ranks) * num_ranks
        return n
