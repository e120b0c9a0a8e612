"""Two FSDP ranks take their weights from Hugging Face files and write them again."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed.layout_matrix import FAMILIES
from tests.unit.models.tiny import filled
from torchtitan.checkpoint.folder import find_damage
from torchtitan.engine import TrainingEngine
from torchtitan.models.moe import MoEArgs
from torchtitan.protocols import train_spec
from torchtitan.testing.gloo import run_ranks
from torchtitan.testing.tiny_jobs import tiny_job

LENGTH = 16
# One rank has a shard of two of them, the other of one.
THREE = MoEArgs(
    num_experts=3, num_shared_experts=0, top_k=2, score_func="softmax", use_grouped_mm=False
)


def args_of(case, **changes):
    """Return (family, args in the sizes of the matrix of layouts)."""
    family, flavor, sizes = FAMILIES[case]
    args = train_spec.get_train_spec(family).model_args[flavor]
    return family, dataclasses.replace(args, **sizes | {"max_seq_len": LENGTH} | changes)


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
    ("case", "changes"), [("qwen3, tied", {}), ("qwen3 MoE", {"moe_args": THREE})]
)
def test_weights_come_from_and_go_to_hugging_face_files_bit_for_bit(case, changes, tmp_path):
    family, args = args_of(case, n_layers=2, **changes)
    weights = hf_weights(family, args)
    assert ("lm_head.weight" in weights) != args.enable_weight_tying
    assert_same_bits(after_two_ranks(family, args, weights, tmp_path), weights)


def test_multimodal_weights_come_in_and_go_out_with_a_copy_of_the_vision_tower(tmp_path):
    family, args = args_of("llama4")
    weights = hf_weights(family, args)
    files = {f"language_model.{name}": tensor.contiguous() for name, tensor in weights.items()}
    files |= {
        "vision_model.layernorm_pre.weight": torch.ones(3),
        "vision_model.logit_scale": torch.tensor(2.5),
        "vision_model.position_ids": torch.arange(5)[None],
        "vision_model.mask": torch.tensor([True, False]),
    }
    assert_same_bits(after_two_ranks(family, args, files, tmp_path), files)
