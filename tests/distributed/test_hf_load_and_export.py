"""Two FSDP ranks take their weights from Hugging Face files and write them again."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.models.tiny import filled
from torchtitan.checkpoint.folder import find_damage
from torchtitan.engine import TrainingEngine
from torchtitan.models.llama4 import TransformerModelArgs
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3 import Qwen3ModelArgs
from torchtitan.protocols import train_spec
from torchtitan.testing.gloo import run_ranks
from torchtitan.testing.tiny_jobs import tiny_job

LENGTH = 16
SIZES = dict(dim=32, n_heads=4, n_kv_heads=2, vocab_size=64)


def llama4_args():
    return TransformerModelArgs(
        **SIZES, n_layers=4, multiple_of=8, max_seq_len=LENGTH, every_n_layers_nope=3,
        fixed_attn_block_size=4, moe_args=MoEArgs(num_experts=4), attn_type="flex",
    )  # fmt: skip


def qwen3_args(**changes):
    return Qwen3ModelArgs(**SIZES, n_layers=2, head_dim=16, hidden_dim=48, **changes)


def three_experts():
    """One rank has a shard of two of them, the other of one."""
    experts = MoEArgs(
        num_experts=3, num_shared_experts=0, top_k=2, score_func="softmax", use_grouped_mm=False
    )
    return qwen3_args(moe_enabled=True, moe_inter_dim=16, moe_args=experts)


def load_and_export(family, args, files_folder, dump_folder):
    """In many parts."""
    from torchtitan.checkpoint import hf

    hf._BYTES_PER_PART = 10_000
    hf._BYTES_PER_FILE = 20_000
    checkpoint = dict(
        enable=True, initial_load_path=files_folder, initial_load_in_hf=True,
        last_save_in_hf=True, untrained_weights="copy",
    )  # fmt: skip
    model, training = {"name": family}, {"seq_len": LENGTH, "steps": 1}
    config = tiny_job(
        dump_folder, "tiny", None, None, model=model, training=training, checkpoint=checkpoint
    )
    spec = dataclasses.replace(train_spec.get_train_spec(family), model_args={"tiny": args})
    engine = TrainingEngine(config, train_spec=spec)
    assert engine.checkpointer.load()
    (model,) = engine.model_parts
    assert (model.output.weight is model.tok_embeddings.weight) == args.enable_weight_tying
    engine.checkpointer.save(1, last_step=True)
    engine.close()


def hf_weights(family, args):
    spec = train_spec.get_train_spec(family)
    model = filled(spec.model_cls(args))
    weights = spec.state_dict_adapter(args, None).to_hf(model.state_dict())
    return {name: tensor.clone() for name, tensor in weights.items()}


def after_two_ranks(family, args, files, folder):
    """The tensors that two ranks write which began with those in `files`."""
    (folder / "hf").mkdir()
    save_file(files, folder / "hf" / "model.safetensors")
    folders = str(folder / "hf"), str(folder / "out")
    run_ranks(load_and_export, 2, family, args, *folders, init_process_group=False)
    step = folder / "out" / "checkpoint" / "step-1"
    assert not (step / "sharded").exists() and find_damage(str(step)) is None
    written = {}
    for file in step.glob("*.safetensors"):
        written |= load_file(file)
    return written


def assert_same_bits(written, weights):
    assert written.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(written[name], tensor), name


@pytest.mark.parametrize(
    "args", [qwen3_args(enable_weight_tying=True), three_experts()], ids=["tied", "three experts"]
)
def test_weights_come_from_and_go_to_hugging_face_files_bit_for_bit(tmp_path, args):
    weights = hf_weights("qwen3", args)
    assert ("lm_head.weight" in weights) != args.enable_weight_tying
    assert_same_bits(after_two_ranks("qwen3", args, weights, tmp_path), weights)


def test_multimodal_weights_come_in_and_go_out_with_a_copy_of_the_vision_tower(tmp_path):
    weights = hf_weights("llama4", llama4_args())
    files = {f"language_model.{name}": tensor.contiguous() for name, tensor in weights.items()}
    files |= {
        "vision_model.layernorm_pre.weight": torch.ones(3),
        "vision_model.logit_scale": torch.tensor(2.5),
        "vision_model.position_ids": torch.arange(5)[None],
        "vision_model.mask": torch.tensor([True, False]),
    }
    assert_same_bits(after_two_ranks("llama4", llama4_args(), files, tmp_path), files)
