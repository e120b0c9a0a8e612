"""Exports of models whose experts are dealt to ranks hold every expert."""

from pathlib import Path

from safetensors.torch import load_file

from tests.distributed.layout_matrix import (
    BY_NAME,
    SHALLOW,
    batch_flags,
    build_engine,
    register_tiny,
    run_step,
    whole,
)
from tests.unit.checkpoint.runs import assert_same
from torchtitan.protocols import train_spec
from torchtitan.testing.gloo import run_ranks

TWO_RANKS = BY_NAME["FSDP 2, EP 2"]
SPLIT = BY_NAME["FSDP 2, TP 2, EP 2, ETP 2"]
# family -> (flags, layout on four ranks). Experts in files: one by one, transposed, fused with biases.
FAMILIES = {
    # Each second rank of FSDP holds one expert less.
    "qwen3 MoE": (["--model.args=moe_args.num_experts=6"], BY_NAME["FSDP 4, EP 2"]),
    "llama4": ([], SPLIT),
    "gpt_oss": ([], SPLIT),
}


def engine_of(family, layout, folder, *flags):
    flags = [*flags, *FAMILIES[family][0], *layout.overrides(), SHALLOW]
    flags += ["--checkpoint.enable", "--checkpoint.last_save_in_hf"]
    return build_engine(family, [*flags, *batch_flags(family, "documents, varlen")], folder)


def train_and_save(folder):
    """Return each family's state after a step, and leave it as Hugging Face files."""
    states = {}
    for family in FAMILIES:
        with engine_of(family, TWO_RANKS, f"{folder}/{family}") as engine:
            run_step(engine, TWO_RANKS, 0)
            engine.optim_step()
            engine.checkpointer.save(2, last_step=True)
            states[family] = {k: whole(x) for k, x in engine.model_parts[0].state_dict().items()}
    return states


def load_files(folder, files_folder):
    """By family: the model's state, loaded from Hugging Face files."""
    states = {}
    for family, (_, layout) in FAMILIES.items():
        source = f"--checkpoint.initial_load_path={files_folder}/{family}/checkpoint/step-2"
        with engine_of(family, layout, folder, source, "--checkpoint.initial_load_in_hf") as engine:
            assert engine.checkpointer.load()
            states[family] = {k: whole(x) for k, x in engine.model_parts[0].state_dict().items()}
    return states


def test_files_hold_every_expert_and_load_in_any_layout(tmp_path):
    how = dict(init_process_group=False, timeout_seconds=300)
    expected = run_ranks(train_and_save, 2, str(tmp_path), **how)[0]
    loaded = run_ranks(load_files, 4, str(tmp_path / "four"), str(tmp_path), **how)
    for family, state in expected.items():
        spec = train_spec.get_train_spec(register_tiny(family))
        adapter = spec.state_dict_adapter(spec.model_args["shallow"], None)
        files = {}
        for file in Path(tmp_path, family, "checkpoint/step-2").glob("*.safetensors"):
            files |= load_file(file)
        assert_same(files, adapter.to_hf(state))
        # The bias that balances experts has no place in these files.
        parameters = {k: v for k, v in state.items() if "expert_bias" not in k}
        for states in loaded:
            assert_same({key: states[family][key] for key in parameters}, parameters)
