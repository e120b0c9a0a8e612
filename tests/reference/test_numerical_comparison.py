"""The script that compares our logits with transformers', on a tiny model made with transformers."""

import sys

import pytest
import torch

from scripts.checkpoint_conversion import numerical_tests_example
from scripts.checkpoint_conversion.numerical_tests_example import (
    compare_logits,
    main,
    numerical_test,
)
from tests.tiny_hf import tiny_hf_config
from torchtitan.models.qwen3 import Qwen3ModelArgs
from torchtitan.protocols import train_spec

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SIZES = dict(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, hidden_dim=48, vocab_size=50)
FLAVORS = {
    "sdpa": Qwen3ModelArgs(**SIZES),
    "varlen": Qwen3ModelArgs(**SIZES, attn_type="varlen", attn_mask_type="block_causal"),
    "other_theta": Qwen3ModelArgs(**SIZES, rope_theta=500.0),
}


@pytest.fixture
def hf_folder(tmp_path, monkeypatch):
    config = tiny_hf_config(vocab_size=50, head_dim=16, intermediate_size=48)
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    spec = train_spec.get_train_spec("qwen3")
    spec.model_args = FLAVORS
    monkeypatch.setitem(train_spec._extra_train_specs, "tiny_qwen3", spec)
    return str(tmp_path)


@pytest.mark.parametrize("flavor", ["sdpa", "varlen"])
def test_right_weights_differ_by_rounding_only(hf_folder, flavor):
    comparison = numerical_test(hf_folder, "tiny_qwen3", flavor, seq_len=40)
    assert abs(comparison.kl_divergence) < 1e-11
    assert comparison.max_difference < 1e-5
    assert comparison.same_likeliest == 1


def run_main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["numerical_tests_example", *arguments])
    main()


def test_program_reports_and_ends_with_an_error_if_models_differ(hf_folder, monkeypatch, capsys):
    arguments = [hf_folder, "--model_name=tiny_qwen3", "--seq_len=40"]
    run_main(monkeypatch, *arguments, "--model_flavor=sdpa")
    assert "KL divergence (mean over tokens) " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="has weights of a model with rope_theta"):
        run_main(monkeypatch, *arguments, "--model_flavor=other_theta")
    with monkeypatch.context() as patched:
        patched.setattr(
            numerical_tests_example, "compare_logits", lambda a, b: compare_logits(a, 2 * b)
        )
        with pytest.raises(SystemExit, match="the models differ by more than 0.001"):
            run_main(monkeypatch, *arguments, "--model_flavor=sdpa")
    with pytest.raises(SystemExit, match="error: model.flavor of 'tiny_qwen3' must be one of"):
        run_main(monkeypatch, *arguments, "--model_flavor=8B")
