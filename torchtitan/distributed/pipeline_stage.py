"""A pipeline stage: a part of the model, and the messages to its neighbours.

Hidden states [B, T, dim] go forward from stage to stage, and their gradients go back. The size of a
message follows from the shape [B, T] of the microbatch's input, so microbatches may differ in shape.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.utils._pytree import tree_leaves

InputShape = tuple[int, int]
"""(B, T) of a microbatch's input"""

ContextFactory = Callable[[], AbstractContextManager[Any]]


class VariableShapeStage(PipelineStage):
    """One stage of a pipeline whose microbatches may differ in shape.

    hidden_states: (dim, dtype) of the tensors sent between stages; a stage with None cannot run.

    Source of torch 2.13: `PipelineStage` allocates its receive buffers once, for one shape. We
    override its private methods to allocate for each microbatch; forward and backward are torch's.
    """

    def __init__(
        self, *args: Any, hidden_states: tuple[int, torch.dtype] | None = None, **kwargs: Any
    ):
        super().__init__(*args, **kwargs)
        self.hidden_states = hidden_states
        self._input_shapes: list[InputShape] = []
        self._contexts: Sequence[ContextFactory] = ()
        self._received: dict[int, Tensor] = {}  # microbatch -> hidden states
        self._received_gradients: dict[int, Tensor] = {}
        # Torch 2.14 has an option for one communicator per direction.
        self._forward_group = getattr(self, "_downstream_group", self.group)
        self._backward_group = getattr(self, "_upstream_group", self.group)
        # Don't check tensors against one shape. This is torch 2.13's switch; for 2.11 see below.
        self._runtime_validate = False
        if hasattr(self, "_stage_meta"):
            # Torch reads only the length, which is the number of gradients to send back.
            self._stage_meta.inputs = (None,)
        if torch.__version__ < "2.13":
            # Torch 2.11's separate pass for weight gradients fails at autograd functions written in
            # Python, and adds the gradients of a function's outputs together. With a builder,
            # backward computes weight gradients too, and the separate pass calls a no-op.
            self.dw_builder = lambda: lambda: None

    def begin_step(
        self,
        input_shapes: list[InputShape],
        has_backward: bool,
        contexts: Sequence[ContextFactory] | None = None,
    ) -> None:
        """Prepare for a call. contexts: one per microbatch, for its forward and its backward."""
        if self.hidden_states is None:
            raise ValueError(
                f"pipeline stage {self.stage_index} does not know the size of hidden states: its "
                "model has no model_args.dim; set stage.hidden_states"
            )
        self.has_backward = has_backward
        self.chunks = len(input_shapes)
        self._input_shapes = input_shapes
        self._contexts = contexts or [nullcontext] * len(input_shapes)
        self.end_step()

    def end_step(self) -> None:
        """Release all tensors."""
        self.clear_runtime_states()
        self.bwd_cache.clear()
        self._received.clear()
        self._received_gradients.clear()

    # ---- forward: for each microbatch the schedule has the stage receive, compute and send ----

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        received = self._received[fwd_chunk_id] = self._empty(fwd_chunk_id)
        return [self._p2p(dist.irecv, received, self.stage_index - 1, self._forward_group)]

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        # Called if this rank also holds the stage before.
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
            # The next stage allocated a buffer for this. Another size would be garbage, or a hang.
            input_shape, (dim, dtype) = self._input_shapes[fwd_chunk_id], self.hidden_states
            if (*output.shape, output.dtype) != (*input_shape, dim, dtype):
                raise RuntimeError(
                    f"pipeline stage {self.stage_index} must return {dtype} of shape "
                    f"{(*input_shape, dim)} for an input of {input_shape}, got {output.dtype} of "
                    f"shape {tuple(output.shape)}"
                )
        if self.is_last and not self.has_backward:
            del self.fwd_cache[fwd_chunk_id]  # don't accumulate logits
        else:
            stage_output, inputs = self.fwd_cache[fwd_chunk_id]
            # Torch expects a flat tuple of tensors, but a head's output is nested. Keep only the
            # first input, because keywords get no gradient.
            tensors = tuple(x for x in tree_leaves(stage_output) if isinstance(x, Tensor))
            # Zero-bubble schedules detach outputs in place, which fails for views, such as the whole
            # rows that tensor parallelism joins.
            tensors = tuple(x.clone() if x._is_view() else x for x in tensors)
            self.fwd_cache[fwd_chunk_id] = tensors, inputs[:1]
        return output

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        keep = self.fwd_cache.__getitem__ if self.has_backward else self.fwd_cache.pop
        (output,), _ = keep(fwd_chunk_id)
        return [self._p2p(dist.isend, output.detach(), self.stage_index + 1, self._forward_group)]

    # ---- backward: the same, in the other direction ----

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
        # Torch's separate pass for weight gradients returns them in any layout, transposed for
        # example. Autograd uses the parameter's layout, and fused optimizers ignore strides.
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
        dim, dtype = self.hidden_states
        return torch.empty(*self._input_shapes[microbatch], dim, dtype=dtype, device=self.device)

    def _validate_fwd_input(self, *args: Any, **kwargs: Any) -> None:
        """Torch 2.11 checks here that all microbatches have one shape."""

    _validate_fwd_outputs = _validate_fwd_input
