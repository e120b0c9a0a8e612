"""qwen3 on two FSDP ranks against one process."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.seeded_init import seeded_init
from torchtitan.models.moe import MoEArgs
from torchtitan.models.parallelize import parallelize_decoder
from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs, Qwen3StateDictAdapter
from torchtitan.testing.gloo import run_ranks

VOCAB, LENGTH, ROWS = 64, 16, 4


def tiny_args():
    return Qwen3ModelArgs(
        dim=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        vocab_size=VOCAB,
        head_dim=16,
        hidden_dim=48,
        max_seq_len=4096,
        attn_type="varlen",
        attn_mask_type="position_block_causal",
        enable_weight_tying=True,
    )


def build(dp_shard, param_dtype="float32"):
    config = JobConfig()
    config.activation_checkpoint.mode = "none"
    config.training.mixed_precision_param = param_dtype
    with torch.device("meta"):
        model = Qwen3Model(tiny_args())
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


def train(dp_shard):
    """(loss of each of three AdamW steps, gradients of the first)."""
    model = build(dp_shard)
    assert model.output.weight is model.tok_embeddings.weight
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


def test_tied_model_learns_the_same_on_two_ranks():
    losses, gradients = train(1)
    assert "output.weight" not in gradients and losses[2] < losses[0]
    for their_losses, their_gradients in run_ranks(train, 2, 2):
        assert their_losses == pytest.approx(losses, abs=1e-5)
        assert their_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                their_gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name
            )


def bf16_logits(dp_shard):
    """(logits of rows that begin at position 4000, dtypes of what a block's attention gets)."""
    model = build(dp_shard, "bfloat16")
    if dp_shard == 1:  # what FSDP does to parameters, and only to them
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    dtypes = []
    model.layers["1"].attention.register_forward_pre_hook(
        lambda module, args: dtypes.extend(arg.dtype for arg in args[:2])
    )
    tokens, _ = this_ranks_rows(dp_shard)
    positions = torch.arange(4000, 4000 + LENGTH).expand(len(tokens), -1)
    masks = model.get_attention_masks(tokens[:, :-1], None, {"positions": positions})
    with torch.no_grad():
        return model(tokens[:, :-1], attention_masks=masks, positions=positions), dtypes


def test_position_tables_stay_fp32_where_parameters_are_bf16():
    expected, _ = bf16_logits(1)
    results = run_ranks(bf16_logits, 2, 2)
    for _, dtypes in results:
        assert dtypes == [torch.bfloat16, torch.float32]
    assert torch.equal(torch.cat([logits for logits, _ in results]), expected)


def three_experts():
    experts = MoEArgs(
        num_experts=3, num_shared_experts=0, top_k=2, score_func="softmax", use_grouped_mm=False
    )
    return dataclasses.replace(
        tiny_args(), moe_enabled=True, moe_inter_dim=16, moe_args=experts, enable_weight_tying=False
    )


def load_and_export(args, files_folder, dump_folder):
    """Two ranks take their weights from Hugging Face files, in many parts, and write them again."""
    from torchtitan.components import checkpoint_hf
    from torchtitan.config import ConfigManager
    from torchtitan.engine import TrainingEngine
    from torchtitan.protocols import train_spec

    checkpoint_hf._BYTES_PER_PART = 10_000
    checkpoint_hf._BYTES_PER_FILE = 20_000
    spec = train_spec.get_train_spec("qwen3")
    train_spec.register_train_spec(
        "tiny_qwen3", dataclasses.replace(spec, model_args={"tiny": args})
    )
    config = ConfigManager().parse_args(
        [
            "--model.name=tiny_qwen3",
            "--model.flavor=tiny",
            f"--job.dump_folder={dump_folder}",
            "--training.seq_len=16",
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
    (model,) = engine.model_parts
    assert (model.output.weight is model.tok_embeddings.weight) == args.enable_weight_tying
    engine.checkpointer.save(1, last_step=True)
    engine.close()


@pytest.mark.parametrize("args", [tiny_args(), three_experts()], ids=["tied", "three_experts"])
def test_weights_come_from_and_go_to_hugging_face_files_bit_for_bit(tmp_path, args):
    model = Qwen3Model(args)
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights()
    weights = Qwen3StateDictAdapter(args, None).to_hf(model.state_dict())
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    assert ("lm_head.weight" in weights) != args.enable_weight_tying
    (tmp_path / "hf").mkdir()
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    run_ranks(
        load_and_export,
        2,
        args,
        str(tmp_path / "hf"),
        str(tmp_path / "out"),
        init_process_group=False,
    )
    step = tmp_path / "out" / "checkpoint" / "step-1"
    assert not (step / "sharded").exists()
    written = {}
    for file in step.glob("*.safetensors"):
        written |= load_file(file)
    assert written.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(written[name], tensor), name
