"""Running a pipeline: stages that pass hidden states from rank to rank, in a schedule's order.

Any schedule of torch.distributed.pipelining runs here on lists of microbatches that were split by
whoever made them: each brings its own positions and masks, and has its own number of rows and
tokens, from step to step and within one. Nothing is padded, on the wire or in compute, and no
shapes are negotiated between stages: a stage allocates what it receives from the shape of the
microbatch's input.

B rows, T tokens of a microbatch's input.
"""

import csv
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
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
from torch.utils._pytree import tree_leaves

from torchtitan.distributed.fsdp import reshard_model, sum_gradients

InputShape = tuple[int, int]
"""(B, T) of a microbatch's input"""

LossFunction = Callable[[Any, Any], Any]
"""(output of the last stage, target) -> loss"""

ContextFactory = Callable[[], AbstractContextManager[Any]]

_MAX_SCHEDULES = 16  # kept for numbers of microbatches that come again


# ---- what passes between stages ----


@dataclass(frozen=True)
class HiddenStates:
    """Size and dtype of hidden states [B, T, dim] between two stages."""

    dim: int
    dtype: torch.dtype

    def shape(self, input_shape: InputShape) -> torch.Size:
        return torch.Size((*input_shape, self.dim))


class VariableShapeStage(PipelineStage):
    """One stage of a pipeline whose microbatches may differ in shape.

    Replaces what torch's stage does about sending and receiving, which allocates buffers of
    one shape once; forward and backward are torch's.
    hidden_states: what goes in and out; None if unknown (such a stage cannot be run).
    """

    def __init__(self, *args: Any, hidden_states: HiddenStates | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.hidden_states = hidden_states
        self._input_shapes: list[InputShape] = []
        self._contexts: Sequence[ContextFactory] = ()
        self._received: dict[int, Tensor] = {}  # microbatch -> hidden states
        self._received_gradients: dict[int, Tensor] = {}
        # Torch 2.14 can be told to use a communicator per direction.
        self._forward_group = getattr(self, "_downstream_group", self.group)
        self._backward_group = getattr(self, "_upstream_group", self.group)
        # Torch checks every tensor against one shape: 2.13 on demand, 2.11 see below.
        self._runtime_validate = False
        if hasattr(self, "_stage_meta"):
            # Only its length is read: how many gradients go back.
            self._stage_meta.inputs = (None,)

    def begin_step(
        self,
        input_shapes: list[InputShape],
        has_backward: bool,
        contexts: Sequence[ContextFactory] | None = None,
    ) -> None:
        """contexts: one per microbatch, entered around its forward and its backward."""
        if self.hidden_states is None:
            raise ValueError(
                f"pipeline stage {self.stage_index} does not know what it receives: its model has "
                "no model_args.dim; set stage.hidden_states"
            )
        self.has_backward = has_backward
        self.chunks = len(input_shapes)
        self._input_shapes = input_shapes
        self._contexts = contexts or [nullcontext] * len(input_shapes)
        self.end_step()

    def end_step(self) -> None:
        """Let go of all tensors."""
        self.clear_runtime_states()
        self.bwd_cache.clear()
        self._received.clear()
        self._received_gradients.clear()

    # ---- forward ----

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        received = self._received[fwd_chunk_id] = self._empty(fwd_chunk_id)
        return [self._p2p(dist.irecv, received, self.stage_index - 1, self._forward_group)]

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        self._received[mb_index] = prev_stage_outputs.detach()

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        return (self._received.pop(fwd_chunk_id).requires_grad_(self.has_backward),)

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        with self._contexts[fwd_chunk_id]():
            output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        if not self.is_last:
            self._check_output(output, fwd_chunk_id)
        if self.is_last and not self.has_backward:
            del self.fwd_cache[fwd_chunk_id]  # or logits pile up
        else:
            # No gradient flows to keywords, and masks are not even tensors.
            stage_output, inputs = self.fwd_cache[fwd_chunk_id]
            # What a head returns is a tuple in the tuple; torch looks at the tensors of one.
            tensors = tuple(x for x in tree_leaves(stage_output) if isinstance(x, Tensor))
            self.fwd_cache[fwd_chunk_id] = tensors, inputs[:1]
        return output

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        keep = self.fwd_cache.__getitem__ if self.has_backward else self.fwd_cache.pop
        (output,), _ = keep(fwd_chunk_id)
        return [self._p2p(dist.isend, output.detach(), self.stage_index + 1, self._forward_group)]

    # ---- backward ----

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last or not self.has_backward:
            return []
        received = self._received_gradients[bwd_chunk_id] = self._empty(bwd_chunk_id)
        return [self._p2p(dist.irecv, received, self.stage_index + 1, self._backward_group)]

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        (gradient,) = next_stage_bwd_outputs
        self._received_gradients[mb_index] = gradient

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor, ...]:
        return (self._received_gradients.pop(bwd_chunk_id),)

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        return self.bwd_cache.pop(mb_index)[:1]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first or not self.has_backward:
            return []
        gradient = self.bwd_cache.pop(bwd_chunk_id)[0]
        return [self._p2p(dist.isend, gradient, self.stage_index - 1, self._backward_group)]

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self._contexts[bwd_chunk_id]():
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self._contexts[bwd_chunk_id]():
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        # Torch's separate pass for weights sets gradients as they come, transposed say, where
        # autograd lays them out like the parameter. Fused optimizers go by memory, not strides.
        for parameter in self.submod.parameters():
            gradient = parameter.grad
            if gradient is not None and gradient.stride() != parameter.stride():
                parameter.grad = torch.empty_like(parameter).copy_(gradient)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)

    # ---- helpers ----

    def _p2p(
        self,
        operation: Callable[..., Any],
        tensor: Tensor,
        stage: int,
        group: dist.ProcessGroup | None,
    ) -> dist.P2POp:
        peer = self.stage_index_to_group_rank[stage]
        return dist.P2POp(operation, tensor.contiguous(), group=group, group_peer=peer)

    def _empty(self, microbatch: int) -> Tensor:
        shape = self.hidden_states.shape(self._input_shapes[microbatch])
        return torch.empty(shape, dtype=self.hidden_states.dtype, device=self.device)

    def _check_output(self, output: Any, microbatch: int) -> None:
        """The next stage allocated this much: anything else would be garbage there, or a hang."""
        expected = self.hidden_states.shape(self._input_shapes[microbatch])
        if (output.shape, output.dtype) != (expected, self.hidden_states.dtype):
            raise RuntimeError(
                f"pipeline stage {self.stage_index} must put out {self.hidden_states.dtype} of "
                f"shape {tuple(expected)} for an input of {self._input_shapes[microbatch]}, got "
                f"{output.dtype} of shape {tuple(output.shape)}"
            )

    def _validate_fwd_input(self, *args: Any, **kwargs: Any) -> None:
        """Torch 2.11 checks here that all microbatches have one shape."""

    def _validate_fwd_outputs(self, *args: Any, **kwargs: Any) -> None:
        """As above."""


