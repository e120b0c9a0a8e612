"""A run that continues from a checkpoint has the bits of a run that was not interrupted."""

import shutil

import pytest

from tests.distributed.rl_runs import run_on_this_rank

SIZES = (
    "dim=32, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=48, vocab_size=32, linear_key_heads=2, "
    "linear_value_heads=4, linear_key_dim=8, linear_value_dim=8"
)
QWEN = ["--model.name=qwen3_5", "--model.attn_type=varlen", "--rl.batch.packing"]
QWEN += ["--model.attn_mask_type=position_block_causal", "--model.args"]
RESUMED = ["--training.steps=4", "--checkpoint.enable", "--checkpoint.interval=2"]
RESUMED += ["--checkpoint.no_last_save_model_only", "--lr_scheduler.warmup_steps=3"]


@pytest.mark.parametrize(
    "flags",
    [
        [*QWEN, SIZES],
        pytest.param(
            [*QWEN, f"{SIZES}, moe_inter_dim=16", "--model.flavor=debugmodel_moe"],
            marks=pytest.mark.slow,
        ),
        ["--rl.loss.kl_coef=0.1", "--optimizer.lr=1e-2"],  # the reference is not taken again
        ["--rl.advantage.name=gae", "--rl.epochs=2", "--rl.critic.warmup_steps=1"],
    ],
    ids=["Qwen 3.5", "Qwen 3.5 MoE", "reference", "critic"],
)
def test_resumed_run_goes_on_bit_for_bit(flags, tmp_path):
    unbroken = run_on_this_rank(tmp_path / "a", [*flags, *RESUMED])
    shutil.copytree(tmp_path / "a/checkpoint/step-2", tmp_path / "b/checkpoint/step-2")
    resumed = run_on_this_rank(tmp_path / "b", [*flags, *RESUMED])
    assert resumed["steps"][0]["step"] == 3 and unbroken["steps"][0]["step"] == 1
    for found, expected in zip(resumed["steps"][::-1], unbroken["steps"][::-1], strict=False):
        names = [name for name in expected if not name.startswith("time/")]
        assert [found[name] for name in names] == [expected[name] for name in names]
    assert resumed["digest"] == unbroken["digest"]
    # The generator has the numbers of the trainer's forward, whose states keep packed samples apart.
    if "--rl.epochs=2" not in flags:
        assert all(step["loss/logprob_diff_max"] < 1e-5 for step in unbroken["steps"])
