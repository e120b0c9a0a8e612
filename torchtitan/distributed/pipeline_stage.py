"""A pipeline stage: a part of the model, its forward, and its backward in one piece or in two.

Hidden states [B, T, dim] go forward from stage to stage, and their gradients go back. The size of both
follows from the shape [B, T] of the microbatch's input, so microbatches may differ in shape.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from torchtitan.distributed.fsdp import accumulate_gradients, store_gradients

InputShape = tuple[int, int]
"""(B, T) of a microbatch's input"""

ContextFactory = Callable[[], AbstractContextManager[Any]]


class PipelineStage:
    """One stage of a pipeline whose microbatches may differ in shape.

    submod: the stage's part of the model, called with the microbatch's inputs on the first stage,
        and with the hidden states of the previous stage on other stages.
    hidden_states: (dim, dtype) of the tensors sent between stages; a stage with None cannot run.

    Torch's schedules read this object's attributes when they compute the order of actions.
    """

    def __init__(
        self,
        submod: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        hidden_states: tuple[int, torch.dtype] | None = None,
    ):
        self.submod = submod
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = device
        self.group = group
        self.group_rank, self.group_size = dist.get_rank(group), dist.get_world_size(group)
        self.is_first, self.is_last = stage_index == 0, stage_index == num_stages - 1
        self.hidden_states = hidden_states
        self._has_backward = False
        self._input_shapes: list[InputShape] = []
        self._contexts: Sequence[ContextFactory] = ()
        # Microbatch -> (output or loss, where backward starts; hidden states, where backward ends).
        self._forwards: dict[int, tuple[Tensor | GradientEdge | None, Tensor | None]] = {}
        # Microbatch -> what `backward_input` leaves for `backward_weight`. On the first stage this is only
        # the gradient of the output, in `_postponed`.
        self._weight_halves: dict[int, tuple[Any, list[_WeightHalf]]] = {}
        self._postponed: dict[int, Tensor | None] = {}

    def begin_step(
        self,
        input_shapes: list[InputShape],
        has_backward: bool,
        contexts: Sequence[ContextFactory] | None = None,
    ) -> None:
        """Prepare for a call of the schedule.

        contexts: per microbatch, a factory of context managers for its forward and its backward.
        """
        if self.hidden_states is None:
            raise ValueError(
                f"pipeline stage {self.stage_index} does not know the size of hidden states: its "
                "model has no model_args.dim; set stage.hidden_states = (dim, dtype)"
            )
        self._input_shapes = input_shapes
        self._has_backward = has_backward
        self._contexts = contexts or [nullcontext] * len(input_shapes)
        self.end_step()
        if has_backward:
            accumulate_gradients(self.submod)

    def end_step(self) -> None:
        self._forwards.clear()
        self._weight_halves.clear()
        self._postponed.clear()

    def empty_hidden(self, microbatch: int) -> Tensor:
        """Return an uninitialized tensor [B, T, dim] to receive hidden states or gradients in."""
        dim, dtype = self.hidden_states
        return torch.empty(*self._input_shapes[microbatch], dim, dtype=dtype, device=self.device)

    def forward(
        self,
        microbatch: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compute_loss: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Return the stage's output.

        args: the input; on stages after the first (hidden states,), without a graph.
        compute_loss: output -> loss, where backward begins. Only for the last stage.
        """
        hidden = None if self.is_first else args[0].requires_grad_(self._has_backward)
        with self._contexts[microbatch]():
            output = self.submod(*args, **kwargs)
        start = output
        if self.is_last:
            start = compute_loss(output) if compute_loss is not None else None
        else:
            # The next stage receives into a buffer of this size. Another size would give garbage or a hang.
            input_shape, (dim, dtype) = self._input_shapes[microbatch], self.hidden_states
            if (*output.shape, output.dtype) != (*input_shape, dim, dtype):
                raise RuntimeError(
                    f"pipeline stage {self.stage_index} must return {dtype} of shape "
                    f"{(*input_shape, dim)} for an input of {input_shape}, got {output.dtype} of "
                    f"shape {tuple(output.shape)}"
                )
        if self._has_backward:
            if not start.requires_grad:  # all parameters of this and earlier stages are frozen
                start = None
            elif not self.is_last:
                # Keep only the edge, so that the output's memory is freed once the output is sent.
                start = get_gradient_edge(start)
            self._forwards[microbatch] = start, hidden
        return output

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Accumulate the weights' gradients; return the gradient of the hidden states [B, T, dim].

        gradient: the output's gradient; None on the last stage, where backward starts at the loss.
        """
        start, hidden = self._forwards.pop(microbatch)
        with self._contexts[microbatch]():
            if start is not None:
                torch.autograd.backward([start], None if gradient is None else [gradient])
        return None if hidden is None else _gradient_of(hidden)

    def backward_input(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Return only the gradient of the hidden states; `backward_weight` continues from here."""
        if self.is_first:
            self._postponed[microbatch] = gradient  # no stage waits for the input's gradient
            return None
        start, hidden = self._forwards.pop(microbatch)
        with self._contexts[microbatch]():
            halves = _backward_input(start, gradient, hidden)
        # Keep `start`: on torch 2.11 and 2.12, nothing else keeps autograd nodes of Python functions alive.
        self._weight_halves[microbatch] = start, halves
        return _gradient_of(hidden)

    def backward_weight(self, microbatch: int) -> None:
        """Accumulate the weights' gradients after `backward_input`."""
        if self.is_first:
            self.backward(microbatch, self._postponed.pop(microbatch))
            return
        _, halves = self._weight_halves.pop(microbatch)
        with self._contexts[microbatch]():
            # Halves with several nodes go first: a half with one node frees nodes that other halves need.
            for half in sorted(halves, key=lambda half: -len(half.arrived)):
                _backward_weight(half)
        store_gradients(self.submod)


def _gradient_of(hidden: Tensor) -> Tensor:
    """Return the gradient of the hidden states; zeros if the loss does not depend on them."""
    return torch.zeros_like(hidden) if hidden.grad is None else hidden.grad


# ---- backward in two halves ----
#
# The first half propagates the gradient from the stage's output to its input along a path of autograd
# nodes. Where a branch leads from the path to a weight, the first half keeps the gradients that arrive
# at the branching node. The second half continues from these gradients.


class _WeightHalf(NamedTuple):
    """Weights, and the nodes of the path that lead to them. arrived: node -> gradients of its outputs."""

    arrived: dict[Node, tuple[Tensor | None, ...]]
    weights: list[Tensor]


def _backward_input(
    start: Tensor | GradientEdge, gradient: Tensor | None, hidden: Tensor
) -> list[_WeightHalf]:
    """Compute `hidden.grad`; return what is needed to compute the weights' gradients later."""
    root = start.node if isinstance(start, GradientEdge) else start.grad_fn
    users = _users_of_nodes(root)
    path = _ancestors([get_gradient_edge(hidden).node], users)
    assert root in path, "the output of a stage does not depend on its input"
    halves = _group_weights(users, path)
    handles = [
        node.register_prehook(functools.partial(half.arrived.__setitem__, node))
        for half in halves
        for node in half.arrived
    ]
    try:
        gradients = None if gradient is None else [gradient]
        torch.autograd.backward([start], gradients, inputs=[hidden], retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
    return halves


def _users_of_nodes(root: Node) -> dict[Node, list[Node]]:
    """Return, for each node of the graph below `root`, the nodes that pass gradients to it."""
    users: dict[Node, list[Node]] = {root: []}
    to_visit = [root]
    while to_visit:
        node = to_visit.pop()
        for below, _ in node.next_functions:
            if below is None:
                continue
            if below not in users:
                users[below] = []
                to_visit.append(below)
            users[below].append(node)
    return users


def _ancestors(
    nodes: Iterable[Node], users: dict[Node, list[Node]], end: frozenset[Node] = frozenset()
) -> frozenset[Node]:
    """Return `nodes`, and all nodes that lead to them; the search stops at nodes of `end`."""
    seen, to_visit = set(nodes), list(nodes)
    while to_visit:
        node = to_visit.pop()
        for user in () if node in end else users.get(node, ()):
            if user not in seen:
                seen.add(user)
                to_visit.append(user)
    return frozenset(seen)


def _group_weights(users: dict[Node, list[Node]], path: frozenset[Node]) -> list[_WeightHalf]:
    """Return groups of the weights below the path; weights that share a node of the path are in one group."""
    group_of: dict[Node, _WeightHalf] = {}
    for leaf in users:
        weight = getattr(leaf, "variable", None)  # only AccumulateGrad nodes have `variable`
        if weight is None or leaf in path:
            continue
        nodes = _ancestors([leaf], users, end=path) & path
        merged = _WeightHalf({}, [])
        for half in {
            id(group_of[node]): group_of[node] for node in nodes if node in group_of
        }.values():
            merged.arrived.update(half.arrived)
            merged.weights.extend(half.weights)
        merged.arrived.update(dict.fromkeys(nodes, ()))
        merged.weights.append(weight)
        group_of.update(dict.fromkeys(merged.arrived, merged))
    return list({id(half): half for half in group_of.values()}.values())


def _backward_weight(half: _WeightHalf) -> None:
    edges: dict[GradientEdge, Tensor] = {}
    for node, gradients in half.arrived.items():
        edges |= {GradientEdge(node, i): g for i, g in enumerate(gradients) if g is not None}
    # A node's kept gradients are complete, so it must ignore further gradients from other nodes.
    handles = [
        node.register_prehook(lambda _, kept=gradients: kept)
        for node, gradients in half.arrived.items()
        if gradients
    ]
    try:
        if edges:
            # With several nodes, backward runs through nodes of the path, which other halves may need.
            retain = len(half.arrived) > 1
            gradients, weights = list(edges.values()), half.weights
            torch.autograd.backward(list(edges), gradients, inputs=weights, retain_graph=retain)
    finally:
        for handle in handles:
            handle.remove()