# ---- running a schedule ----


class PipelineSchedule:
    """Runs a schedule of torch on microbatches of any number and any shapes.

    All ranks of the pipeline call `step` and `eval` together, with the same number of
    microbatches. That number may change from call to call, and be one that torch's schedule
    does not take: 1F1B with fewer microbatches than stages runs as GPipe, which is the same
    then; of the schedules with several stages per rank the order for the next number that they
    take is run without the microbatches that don't exist.

    name: of torch's schedule, in any case.
    stages: this rank's, in the order of the model.
    loss_fn: (output, target) -> loss, a sum over tokens: gradients are not scaled here.
    n_microbatches: into how many a whole batch is split.
    csv_path: a file with an order of one's own, in place of the named schedule's.
    replicas: ranks that hold the same stages unsharded and read other data; the gradients of
        each step are summed over them.
    """

    def __init__(
        self,
        name: str,
        stages: Sequence[VariableShapeStage],
        loss_fn: LossFunction | None,
        n_microbatches: int,
        csv_path: str = "",
        replicas: DeviceMesh | None = None,
    ):
        self.schedule_class = _PipelineScheduleRuntime if csv_path else get_schedule_class(name)
        self.stages = list(stages)
        self.loss_fn = loss_fn
        self.n_microbatches = n_microbatches
        self.csv_path = csv_path
        self.replicas = replicas
        self.group = self.stages[0].group
        self.num_stages = self.stages[0].num_stages
        self.has_first_stage = any(stage.is_first for stage in self.stages)
        self.has_last_stage = any(stage.is_last for stage in self.stages)
        self._schedules: dict[tuple[int, bool], Any] = {}
        self._loss_fn_of_step: LossFunction | None = None
        self._is_connected = False
        # Refuse now what torch's schedule refuses.
        self._schedule_for(n_microbatches, forward_only=False)

    def step(self, *args: Any, **kwargs: Any) -> list[Any] | Any | None:
        """Forward and backward of all microbatches; gradients accumulate in the parameters.

        With lists, microbatch i being the i-th entry of each:

            step(arg_mbs=[(inputs,), ...], kwarg_mbs=[{...}, ...], target_mbs=[...], losses=[])

        arg_mbs: inputs [B, T]; read on the rank of the first stage.
        kwarg_mbs: keywords of the model's forward, on every rank.
        target_mbs: what the loss function gets, on the rank of the last stage; any objects.
        losses: a list that takes the losses there.
        return_outputs: whether the outputs are kept and returned, in order, on the rank of the
            last stage. True by default, as in torch; logits are large.
        loss_fn: used in this call in place of the schedule's own.
        input_shapes: (B, T) of every microbatch, on all ranks or on none; without, the rank of
            the first stage tells the others, which wait for it.
        context_mbs: for every microbatch a callable whose context managers its forward and
            backward run in, on each stage.

        Or with a whole batch, `step(inputs, target=labels, losses=[], **keywords)`, which is
        split into `n_microbatches`; the outputs come back in one piece.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("step() computes gradients and they are disabled here; call eval()")
        return self._split_and_run(False, *args, **kwargs)

    @torch.no_grad()
    def eval(self, *args: Any, **kwargs: Any) -> list[Any] | Any | None:
        """Forward of all microbatches alone; arguments and results are those of `step`.

        Without targets no loss is computed.
        """
        return self._split_and_run(True, *args, **kwargs)

    def broadcast_from_last_stage(self, tensor: Tensor) -> Tensor:
        """Give all ranks of the pipeline the tensor of the rank with the last stage, in place."""
        dist.broadcast(tensor, self._global_rank_of(self.num_stages - 1), group=self.group)
        return tensor

    # ---- one call ----

    def _split_and_run(
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
                f"give a pipeline either lists of microbatches or a whole batch, got both: lists, "
                f"{len(args)} positional argument(s), target and keywords {sorted(kwargs)}"
            )
        if not is_split:
            n = self.n_microbatches
            if args or kwargs:
                arg_mbs, kwarg_mbs = split_args_kwargs_into_chunks(args, kwargs, n)
            else:
                kwarg_mbs = [{}] * n
            target_mbs = None if target is None else list(torch.tensor_split(target, n))
        outputs = self._run(
            forward_only,
            arg_mbs,
            kwarg_mbs,
            target_mbs,
            losses,
            return_outputs,
            loss_fn or self.loss_fn,
            input_shapes,
            context_mbs,
        )
        return outputs if is_split or outputs is None else torch.cat(outputs)

    def _run(
        self,
        forward_only: bool,
        arg_mbs: list[tuple[Any, ...]] | None,
        kwarg_mbs: list[dict[str, Any]] | None,
        target_mbs: list[Any] | None,
        losses: list[Any] | None,
        return_outputs: bool,
        loss_fn: LossFunction | None,
        input_shapes: list[InputShape] | None,
        context_mbs: Sequence[ContextFactory] | None,
    ) -> list[Any] | None:
        n = _common_length(
            arg_mbs=arg_mbs,
            kwarg_mbs=kwarg_mbs,
            target_mbs=target_mbs,
            input_shapes=input_shapes,
            context_mbs=context_mbs,
        )
        if self.has_first_stage and arg_mbs is None:
            raise ValueError("the rank with a pipeline's first stage needs arg_mbs, got None")
        if self.has_last_stage and target_mbs is None and not forward_only:
            raise ValueError("the rank with a pipeline's last stage needs target_mbs, got None")
        self._connect()
        if input_shapes is None:
            input_shapes = self._exchange_input_shapes(arg_mbs, n)
        computes_loss = self.has_last_stage and target_mbs is not None
        schedule = self._schedule_for(n, forward_only)
        schedule._loss_fn = self._compute_loss if computes_loss else None
        self._loss_fn_of_step = loss_fn
        for stage in self.stages:
            stage.begin_step(input_shapes, not forward_only, context_mbs)
        try:
            with self._summed_over_replicas(forward_only):
                _run_microbatches(
                    schedule,
                    arg_mbs if arg_mbs is not None else [()] * n,
                    kwarg_mbs if kwarg_mbs is not None else [{}] * n,
                    target_mbs,
                    losses if computes_loss else None,
                    return_outputs,
                )
            if not (self.has_last_stage and return_outputs):
                return None
            (last,) = (stage for stage in self.stages if stage.is_last)
            return list(last.output_chunks)
        except BaseException:
            # Torch's schedule goes on with the losses and counts of the call that failed.
            self._schedules.pop((n, forward_only), None)
            raise
        finally:
            self._loss_fn_of_step = None
            for stage in self.stages:
                stage.end_step()
                if forward_only:
                    # Backward would have freed what forward gathered, and until then neither
                    # the optimizer nor a checkpoint sees the parameters that forward uses.
                    reshard_model(stage.submod)

    def _compute_loss(self, output: Any, target: Any) -> Any:
        return self._loss_fn_of_step(output, target)

    def _connect(self) -> None:
        """Make the group's communicator while all ranks are here.

        NCCL makes it at first use, which would be a send to one neighbour while the other ranks
        are still waiting for their first input.
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
    def _summed_over_replicas(self, forward_only: bool) -> Iterator[None]:
        """Sum the gradients that appear inside, and not those of earlier steps once more."""
        if self.replicas is None or forward_only:
            yield
            return
        parameters = [
            p for stage in self.stages for p in stage.submod.parameters() if p.requires_grad
        ]
        earlier = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
            sum_gradients(parameters, self.replicas)
        except BaseException:
            # What a failed step left is of no use; what came before is.
            for parameter, gradient in zip(parameters, earlier, strict=True):
                parameter.grad = gradient
            raise
        for parameter, gradient in zip(parameters, earlier, strict=True):
            if gradient is not None:
                parameter.grad += gradient

    # ---- torch's schedules ----

    def _schedule_for(self, n: int, forward_only: bool) -> Any:
        """Torch's schedule for so many microbatches; those used last are kept."""
        key = n, forward_only
        if key in self._schedules:
            self._schedules[key] = self._schedules.pop(key)  # to the end: it is the newest now
        else:
            is_single = issubclass(self.schedule_class, PipelineScheduleSingle)
            make = self._make_single_stage_schedule if is_single else self._make_schedule
            schedule = make(n, forward_only)
            schedule._has_backward = not forward_only
            # Torch would find out shapes here, and allocate for them.
            schedule._initialize_stage = schedule._initialize_stages = _nothing_to_initialize
            # Torch 2.14 would join outputs, which may differ in length.
            schedule._merge_outputs = list
            self._schedules[key] = schedule
            if len(self._schedules) > _MAX_SCHEDULES:
                del self._schedules[next(iter(self._schedules))]
        return self._schedules[key]

    def _make_single_stage_schedule(self, n: int, forward_only: bool) -> Any:
        schedule_class = self.schedule_class
        # 1F1B pairs its sends with receives of backward: none come without backward, and with
        # too few microbatches the neighbour is not at its own pair, where NCCL would hang.
        if forward_only or (schedule_class is Schedule1F1B and n < self.num_stages):
            schedule_class = ScheduleGPipe
        return schedule_class(self.stages[0], n, loss_fn=self._compute_loss, scale_grads=False)

    def _make_schedule(self, n: int, forward_only: bool) -> Any:
        num_planned = self._num_to_plan_for(n)
        schedule = self.schedule_class(
            self.stages, num_planned, loss_fn=self._compute_loss, scale_grads=False
        )
        if self.csv_path:
            schedule._load_csv(self.csv_path)
            self._check_csv_stages(schedule)
        schedule._n_microbatches = n

        def is_wanted(action: _Action) -> bool:
            exists = action.microbatch_index is None or action.microbatch_index < n
            return exists and (
                not forward_only or action.computation_type.name in _FORWARD_ONLY_ACTIONS
            )

        schedule.pipeline_order_with_comms = {
            rank: _filter_actions(actions, is_wanted)
            for rank, actions in schedule.pipeline_order_with_comms.items()
        }
        return schedule

    def _num_to_plan_for(self, n: int) -> int:
        """The smallest number of microbatches, n or more, that torch's schedule takes."""
        if self.csv_path:
            num_planned = _num_microbatches_in_csv(self.csv_path)
            if n > num_planned:
                raise ValueError(
                    f"parallelism.pipeline_parallel_schedule_csv = {self.csv_path!r} orders "
                    f"{num_planned} microbatches, got {n}; give fewer, or a longer file"
                )
            return num_planned
        if issubclass(self.schedule_class, ScheduleDualPipeV):
            return max(n, self.num_stages)
        if issubclass(self.schedule_class, ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble):
            # In equal rounds of about one microbatch per rank.
            num_ranks = self.stages[0].group_size
            return n if n % max(1, n // num_ranks) == 0 else -(-n // num_ranks) * num_ranks
        return n

    def _check_csv_stages(self, schedule: Any) -> None:
        rank_of = schedule.stage_index_to_group_rank
        ours = [stage for stage, rank in sorted(rank_of.items()) if rank == schedule.rank]
        held = [stage.stage_index for stage in self.stages]
        if ours != held:
            raise ValueError(
                f"parallelism.pipeline_parallel_schedule_csv = {self.csv_path!r} has rank "
                f"{schedule.rank} run stages {ours}, but it holds {held}; rank r must have stages "
                "r, r + p, r + 2p, ... (or r and its mirror image with a V-shaped schedule's name)"
            )


_FORWARD_ONLY_ACTIONS = {"FORWARD", "SEND_F", "RECV_F", "UNSHARD", "RESHARD"}


def _filter_actions(actions: list[_Action], is_wanted: Callable[[_Action], bool]) -> list[_Action]:
    """The wanted actions; of overlapped ones that are wanted in part, that part."""
    kept: list[_Action] = []
    for action in actions:
        parts = action.sub_actions or (action,)
        wanted = [part for part in parts if is_wanted(part)]
        kept += [action] if len(wanted) == len(parts) else wanted
    return kept


def _nothing_to_initialize(*args: Any, **kwargs: Any) -> None:
    pass


def _run_microbatches(
    schedule: Any,
    arg_mbs: list[tuple[Any, ...]],
    kwarg_mbs: list[dict[str, Any]],
    target_mbs: list[Any] | None,
    losses: list[Any] | None,
    return_outputs: bool,
) -> None:
    """Torch's `step` where it takes lists (from 2.14 on), else what it does with its own."""
    if "arg_mbs" not in inspect.signature(schedule.step).parameters:
        # `step` would take the lists for keywords of the model.
        schedule._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs)
        return
    lists = {"arg_mbs": arg_mbs, "kwarg_mbs": kwarg_mbs, "target_mbs": target_mbs}
    schedule.step(**lists, losses=losses, return_outputs=return_outputs)


def _common_length(**lists: Sequence[Any] | None) -> int:
    lengths = {name: len(entries) for name, entries in lists.items() if entries is not None}
    if not lengths or len(set(lengths.values())) > 1 or 0 in lengths.values():
        raise ValueError(
            f"a pipeline step needs lists of one length, at least 1, got {lengths}; give every "
            "microbatch one entry in each"
        )
    return next(iter(lengths.values()))


def _num_microbatches_in_csv(path: str) -> int:
    with open(path, newline="") as file:
        actions = [_Action.from_str(cell) for row in csv.reader(file) for cell in row]
    parts = [part for action in actions if action for part in action.sub_actions or (action,)]
    return 1 + max((part.microbatch_index or 0 for part in parts), default=-1)
