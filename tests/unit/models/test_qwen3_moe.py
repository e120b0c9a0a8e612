"""The mixtures of experts of qwen3: sizes, names, training."""

import copy

import pytest
import torch

from torchtitan.config import ConfigManager, JobConfig
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs, get_train_spec, qwen3_args
from torchtitan.optim.optimizer import build_optimizers_with_moe_load_balancing

# (parameters, FLOPs per token at sequence length 2048)
KNOWN_SIZES = {
    "debugmodel_moe_small": (11_545_856, 138_481_152),
    "debugmodel_moe": (315_758_848, 708_613_632),
    "30B-A3B": (30_532_122_624, 23_083_044_864),
    "235B-A22B": (235_093_634_560, 148_335_301_632),
}


def meta_model(args):
    with torch.device("meta"):
        return Qwen3Model(args)


def tiny_args(**changes):
    moe_args = MoEArgs(
        num_experts=6,
        top_k=2,
        num_shared_experts=0,
        score_func="softmax",
        route_norm=True,
        score_before_experts=False,
    )
    sizes = {
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "vocab_size": 64,
        "head_dim": 16,
        "max_seq_len": 64,
        "moe_enabled": True,
        "moe_inter_dim": 24,
        "moe_args": moe_args,
    }
    return Qwen3ModelArgs(**sizes | changes)


def test_moe_flavors_are_the_known_ones():
    moe = [flavor for flavor, args in qwen3_args.items() if args.moe_enabled]
    # Other tests add tiny ones.
    assert [flavor for flavor in moe if not flavor.startswith("tiny")] == [*KNOWN_SIZES]


@pytest.mark.parametrize("flavor", KNOWN_SIZES)
def test_flavor_has_its_known_size_and_flops(flavor):
    args = qwen3_args[flavor]
    assert args.get_nparams_and_flops(meta_model(args), 2048) == KNOWN_SIZES[flavor]
    assert args.rope_theta == (5e6 if flavor == "235B-A22B" else 1e6)
    assert args.max_seq_len == (262144 if flavor == "30B-A3B" else 4096)
    num_experts = {"debugmodel_moe_small": 8, "debugmodel_moe": 64}.get(flavor, 128)
    assert args.moe_args.num_experts == num_experts


def test_names_of_an_moe_block_are_fixed():
    names = list(meta_model(tiny_args()).layers["0"].state_dict())
    assert names == [
        *(f"attention.{name}.weight" for name in ("q_norm", "k_norm", "wq", "wk", "wv", "wo")),
        "moe.expert_bias",
        *(f"moe.experts.w{i}" for i in (1, 2, 3)),
        "moe.router.gate.weight",
        "attention_norm.weight",
        "ffn_norm.weight",
    ]


def test_defaults_of_the_args_are_the_known_ones():
    args = Qwen3ModelArgs()
    assert (args.moe_enabled, args.moe_inter_dim, args.moe_args) == (False, 768, MoEArgs())


def test_forced_balance_changes_no_shared_flavor():
    config = JobConfig()
    config.debug.moe_force_load_balance = True
    shared = qwen3_args["30B-A3B"].moe_args
    args = copy.copy(qwen3_args["30B-A3B"])
    args.update_from_config(config)
    assert args.moe_args._debug_force_load_balance and not shared._debug_force_load_balance
    assert args.moe_args.num_experts == 128


def test_spec_balances_the_load_of_experts():
    assert get_train_spec().build_optimizers_fn is build_optimizers_with_moe_load_balancing


def test_small_preset_learns_and_moves_the_biases(tmp_path):
    from torchtitan.trainer import Trainer

    trainer = Trainer(
        ConfigManager().parse_args(
            [
                "--job.config_file=torchtitan/models/qwen3/train_configs/debug_moe_small.toml",
                f"--job.dump_folder={tmp_path}",
                "--training.steps=5",
                "--training.seq_len=64",
                "--training.local_batch_size=1",
                "--lr_scheduler.warmup_steps=1",
            ]
        )
    )
    losses = []
    trainer.metrics_processor.log = lambda step, loss, *others, **more: losses.append(loss)
    trainer.train()
    # Losses fall from log(2048) = 7.6.
    assert len(losses) == 5 and losses[0] == pytest.approx(8.0, abs=0.5)
    assert losses[-1] < losses[0] - 0.5
    for block in trainer.model_parts[0].layers.values():
        assert 0 < block.moe.expert_bias.abs().max() < 6e-3  # five steps of 1e-3
        assert not block.moe.tokens_per_expert.any()
    trainer.close()
