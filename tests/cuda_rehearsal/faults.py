"""Faults of the kind that only a CUDA machine shows, seeded one by one: each has to be caught."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import torch

from tests.cuda_rehearsal.cases import ALLOWED
from tests.cuda_rehearsal.jobs import rehearse
from tests.cuda_rehearsal.scenarios import SCENARIOS

FAULTS: dict[str, Callable[[str], dict]] = {}


class NotCaught(Exception):
    pass


def fault(case: str, target: str | None = None) -> Callable:
    """Seed a fault while `case` is rehearsed.

    What is decorated gets the function named `target` ("module:Class.function"), and returns what
    stands in for it; or, without a target, it is a context manager.
    """

    def register(make: Callable) -> Callable:
        def check(_name: str) -> dict:
            with make() if target is None else replaced(target, make):
                try:
                    notes = (SCENARIOS.get(case) or rehearse)(case)
                except Exception as error:
                    text = str(error).strip() or type(error).__name__
                    return {"caught": {f"{type(error).__name__}: {text.splitlines()[0][:150]}": 1}}
            noted = {part: waits for part, waits in notes.items() if waits}
            if noted == ALLOWED.get(case, {}):
                raise NotCaught(f"{case!r} went as if there were no fault")
            return {"caught": {what: 1 for part in noted.values() for what in part}}

        FAULTS[make.__name__.replace("_", " ")] = check
        return make

    return register


@contextlib.contextmanager
def replaced(target: str, make: Callable) -> Iterator[None]:
    module, _, path = target.partition(":")
    *outer, name = path.split(".")
    owner = functools.reduce(getattr, outer, __import__(module, fromlist=["_"]))
    with mock.patch.object(owner, name, make(getattr(owner, name))):
        yield


def _then(function: Callable, also: Callable) -> Callable:
    """Calls the function, then `also` with its result."""

    @functools.wraps(function)
    def both(*args, **kwargs):
        result = function(*args, **kwargs)
        also(result)
        return result

    return both


ENGINE = "torchtitan.engine:TrainingEngine."
CONTEXT = "torchtitan.distributed.context_parallel:"

# ---- the host waits, once per step ----


@fault("llama3", ENGINE + "optim_step")
def gradient_norm_is_read_in_each_step(function):
    return _then(function, lambda result: result.grad_norm.item())


@fault("llama3", ENGINE + "forward_backward_step")
def loss_is_read_in_each_step(function):
    return _then(function, float)


@fault("llama3", ENGINE + "optim_step")
def device_is_synchronized_in_each_step(function):
    return _then(function, lambda _: torch.cuda.synchronize())


@fault("llama3 fsdp", "torchtitan.distributed.utils:clip_grad_norm_")
def norm_is_checked_on_the_host(function):
    return _then(function, lambda norm: bool(norm > 1))


@fault("llama3 flex", "torchtitan.batch.mask:DocumentMask.block_mask")
def documents_are_counted_on_the_host(function):
    def count(mask, *args, **kwargs):
        int(mask.starts.max())
        return function(mask, *args, **kwargs)

    return count


@fault("llama3", "torchtitan.models.decoder:Decoder.forward")
def forward_looks_for_places_by_value(function):
    def forward(self, tokens, *args, **kwargs):
        (tokens == 0).nonzero()
        return function(self, tokens, *args, **kwargs)

    return forward


@fault("qwen3 moe ep", "torchtitan.models.moe.moe:TokenReorderer.forward")
def experts_are_counted_one_by_one(function):
    return _then(function, lambda outputs: outputs[2].tolist())


@fault("trainer", "torchtitan.listeners.metrics:MetricsProcessor.should_log")
def every_step_logs(function):
    return lambda self, step: True


# ---- copies that the host has to stay for ----


@fault("llama3", "torchtitan.batch.batch:TokenBatch.to")
def batch_is_copied_from_pageable_memory(function):
    def to(self, device):
        return self.with_tokens(lambda x, _padding: x.clone().to(device))

    return to


@fault("llama3", "torchtitan.models.decoder:Decoder.forward")
def constant_is_made_on_the_host_in_each_step(function):
    def forward(self, tokens, *args, **kwargs):
        torch.tensor([1.0, 2.0], device=tokens.device)
        return function(self, tokens, *args, **kwargs)

    return forward


@fault("llama3", ENGINE + "forward_backward_step")
def loss_goes_to_the_host_in_each_step(function):
    return _then(function, lambda loss: loss.to("cpu"))


@fault("to host and back", "torchtitan.optim.offload:Offloader._pinned_copies")
def states_go_to_pageable_memory(function):
    def copies(self, kinds):
        return {key: (x, y.clone()) for key, (x, y) in function(self, kinds).items()}

    return copies


@fault("trainer", "torchtitan.tools.host_copy:pinned")
def batches_are_not_pinned(function):
    return lambda x: x


# ---- what was asked the host before ----


@fault("llama3 fsdp", "torchtitan.step.update:skips_on_device")
def the_host_decides_whether_to_skip_a_step(function):
    return lambda optimizers: False


@fault("llama3 varlen", "torchtitan.tools.host_copy:remember_host")
def documents_are_read_back_from_the_device(function):
    return lambda copy, source: copy


@fault("qwen3 moe ep full compile", "torchtitan.distributed.expert_parallel:read_once")
def recomputation_waits_for_the_counts_again(function):
    return lambda read: read()


@fault("llama3", "torchtitan.tools.host_copy:read_later")
def number_is_read_before_it_has_arrived(function):
    return lambda tensor: tensor.to("cpu", non_blocking=True).tolist


# ---- tensors of the host among those of the device ----


@fault("llama3 flex", "torchtitan.batch.mask:DocumentMask.block_mask")
def mask_stays_on_the_host(function):
    return lambda mask, *args, **kwargs: function(
        replace(mask, starts=torch.zeros(mask.starts.shape, dtype=torch.int32)), *args, **kwargs
    )


@fault("llama3", "torchtitan.models.decoder:Decoder.forward")
def device_argument_is_forgotten(function):
    def forward(self, tokens, *args, **kwargs):
        return function(self, tokens + torch.zeros(tokens.shape, dtype=torch.long), *args, **kwargs)

    return forward


@fault("llama3 fsdp", "torchtitan.loss.cross_entropy:cross_entropy_loss")
def labels_stay_on_the_host(function):
    return lambda logits, labels, *a, **k: function(
        logits, torch.zeros(labels.shape, dtype=torch.long), *a, **k
    )


@fault("llama3 cp allgather", CONTEXT + "ContextPart.gathered_keys")
def index_of_gathered_keys_stays_on_the_host(function):
    return lambda self: function(self).index_select(0, torch.arange(8))


@fault("qwen3 moe compile", "torchtitan.models.moe.moe:MoE.forward")
def bias_of_experts_stays_on_the_host(function):
    def forward(self, x, *args, **kwargs):
        return function(self, x + torch.zeros(x.shape[-1]), *args, **kwargs)

    return forward


# ---- streams ----


@fault("checkpoint pinned", "torchtitan.checkpoint.saver:order_staging_after_compute")
def staging_does_not_wait_for_the_update(function):
    return lambda stager: None


@contextlib.contextmanager
def _streams_never_wait() -> Iterator[None]:
    from tests.cuda_rehearsal import device

    with (
        mock.patch.object(torch.cuda.Stream, "wait_stream", lambda self, stream: None),
        mock.patch.object(device.Event, "wait", lambda self, stream=None: None),
    ):
        yield


@fault("llama3 fsdp")
def gathered_parameters_are_read_before_they_are_there():
    return _streams_never_wait()


@fault("llama3", "torchtitan.models.decoder:Decoder.forward")
def work_of_another_stream_is_not_waited_for(function):
    def forward(self, tokens, *args, **kwargs):
        with torch.cuda.stream(torch.cuda.Stream()):
            tokens = tokens + 0
        return function(self, tokens, *args, **kwargs)

    return forward


# ---- the compiler, and what only runs on a device ----


@fault("qwen3 moe compile", "torchtitan.models.moe.moe:indices_padding_wrapper")
def compiled_block_wraps_a_partial_function(function):
    return lambda run: functools.wraps(run)(function(run))


@fault("llama3 op flex")
def recomputation_refuses_higher_order_operators():
    from torchtitan.distributed.activation_checkpoint import _recompute_mode

    return mock.patch.object(_recompute_mode(), "supports_higher_order_operators", False)
