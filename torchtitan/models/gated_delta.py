"""Linear attention by the gated delta rule: Qwen 3.5's and Qwen3-Next's gated delta net.

B rows, T tokens, M model dim, Hk key heads, Hv value heads (value head h uses key head h // (Hv / Hk)), Dk and
Dv their sizes, W taps of the convolution.

Initialisation is that of transformers, except for linear layers, which start like those of the decoder's
attention. The convolution is normal with std 0.02. A_log is the logarithm of a uniform number in (0.01, 16).
dt_bias and the norm's weight are 1.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtitan.batch.mask import DocumentMask, Masks
from torchtitan.distributed.dtensor import local_parameter
from torchtitan.models.feed_forward import PROJECTION_STD, init_linear
from torchtitan.numerics.delta_rule import gated_delta_rule
from torchtitan.numerics.document_conv import document_conv
from torchtitan.numerics.linear import Linear
from torchtitan.numerics.norm import RMSNorm


class Decay(nn.Module):
    """The parameters of the state's decay, one per value head, in fp32 even if other parameters are in bf16.

    In bf16 the last bit of A_log changes the decay by up to 0.8 %, and small updates would be lost. These
    parameters are a module of their own, because FSDP casts the parameters of a unit to one dtype.
    """

    reads_local_parameters: ClassVar[bool] = True
    keeps_fp32: ClassVar[bool] = True

    def __init__(self, n_heads: int):
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(n_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(n_heads, dtype=torch.float32))

    def init_weights(self) -> None:
        nn.init.uniform_(self.A_log, 0.01, 16)
        self.A_log.log_()
        nn.init.ones_(self.dt_bias)


class DeltaRule(nn.Module):
    """The part of a `GatedDeltaNet` that mixes tokens: convolution, then delta rule, on whole rows.

    `generation.kv_cache` replaces this module, as it replaces the kernels of attention.
    """

    def forward(
        self,
        inputs: tuple[Tensor, ...],
        taps: tuple[Tensor, ...],
        g: Tensor,
        beta: Tensor,
        key_dim: int,
        mask: DocumentMask,
    ) -> Tensor:
        """Return [B, T, Hv, Dv].

        inputs: queries, keys and values before the convolution, [B, T, heads * D]. taps: the weights of their
        convolutions, [heads * D, W]. g, beta: [B, T, Hv], as in `numerics.delta_rule`.
        """
        starts = mask.starts_of_rows(*g.shape[:2], g.device)
        mixed = [document_conv(x, w, starts) for x, w in zip(inputs, taps, strict=True)]
        q, k, v = in_heads(mixed, key_dim, g)
        cu_seqlens = None if mask.lengths is None else mask.lengths.cu_seq_q
        return gated_delta_rule(q, k, v, g, beta, starts, cu_seqlens=cu_seqlens)[0]


def in_heads(mixed: list[Tensor], key_dim: int, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split queries, keys and values [B, T, heads * D] into heads: [B, T, Hk, Dk] twice, [B, T, Hv, Dv]."""
    q, k, v = mixed
    keys = (-1, key_dim)
    return q.unflatten(-1, keys), k.unflatten(-1, keys), v.unflatten(-1, (g.shape[-1], -1))


class GatedDeltaNet(nn.Module):
    """A gated delta net (Yang et al. 2024, arXiv:2412.06464) within documents, in place of attention.

    Under tensor parallelism a rank has some key heads and their value heads. Under context parallelism an
    all-to-all gives each rank whole rows of some heads.
    """

    reads_local_parameters: ClassVar[bool] = True

    def __init__(
        self,
        dim: int,
        n_key_heads: int,
        n_value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_width: int,
        norm_eps: float,
    ):
        super().__init__()
        self.key_dim, self.value_dim = key_dim, value_dim
        self.heads_per_key = n_value_heads // n_key_heads
        keys, values = n_key_heads * key_dim, n_value_heads * value_dim
        self.wq = Linear(dim, keys, bias=False)
        self.wk = Linear(dim, keys, bias=False)
        self.wv = Linear(dim, values, bias=False)
        self.wz = Linear(dim, values, bias=False)
        self.wb = Linear(dim, n_value_heads, bias=False)
        self.wa = Linear(dim, n_value_heads, bias=False)
        self.conv_q = nn.Parameter(torch.empty(keys, conv_width))
        self.conv_k = nn.Parameter(torch.empty(keys, conv_width))
        self.conv_v = nn.Parameter(torch.empty(values, conv_width))
        self.decay = Decay(n_value_heads)
        self.norm = RMSNorm(value_dim, norm_eps)
        self.wo = Linear(values, dim, bias=False)
        self.inner_attention = DeltaRule()

    def forward(self, x: Tensor, rope: Any, attention_masks: Masks | None = None) -> Tensor:
        """x: [B, T, M]; rope is ignored. Returns [B, T, M]."""
        if isinstance(attention_masks, dict):  # the masks differ only in windows
            attention_masks = next(iter(attention_masks.values()))
        mask = DocumentMask.from_mask(attention_masks)
        inputs = [linear(x) for linear in (self.wq, self.wk, self.wv, self.wb, self.wa)]
        convolutions = self.conv_q, self.conv_k, self.conv_v
        weights = [*convolutions, self.decay.A_log, self.decay.dt_bias]
        weights = [local_parameter(weight) for weight in weights]
        if (part := mask.part) is not None:
            # One all-to-all for all inputs: concatenate each key head's columns of every input.
            n_key_heads = inputs[0].shape[-1] // self.key_dim
            each = [y.unflatten(-1, (n_key_heads, -1)) for y in inputs]
            exchanged = part.tokens_to_heads(torch.cat(each, dim=-1).transpose(1, 2))
            each = exchanged.transpose(1, 2).split([y.shape[-1] for y in each], dim=-1)
            inputs = [y.flatten(-2) for y in each]
            weights = [part.own_heads(weight) for weight in weights]
        *inputs, b, a = inputs
        *taps, a_log, dt_bias = weights
        with torch.autocast(x.device.type, enabled=False):
            dtype = torch.promote_types(x.dtype, torch.float32)
            g = -a_log.to(dtype).exp() * F.softplus(a.to(dtype) + dt_bias.to(dtype))
        out = self.inner_attention(tuple(inputs), tuple(taps), g, b.sigmoid(), self.key_dim, mask)
        if part is not None:
            out = part.heads_to_tokens(out.transpose(1, 2)).transpose(1, 2)
        z = self.wz(x).unflatten(-1, (-1, self.value_dim)).to(dtype)
        out = (self.norm(out) * F.silu(z)).to(out.dtype)
        return self.wo(out.flatten(-2))

    def init_weights(self, init_std: float) -> None:
        for linear in (self.wq, self.wk, self.wv, self.wz, self.wb, self.wa):
            init_linear(linear, PROJECTION_STD)
        init_linear(self.wo, init_std)
        for taps in (self.conv_q, self.conv_k, self.conv_v):
            nn.init.normal_(taps, std=PROJECTION_STD)
        self.decay.init_weights()
        self.norm.reset_parameters()
