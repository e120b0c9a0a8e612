"""The tensor-parallel plan fits every family, and refuses a model that it doesn't fit."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan.config import JobConfig
from torchtitan.distributed.sequence_parallel import SequenceShards
from torchtitan.distributed.tensor_parallel import (
    maybe_enable_async_tp,
)
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.tp_plan import apply_tp
from torchtitan.protocols.train_spec import get_train_spec

TP = 2
FAMILIES = "llama3 qwen3 qwen3_moe deepseek_v3 llama4 gpt_oss qwen3_5 qwen3_5_moe".split()


@pytest.fixture(scope="module", autouse=True)
def simulated_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=TP)


def mesh():
    return init_device_mesh("cpu", (TP,), mesh_dim_names=("tp",))


def refused(model, message):
    with pytest.raises(ValueError, match=message):
        apply_tp(model, mesh(), loss_parallel=True)


def tiny_model(**changes):
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 64, "multiple_of": 16}
    with torch.device("meta"):
        return Transformer(TransformerModelArgs(**sizes | changes, max_seq_len=16))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_of_every_family_lies_on_the_mesh(family):
    name = family.removesuffix("_moe")
    spec = get_train_spec(name)
    with torch.device("meta"):
        model = spec.model_cls(spec.model_args["debugmodel" + family.removeprefix(name)])
    shapes = {name: p.shape for name, p in model.named_parameters()}
    apply_tp(model, mesh(), loss_parallel=True)
    for name, parameter in model.named_parameters():
        assert parameter.device_mesh.mesh_dim_names == ("tp",), name
        assert parameter.shape == shapes[name]
        if parameter.ndim > 1 and not name.endswith("_bias"):
            # Split, except for matrices whose whole result every head or expert needs.
            alike = any(part in name for part in ("router.gate", "shared_gate", "wq_a", "wkv_a"))
            assert parameter.placements[0].is_shard() != alike, name


def test_linear_without_a_row_is_an_error_that_names_it():
    model = tiny_model()
    model.layers["1"].attention.extra = nn.Linear(4, 4, device="meta")
    refused(model, "weight, bias of 'layers.1.attention.extra', a Linear")


def test_size_that_the_mesh_does_not_divide_is_named():
    refused(tiny_model(vocab_size=65), "must divide dimension 0 of tok_embeddings.weight, got 2")


def test_linear_of_another_class_is_refused_rather_than_computed_wrongly():
    class Float8Linear(nn.Linear):
        pass

    model = tiny_model()
    model.layers["0"].feed_forward.w1 = Float8Linear(32, 48, bias=False, device="meta")
    refused(model, "cannot split 'layers.0.feed_forward.w1', a Float8Linear")


def float8_model(filter_fqns=("output",), recipe="tensorwise", **changes):
    float8 = pytest.importorskip("torchao.float8")
    model = tiny_model(**changes)
    return float8.convert_to_float8_training(
        model,
        config=float8.Float8LinearConfig.from_recipe_name(recipe),
        module_filter_fn=lambda module, name: not any(part in name for part in filter_fqns),
    )


@pytest.mark.parametrize(
    ("given", "in_float8"),
    [
        ({}, True),
        ({"recipe": "rowwise"}, False),
        ({"filter_fqns": ("output", "wk")}, False),
        ({"mlp_bias": True}, False),  # its gradient would be summed in float8
        ({"attention_bias": True, "filter_fqns": ("output", "w2")}, False),
    ],
)
def test_block_gathers_in_float8_if_all_that_compute_with_it_take_it(given, in_float8):
    model = float8_model(**given)
    names = list(model.state_dict())
    apply_tp(model, mesh(), loss_parallel=True, enable_float8_tensorwise_tp=True)
    assert list(model.state_dict()) == names
    assert type(model.layers["0"].attention.wq).__name__ == "LocalFloat8Linear"
    gathers = {type(block.sequence).__name__ for block in model.layers.values()}
    assert gathers == {"Float8SequenceShards" if in_float8 else "SequenceShards"}
    assert type(model.sequence) is SequenceShards


def test_float8_output_projection_is_refused_with_the_filter_that_helps():
    refused(float8_model(filter_fqns=()), "'output' to quantize.linear.float8.filter_fqns")


def test_pipeline_stage_without_embedding_norm_and_output_is_split_too():
    model = tiny_model()
    model.tok_embeddings = model.norm = model.output = None
    apply_tp(model, mesh(), loss_parallel=True)
    assert isinstance(model.sequence, SequenceShards)
    assert isinstance(model.layers["0"].sequence, SequenceShards)


def test_asynchronous_tensor_parallelism_needs_compiled_blocks(caplog):
    import torch._inductor.config as inductor

    config = JobConfig()
    with inductor.patch(_micro_pipeline_tp=False):
        maybe_enable_async_tp(config, mesh())
        assert not inductor._micro_pipeline_tp
        config.parallelism.enable_async_tensor_parallel = True
        with pytest.raises(RuntimeError, match="enable_async_tensor_parallel.*compile.enable"):
            maybe_enable_async_tp(config, mesh())
        config.compile.enable = True
        maybe_enable_async_tp(config, mesh())
        assert inductor._micro_pipeline_tp
    assert "has no effect on 'cpu'" in caplog.text
