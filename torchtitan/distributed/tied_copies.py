"""A tied embedding in a pipeline: two copies of a parameter, on the first and the last stage.

The two stages are on two ranks, or on one rank under a V-shaped schedule. The copies act as one parameter:

    initial weights     both are drawn under the first name                     `name_in_whole_model`
    gradients           both get the sum, in each call of the schedule          `sum_gradients`
    gradient norm       includes the parameter once                             `second_copies`
    optimizers          each copy has its own state: equal gradients give equal updates
    checkpoints         weights under both names, as without a pipeline; optimizer state under the
                        first name                                              `name_in_whole_model`
"""

import weakref
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from torchtitan.distributed.dtensor import local_tensor

FIRST, SECOND = "tok_embeddings.weight", "output.weight"

_holders_of_second: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def mark_copy(part: nn.Module, whole_model: nn.Module) -> None:
    """Mark a stage's part that holds one copy of the embedding, if the whole model has tied embeddings."""
    names = "tok_embeddings", "output"
    first, second = (getattr(getattr(whole_model, x, None), "weight", None) for x in names)
    has_first, has_second = (getattr(part, x, None) is not None for x in names)
    if first is None or first is not second or has_first == has_second:
        return  # no tied embedding, or this part has neither or both of the modules
    part.tied_copy, part.tied_copy_trains = FIRST if has_first else SECOND, first.requires_grad
    if has_second:
        _holders_of_second.add(part)


def copies_in(parts: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the copies of a tied embedding that these parts hold: none, one, or both."""
    return [part.get_parameter(part.tied_copy) for part in parts if hasattr(part, "tied_copy")]


def trained_copies_in(parts: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the copies that these parts hold; none if the embedding was frozen when the model was cut."""
    return copies_in(part for part in parts if getattr(part, "tied_copy_trains", False))


def holds_second(part: nn.Module) -> bool:
    """Return True if the part holds the second copy, whose optimizer state is not saved."""
    return getattr(part, "tied_copy", None) == SECOND


def name_in_whole_model(part: nn.Module, name: str) -> str:
    """Return a parameter's name in the whole model, where the two copies are one tensor."""
    return FIRST if name == SECOND and holds_second(part) else name


def second_copies() -> set[int]:
    """Return the ids of this process's second copies, whose gradient the first copy's norm includes."""
    return {id(copy) for copy in copies_in(_holders_of_second)}


@torch.no_grad()
def sum_gradients(
    copies: list[nn.Parameter], group: dist.ProcessGroup | None, other_rank: int
) -> None:
    """Replace each copy's gradient by the sum of both copies' gradients, bitwise equal on both ranks.

    copies: the copies that this rank holds. other_rank: the rank in `group` with the other copy.
    """
    for parameter in copies:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    own, *others = (local_tensor(parameter.grad) for parameter in copies)
    if not own.numel():  # this shard is empty, and so is the other copy's
        return
    if not others:
        other = torch.empty_like(own, memory_format=torch.contiguous_format)
        exchange = [
            dist.P2POp(dist.isend, own.contiguous(), group=group, group_peer=other_rank),
            dist.P2POp(dist.irecv, other, group=group, group_peer=other_rank),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        own += other
    for other in others:
        own += other
        other.copy_(own)
    for parameter in copies:
        if not parameter.requires_grad:  # a frozen copy takes part only for the other rank's sake
            parameter.grad = None
