"""GRPO on a tiny Qwen 3.5, dense and with experts: its states and convolutions keep samples apart."""

import pytest
import torch

from tests.unit.rl.toy import gradients, toy_config, toy_samples
from torchtitan.rl.batcher import Batcher
from torchtitan.rl.policy import PolicyTrainer

SIZES = (
    "dim=32, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=48, vocab_size=32, linear_key_heads=2, "
    "linear_value_heads=4, linear_key_dim=8, linear_value_dim=8"
)
FLAVORS = {"debugmodel": SIZES, "debugmodel_moe": f"{SIZES}, moe_inter_dim=16"}


def qwen(flavor):
    flags = ["--model.name=qwen3_5", f"--model.flavor={flavor}", "--model.args", FLAVORS[flavor]]
    return [*flags, "--model.attn_type=varlen", "--model.attn_mask_type=position_block_causal"]


@pytest.mark.parametrize("flavor", FLAVORS)
def test_loss_and_gradient_do_not_depend_on_how_samples_share_rows(flavor, tmp_path):
    trainer, samples = PolicyTrainer(toy_config(tmp_path, *qwen(flavor))), toy_samples(9)
    found = []
    # Nine samples packed in four rows, or each sample in a row of its own.
    for n_parts in (1, 3, 9):
        batcher = Batcher(seq_len=24, rows=4, agg_mode="token-sum")
        parts = [samples[i::n_parts] for i in range(n_parts)]
        loss = sum(trainer.forward_backward(batcher.batch(part)).loss for part in parts)
        found.append((loss, gradients(trainer)))
        trainer.zero_grad()
    (loss, expected), *others = found
    assert all(gradient.abs().max() > 0 for name, gradient in expected.items())
    for other, own in others:
        assert other == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)
    trainer.close()
