"""gpt_oss on two FSDP ranks against one process."""

import copy

import pytest
import torch
from torch.distributed.tensor import DTensor

from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.seeded_init import seeded_init
from torchtitan.models.gpt_oss import GptOssModel, GptOssModelArgs, gptoss_configs
from torchtitan.models.parallelize import parallelize_decoder
from torchtitan.testing.gloo import run_ranks

VOCAB, LENGTH, ROWS = 64, 16, 4


def build(dp_shard, attn_type, ac_mode):
    config = JobConfig()
    config.activation_checkpoint.mode = ac_mode
    config.training.mixed_precision_param = "float32"
    args = GptOssModelArgs(
        dim=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        vocab_size=VOCAB,
        head_dim=16,
        moe_inter_dim=32,
        sliding_window_size=4,
        max_seq_len=64,
        attn_type=attn_type,
        attn_mask_type="position_block_causal",
        moe_args=copy.copy(gptoss_configs["debugmodel"].moe_args),
    )
    with torch.device("meta"):
        model = GptOssModel(args)
    parallel_dims = ParallelDims(1, dp_shard, 1, 1, 1, 1, 1, dp_shard)
    model = parallelize_decoder(model, parallel_dims, config).to_empty(device="cpu")
    with torch.no_grad(), seeded_init(model, 1):
        model.init_weights()
    return model.train()


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


def train(dp_shard, attn_type, ac_mode="none"):
    """(loss of each of three AdamW steps, gradients of the first)."""
    model = build(dp_shard, attn_type, ac_mode)
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


def train_all(dp_shard):
    return [train(dp_shard, "flex"), train(dp_shard, "varlen"), train(dp_shard, "flex", "full")]


def test_model_learns_the_same_on_two_ranks_with_either_kernel_and_with_checkpointing():
    losses, gradients = train(1, "flex")
    assert losses[2] < losses[0]
    for rank in run_ranks(train_all, 2, 2):
        for their_losses, their_gradients in rank:
            assert their_losses == pytest.approx(losses, abs=1e-5)
            names = {
                name.replace("_checkpoint_wrapped_module.", ""): name for name in their_gradients
            }
            assert names.keys() == gradients.keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(
                    their_gradients[names[name]], gradient, rtol=1e-4, atol=1e-6, msg=name
                )
