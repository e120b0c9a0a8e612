"""The parallelize plan on a single process: what it applies, in which order, what it refuses."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from tests.unit.models.tiny import Operators, filled, sized
from torchtitan.config import JobConfig
from torchtitan.config.job_config import Compile
from torchtitan.distributed import ParallelDims
from torchtitan.models.decoder import FeedForward
from torchtitan.models.gpt_oss import GptOssModel, gptoss_configs
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.parallelize import apply_compile, parallelize_decoder

pytestmark = pytest.mark.long


def dims(**degrees):
    names = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp")
    world_size = math.prod(degrees.values())
    return ParallelDims(**dict.fromkeys(names, 1) | degrees, world_size=world_size)


def config_with(mode, option="op", compiled=True):
    config = JobConfig()
    config.activation_checkpoint.mode = mode
    config.activation_checkpoint.selective_ac_option = option
    config.compile.enable = compiled
    config.compile.backend = "aot_eager"
    return config


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    # Otherwise all tests together exceed dynamo's limit of variants per function.
    torch._dynamo.reset()


def tiny_model(**changes):
    return filled(Transformer(sized(TransformerModelArgs, multiple_of=16, **changes)))


def test_one_process_without_options_gets_the_model_as_it_is():
    model = tiny_model()
    names = [name for name, _ in model.named_modules()]
    assert parallelize_decoder(model, dims(), config_with("none", compiled=False)) is model
    assert [name for name, _ in model.named_modules()] == names


QUICK = {("varlen", "full", "op"), ("varlen", "selective", "op"), ("sdpa", "selective", "1")}


@pytest.mark.parametrize(
    "attn_type, mode, option",
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(
            ["sdpa", "flex", "varlen"], ["full", "selective"], ["op", "1"]
        )
        if case[1:] != ("full", "1")
    ],
)
def test_checkpointed_compiled_blocks_have_the_gradients_of_plain_ones(attn_type, mode, option):
    mask_type = "causal" if attn_type == "sdpa" else "position_block_causal"
    changes = {"attn_type": attn_type, "attn_mask_type": mask_type}
    plain, wrapped = tiny_model(**changes), tiny_model(**changes)
    parallelize_decoder(wrapped, dims(), config_with(mode, option))

    tokens = torch.randint(0, 64, (2, 12))
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4])[None]
    masks = None
    if attn_type != "sdpa":
        masks = plain.get_attention_masks(tokens, None, {"positions": positions})
    for model in (plain, wrapped):
        model(tokens, attention_masks=masks, positions=positions).pow(2).sum().backward()
    for a, b in zip(plain.parameters(), wrapped.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize(
    "mode", ["none", pytest.param("full", marks=pytest.mark.slow), "selective"]
)
def test_all_blocks_share_one_compiled_graph(mode):
    from torch._dynamo.utils import counters

    counters.clear()
    model = tiny_model(n_layers=10)  # more than dynamo's limit of 8 variants
    parallelize_decoder(model, dims(), config_with(mode))
    model(torch.randint(0, 64, (2, 12))).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1


def test_selective_checkpointing_keeps_what_attention_computed_on_the_cpu():
    model = tiny_model(attn_type="varlen", attn_mask_type="position_block_causal")
    parallelize_decoder(model, dims(), config_with("selective", compiled=False))
    tokens, positions = torch.randint(0, 64, (1, 6)), torch.arange(6)[None]
    masks = model.get_attention_masks(tokens, None, {"positions": positions})
    with Operators() as operators:
        model(tokens, attention_masks=masks, positions=positions).sum().backward()
    # Once per layer: backward did not run it again.
    assert sum("document_attention.default" in str(op) for op, _ in operators.calls) == 2


VARLEN = {"attn_type": "varlen", "attn_mask_type": "position_block_causal"}
OFFLOAD = {"training.enable_cpu_offload": True}
FP32 = {"training.mixed_precision_param": "float32"}
ALLTOALL = {"parallelism.context_parallel_rotate_method": "alltoall"}


@pytest.fixture
def config_on_cuda(monkeypatch):
    """A function of settings that returns a config, checked as on an accelerator."""
    monkeypatch.setattr("torchtitan.config.checks.device.get_device_type", lambda: "cuda")

    def config(settings):
        config = JobConfig()
        config.model.name, config.activation_checkpoint.mode = "some_model", "none"
        for key, value in settings.items():
            section, name = key.split(".")
            setattr(getattr(config, section), name, value)
        return config

    return config


@pytest.mark.parametrize(
    "model, degrees, settings, match",
    [
        ({}, {}, OFFLOAD, "training.enable_cpu_offload .*data_parallel_shard_degree"),
        ({}, {"dp_replicate": 2, "pp": 2}, OFFLOAD, "training.enable_cpu_offload "),
        ({}, {"cp": 2}, FP32, "'allgather'.*got training.mixed_precision_param = 'float32'"),
        (VARLEN, {}, FP32, "'varlen' needs 16.*got training.mixed_precision_param.*'flex'"),
        # Without FSDP nothing casts split models.
        (VARLEN, {"tp": 2}, {}, "'varlen' needs 16.*got training.dtype = 'float32'.*'flex'"),
        ("varlen", {}, {}, "'varlen' gives no.*'some_model'.*set the type to 'flex'"),
        ("varlen", {"cp": 2}, ALLTOALL, "'varlen' gives no gradient.*set the type to 'flex'"),
        ("flex", {"cp": 2}, {}, "'allgather' gives no gradient.*set the method to 'alltoall'"),
    ],
)
def test_what_no_kernel_of_an_accelerator_computes_is_refused(
    model, degrees, settings, match, config_on_cuda
):
    if isinstance(model, dict):
        model = tiny_model(**model)
    else:  # gpt_oss needs the log-sum-exp
        with torch.device("meta"):
            model = GptOssModel(replace(gptoss_configs["debugmodel_small"], attn_type=model))
    with pytest.raises(ValueError, match=match):
        parallelize_decoder(model, dims(**degrees), config_on_cuda(settings))


def test_varlen_in_bf16_and_fp32_on_the_cpu_are_not_refused(config_on_cuda, monkeypatch):
    for settings in ({}, FP32 | {"training.dtype": "bfloat16"}):
        parallelize_decoder(tiny_model(**VARLEN), dims(), config_on_cuda(settings))
    monkeypatch.undo()
    parallelize_decoder(tiny_model(**VARLEN), dims(), config_on_cuda(FP32))


def test_sdpa_that_cpu_compilation_would_recompute_is_refused_under_tensor_parallelism():
    with pytest.raises(ValueError, match="activation_checkpoint.mode = 'full'.*option = 'op'"):
        parallelize_decoder(tiny_model(), dims(tp=2), config_with("full"))


def test_more_kinds_of_blocks_compile_than_torch_allows_a_function_by_itself():
    model = tiny_model(n_layers=10)
    for i, block in enumerate(model.layers.values()):
        block.feed_forward = FeedForward(32, 16 * (i + 1))
    apply_compile(model, Compile(backend="eager"))
    assert model(torch.randint(0, 64, (1, 8))).isfinite().all()
