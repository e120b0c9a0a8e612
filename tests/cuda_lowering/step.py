"""A training step of an engine, lowered: what it compiles, how often, and what it launches."""

import dataclasses
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor

from tests.cuda_lowering.cases import CASES
from tests.cuda_lowering.target import Target
from tests.cuda_rehearsal import jobs
from torchtitan.models.attention import FlexAttentionWrapper
from torchtitan.protocols.train_spec import get_train_spec

_TUNED_FLEX = FlexAttentionWrapper._compiled_flex_attn  # before the rehearsal replaces it

MEAN_DOCUMENT = 256


@dataclasses.dataclass
class Lowered:
    """What a case compiled.

    graphs: what each graph launches, in the order of compilation, of the first step.
    recompiled: graphs that later steps compiled. breaks: of graphs. problems: kernels that do not
    fit the card, or compute in fp64. spills: kernel -> bytes of stack in its best configuration.
    shared: the most bytes of shared memory.
    """

    graphs: list[str]
    recompiled: int
    breaks: int
    problems: list[str]
    spills: dict[str, int]
    shared: int


def add_small_model() -> None:
    """llama3 "lowered": two layers as wide as they need be for heads of 64, and a large vocabulary,
    whose loss is computed chunk by chunk."""
    args = get_train_spec("llama3").model_args
    sizes = {"dim": 512, "n_layers": 2, "n_heads": 8, "n_kv_heads": 2, "vocab_size": 32768}
    args["lowered"] = dataclasses.replace(args["debugmodel"], **sizes)


def lower(name: str, target: Target) -> Lowered:
    """Train the steps of a case; see `cases.py`."""
    from torch._dynamo.utils import counters

    case, family = CASES[name], name.split()[0]
    counters.clear()
    target.forget()
    flags = f"--model.name={family} --model.flavor={case.flavor} {case.flags}".split()
    if "activation_checkpoint" not in case.flags:
        flags.append("--activation_checkpoint.mode=none")
    sizes = f"--training.seq_len={max(case.seq_lens)}", f"--training.local_batch_size={case.rows}"
    get_train_spec(family).model_args[case.flavor].n_layers = case.n_layers
    flags = *flags, *sizes, *case.compile.split()
    with (
        mock.patch.object(FlexAttentionWrapper, "_compiled_flex_attn", staticmethod(_TUNED_FLEX)),
        jobs.engine_of(case.ranks, *flags) as (engine, _),
    ):
        n_graphs = 0
        for step, tokens in enumerate(batches(case.rows, case.seq_lens)):
            engine.forward_backward_step(
                input_dict={"input": tokens}, labels=tokens, global_valid_tokens=tokens.numel()
            )
            engine.optim_step()
            n_graphs = n_graphs if step else len(target.graphs)
    return Lowered(
        graphs=target.graphs[:n_graphs],
        recompiled=len(target.graphs) - n_graphs,
        breaks=sum(counters["graph_break"].values()),
        problems=[*_problems(target)],
        spills=_spills(target),
        shared=max(b.shared for kernel in target.kernels for b in kernel.binaries),
    )


def batches(n_rows: int, seq_lens: tuple[int, ...]) -> Iterator[Tensor]:
    """Tokens [n_rows, T] in documents of 256 on average, each closed by token 0."""
    generator = torch.Generator().manual_seed(0)
    for seq_len in seq_lens:
        tokens = torch.randint(1, 2000, (n_rows, seq_len), generator=generator)
        tokens[torch.rand(tokens.shape, generator=generator) < 1 / MEAN_DOCUMENT] = 0
        yield tokens.pin_memory()


def _problems(target: Target) -> Iterator[str]:
    for kernel in target.kernels:
        # torchao divides 1 by the largest number of a float8 tensor in fp64.
        if "tl.float64" in kernel.source and "reciprocal" not in kernel.name:
            yield f"{kernel.name} computes in fp64"
        errors = [binary.error for binary in kernel.binaries]
        if all(errors):  # the tuner leaves out a configuration that does not fit
            yield f"{kernel.name}: {errors[0]}"


def _spills(target: Target) -> dict[str, int]:
    stacks = {k.name: [b.stack for b in k.binaries if not b.error] for k in target.kernels}
    return {name: min(of_kernel) for name, of_kernel in stacks.items() if min(of_kernel, default=0)}
