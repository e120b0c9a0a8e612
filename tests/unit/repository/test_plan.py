"""The planner's choice of layouts; what a rehearsal tells is made up here."""

import dataclasses
import json
import tomllib
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import torchtitan.models.attention_cpu  # noqa: F401 (registers its operators)
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.config.job_config import Model
from torchtitan.config.pipeline_layout import modules_of_stages
from torchtitan.estimate.bounds import Bound, Machine, bound_of, depths_of, without_memory
from torchtitan.estimate.plan import (
    Layout,
    Planned,
    layouts,
    least_states,
    plan_of,
    table_of,
    winner_of,
)
from torchtitan.estimate.step import StepEstimate
from torchtitan.estimate.step_counter import StepCounter, StepCounts
from torchtitan.models.hf_config import to_hf_config
from torchtitan.protocols.train_spec import get_train_spec

GIB = 2**30


def test_layouts_use_every_gpu_and_deal_whole_rows():
    config = JobConfig()
    config.parallelism.context_parallel_degree = 2
    found = list(layouts(config, 32, gpus_per_node=8, global_rows=8))
    assert len(set(found)) == len(found)
    for layout in found:
        dp = layout.replicas * layout.shards
        assert dp * layout.tp * layout.pp * layout.cp == 32 and layout.cp == 2
        assert layout.rows * dp == 8 and layout.tp <= 8
    names = {layout.name for layout in found}
    # 16 data-parallel ranks would have half a row each.
    assert "FSDP 16, CP 2" not in names
    assert {"FSDP 8, CP 2, TP 2", "HSDP 4 x 2, CP 2, TP 2", "PP 4, FSDP 4, CP 2"} <= names


def test_rows_at_once_are_as_many_as_fit():
    layout = Layout(replicas=1, shards=4, tp=1, pp=1, cp=1, rows=12)
    asked = []

    def estimate(config, rank):
        rows = config.training.local_batch_size
        assert config.training.global_batch_size == 48
        asked.append(rows)
        return SimpleNamespace(peak=(10 + 5 * rows) * GIB, rows=rows)

    for usable, rows in ((14, None), (15, 1), (20, 2), (34, 4), (40, 6), (1000, 12)):
        found = plan_of(layout, JobConfig(), usable * GIB, estimate)
        assert (found and found[0]) == rows
        if rows:
            assert found[1][0].rows == rows
    assert set(asked) == {1, 2, 4, 6, 12}


def test_of_a_pipeline_the_fuller_stage_counts():
    layout = Layout(replicas=1, shards=2, tp=1, pp=2, cp=1, rows=4)
    peaks = {0: 20 * GIB, 3: 30 * GIB}

    def estimate(config, rank):
        assert config.training.local_batch_size == 4
        return SimpleNamespace(peak=peaks[rank])

    assert plan_of(layout, JobConfig(), 25 * GIB, estimate) is None
    rows, found = plan_of(layout, JobConfig(), 30 * GIB, estimate)
    assert rows == 4 and [estimate.peak for estimate in found] == [30 * GIB, 20 * GIB]


def test_fastest_layout_comes_first():
    layout = Layout(replicas=2, shards=8, tp=4, pp=1, cp=1, rows=2)
    assert layout.name == "HSDP 2 x 8, TP 4"
    assert least_states(128 * GIB, layout) == 128 * GIB / 32
    estimate = SimpleNamespace(peak=40 * GIB, bubble=0.0, tokens=64_000, world_size=64)
    plans = [
        Planned(dataclasses.replace(layout, tp=tp), 1, estimate, Bound(1, 1, 1, 1, seconds, 0.5))
        for tp, seconds in ((1, 3.0), (2, 2.0))
    ]
    rows = table_of(plans, memory_gib=80).splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| HSDP 2 x 8, TP 2", "| HSDP 2 x 8"]
    assert "50 %" in rows[0] and rows[0].endswith("| 500 |")
    flags, toml = winner_of(plans).split("\n\nand as TOML:\n")
    read = ConfigManager().parse_args(flags.splitlines()[1].split())
    assert read.to_dict() == ConfigManager().parse_args([], tomllib.loads(toml)).to_dict()
    assert read.to_dict() == plans[1].layout.config(JobConfig(), 1).to_dict()


@pytest.mark.parametrize("option", ["1", "2", "3", "op"])
@pytest.mark.parametrize("less", [(1, 1), (0, 0), (2, 1)])
@pytest.mark.parametrize("schedule", ["1F1B", "interleaved1f1b", "ZBVZeroBubble"])
def test_rehearsed_depths_fill_all_stages_alike(schedule, less, option):
    config = JobConfig()
    config.parallelism.pipeline_parallel_degree = 4
    config.parallelism.pipeline_parallel_schedule = schedule
    config.parallelism.pipeline_parallel_first_stage_less_layers = less[0]
    config.parallelism.pipeline_parallel_last_stage_less_layers = less[1]
    config.activation_checkpoint.selective_ac_option = option
    sizes = []
    for depth in depths_of(config):
        stages = modules_of_stages(config.parallelism, depth)
        layers = [sum(name.startswith("layers.") for name in stage) for stage in stages]
        layers[0] += less[0]
        layers[-1] += less[1]
        assert len(set(layers)) == 1 and min(layers) > max(less)
        sizes.append(layers[0])
    # Whole periods of what selective checkpointing repeats.
    assert (sizes[1] - sizes[0]) % (int(option) if option.isdigit() else 1) == 0


