"""Layouts that cannot run are refused before a process group exists, in one sentence each."""

import dataclasses
import re

import pytest

from torchtitan.config import JobConfig
from torchtitan.config.checks import ConfigError, check_against_spec, check_job_config
from torchtitan.protocols.train_spec import get_train_spec

MOE = {"name": "qwen3", "flavor": "debugmodel_moe_small"}


def check(world_size, settings, model=None, changes=None, **fields):
    """Check a job with `settings` of parallelism, or of the section before a dot."""
    config = JobConfig()
    config.model.name, config.model.flavor = "llama3", "debugmodel"
    for key, value in ({f"model.{k}": v for k, v in (model or {}).items()} | settings).items():
        section, _, name = key.rpartition(".")
        section = getattr(config, section or "parallelism")
        assert hasattr(section, name), key
        setattr(section, name, value)
    spec = get_train_spec(config.model.name)
    args = dataclasses.replace(spec.model_args[config.model.flavor], **changes or {})
    fields = {"build_tokenizer_fn": None, "model_args": {config.model.flavor: args}} | fields
    check_job_config(config, world_size)
    check_against_spec(config, dataclasses.replace(spec, **fields))


def stages(*names):
    return [name.split() for name in names]


# Problem: ranks, settings, further arguments of `check`, words of the message in their order.
BAD_LAYOUTS = {
    # --- the world ---
    "degree of 0": (
        2,
        {"context_parallel_degree": 0},
        {},
        ["parallelism.context_parallel_degree", "at least 1, got 0", "default is 1"],
    ),
    "more ranks wanted than there are": (
        4,
        {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "context_parallel_degree": 2},
        {},
        ["got 4 processes and a product of 8", "tensor_parallel_degree = 2", "start 8 processes"],
    ),
    "saves of one rank of several": (
        4,
        {"comm.mode": "fake_backend", "checkpoint.enable": True},
        {},
        [
            "checkpoint.enable",
            "'fake_backend'",
            "only one rank's part",
            "4 ranks",
            "set checkpoint.enable to False",
        ],
    ),
    # --- tensor parallelism ---
    "tp, heads": (
        3,
        {"tensor_parallel_degree": 3},
        {},
        [
            "tensor_parallel_degree must divide n_heads",
            "got 3 with 16",
            "choices are 1, 2, 4, 8, 16",
        ],
    ),
    "tp, key heads": (
        4,
        {"tensor_parallel_degree": 4},
        {"changes": {"n_kv_heads": 2}},
        ["tensor_parallel_degree must divide n_kv_heads", "got 4 with 2", "choices are 1, 2"],
    ),
    "tp, vocabulary": (
        2,
        {"tensor_parallel_degree": 2},
        {"changes": {"vocab_size": 2049}},
        ["tensor_parallel_degree must divide vocab_size", "got 2 with 2049", "choices are 1"],
    ),
    "tp, feed-forward": (
        4,
        {"tensor_parallel_degree": 4},
        {"changes": {"hidden_dim": 130}},
        ["tensor_parallel_degree must divide ffn_hidden_dim", "got 4 with 130", "choices are 1, 2"],
    ),
    "tp, experts": (
        4,
        {"tensor_parallel_degree": 4},
        {"model": MOE, "changes": {"moe_inter_dim": 6}},
        ["tensor_parallel_degree must divide moe_inter_dim", "got 4 with 6", "choices are 1, 2"],
    ),
    # --- context parallelism ---
    "cp, sequence": (
        2,
        {"context_parallel_degree": 2, "training.seq_len": 2050},
        {},
        ["training.seq_len must be a multiple of 4", "got 2050", "nearest is 2048"],
    ),
    "cp, validation sequence": (
        2,
        {"context_parallel_degree": 2, "validation.enable": True, "validation.seq_len": 1001},
        {},
        ["validation.seq_len must be a multiple of 4", "got 1001", "nearest is 1000"],
    ),
    "cp, sequence of ptrr": (
        2,
        {
            "context_parallel_degree": 2,
            "context_parallel_load_balancer": "ptrr",
            "training.seq_len": 300,
            "model.attn_type": "flex",
        },
        {},
        ["training.seq_len must be a multiple of 256", "'ptrr', got 300", "nearest is 256"],
    ),
    "cp, balancing by a mask that is not there": (
        2,
        {"context_parallel_degree": 2, "context_parallel_load_balancer": "ptrr"},
        {},
        ["context_parallel_load_balancer = 'ptrr'", "'sdpa'", "set the balancer to 'headtail'"],
    ),
    "cp, documents that attention cannot keep apart": (
        2,
        {"context_parallel_degree": 2, "model.attn_mask_type": "block_causal"},
        {},
        ["model.attn_type = 'sdpa'", "'block_causal'", "set model.attn_type to 'flex' or 'varlen'"],
    ),
    "cp, unknown balancer": (
        2,
        {"context_parallel_degree": 2, "context_parallel_load_balancer": "tail"},
        {},
        ["context_parallel_load_balancer must be headtail, ptrr or None, got 'tail'"],
    ),
    "cp, unknown exchange": (
        2,
        {"context_parallel_degree": 2, "context_parallel_rotate_method": "ring"},
        {},
        ["context_parallel_rotate_method must be one of allgather, alltoall, got 'ring'"],
    ),
    "cp, heads of a rank": (
        32,
        {
            "context_parallel_degree": 16,
            "tensor_parallel_degree": 2,
            "context_parallel_rotate_method": "alltoall",
        },
        {},
        ["context_parallel_degree must divide the 8 attention heads", "got 16", "'allgather'"],
    ),
    # --- pipeline parallelism ---
    "pp, more stages than layers": (
        16,
        {"pipeline_parallel_degree": 16},
        {},
        ["pipeline_parallel_degree = 16", "16 stages, which 6 layers", "lower the degree"],
    ),
    "pp, more virtual stages than layers": (
        8,
        {"pipeline_parallel_degree": 8, "pipeline_parallel_schedule": "Interleaved1F1B"},
        {},
        ["pipeline_parallel_degree = 8", "16 stages, which 6 layers", "one stage per rank"],
    ),
    "pp, heavy embedding": (
        2,
        {"pipeline_parallel_degree": 2, "pipeline_parallel_first_stage_less_layers": 9},
        {},
        ["pipeline_parallel_degree = 2", "embedding weighs 9", "less_layers"],
    ),
    "pp, unknown schedule": (
        2,
        {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F2B"},
        {},
        ["pipeline_parallel_schedule must be one of 1F1B", "got '1F2B', did you mean '1F1B'?"],
    ),
    "pp, schedule of one stage per rank": (
        2,
        {"pipeline_parallel_degree": 2, "pipeline_parallel_layers_per_stage": 2},
        {},
        ["schedule = '1F1B' needs exactly 1 stage per rank", "give 4 stages", "change the number"],
    ),
    "pp, schedule of two stages per rank": (
        2,
        {
            "pipeline_parallel_degree": 2,
            "pipeline_parallel_layers_per_stage": 1,
            "pipeline_parallel_schedule": "DualPipeV",
        },
        {},
        ["'DualPipeV' needs exactly 2 stages per rank", "give 8 stages", "change the number"],
    ),
    "pp, stages that ranks cannot share": (
        2,
        {
            "pipeline_parallel_degree": 2,
            "pipeline_parallel_layers_per_stage": 3,
            "pipeline_parallel_schedule": "LoopedBFS",
        },
        {},
        ["must be a multiple of parallelism.pipeline_parallel_degree", "give 3 stages", "change"],
    ),
    "pp, layers per stage": (
        2,
        {"pipeline_parallel_degree": 2, "pipeline_parallel_layers_per_stage": 0},
        {},
        ["pipeline_parallel_layers_per_stage must be at least 1, got 0", "leave it out"],
    ),
    "pp, schedule without an order": (
        2,
        {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "PipelineScheduleMulti"},
        {},
        ["'PipelineScheduleMulti' has no order", "set pipeline_parallel_schedule_csv"],
    ),
    "pp, file that is not there": (
        2,
        {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule_csv": "no.csv"},
        {},
        ["pipeline_parallel_schedule_csv must be a file, got 'no.csv'", "correct the path"],
    ),
    "pp, microbatches": (
        2,
        {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 3},
        {},
        ["pipeline_parallel_microbatch_size must divide", "got 3 with 8", "choices are 1, 2, 4, 8"],
    ),
    "pp, a layer left out": (
        2,
        {
            "pipeline_parallel_degree": 2,
            "module_fqns_per_model_part": stages("tok_embeddings layers.0", "norm output"),
        },
        {"changes": {"n_layers": 2}},
        ["module_fqns_per_model_part must list", "lacks ['layers.1']", "correct it"],
    ),
    "pp, a layer twice": (
        2,
        {
            "pipeline_parallel_degree": 2,
            "module_fqns_per_model_part": stages(
                "tok_embeddings layers.0 layers.1", "layers.1 norm output"
            ),
        },
        {"changes": {"n_layers": 2}},
        ["module_fqns_per_model_part must list", "repeats ['layers.1']", "correct it"],
    ),
    "pp, lists that ranks cannot share": (
        2,
        {
            "pipeline_parallel_degree": 2,
            "module_fqns_per_model_part": stages("tok_embeddings", "layers.0", "norm output"),
        },
        {"changes": {"n_layers": 1}},
        ["lists in module_fqns_per_model_part give 3 stages for 2 ranks", "change one"],
    ),
    "pp, model that is never cut": (
        2,
        {"pipeline_parallel_degree": 2},
        {"pipelining_fn": None},
        ["pipeline_parallel_degree = 2", "'llama3' has no pipelining_fn", "set the degree to 1"],
    ),
    "pp, split backward of compiled blocks": (
        2,
        {
            "pipeline_parallel_degree": 2,
            "pipeline_parallel_schedule": "InterleavedZeroBubble",
            "compile.enable": True,
        },
        {},
        ["'InterleavedZeroBubble'", "got compile.enable = True", "turn compile off"],
    ),
    "pp, step in backward": (
        2,
        {"pipeline_parallel_degree": 2, "optimizer.early_step_in_backward": True},
        {},
        [
            "optimizer.early_step_in_backward",
            "got parallelism.pipeline_parallel_degree = 2",
            "change one",
        ],
    ),
    # --- expert parallelism ---
    "ep, experts": (
        3,
        {"expert_parallel_degree": 3},
        {"model": MOE, "changes": {}},
        [
            "expert_parallel_degree must divide the experts",
            "got 3 with",
            "choices are 1, 2",
        ],
    ),
    "ep, no experts": (
        2,
        {"expert_parallel_degree": 2},
        {},
        ["expert_parallel_degree above 1 needs a flavor with experts, got 2", "set it to 1"],
    ),
    "ep, ranks": (
        2,
        {"expert_parallel_degree": 4},
        {"model": MOE},
        [
            "expert_parallel_degree must divide",
            "= 2 * 1 * 1 / 1, got 4 with 2",
            "the choices are 1, 2",
        ],
    ),
    "ep, ranks of other stages": (
        2,
        {"expert_parallel_degree": 2, "pipeline_parallel_degree": 2},
        {"model": MOE},
        [
            "expert_parallel_degree must divide",
            "= 1 * 1 * 1 / 1, got 2 with 1",
            "the choices are 1",
        ],
    ),
    "ep, split experts": (
        4,
        {
            "expert_parallel_degree": 2,
            "tensor_parallel_degree": 4,
            "expert_tensor_parallel_degree": 2,
        },
        {"model": MOE},
        ["expert_tensor_parallel_degree must be 1 or equal", "got 2 with 4", "1 or 4"],
    ),
    "ep, exchange": (
        2,
        {"expert_parallel_degree": 2, "expert_parallel_comm_backend": "deepep"},
        {"model": MOE},
        ["expert_parallel_comm_backend must be 'standard'", "got 'deepep'", "leave it out"],
    ),
    "ep, step in backward": (
        2,
        {"expert_parallel_degree": 2, "optimizer.early_step_in_backward": True},
        {"model": MOE},
        [
            "optimizer.early_step_in_backward",
            "got parallelism.expert_parallel_degree = 2",
            "change one",
        ],
    ),
}


@pytest.mark.parametrize("name", BAD_LAYOUTS)
def test_layout_is_refused_in_one_sentence_with_key_value_and_remedy(name):
    world_size, settings, more, words = BAD_LAYOUTS[name]
    with pytest.raises(ConfigError, match=".*".join(map(re.escape, words))) as error:
        check(world_size, settings, **more)
    assert not re.search(r"[.?!] [A-Z]|\n", str(error.value))


@pytest.mark.parametrize(
    "world_size, settings, more",
    [
        (8, {"tensor_parallel_degree": 2, "context_parallel_degree": 2}, {}),
        (8, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 4}, {}),
        (2, {"tensor_parallel_degree": 2, "training.seq_len": 2049}, {}),
        (
            2,
            {"tensor_parallel_degree": 2, "expert_parallel_degree": 2},
            {"model": MOE, "changes": {"moe_inter_dim": 31, "hidden_dim": 31}},
        ),
        (2, {"tensor_parallel_degree": 2}, {"model": MOE, "changes": {"hidden_dim": 31}}),
    ],
)
def test_layout_that_fits_passes(world_size, settings, more):
    check(world_size, settings, **more)
