"""gpt-oss on the shared decoder.

Letters as in `models.decoder`. Initialisation differs from the table there: all weights of a block,
and the biases and sinks of attention and experts, have the std that depends on depth; the router's
bias starts at 0.
"""
# ruff: noqa: F401 (names of the reference)

from typing import ClassVar

import torch
from torch import Tensor, nn

from torchtitan.batch.mask import DocumentMask, Masks
from torchtitan.distributed.dtensor import local_parameter
from torchtitan.distributed.seeded_init import trunc_normal_
from torchtitan.models import decoder
from torchtitan.models.attention import attend
from torchtitan.models.decoder import Decoder, TransformerBlock
from torchtitan.models.gpt_oss.model.args import GptOssModelArgs
from torchtitan.models.gpt_oss.model.moe import GptOssMoE
from torchtitan.models.rope import YaRNArgs, yarn_mscale
from torchtitan.models.rope import apply_rotary_emb_to_halves as apply_rotary_emb
from torchtitan.models.rope import precompute_rope_cache as precompute_plain_rope_cache


def precompute_rope_cache(
    dim: int,
    max_seq_len: int,
    base: float = 1_000_000.0,
    rope_factor: float = 1.0,
    ntk_alpha: float = 1.0,
    ntk_beta: float = 32.0,
    original_seq_len: int = 4096,
) -> Tensor:
    """Return the table fp32 [max_seq_len, 2 * dim] of `models.rope` for heads of size `dim`.

    YaRN stretches it, with a blend that need not begin at whole pairs, and scales its magnitude.
    """
    yarn = YaRNArgs(rope_factor, original_seq_len, ntk_beta, ntk_alpha, truncate=False)
    return precompute_plain_rope_cache(dim, max_seq_len, base, yarn, yarn_mscale(rope_factor))


class Attention(decoder.Attention):
    """Attention with a sink in each head: one more key with a learnt score and value zero.

    use_sliding_attention: a query sees only the sliding window.
    """

    reads_local_parameters: ClassVar[bool] = True
    needs_log_sum_exp: ClassVar[bool] = True

    def __init__(self, model_args: GptOssModelArgs, use_sliding_attention: bool):
        super().__init__(
            model_args.dim,
            model_args.n_heads,
            model_args.n_kv_heads,
            model_args.head_dim,
            attn_type=model_args.attn_type,
            qkv_bias=True,
            output_bias=True,
            apply_rope=apply_rotary_emb,
            mask_name="sliding_window_mask" if use_sliding_attention else "basic_mask",
        )
        # Again here, because varlen's metadata holds no window.
        self.window = model_args.sliding_window_size if use_sliding_attention else None
        self.sinks = nn.Parameter(torch.empty(model_args.n_heads))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: DocumentMask) -> Tensor:
        """See `decoder.Attention.attend`."""
        out, lse = attend(self.inner_attention, q, k, v, mask, window=self.window, return_lse=True)
        # The softmax's share without the sink: exp(lse) / (exp(lse) + exp(sink)).
        share = torch.sigmoid(lse - local_parameter(self.sinks).float())
        return (out * share.unsqueeze(-1)).to(out.dtype)

    def init_weights(self, init_std: float) -> None:
        for parameter in self.parameters():
            trunc_normal_(parameter, mean=0.0, std=init_std)


class GptOssModel(Decoder):
    """gpt-oss: sinks, windows in even layers, RoPE of halves with YaRN, experts in every layer."""

    model_args: GptOssModelArgs
    rope_buffer_name = "rope_cache"

    def __init__(self, model_args: GptOssModelArgs):
        if model_args.attn_type == "sdpa":
            raise ValueError(
                "attn_type 'sdpa' has no sliding windows and no attention sinks, which gpt-oss "
                "needs; set model.attn_type to 'flex' or 'varlen'"
            )
        super().__init__(model_args)

    def build_attention(self, layer_id: int) -> Attention:
        return Attention(self.model_args, use_sliding_attention=layer_id % 2 == 0)

    def is_moe_layer(self, layer_id: int) -> bool:
        return True

    def build_feed_forward(self, layer_id: int) -> GptOssMoE:
        return GptOssMoE(self.model_args, self.model_args.dim, self.model_args.moe_inter_dim)

    def build_rope_table(self, length: int) -> Tensor:
        args = self.model_args
        yarn = args.rope_factor, args.ntk_alpha, args.ntk_beta, args.original_seq_len
        return precompute_rope_cache(args.head_dim, length, args.rope_theta, *yarn)

    def layer_masks(self, documents: DocumentMask) -> Masks:
        window = documents.with_window(self.model_args.sliding_window_size)
        return {"basic_mask": documents, "sliding_window_mask": window}
