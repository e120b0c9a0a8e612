"""What qwen3 has of its own; `test_families.py` has what every family has."""

import pytest
import torch

from tests.unit.models.tiny import filled, on_meta, sized
from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs, Qwen3StateDictAdapter


def tiny_args(**changes):
    return sized(Qwen3ModelArgs, n_kv_heads=2, head_dim=16, hidden_dim=48, **changes)


@pytest.mark.parametrize(
    "there, here",
    [({}, {"qk_norm": False, "qkv_bias": True}), ({"qk_norm": False, "qkv_bias": True}, {})],
)
def test_qwen2_weights_in_a_qwen3_model_are_named_and_the_reverse(there, here):
    state = on_meta(Qwen3Model, tiny_args(**there)).state_dict()
    files = Qwen3StateDictAdapter(tiny_args(**there), None).to_hf(state)
    other = Qwen3StateDictAdapter(tiny_args(**here), None)
    odd_one = "q_norm.weight" if there == {} else "q_proj.bias"
    with pytest.raises(ValueError, match=rf"model.layers.1.self_attn.{odd_one}"):
        other.from_hf(files)
    with pytest.raises(ValueError, match=r"layers.1.attention.(q_norm|wq.bias)"):
        other.to_hf(state)


def test_normed_queries_and_keys_have_the_dtype_of_values():
    model = filled(Qwen3Model(tiny_args()))
    attention = model.layers["0"].attention
    seen = []

    def look(module, args, kwargs):
        seen.extend(x.dtype for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))

    attention.inner_attention.register_forward_pre_hook(look, with_kwargs=True)
    for norm in (attention.q_norm, attention.k_norm):  # as autocast on CUDA computes norms
        norm.register_forward_hook(lambda module, args, output: output.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randint(0, 64, (1, 8)))
    assert len(seen) == 3 and set(seen) == {torch.bfloat16}
