"""The table of layouts on NCCL, as tests/distributed/test_layout_matrix.py has it on gloo.

A layout is skipped where there are fewer GPUs than it has ranks. In fp32, so that differences are
those of summation alone: flex attention serves packed documents and whole context-parallel rows,
as the kernel of "varlen", which also meets gathered keys, knows 16-bit numbers only. That one is
compared in bf16.
"""

import functools

import pytest
import torch

from tests.distributed.layout_matrix import (
    FAMILIES,
    LAYOUTS,
    MOE_FAMILIES,
    MOE_LAYOUTS,
    ONE_PROCESS,
    Layout,
    differences,
    measure,
)

# GPUs sum in an order that changes from run to run, and their exponentials are rounded otherwise.
TOLERANCES = dict(loss=1e-5, grad_norm=1e-5, gradient=1e-4, weights=1e-4, optimizer_state=1e-4)
TOLERANCES["expert_bias"] = 0.0
BF16_TOLERANCES = {"loss": 1e-3, "grad_norm": 5e-3, "gradient": 3e-2, "weights": 3e-3}
BATCHES = ("whole rows", "documents, flex")
ALLTOALL = "--parallelism.context_parallel_rotate_method=alltoall"
BF16 = "--training.mixed_precision_param=bfloat16"


def cases_of(layout: Layout) -> list[tuple[str, str]]:
    """(family, rows). sdpa takes no mask, and context parallelism spreads one over ranks."""
    families = MOE_FAMILIES if layout in MOE_LAYOUTS else ["llama3", "qwen3", *MOE_FAMILIES]
    assert set(families) <= set(FAMILIES)
    return [(family, batch) for family in families for batch in BATCHES]


@functools.cache
def run(layout: Layout, case: tuple[str, str], flags: tuple[str, ...], folder: str):
    (only,) = measure(layout, [case], folder, flags, on_accelerators=True)
    return only


def needs(layout: Layout) -> None:
    n_gpus = torch.cuda.device_count()
    if n_gpus < layout.world_size:
        pytest.skip(f"needs {layout.world_size} GPUs, and there are {n_gpus}")


@pytest.mark.parametrize("layout", LAYOUTS + MOE_LAYOUTS, ids=lambda layout: layout.name)
def test_layout_gives_the_numbers_of_one_gpu(layout, tmp_path_factory):
    needs(layout)
    folder = str(tmp_path_factory.getbasetemp())
    cases, flags = cases_of(layout), (ALLTOALL,) if layout.cp > 1 else ()
    runs = measure(layout, cases, folder, flags, on_accelerators=True)
    for case, seen in zip(cases, runs, strict=True):
        expected = run(ONE_PROCESS, case, (), folder)
        assert seen.hashes == expected.hashes, f"{case}: initial weights differ"
        for kind, difference in differences(seen, expected).items():
            assert difference <= TOLERANCES[kind], f"{case}: {kind} differs by {difference:.1e}"


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
@pytest.mark.parametrize("cp", [2, 4])
def test_gathered_keys_give_the_numbers_of_whole_rows_in_bf16(cp, family, tmp_path_factory):
    """Both layouts have FSDP, which casts parameters; alone, one process would use autocast."""
    layout = Layout(f"CP {cp}", cp=cp)
    needs(layout)
    folder = str(tmp_path_factory.getbasetemp())
    case = (family, "documents, varlen")
    seen = run(layout, case, (BF16,), folder)
    expected = run(Layout("FSDP", dp_shard=2), case, (BF16,), folder)
    found = differences(seen, expected)
    for kind, tolerance in BF16_TOLERANCES.items():
        assert found[kind] <= tolerance, f"{kind} differs by {found[kind]:.1e}"
