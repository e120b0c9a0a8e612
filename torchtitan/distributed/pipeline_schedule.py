"""Running torch's pipeline schedules on any number of microbatches, of any shapes.

Any schedule of torch.distributed.pipelining runs here. The caller splits the batch: each microbatch
has its own positions and masks, and its own number of rows and tokens. No microbatch is padded, and
stages don't negotiate shapes (see `pipeline_stage`).

B rows, T tokens of a microbatch's input.
"""

import csv
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    _Action,
    _PipelineScheduleRuntime,
    get_schedule_class,
)
from torch.utils._pytree import tree_map_only

from torchtitan.distributed import tied_copies
from torchtitan.distributed.fsdp import reshard_model, sum_gradients
from torchtitan.distributed.pipeline_stage import ContextFactory, InputShape, VariableShapeStage

LossFunction = Callable[[Any, Any], Any]
"""(output of the last stage, target) -> loss"""

_MAX_SCHEDULES = 16  # cached, one per number of microbatches


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
        stages: Sequence[VariableShapeStage],
        loss_fn: LossFunction | None,
        n_microbatches: int,
        csv_path: str = "",
    ):
        self.schedule_class = _PipelineScheduleRuntime if csv_path else get_schedule_class(name)
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
        self._schedule_for = functools.lru_cache(_MAX_SCHEDULES)(self._make_schedule)
        # If torch's schedule refuses these stages, it raises here.
        self._schedule_for(n_microbatches, False)

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
        device = self.stages[0].device
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
                f"give a pipeline either lists of microbatches or a whole batch, got lists together "
                f"with {len(args)} positional argument(s), keywords {sorted(kwargs)} or target"
            )
        if not is_split:
            n = self.n_microbatches
            kwarg_mbs = [{}] * n
            if args or kwargs:
                arg_mbs, kwarg_mbs = split_args_kwargs_into_chunks(args, kwargs, n)
            target_mbs = None if target is None else list(torch.tensor_split(target, n))
        lists = {
            "arg_mbs": arg_mbs,
            "kwarg_mbs": kwarg_mbs,
            "target_mbs": target_mbs,
            "input_shapes": input_shapes,
            "context_mbs": context_mbs,
        }
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
        self._connect()
        if input_shapes is None:
            input_shapes = self._exchange_input_shapes(arg_mbs, n)
        computes_loss = self.has_last_stage and target_mbs is not None
        schedule = self._schedule_for(n, forward_only)
        schedule._loss_fn = (loss_fn or self.loss_fn) if computes_loss else None
        for stage in self.stages:
            stage.begin_step(input_shapes, not forward_only, context_mbs)
        try:
            with self._summed(forward_only):
                _run_microbatches(
                    schedule,
                    [()] * n if arg_mbs is None else arg_mbs,
                    [{}] * n if kwarg_mbs is None else kwarg_mbs,
                    target_mbs,
                    losses if computes_loss else None,
                    return_outputs,
                )
            if not (self.has_last_stage and return_outputs):
                return None
            (last,) = (stage for stage in self.stages if stage.is_last)
            outputs = list(last.output_chunks)
            return outputs if is_split else torch.cat(outputs)
        except BaseException:
            # Make new schedules, because torch's keep the losses and counts of the failed call.
            self._schedule_for.cache_clear()
            raise
        finally:
            schedule._loss_fn = None  # it may reference this call's tensors
            for stage in self.stages:
                stage.end_step()
                if forward_only:
                    # Without backward, parameters stay gathered, and neither the optimizer nor a
                    # checkpoint knows gathered parameters.
                    reshard_model(stage.submod)

    def _connect(self) -> None:
        """Make the group's communicator, with all ranks taking part.

        NCCL makes it when the group is first used. Without this call that would be by a send to one
        neighbour, while the other ranks still wait for their first input.
        """
        if not self._is_connected:
            dist.all_reduce(torch.zeros(1, device=self.stages[0].device), group=self.group)
            self._is_connected = True

    def _exchange_input_shapes(
        self, arg_mbs: list[tuple[Any, ...]] | None, n: int
    ) -> list[InputShape]:
        device = self.stages[0].device
        shapes = torch.zeros(n, 2, dtype=torch.int64, device=device)
        if self.has_first_stage:
            shapes = torch.tensor([mb[0].shape[:2] for mb in arg_mbs], device=device)
        dist.broadcast(shapes, self._global_rank_of(0), group=self.group)
        return [(rows, tokens) for rows, tokens in shapes.tolist()]

    def _global_rank_of(self, stage: int) -> int:
        group = self.group or dist.group.WORLD
        return dist.get_global_rank(group, self.stages[0].stage_index_to_group_rank[stage])

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
                other_rank = self.stages[0].stage_index_to_group_rank[other]
                tied_copies.sum_gradients(copies, self.group, other_rank)
        except BaseException:
            # Drop the gradients of the failed call, and keep those of the calls before it.
            for parameter, gradient in zip(parameters, earlier, strict=True):
                parameter.grad = gradient
            raise
        for parameter, gradient in zip(parameters, earlier, strict=True):
            if gradient is not None:
                parameter.grad += gradient

    # ---- torch's schedules ----

    def _make_schedule(self, n: int, forward_only: bool) -> Any:
        """Return torch's schedule for n microbatches, even if torch does not accept that number.

        1F1B with fewer microbatches than stages becomes GPipe, whose order is the same then. A
        schedule with several stages per rank is made for the next number that torch accepts, and
        actions of microbatches that don't exist are removed.

        The schedules of torch 2.13, whose source we read, fix a number and one shape when they are made.
        We patch the private fields and methods below because microbatches differ in number and shape.
        """
        schedule_class = self.schedule_class
        if issubclass(schedule_class, PipelineScheduleSingle):
            # 1F1B issues the send of a forward and the receive of a backward as one pair. Without
            # backward the neighbour issues no matching pair, and with fewer microbatches than stages
            # it pairs other operations: NCCL would hang.
            if schedule_class is Schedule1F1B and (forward_only or n < self.num_stages):
                schedule_class = ScheduleGPipe
            schedule = schedule_class(self.stages[0], n, loss_fn=self.loss_fn, scale_grads=False)
        else:
            schedule = schedule_class(
                self.stages, self._num_to_plan_for(n), loss_fn=self.loss_fn, scale_grads=False
            )
            if self.csv_path:
                schedule._load_csv(self.csv_path)
                rank_of, rank = schedule.stage_index_to_group_rank, schedule.rank
                ours = sorted(stage for stage in rank_of if rank_of[stage] == rank)
                held = [stage.stage_index for stage in self.stages]
                if ours != held:
                    raise ValueError(
                        f"parallelism.pipeline_parallel_schedule_csv = {self.csv_path!r} has rank "
                        f"{rank} run stages {ours}, but it holds {held}; rank r must have stages r, "
                        "r + p, r + 2p, ... (or r and its mirror image with a V-shaped schedule's "
                        "name)"
                    )
            schedule._n_microbatches = n
            schedule.pipeline_order_with_comms = {
                rank: _filter_actions(actions, n, forward_only)
                for rank, actions in schedule.pipeline_order_with_comms.items()
            }
        schedule._has_backward = not forward_only
        # Torch's methods would infer shapes, and allocate buffers for them.
        schedule._initialize_stage = schedule._initialize_stages = lambda *args, **kwargs: None
        # Torch 2.14's method would concatenate outputs, which may differ in length.
        schedule._merge_outputs = list
        return schedule

    def _num_to_plan_for(self, n: int) -> int:
        """Return the smallest number of microbatches, n or more, that torch's schedule accepts."""
        if self.csv_path:
            with open(self.csv_path, newline="") as file:
                actions = [_Action.from_str(cell) for row in csv.reader(file) for cell in row]
            parts = [part for action in actions if action for part in _parts_of(action)]
            num_planned = 1 + max((part.microbatch_index or 0 for part in parts), default=-1)
            if n > num_planned:
                raise ValueError(
                    f"parallelism.pipeline_parallel_schedule_csv = {self.csv_path!r} orders "
                    f"{num_planned} microbatches, got {n}; give fewer, or a longer file"
                )
            return num_planned
        if issubclass(self.schedule_class, ScheduleDualPipeV):
            return max(n, self.num_stages)
        if issubclass(self.schedule_class, ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble):
            # Torch runs microbatches in equal rounds of about one microbatch per rank.
            num_ranks = self.stages[0].group_size
            return n if n % max(1, n // num_ranks) == 0 else -(-n // num_ranks) * num_ranks
        return n


_FORWARD_ONLY_ACTIONS = {"FORWARD", "SEND_F", "RECV_F", "UNSHARD", "RESHARD"}


def _parts_of(action: _Action) -> tuple[_Action, ...]:
    """Return the two actions that an overlapped action consists of, or the action itself."""
    return action.sub_actions or (action,)


def _filter_actions(actions: list[_Action], n: int, forward_only: bool) -> list[_Action]:
    """Return the actions of the first n microbatches; only forward's if `forward_only`.

    An overlapped action is replaced by its wanted part if the other part is not wanted.
    """

    def is_wanted(action: _Action) -> bool:
        exists = action.microbatch_index is None or action.microbatch_index < n
        return exists and (
            not forward_only or action.computation_type.name in _FORWARD_ONLY_ACTIONS
        )

    kept: list[_Action] = []
    for action in actions:
        parts = _parts_of(action)
        wanted = [part for part in parts if is_wanted(part)]
        kept += [action] if len(wanted) == len(parts) else wanted
    return kept


def _run_microbatches(
    schedule: Any,
    arg_mbs: list[tuple[Any, ...]],
    kwarg_mbs: list[dict[str, Any]],
    target_mbs: list[Any] | None,
    losses: list[Any] | None,
    return_outputs: bool,
) -> None:
    """Call torch's `step` if it takes lists (torch 2.14), else the private method behind it."""
    if "arg_mbs" not in inspect.signature(schedule.step).parameters:
        # `step` of torch 2.13 would pass the lists to the model, as keywords.
        schedule._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs)
        return
    lists = {"arg_mbs": arg_mbs, "kwarg_mbs": kwarg_mbs, "target_mbs": target_mbs}
    schedule.step(**lists, losses=losses, return_outputs=return_outputs)
