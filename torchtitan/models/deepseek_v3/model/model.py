"""DeepSeek-V2 and V3 on the shared decoder: multi-head latent attention, and experts.

B rows, T tokens, M model dim, H heads, N and R the sizes of a query or key head's parts without and
with RoPE, V the size of a value head.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from torchtitan.batch.mask import Masks
from torchtitan.models.attention import attend, build_inner_attention
from torchtitan.models.decoder import PROJECTION_STD, Decoder, FeedForward, init_linear
from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs
from torchtitan.models.moe import build_moe
from torchtitan.models.rope import YaRNArgs, apply_rotary_emb, yarn_mscale
from torchtitan.models.rope import precompute_freqs_cis as precompute_table
from torchtitan.numerics.linear import Linear
from torchtitan.numerics.norm import RMSNorm

# DeepSeek's own code uses this eps for the two latents' norms, independent of `rms_norm_eps`.
LATENT_NORM_EPS = 1e-6


def precompute_freqs_cis(args: DeepSeekV3ModelArgs) -> Tensor:
    """Return the RoPE table complex64 [args.max_seq_len, R / 2], stretched by YaRN."""
    yarn = YaRNArgs(args.rope_factor, args.original_seq_len, args.beta_fast, args.beta_slow)
    return precompute_table(args.qk_rope_head_dim, args.max_seq_len, args.rope_theta, yarn)


class Attention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    The keys and values of all heads are projected from one latent per token. RoPE turns R extra
    numbers of each query head, and one key of R numbers that all heads share.
    """

    def __init__(self, model_args: DeepSeekV3ModelArgs):
        super().__init__()
        args = model_args
        self.n_heads = args.n_heads
        self.q_lora_rank = args.q_lora_rank
        self.kv_lora_rank = args.kv_lora_rank
        self.qk_nope_head_dim = args.qk_nope_head_dim
        self.qk_rope_head_dim = args.qk_rope_head_dim
        self.qk_head_dim = args.qk_nope_head_dim + args.qk_rope_head_dim
        self.v_head_dim = args.v_head_dim
        mscale = yarn_mscale(args.rope_factor, args.mscale)
        self.softmax_scale = mscale**2 * self.qk_head_dim**-0.5

        q_width = args.n_heads * self.qk_head_dim
        if args.q_lora_rank == 0:
            self.wq = Linear(args.dim, q_width, bias=False)
        else:
            self.wq_a = Linear(args.dim, args.q_lora_rank, bias=False)
            self.q_norm = RMSNorm(args.q_lora_rank, eps=LATENT_NORM_EPS)
            self.wq_b = Linear(args.q_lora_rank, q_width, bias=False)
        self.wkv_a = Linear(args.dim, args.kv_lora_rank + args.qk_rope_head_dim, bias=False)
        self.kv_norm = RMSNorm(args.kv_lora_rank, eps=LATENT_NORM_EPS)
        kv_width = args.n_heads * (args.qk_nope_head_dim + args.v_head_dim)
        self.wkv_b = Linear(args.kv_lora_rank, kv_width, bias=False)
        self.wo = Linear(args.n_heads * args.v_head_dim, args.dim, bias=False)
        self.inner_attention = build_inner_attention(args.attn_type)

    def forward(self, x: Tensor, rope: Tensor, attention_masks: Masks | None = None) -> Tensor:
        """x: [B, T, M]; rope: the table's rows [1 or B, T, R / 2]. Returns [B, T, M]."""
        q = self.wq(x) if self.q_lora_rank == 0 else self.wq_b(self.q_norm(self.wq_a(x)))
        # -1: under tensor parallelism a rank holds only some of the heads.
        q = q.unflatten(-1, (-1, self.qk_head_dim))
        q_nope, q_rope = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        latent, k_rope = self.wkv_a(x).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        kv = self.wkv_b(self.kv_norm(latent))
        kv = kv.unflatten(-1, (-1, self.qk_nope_head_dim + self.v_head_dim))
        k_nope, v = kv.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)

        q_rope, k_rope = apply_rotary_emb(q_rope, k_rope.unsqueeze(2), rope)
        q = torch.cat((q_nope, q_rope), dim=-1)  # [B, T, H, N + R]
        k = torch.cat((k_nope, k_rope.expand(-1, -1, k_nope.shape[2], -1)), dim=-1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = attend(self.inner_attention, q, k, v, attention_masks, self.softmax_scale)
        return self.wo(out.flatten(-2))

    def init_weights(self, init_std: float) -> None:
        for name, module in self.named_children():
            if isinstance(module, nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear):
                init_linear(module, init_std if name == "wo" else PROJECTION_STD)


class DeepSeekV3Model(Decoder):
    """DeepSeek-V2 or V3: a few dense layers, then layers of experts."""

    model_args: DeepSeekV3ModelArgs

    def build_attention(self, layer_id: int) -> Attention:
        return Attention(self.model_args)

    def build_feed_forward(self, layer_id: int) -> nn.Module:
        args = self.model_args
        if not self.is_moe_layer(layer_id):
            return FeedForward(args.dim, args.inter_dim)
        backend = args.expert_parallel_comm_backend
        return build_moe(args.moe_args, args.dim, args.moe_inter_dim, moe_impl=backend)

    def is_moe_layer(self, layer_id: int) -> bool:
        return layer_id >= self.model_args.n_dense_layers

    def build_rope_table(self, length: int) -> Tensor:
        return precompute_freqs_cis(replace(self.model_args, max_seq_len=length))
