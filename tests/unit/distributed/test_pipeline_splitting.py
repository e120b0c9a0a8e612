"""The layers and stages of a pipeline rank, and the configs that are refused."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan.config import JobConfig
from torchtitan.config.checks import ConfigError, check_against_spec
from torchtitan.config.pipeline_layout import stage_ids_of_rank
from torchtitan.distributed.pipeline_parallel import (
    build_pipeline_schedule,
    generate_llm_fqn_per_model_part,
    pipeline_module_split,
)
from torchtitan.protocols.train_spec import get_train_spec

# (arguments, stages): E embedding, a number a layer, NO norm and output
SPLITS = [
    ((1, 3), "E012NO"),
    ((4, 6), "E0 12 34 5NO"),
    ((8, 6), "E 0 1 2 3 4 5 NO"),
    ((2, 3, 2, 2), "E01 2NO"),
    ((2, 6, 0, 0), "E012 345NO"),
    ((2, 3, 0, 0), "E01 2NO"),
    ((2, 1), "E0 NO"),
    ((3, 1), "E 0 NO"),
    ((3, 4, 2, 1), "E0 12 3NO"),
    ((4, 8, 2, 2), "E0 123 456 7NO"),
]
NAMES = {"E": "tok_embeddings", "N": "norm", "O": "output"}


@pytest.mark.parametrize("arguments, stages", SPLITS)
def test_layers_are_split_evenly_with_first_and_last_stage_weighed(arguments, stages):
    expected = [[NAMES.get(c, f"layers.{c}") for c in stage] for stage in stages.split()]
    assert generate_llm_fqn_per_model_part(*arguments) == expected


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((0, 3), "at least 1 stage"),
        ((9, 6), "9 stages are more than 6 layers"),
        ((4, 3, 3, 1), "embedding weighs 3"),
        ((4, 3, 1, 3), "output weighs 3"),
    ],
)
def test_stages_that_cannot_be_filled_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        generate_llm_fqn_per_model_part(*arguments)


@given(st.integers(1, 12), st.integers(1, 40), st.integers(0, 3), st.integers(0, 3))
def test_every_module_is_in_one_stage_and_in_order(num_stages, num_layers, first, last):
    try:
        stages = generate_llm_fqn_per_model_part(num_stages, num_layers, first, last)
    except ValueError:
        return
    assert len(stages) == num_stages
    layers = [f"layers.{i}" for i in range(num_layers)]
    assert sum(stages, []) == ["tok_embeddings", *layers, "norm", "output"]


def test_stages_loop_over_ranks_or_turn_back_in_a_v():
    assert [stage_ids_of_rank("Interleaved1F1B", r, 2, 4) for r in range(2)] == [[0, 2], [1, 3]]
    assert [stage_ids_of_rank("zbvzerobubble", r, 2, 4) for r in range(2)] == [[0, 3], [1, 2]]
    with pytest.raises(ValueError, match="3 stages.*pipeline_parallel_degree = 2"):
        stage_ids_of_rank("1F1B", 0, 2, 3)
    with pytest.raises(ValueError, match="exactly 2 stages per rank"):
        stage_ids_of_rank("DualPipeV", 0, 2, 6)


# ---- the config ----


def config_with(schedule="1F1B", degree=2, **parallelism) -> JobConfig:
    config = JobConfig()
    config.parallelism.pipeline_parallel_schedule = schedule
    config.parallelism.pipeline_parallel_degree = degree
    for name, value in parallelism.items():
        setattr(config.parallelism, name, value)
    return config


def refused(config, words):
    with pytest.raises(ConfigError, match=words):
        check_against_spec(config, get_train_spec("llama3"))


# tests/unit/config/test_config_checks.py has the other messages about pipelines.
def test_config_that_does_not_fit_is_refused(tmp_path):
    config = config_with("Interleaved1F1B", pipeline_parallel_layers_per_stage=4)
    refused(config, "needs at least 2 stages per rank")
    stages = generate_llm_fqn_per_model_part(2, 6)
    refused(config_with(module_fqns_per_model_part=stages[::-1]), "out of order")
    order = tmp_path / "order.csv"
    order.write_text("0F0,0I0,0W0\n1F0,1B0\n")
    config = config_with("PipelineScheduleMulti", pipeline_parallel_schedule_csv=str(order))
    config.compile.enable = True
    refused(config, "compiled blocks cannot")


# ---- cutting a model, as rank 1 of 2 that don't exist ----


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(8, 4)
        self.layers = nn.ModuleDict({str(i): nn.Linear(4, 4) for i in range(4)})
        self.blocks = nn.ModuleList([nn.Linear(4, i + 1) for i in range(3)])
        self.norm = nn.RMSNorm(4)
        self.register_buffer("table", torch.zeros(3))


@pytest.fixture
def pp_mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    return init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))


def test_a_rank_keeps_its_modules_under_their_names(pp_mesh):
    whole = Model()
    stages = "tok_embeddings layers.0, layers.1 blocks.2, layers.2, layers.3 norm".split(", ")
    names = [stage.split() for stage in stages]
    stages, models = pipeline_module_split(
        whole, pp_mesh, "Interleaved1F1B", torch.device("cpu"), names
    )
    assert [stage.stage_index for stage in stages] == [1, 3]
    assert [stage.submod for stage in stages] == models
    first, second = models
    assert first.tok_embeddings is None and first.norm is None
    assert list(first.layers) == ["1"] and list(second.layers) == ["3"]
    assert [block.out_features for block in first.blocks] == [3] and len(second.blocks) == 0
    assert second.norm is not None and torch.equal(second.table, whole.table)
    assert torch.equal(first.layers["1"].weight, whole.layers["1"].weight)
    assert len(whole.layers) == 4 and whole.tok_embeddings is not None


def test_schedule_that_cannot_be_built_says_why(pp_mesh, caplog):
    stages, _ = pipeline_module_split(Model(), pp_mesh, "1F1B", torch.device("cpu"), [[], []])
    config = config_with(pipeline_parallel_microbatch_size=3)
    with pytest.raises(ValueError, match="must divide training.local_batch_size, got 3 with 8"):
        build_pipeline_schedule(config, stages, None)
    with pytest.raises(ValueError, match="must be one of"):
        build_pipeline_schedule(config_with("PipelineScheduleSingle"), stages, None)
    config = config_with(pipeline_parallel_microbatch_size=8)
    schedule = build_pipeline_schedule(config, stages, None)
    assert "1 pipeline microbatches" in caplog.text and schedule.n_microbatches == 1
    assert schedule.has_last_stage and not schedule.has_first_stage


def test_wrong_calls_of_a_schedule_say_what_to_give(pp_mesh):
    stages, _ = pipeline_module_split(Model(), pp_mesh, "1F1B", torch.device("cpu"), [[], []])
    schedule = build_pipeline_schedule(config_with(), stages, None)
    for words, call, args, settings in (
        ("lists of equal length", schedule.step, (), {"target_mbs": [None]}),
        ("needs target_mbs", schedule.step, (), {}),
        ("got lists together", schedule.step, (torch.zeros(2, 2),), {}),
        ("set stage.hidden_states", schedule.eval, (), {"input_shapes": [(1, 2), (1, 3)]}),
    ):
        with pytest.raises(ValueError, match=words):
            call(*args, kwarg_mbs=[{}, {}], **settings)
    with torch.no_grad(), pytest.raises(RuntimeError, match="call eval"):
        schedule.step(kwarg_mbs=[{}], target_mbs=[None])
