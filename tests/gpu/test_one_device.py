"""Two ranks on one GPU have the numbers of one process: the first layouts where there is only one GPU.

NCCL refuses two ranks on one device, and gloo has neither all-gather, reduce-scatter nor messages for CUDA
tensors. So each collective of CUDA tensors copies them to the host, runs on gloo, and copies them back.
"""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import library
from torch.utils import _pytree as pytree

from tests.distributed import layout_matrix
from tests.distributed.layout_matrix import ONE_PROCESS, Layout, Run, differences
from tests.gpu.test_layouts import ALLTOALL, TOLERANCES
from tests.gpu.untuned import compile_untuned
from torchtitan.testing.gloo import run_ranks

LAYOUTS = [x for x in layout_matrix.LAYOUTS if x.name in ("FSDP 2", "TP 2", "PP 2, 1F1B", "CP 2")]
CASES = [("llama3", "whole rows"), ("llama3", "documents, flex")]
SYNCHRONOUS = """
    allreduce_ allreduce_coalesced_ broadcast_ allgather_ _allgather_base_ reduce_scatter_
    allgather_into_tensor_coalesced_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_ alltoall_
    alltoall_base_ barrier
""".split()


class Received(dist.Work):
    """A message on its way; `wait` copies it to the device."""

    def __init__(self, work: dist.Work, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.work, self.copies = work, copies

    def wait(self, timeout: Any = None) -> bool:
        self.work.wait()
        for on_device, on_host in self.copies:
            on_device.copy_(on_host)
        return True


_received: list[Received] = []  # torch keeps only the part in C++ alive


def through_the_host(name: str):
    """Return a kernel for the operator c10d::`name` on CUDA tensors."""
    operator = getattr(torch.ops.c10d, name)

    def kernel(*arguments: Any) -> Any:
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def moved(x: torch.Tensor) -> torch.Tensor:
            copies.append((x, x.cpu()))
            return copies[-1][1]

        result = operator(*pytree.tree_map_only(torch.Tensor, moved, arguments))
        *outputs, work = result if isinstance(result, tuple) else (result,)
        received = Received(dist.Work.unbox(work), copies)
        if name in SYNCHRONOUS:
            received.wait()
        elif name == "recv_":
            _received.append(received)
            work = received.boxed()
        originals = {id(on_host): on_device for on_device, on_host in copies}
        back = lambda x: originals.get(id(x), x)  # noqa: E731
        outputs = pytree.tree_map_only(torch.Tensor, back, outputs)
        return (*outputs, work) if outputs else work

    return kernel


def measure_on_one_device(layout: Layout, cases: list[tuple[str, str]], folder: str) -> list[Run]:
    from torchtitan.distributed.processes import process_group

    torch.compile = compile_untuned
    os.environ["LOCAL_RANK"] = "0"
    torch.cuda.set_device(0)
    kernels = library.Library("c10d", "IMPL")
    for name in (*SYNCHRONOUS, "send", "recv_"):
        kernels.impl(name, through_the_host(name), "CUDA")
    process_group._check_existing_group = lambda *_: None  # it refuses gloo for CUDA tensors
    dist.init_process_group("cpu:gloo,cuda:gloo")
    flags = (ALLTOALL,) if layout.cp > 1 else ()
    runs = layout_matrix._measure_cases(layout, cases, folder, flags)
    dist.barrier()
    return runs


def measure(layout: Layout, folder: str) -> list[Run]:
    ranks = run_ranks(
        measure_on_one_device, layout.world_size, layout, CASES, folder,
        timeout_seconds=300, init_process_group=False, on_accelerators=True,
    )  # fmt: skip
    return [layout_matrix._merge(runs) for runs in zip(*ranks, strict=True)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return measure(ONE_PROCESS, str(tmp_path_factory.mktemp("one")))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_two_ranks_on_one_gpu_have_the_numbers_of_one_process(layout, expected, tmp_path):
    for seen, alone in zip(measure(layout, str(tmp_path)), expected, strict=True):
        assert seen.hashes == alone.hashes
        for kind, difference in differences(seen, alone).items():
            assert difference <= TOLERANCES[kind], f"{kind} differs by {difference:.1e}"
