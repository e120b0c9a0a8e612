"""Adapters give the numbers of one process on every layout, and their base costs nothing there."""

import pytest
import torch

from tests.distributed.layout_matrix import (
    BY_NAME,
    LAYOUTS,
    MOE_LAYOUTS,
    ONE_PROCESS,
    SHALLOW,
    Layout,
    assert_same_numbers,
    build_engine,
    measure,
    needs_four_layers,
    run_step,
    shallow,
)
from torchtitan.testing.gloo import run_ranks

FLAGS = ("--model.converters=lora", "--lora.rank=4", "--lora.alpha=8")
DENSE, TIED = ("llama3", "documents, varlen"), ("qwen3, tied", "whole rows")
EXPERTS, LATENTS = ("qwen3 MoE", "documents, flex"), ("deepseek_v3", "whole rows")
# One layout for each way to split a matrix; the first and last stage of ZBV hold no adapters.
QUICK = {
    "FSDP 2, accumulation 2, full AC": [DENSE],
    "TP 2, whole logits, op AC": [DENSE],
    "PP 2, ZBVZeroBubble": [TIED],
    "TP 2, EP 2": [EXPERTS],
}
ALL = {layout.name: [DENSE, LATENTS] for layout in LAYOUTS}
ALL |= {layout.name: [EXPERTS, LATENTS] for layout in MOE_LAYOUTS}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """(Is shallow, case) -> its run."""
    cases = [DENSE, TIED, EXPERTS, LATENTS]
    folder = str(tmp_path_factory.mktemp("one"))
    runs = {}
    for layout in (ONE_PROCESS, shallow(ONE_PROCESS)):
        is_shallow = SHALLOW in layout.extra
        for case, run in zip(cases, measure(layout, cases, folder, FLAGS), strict=True):
            runs[is_shallow, case] = run
    return runs


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        *(pytest.param(*row, id=row[0]) for row in QUICK.items()),
        *(pytest.param(*row, id=f"{row[0]}, slow", marks=pytest.mark.slow) for row in ALL.items()),
    ],
)
def test_layout_gives_the_numbers_of_one_process(name, cases, one_process, tmp_path):
    layout = BY_NAME[name]
    is_shallow = not needs_four_layers(layout) and layout.pp < 4
    layout = shallow(layout) if is_shallow else layout
    for case, run in zip(cases, measure(layout, cases, str(tmp_path), FLAGS), strict=True):
        expected = one_process[is_shallow, case]
        assert expected.losses[-1] < expected.losses[0]
        assert all(".lora_" in name or "_lora_" in name for name in run.gradients), run.gradients
        assert_same_numbers(run, expected, case)


SIZES = {
    "llama3": "n_heads=8",
    "qwen3, tied": "head_dim=32",
    "qwen3 MoE": "head_dim=32, moe_inter_dim=128",
}


def compare(layouts, case, folder, *flags, **tolerance):
    """Return both runs, after a check that they have the same numbers."""
    one, other = (measure(each, [case], str(folder), (*FLAGS, *flags))[0] for each in layouts)
    assert one.losses[-1] < one.losses[0]
    assert_same_numbers(other, one, case, **tolerance)
    return one, other


def test_adapter_of_the_output_gives_the_numbers_of_one_process(tmp_path):
    layouts = [shallow(x) for x in (ONE_PROCESS, BY_NAME["TP 2, whole logits, op AC"])]
    _, run = compare(layouts, DENSE, tmp_path, "--lora.target_modules=all-linear,lm_head")
    assert {"output.lora_a", "output.lora_b"} < run.gradients.keys()


@pytest.mark.skipif(torch.__version__ < "2.12", reason="FSDP casts integers")
@pytest.mark.parametrize(
    "name",
    [
        "FSDP 2, accumulation 2, full AC",
        "TP 2, whole logits, op AC",
        pytest.param("PP 2, ZBVZeroBubble", marks=pytest.mark.slow),
        pytest.param("TP 2, EP 2", marks=pytest.mark.slow),
        pytest.param("DDP 2", marks=pytest.mark.slow),
    ],
)
def test_base_in_4_bits_gives_the_numbers_of_one_process(name, tmp_path):
    (case,) = QUICK.get(name, [DENSE])
    # A rank's part of a row has at least one block of 64 numbers.
    flags = ("--lora.base_format=nf4", f"--model.args=dim=128, {SIZES[case[0]]}")
    layouts = [ONE_PROCESS, BY_NAME[name]]
    if not needs_four_layers(BY_NAME[name]):
        layouts = list(map(shallow, layouts))
    compare(layouts, case, tmp_path, *flags)


@pytest.mark.slow
def test_base_in_float8_gives_the_numbers_of_one_process(tmp_path):
    pytest.importorskip("torchao")
    flags = (
        "--model.converters=quantize.linear.float8,lora",
        "--quantize.linear.float8.emulate",
        "--quantize.linear.float8.filter_fqns=output",
        "--quantize.linear.float8.recipe_name=rowwise",  # scales don't depend on the batch
    )
    one, other = (
        measure(shallow(x), [("llama3", "whole rows")], str(tmp_path), flags)[0]
        for x in (ONE_PROCESS, Layout("FSDP 2", dp_shard=2))
    )
    # Sums that round differently move a few values to the next float8 number.
    assert_same_numbers(other, one, "float8", factor=2)


def sent_and_held(folder):
    """Bytes that FSDP reduces in a step, sizes of what trains, and the dtypes of what does not."""
    from torchtitan.distributed import fsdp

    layout, reduced = Layout("FSDP 2", dp_shard=2), []

    def counted(tensor, *others, sum_over_ranks=fsdp.sum_over_ranks):
        reduced.append(tensor.nbytes)
        return sum_over_ranks(tensor, *others)

    fsdp.sum_over_ranks = counted
    flags = [*FLAGS, SHALLOW, *layout.overrides(), "--training.mixed_precision_param=bfloat16"]
    with build_engine("llama3", flags, folder) as engine:
        parameters = list(engine.model_parts[0].parameters())
        run_step(engine, layout, 0)
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        frozen = {p.dtype for p in parameters if not p.requires_grad}
        assert all(p.grad is None for p in parameters if not p.requires_grad)
        assert {p.dtype for p in parameters if p.requires_grad} == {torch.float32}
        engine.optim_step()
        assert len(engine.optimizers.state) == sum(p.requires_grad for p in parameters)
    return sum(reduced), trained, frozen


def test_fsdp_reduces_the_adapters_only_and_casts_no_frozen_weight(tmp_path):
    for n_bytes, n_trained, frozen in run_ranks(sent_and_held, 2, str(tmp_path)):
        assert n_bytes == 4 * n_trained  # reduced in fp32; all rows divide by 2
        assert frozen == {torch.bfloat16}
