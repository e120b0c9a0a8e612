"""Exports of models whose experts are dealt to ranks hold every expert."""

import copy
import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.layout_matrix import whole
from torchtitan.config import ConfigManager
from torchtitan.engine import TrainingEngine
from torchtitan.models.gpt_oss import GptOssModelArgs, gptoss_configs
from torchtitan.models.llama4 import TransformerModelArgs
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3 import Qwen3ModelArgs
from torchtitan.protocols import train_spec
from torchtitan.testing.gloo import run_ranks

VOCAB, LENGTH, ROWS = 64, 16, 4
TWO_RANKS = ["--parallelism.data_parallel_shard_degree=2", "--parallelism.expert_parallel_degree=2"]
UNEVEN = [  # each second rank of FSDP holds one expert less
    "--parallelism.data_parallel_shard_degree=4",
    "--parallelism.expert_parallel_degree=2",
]
SPLIT = [
    "--parallelism.data_parallel_shard_degree=2",
    "--parallelism.tensor_parallel_degree=2",
    "--parallelism.expert_parallel_degree=2",
    "--parallelism.expert_tensor_parallel_degree=2",
]
FOUR_RANKS = {"qwen3": UNEVEN, "llama4": SPLIT, "gpt_oss": SPLIT}


SIZES = dict(dim=32, n_heads=4, n_kv_heads=2, vocab_size=VOCAB)


def qwen3_args():
    experts = MoEArgs(
        num_experts=6, top_k=2, num_shared_experts=0, score_func="softmax", route_norm=True,
        score_before_experts=False, load_balance_coeff=0.01,
    )  # fmt: skip
    return Qwen3ModelArgs(
        **SIZES, n_layers=2, head_dim=16, max_seq_len=LENGTH, moe_enabled=True, moe_inter_dim=24,
        moe_args=experts,
    )  # fmt: skip


def llama4_args():
    return TransformerModelArgs(
        **SIZES, n_layers=4, multiple_of=8, max_seq_len=LENGTH, every_n_layers_nope=3,
        fixed_attn_block_size=4, moe_args=MoEArgs(num_experts=4), attn_type="flex",
    )  # fmt: skip


def gpt_oss_args():
    experts = copy.copy(gptoss_configs["debugmodel"].moe_args)
    return GptOssModelArgs(
        **SIZES, n_layers=2, head_dim=16, moe_inter_dim=32, sliding_window_size=4, moe_args=experts
    )


# One by one, transposed and fused in files; alone, with dense layers, with biases.
FAMILIES = {
    "qwen3": qwen3_args(),
    "llama4": llama4_args(),
    "gpt_oss": gpt_oss_args(),
}


def engine_of(family, dump_folder, overrides):
    name = f"tiny_{family}"
    if name not in train_spec._extra_train_specs:
        spec = train_spec.get_train_spec(family)
        tiny = dataclasses.replace(spec, model_args={"tiny": FAMILIES[family]})
        train_spec.register_train_spec(name, tiny)
    return TrainingEngine(
        ConfigManager().parse_args(
            [
                f"--model.name={name}",
                "--model.flavor=tiny",
                "--model.attn_type=varlen",
                "--model.attn_mask_type=position_block_causal",
                f"--job.dump_folder={dump_folder}/{family}",
                f"--training.seq_len={LENGTH}",
                "--training.mixed_precision_param=float32",
                "--training.steps=2",
                "--lr_scheduler.warmup_steps=0",
                "--activation_checkpoint.mode=none",
                "--checkpoint.enable",
                "--checkpoint.interval=1",
                "--checkpoint.last_save_in_hf",
                *overrides,
            ]
        )
    )


def take_one_step(engine):
    """On the same rows, whatever the layout."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    tokens = tokens.chunk(engine.dp_size)[engine.dp_rank]
    positions = torch.arange(LENGTH).expand(len(tokens), -1)
    engine.forward_backward_step(
        input_dict={"input": tokens[:, :-1], "positions": positions},
        labels=tokens[:, 1:].contiguous(),
        global_valid_tokens=ROWS * LENGTH,
    )
    engine.optim_step()


def state_of(engine):
    """All of the model and of its optimizer, gathered."""
    state = engine.model_parts[0].state_dict() | engine.optimizers.state_dict()
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    return {key: whole(value) for key, value in tensors.items()}


def train_and_save(dump_folder, overrides):
    """Return each family's state after two steps, and leave it as Hugging Face files."""
    states = {}
    for family in FAMILIES:
        engine = engine_of(family, dump_folder, overrides)
        for _ in range(2):
            take_one_step(engine)
        engine.checkpointer.save(2, last_step=True)
        states[family] = state_of(engine)
        engine.close()
    return states


def load_files(dump_folder, files_folder, layouts):
    """By family: the model's state, loaded from Hugging Face files."""
    states = {}
    for family, overrides in layouts.items():
        source = f"--checkpoint.initial_load_path={files_folder}/{family}/checkpoint/step-2"
        hf = [source, "--checkpoint.initial_load_in_hf"]
        engine = engine_of(family, dump_folder, [*overrides, *hf])
        assert engine.checkpointer.load()
        model_state = engine.model_parts[0].state_dict()
        states[family] = {key: whole(value) for key, value in model_state.items()}
        engine.close()
    return states


def run(fn, world_size, *args):
    return run_ranks(fn, world_size, *args, init_process_group=False, timeout_seconds=300)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder, states) of a run with the experts on two ranks."""
    folder = str(tmp_path_factory.mktemp("dealt"))
    return folder, run(train_and_save, 2, folder, TWO_RANKS)[0]


def assert_equal_states(ours, theirs):
    assert ours.keys() == theirs.keys()
    different = [key for key in theirs if not torch.equal(ours[key], theirs[key])]
    assert different == []


def test_files_hold_every_expert_and_load_in_any_layout(trained, tmp_path):
    folder, expected = trained
    loaded = run(load_files, 4, str(tmp_path), folder, FOUR_RANKS)
    for family, args in FAMILIES.items():
        state = expected[family]
        parameters = {key: value for key, value in state.items() if key in loaded[0][family]}
        adapter = train_spec.get_train_spec(family).state_dict_adapter(args, None)
        files = {}
        for file in (tmp_path / folder / family / "checkpoint" / "step-2").glob("*.safetensors"):
            files |= load_file(file)
        assert_equal_states(files, adapter.to_hf(parameters))
        # The bias that balances experts has no place in these files.
        expected_parameters = {k: v for k, v in parameters.items() if "expert_bias" not in k}
        for states in loaded:
            assert_equal_states(
                {key: states[family][key] for key in expected_parameters}, expected_parameters
            )
