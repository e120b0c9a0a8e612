"""Asynchronous tensor parallelism: the compiler finds products to overlap, and results don't change.

torch's pass runs as it does for CUDA. The operators that it inserts are torch's slow reference
versions, which gather, multiply and reduce one after the other on any device.
"""

import contextlib
from collections import Counter
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.distributed.layout_matrix import (
    ONE_PROCESS,
    SHALLOW,
    Layout,
    assert_same_numbers,
    measure_on_rank,
)
from tests.reliability.jobs import flags_in
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.tp_plan import apply_tp
from torchtitan.testing.gloo import run_ranks

GATHER = "fused_all_gather_matmul"
REDUCE = "fused_matmul_reduce_scatter"


@contextlib.contextmanager
def pass_for_cuda():
    """Count the operators in graphs that the backend "post_grad_passes" compiles inside."""
    import torch._inductor.config
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._guards import detect_fake_mode
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.virtualized import V
    from torch.distributed import _symmetric_memory

    counts = Counter()

    def compile_graph(gm, inputs):
        with V.set_fake_mode(detect_fake_mode(inputs)):
            view_to_reshape(gm)
            post_grad_passes(gm, is_inference=False)
        gm.recompile()
        counts.update(getattr(node.target, "_opname", "") for node in gm.graph.nodes)
        return gm.forward

    compilers = dict(fw_compiler=compile_graph, bw_compiler=compile_graph)
    cut = min_cut_rematerialization_partition
    backend = aot_autograd(**compilers, decompositions=select_decomp_table, partition_fn=cut)
    torch._dynamo.register_backend(backend, name="post_grad_passes")
    with (
        mock.patch("torch.distributed.is_nccl_available", lambda: True),
        _symmetric_memory._test_mode(),
        # What the pass does not replace stays as it is, without kernels that need a compiler.
        torch._inductor.config.patch(pattern_matcher=False, _micro_pipeline_tp=True),
    ):
        yield counts
    torch._dynamo.reset()


OVERLAPPED = flags_in("""
    parallelism.enable_async_tensor_parallel compile.enable compile.components=model
    compile.backend=post_grad_passes
""")


def train(layout, folder):
    return measure_on_rank(layout, "llama3", "whole rows", folder, (SHALLOW,))


def train_overlapped(folder):
    """Return a run, and the operators in its compiled blocks."""
    from torch.distributed import _symmetric_memory

    operators = torch.library.Library("symm_mem", "IMPL")  # kept alive by this name
    for name in (GATHER, REDUCE):
        operators.impl(name, getattr(_symmetric_memory, f"_{name}_fallback"), "CPU")
    with pass_for_cuda() as counts:
        return train(Layout("TP 2", tp=2, extra=tuple(OVERLAPPED)), folder), dict(counts)


@pytest.mark.slow
def test_collectives_beside_products_are_fused_and_numbers_stay(tmp_path):
    folder = str(tmp_path)
    found, counts = run_ranks(train_overlapped, 2, folder, timeout_seconds=300)[1]
    # Blocks share their graphs. Forward: attention's and feed-forward's input and output, all of
    # them. Backward: the gradients of the two outputs; those of the inputs are sums of products,
    # which the pass leaves alone.
    assert (counts[GATHER], counts[REDUCE]) == (4, 2)
    assert (counts.get("all_gather_into_tensor", 0), counts["reduce_scatter_tensor"]) == (0, 2)
    assert_same_numbers(found, train(ONE_PROCESS, folder), "overlapped")


def test_float8_products_are_fused_with_gathers_of_float8():
    float8 = pytest.importorskip("torchao.float8")
    sizes = dict(dim=128, n_layers=1, n_heads=4, vocab_size=64, max_seq_len=16)
    with torch.device("meta"):
        model = Transformer(TransformerModelArgs(**sizes)).bfloat16()
    float8.convert_to_float8_training(
        model,
        config=float8.Float8LinearConfig(),
        module_filter_fn=lambda module, name: name != "output",
    )
    torch._dynamo.reset()  # sizes that other tests compiled would make these dynamic
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    apply_tp(model, mesh, True, enable_float8_tensorwise_tp=True, enable_async_tp=True)
    x = torch.zeros(2, 8, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with pass_for_cuda() as counts:
        block = torch.compile(model.layers["0"], backend="post_grad_passes", fullgraph=True)
        block(x, model.freqs_cis[None]).sum().backward()
    fused = counts["fused_all_gather_scaled_matmul"], counts["fused_scaled_matmul_reduce_scatter"]
    assert fused == (4, 2)
    # What remains are gradients of inputs, and products with gradients of weights among them.
    assert (counts["all_gather_into_tensor"], counts["reduce_scatter_tensor"]) == (0, 2)
    assert counts["mm"] == 0 and counts["_scaled_mm"] == 12