def test_rehearsed_depths_differ_by_all_kinds_of_layers_of_the_flavor_or_config_json(tmp_path):
    def depths(family, **settings):
        return depths_of(JobConfig(model=Model(name=family, **settings)))

    assert depths("llama3", flavor="8B") == (4, 6)
    assert depths("qwen3_5", flavor="9B") == (4, 8)
    assert depths("qwen3_5") is None  # the debug model's layers
    config = to_hf_config(get_train_spec("qwen3_5").model_args["9B"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert depths("qwen3_5", hf_config=str(tmp_path)) == (4, 8)


def test_phase_with_the_peak_may_be_another_in_the_whole_model():
    def at_depth(n_layers):
        # Logits are large beside few layers, and optimizer states beside many.
        peaks = Counter({"forward and backward": 30 + n_layers, "optimizer step": 2 * n_layers})
        counted = dict(parameters=1, gradients=1, optimizer_state=1, activations=1, num_params=1)
        counted |= dict(peaks=peaks, counts=StepCounts(), host_waits=Counter(), model_flops=1.0)
        return StepEstimate(rank=0, world_size=1, tokens=1, bubble=0, **counted)

    extrapolated = at_depth(4).towards(at_depth(8), 9)
    assert (extrapolated.peak, extrapolated.peaks) == (80, at_depth(40).peaks)


def test_bound_of_a_step_is_its_longer_part_and_the_bubble():
    traffic = SimpleNamespace(sent=3e9, network=0.0, calls=10)
    counts = SimpleNamespace(
        flops=Counter({"matrix products": 2e12, "attention": 1e12}),
        traffic={("fsdp", "all-gather"): traffic},
        moved=4e9,
    )
    estimate = SimpleNamespace(counts=counts, bubble=0.5, model_flops=1e12, world_size=1)
    gpu = Machine(flops=1e12, nvlink=1e9, network=1e9, gpus_per_node=8)
    assert bound_of(estimate, gpu).step == 4.5
    assert bound_of(estimate, dataclasses.replace(gpu, nvlink=5e8)).step == 6  # sends take longer
    slow = dataclasses.replace(gpu, memory=1e9)
    bound = bound_of(estimate, slow)
    assert (bound.compute, bound.memory, bound.step) == (3, 4, 10.5)
    assert bound_of(estimate, without_memory(slow)).step == 4.5


def test_operators_but_views_move_what_they_read_and_write():
    counter = StepCounter({}, gpus_per_node=8)
    x, y, table = torch.ones(64, 32), torch.ones(64, 32), torch.ones(1000, 32)
    rows = torch.zeros(64, dtype=torch.int64)

    def moved(operate):
        with counter:
            operate()
        return counter.take().moved / x.nbytes

    assert moved(lambda: x.add(x)) == 3
    assert moved(lambda: x.mul_(2)) == 2
    assert moved(lambda: x.view(32, 64).t()) == 0
    assert moved(lambda: torch.empty_like(x)) == 0
    assert moved(lambda: x[:1].expand(64, 32).add(x)) == 1 / 64 + 2
    assert moved(lambda: x @ x.t()) == 0  # counted by its FLOPs
    assert moved(lambda: table[rows]) == 2
    assert moved(lambda: x.copy_(y)) == 2
    assert moved(lambda: x.zero_()) == moved(lambda: torch.zeros_like(x)) == 1
    assert moved(lambda: torch._foreach_mul_([x, y], 2)) == 4
    assert moved(lambda: torch.add(x, x, out=y)) == 3


def test_attention_of_the_cpu_counts_the_keys_that_queries_see():
    counter = StepCounter({}, gpus_per_node=8)
    q, k = torch.ones(6, 2, 8), torch.ones(9, 2, 8)
    ends_q, ends_k = torch.tensor([[0, 4, 6], [0, 4, 9]], dtype=torch.int32)

    def pairs(window):
        with counter:
            torch.ops.torchtitan.document_attention(q, k, k, ends_q, ends_k, 1.0, window)
        return counter.take().flops["attention"] / (2 * 2 * 2 * 8)

    # Four queries of four keys, and two of five, which see four and five of them.
    assert pairs(None) == 1 + 2 + 3 + 4 + 4 + 5
    assert pairs(2) == 1 + 2 + 2 + 2 + 2 + 2
