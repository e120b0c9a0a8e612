"""Faults of lowering, seeded one by one: each has to be caught."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from unittest import mock

import torch
from torch.library import _scoped_library

from tests.cuda_lowering.cases import EXPECTED
from tests.cuda_lowering.step import lower
from tests.cuda_lowering.target import Target
from tests.cuda_rehearsal.faults import NotCaught, replaced
from torchtitan.tools.compiler import load_flex_attention

FAULTS: dict[str, Callable[[str, Target], dict[str, str]]] = {}
SMALL = "llama3 small flex"
ATTENTION = "torchtitan.models.decoder:Attention.forward"
FEED_FORWARD = "torchtitan.models.decoder:FeedForward.forward"


def fault(case: str, where: str | None = None) -> Callable:
    """As in the rehearsal: what is decorated stands in for `where`, or is a context manager."""

    def register(make: Callable) -> Callable:
        def check(_name: str, target: Target) -> dict[str, str]:
            with make() if where is None else replaced(where, make):
                try:
                    lowered = lower(case, target)
                except Exception as error:
                    text = str(error).strip() or type(error).__name__
                    return {"caught": f"{type(error).__name__}: {text[:300]}"}
            if not (found := unexpected(case, asdict(lowered))):
                raise NotCaught(f"{case!r} was lowered as if there were no fault")
            return {"caught": str(found)}

        FAULTS[make.__name__.replace("_", " ")] = check
        return make

    return register


def unexpected(case: str, record: dict) -> dict[str, tuple]:
    """Return the fields of `Lowered` that differ: (found, expected)."""
    expected = asdict(EXPECTED[case])
    return {key: (record[key], value) for key, value in expected.items() if record[key] != value}


# ---- dynamo ----


@fault(SMALL, ATTENTION)
def graph_breaks_in_a_block(function):
    def forward(self, *args, **kwargs):
        torch._dynamo.graph_break()
        return function(self, *args, **kwargs)

    return forward


@fault(SMALL, FEED_FORWARD)
def block_asks_for_a_value(function):
    def forward(self, x):
        return function(self, x) if x.amax() > 0 else x

    return forward


@fault(SMALL, "torchtitan.batch.mask:DocumentMask.block_mask")
def mask_function_holds_a_number_that_changes(function):
    windows = iter(range(700, 800))
    return lambda mask, *args: function(replace(mask, window=next(windows)), *args)


@fault("llama3 small lengths", "torchtitan.models.parallelize:torch.compile")
def each_length_is_compiled_by_itself(function):
    return functools.partial(function, dynamic=False)


# ---- operators ----


@contextlib.contextmanager
def _operator(fake: Callable) -> Iterator[None]:
    """`FeedForward` ends in an operator of its own."""
    from torchtitan.models.decoder import FeedForward

    with _scoped_library("lowering_faults", "FRAGMENT") as library:
        library.define("scaled(Tensor x) -> Tensor")
        library.impl("scaled", fake, "Meta")
        forward = FeedForward.forward
        scaled = torch.ops.lowering_faults.scaled
        with mock.patch.object(FeedForward, "forward", lambda self, x: scaled(forward(self, x))):
            yield


@fault(SMALL)
def operator_refuses_the_dtype():
    def fake(x):
        raise TypeError(f"scaled is for float32, got {x.dtype}")

    return _operator(fake)


@fault(SMALL, FEED_FORWARD)
def tensor_of_the_host_is_in_the_graph(function):
    def forward(self, x):
        return function(self, x * torch.ones(x.shape[-1], device="cpu").to(x.device))

    return forward


@fault(SMALL, FEED_FORWARD)
def products_are_in_fp32(function):
    def forward(self, x):
        weights = [w.weight.float() for w in (self.w1, self.w2, self.w3)]
        h = torch.nn.functional.silu(x.float() @ weights[0].t()) * (x.float() @ weights[2].t())
        return (h @ weights[1].t()).to(x.dtype)

    return forward


@fault(SMALL, FEED_FORWARD)
def scalar_makes_fp64(function):
    def forward(self, x):
        return function(self, (x.double() * 1.0000001).to(x.dtype))

    return forward


@fault(SMALL, FEED_FORWARD)
def rows_are_gathered_by_index(function):
    def forward(self, x):
        order = torch.arange(x.shape[1], device=x.device).flip(0)
        return function(self, x[:, order])  # whose gradient is added row by row

    return forward


@fault(SMALL, "torchtitan.loss.cross_entropy:SummedCrossEntropy.__post_init__")
def loss_is_not_compiled(function):
    def forget_backend(self):
        object.__setattr__(self, "compile_backend", None)
        function(self)

    return forget_backend


# ---- kernels ----


def _with_kernel_options(**options):
    flex = load_flex_attention().flex_attention

    def attend(*args, **kwargs):
        return flex(*args, **kwargs | {"kernel_options": options})

    return mock.patch.object(load_flex_attention(), "flex_attention", attend)


@fault(SMALL)
def kernel_wants_too_much_shared_memory():
    return _with_kernel_options(fwd_BLOCK_M=128, fwd_BLOCK_N=128, fwd_num_stages=8)


@fault(SMALL)
def kernel_spills():
    return _with_kernel_options(
        bwd_BLOCK_M1=128, bwd_BLOCK_N1=128, bwd_BLOCK_M2=128, bwd_BLOCK_N2=128, bwd_num_warps=4,
        bwd_num_stages=1,
    )  # fmt: skip


@fault("llama3 1B sdpa", "torch.nn.functional:scaled_dot_product_attention")
def attention_stores_all_scores(function):
    def attend(q, k, v, **options):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = q @ k.mT * (q.shape[-1] ** -0.5)
        return scores.softmax(-1) @ v

    return attend
