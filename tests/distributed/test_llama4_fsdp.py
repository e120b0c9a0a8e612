"""llama4 with chunks, layers without positions and experts, on two FSDP ranks and on one."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.seeded_init import seeded_init
from torchtitan.engine import TrainingEngine
from torchtitan.models.llama4 import Llama4StateDictAdapter, Transformer, TransformerModelArgs
from torchtitan.models.moe import MoEArgs
from torchtitan.models.parallelize import parallelize_decoder
from torchtitan.protocols import train_spec
from torchtitan.testing.gloo import run_ranks

VOCAB, LENGTH, ROWS = 64, 16, 4


def tiny_args(attn_type="flex"):
    return TransformerModelArgs(
        dim=32,
        n_layers=4,
        n_heads=4,
        n_kv_heads=2,
        vocab_size=VOCAB,
        multiple_of=8,
        max_seq_len=LENGTH,
        every_n_layers_nope=3,
        fixed_attn_block_size=4,
        moe_args=MoEArgs(num_experts=4),
        use_qk_norm=True,
        attn_temperature_tuning=True,
        floor_scale=2,
        attn_type=attn_type,
        attn_mask_type="position_block_causal",
    )


def build(dp_shard, attn_type):
    config = JobConfig()
    config.activation_checkpoint.mode = "none"
    config.training.mixed_precision_param = "float32"
    with torch.device("meta"):
        model = Transformer(tiny_args(attn_type))
    parallel_dims = ParallelDims(1, dp_shard, 1, 1, 1, 1, 1, dp_shard)
    model = parallelize_decoder(model, parallel_dims, config).to_empty(device="cpu")
    with torch.no_grad(), seeded_init(model, 1):
        model.init_weights()
    return model


def this_ranks_rows(dp_shard):
    """Tokens with their labels [rows, 17], positions [rows, 16]: two documents in each row."""
    rank = torch.distributed.get_rank() if dp_shard > 1 else 0
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    first_lengths = [3, 8, 9, 15]
    positions = torch.stack(
        [torch.cat([torch.arange(n), torch.arange(LENGTH - n)]) for n in first_lengths]
    )
    return tokens.chunk(dp_shard)[rank], positions.chunk(dp_shard)[rank]


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def train(dp_shard, attn_type):
    """(loss of each of three AdamW steps, gradients of the first)."""
    model = build(dp_shard, attn_type)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens, positions = this_ranks_rows(dp_shard)
    losses, gradients = [], {}
    for _ in range(3):
        masks = model.get_attention_masks(tokens[:, :-1], None, {"positions": positions})
        logits = model(tokens[:, :-1], attention_masks=masks, positions=positions)
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        ) / (ROWS * LENGTH)
        loss.backward()
        gradients = gradients or {name: full(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        if dp_shard > 1:
            torch.distributed.all_reduce(total)
        losses.append(total.item())
    return losses, gradients


def train_both(dp_shard):
    return [train(dp_shard, attn_type) for attn_type in ("flex", "varlen")]


def test_model_learns_the_same_on_two_ranks():
    alone = train_both(1)
    for together in run_ranks(train_both, 2, 2):
        for (losses, gradients), (their_losses, their_gradients) in zip(
            alone, together, strict=True
        ):
            assert losses[2] < losses[0]
            assert their_losses == pytest.approx(losses, abs=1e-5)
            assert their_gradients.keys() == gradients.keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(
                    their_gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name
                )


def load_and_export(files_folder, dump_folder):
    """Two ranks take their weights from Hugging Face files and write them again."""
    spec = train_spec.get_train_spec("llama4")
    train_spec.register_train_spec(
        "tiny_llama4", dataclasses.replace(spec, model_args={"tiny": tiny_args()})
    )
    config = ConfigManager().parse_args(
        [
            "--model.name=tiny_llama4",
            "--model.flavor=tiny",
            f"--job.dump_folder={dump_folder}",
            f"--training.seq_len={LENGTH}",
            "--training.steps=1",
            "--activation_checkpoint.mode=none",
            "--checkpoint.enable",
            f"--checkpoint.initial_load_path={files_folder}",
            "--checkpoint.initial_load_in_hf",
            "--checkpoint.last_save_in_hf",
        ]
    )
    engine = TrainingEngine(config)
    assert engine.checkpointer.load()
    engine.checkpointer.save(1, last_step=True)
    engine.close()


def test_multimodal_weights_come_in_and_go_out_as_text_bit_for_bit(tmp_path):
    model = Transformer(tiny_args())
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights()
    weights = Llama4StateDictAdapter(tiny_args(), None).to_hf(model.state_dict())
    files = {f"language_model.{name}": tensor.contiguous() for name, tensor in weights.items()}
    files["vision_model.layernorm_pre.weight"] = torch.ones(3)
    (tmp_path / "hf").mkdir()
    save_file(files, tmp_path / "hf" / "model.safetensors")
    run_ranks(
        load_and_export, 2, str(tmp_path / "hf"), str(tmp_path / "out"), init_process_group=False
    )
    written = {}
    for file in (tmp_path / "out" / "checkpoint" / "step-1").glob("*.safetensors"):
        written |= load_file(file)
    assert written.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(written[name], tensor), name
