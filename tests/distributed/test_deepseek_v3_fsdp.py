"""deepseek_v3 on two FSDP ranks against one process, expert balancing included."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from torchtitan.components.optimizer import build_optimizers_with_moe_load_balancing
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.seeded_init import seeded_init
from torchtitan.models.deepseek_v3 import DeepSeekV3Model, DeepSeekV3ModelArgs
from torchtitan.models.moe import MoEArgs
from torchtitan.models.parallelize import parallelize_decoder
from torchtitan.testing.gloo import run_ranks

VOCAB, LENGTH, ROWS = 64, 16, 4


def tiny_args():
    return DeepSeekV3ModelArgs(
        dim=32,
        inter_dim=48,
        moe_inter_dim=16,
        n_layers=2,
        n_heads=4,
        vocab_size=VOCAB,
        q_lora_rank=12,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        max_seq_len=LENGTH,
        attn_type="varlen",
        attn_mask_type="position_block_causal",
        # Odd, so that the two ranks hold different numbers of experts.
        moe_args=MoEArgs(num_experts=5, top_k=2, route_norm=True, score_before_experts=False),
    )


def build(dp_shard, checkpointing):
    config = JobConfig()
    config.activation_checkpoint.mode = checkpointing
    config.training.mixed_precision_param = "float32"
    config.optimizer.lr = 1e-2
    with torch.device("meta"):
        model = DeepSeekV3Model(tiny_args())
    parallel_dims = ParallelDims(1, dp_shard, 1, 1, 1, 1, 1, dp_shard)
    model = parallelize_decoder(model, parallel_dims, config).to_empty(device="cpu")
    with torch.no_grad(), seeded_init(model, 1):
        model.init_weights()
    optimizers = build_optimizers_with_moe_load_balancing([model], config.optimizer, parallel_dims)
    return model, optimizers


def this_ranks_rows(dp_shard):
    """Tokens with their labels [rows, 17], positions [rows, 16]: two documents in each row."""
    rank = torch.distributed.get_rank() if dp_shard > 1 else 0
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    positions = torch.stack(
        [torch.cat([torch.arange(n), torch.arange(LENGTH - n)]) for n in (3, 8, 9, 15)]
    )
    return tokens.chunk(dp_shard)[rank], positions.chunk(dp_shard)[rank]


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def train(dp_shard, checkpointing="none"):
    """(loss of each of three AdamW steps, gradients of the first, the routing bias)."""
    model, optimizers = build(dp_shard, checkpointing)
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
        optimizers.step()
        optimizers.zero_grad()
        total = loss.detach()
        if dp_shard > 1:
            torch.distributed.all_reduce(total)
        losses.append(total.item())
    moe = model.layers["1"].moe
    assert moe.tokens_per_expert.sum() == 0
    return losses, gradients, moe.expert_bias.clone()


def test_it_learns_and_balances_the_same_on_two_ranks():
    ((losses, gradients, bias),) = run_ranks(train, 1, 1)
    assert losses[2] < losses[0] and bias.any() and bias.dtype == torch.float32
    for their_losses, their_gradients, their_bias in run_ranks(train, 2, 2, "full"):
        assert their_losses == pytest.approx(losses, abs=1e-5)
        assert torch.equal(their_bias, bias)
        their_gradients = {
            name.replace("_checkpoint_wrapped_module.", ""): gradient
            for name, gradient in their_gradients.items()
        }
        assert their_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                their_gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name
            )
