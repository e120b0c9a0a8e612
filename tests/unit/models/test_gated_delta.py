"""Layers of linear attention: their parameters in fp32, their optimizer groups, and what is refused."""

import dataclasses

import pytest
import torch

from tests.unit.models.tiny import filled
from torchtitan.batch.mask import DocumentMask
from torchtitan.config import JobConfig
from torchtitan.config.checks.layout import context_parallel, tensor_parallel_sizes
from torchtitan.config.job_config import Optimizer, ParameterGroup
from torchtitan.models.attention import create_attention_mask, get_causal_mask_mod
from torchtitan.models.gated_delta import Decay
from torchtitan.numerics import delta_rule_fla
from torchtitan.optim.groups import ParameterGroups
from torchtitan.protocols.train_spec import get_train_spec

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SIZES = {"dim": 32, "n_layers": 4, "n_heads": 4, "head_dim": 16, "hidden_dim": 48, "vocab_size": 64}
SIZES |= {"linear_key_heads": 2, "linear_value_heads": 4, "max_seq_len": 64}
DOCUMENTS = torch.tensor([[*range(12)], [*range(5), *range(7)]])  # their positions
TOKENS = torch.arange(24).view(2, 12)


def tiny_args(**changes):
    args = get_train_spec("qwen3_5").model_args["debugmodel"]
    return dataclasses.replace(args, **SIZES | changes)


def tiny_model(**changes):
    return filled(get_train_spec("qwen3_5").model_cls(tiny_args(**changes)))


@pytest.mark.parametrize("is_available", [False, True])
def test_masks_have_lengths_of_documents_only_for_a_kernel_that_reads_them(
    is_available, monkeypatch
):
    monkeypatch.setattr(delta_rule_fla, "is_available", lambda device: is_available)
    documents = DocumentMask.from_documents((DOCUMENTS == 0).cumsum(1))
    mask = tiny_model().layer_masks(documents)
    assert (mask.lengths is not None) == is_available


# ---- parameters of the decay ----


def test_decay_is_in_fp32_in_a_model_of_bf16():
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = tiny_model()
    finally:
        torch.set_default_dtype(torch.float32)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    in_fp32 = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert in_fp32 == {name for name in dtypes if ".decay." in name} != set()
    assert model(TOKENS).dtype == torch.bfloat16


def test_initial_values_are_those_of_transformers():
    decay = filled(Decay(2000))
    rates = decay.A_log.exp()
    assert 0.01 <= rates.min() < 0.1 and 15.9 < rates.max() <= 16.01
    assert rates.mean().item() == pytest.approx(8, rel=0.05)
    assert (decay.dt_bias == 1).all()
    model = tiny_model()
    layer = model.layers["0"].attention
    assert (layer.norm.weight == 1).all() and (model.layers["0"].attention_norm.weight == 0).all()
    assert layer.conv_v.std().item() == pytest.approx(0.02, rel=0.1)


def test_norms_and_decay_have_no_weight_decay_unless_a_table_gives_one():
    model, table = tiny_model(), ParameterGroup(pattern="dt_bias", weight_decay=0.3)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = ParameterGroups([model], Optimizer(groups=[table])).of_part(model, (0.9, 0.95))
    decays = {names[p]: group.get("weight_decay") for group in groups for p in group["params"]}
    assert len(decays) == len(names)
    for name, decay in decays.items():
        is_exempt = "norm" in name or name.endswith("A_log")
        assert decay == (0.3 if name.endswith("dt_bias") else 0 if is_exempt else None), name


def test_muon_leaves_convolutions_to_adamw():
    model = tiny_model()
    matrices = {*ParameterGroups([model], Optimizer(name="Muon")).matrices()}
    layer = model.layers["0"].attention
    assert layer.wq.weight in matrices
    assert not matrices & {layer.conv_q, layer.conv_k, layer.conv_v}


# ---- masks ----


def test_mask_without_boundaries_is_refused():
    model = tiny_model(attn_type="flex")
    mask = create_attention_mask(get_causal_mask_mod(), 2, None, 12, 12)
    with pytest.raises(ValueError, match="boundaries, which a mask of trees or a custom mask does"):
        model(TOKENS, attention_masks=mask)


# ---- layouts ----


def test_degrees_that_do_not_divide_the_key_heads_are_refused():
    config, args = JobConfig(), tiny_args(n_kv_heads=4, linear_value_heads=6, linear_key_heads=3)
    config.parallelism.tensor_parallel_degree = 2
    (problem,) = tensor_parallel_sizes(config, args)
    assert "tensor_parallel_degree" in problem and "linear_key_heads" in problem
    config.parallelism.tensor_parallel_degree = 1
    config.parallelism.context_parallel_degree = 2
    (problem,) = context_parallel(config, args, builds_data=False)
    assert "must divide a rank's key heads of linear attention, got 2 with 3" in problem
