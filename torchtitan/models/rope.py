"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864).

B rows, T tokens, D head size, L table length. Position p rotates pair i of a head by the angle
p * f_i, where f_i = theta ** (-2 i / D). Two conventions pair the D dimensions differently:
    neighbours (2i, 2i + 1), as in the original Llama weights; the table is complex64 [L, D/2], numbers
        of magnitude 1 with these angles
    halves (i, i + D/2), as in Hugging Face; the table is fp32 [L, 2 D], the cosines of all D dimensions
        and then the sines
"""

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from torchtitan.tools.torch_parts import assert_on_device


@dataclass
class RoPEScalingArgs:
    """Llama 3.1's scaling of low frequencies for longer contexts.

    Let L = original_max_position_embeddings. Wavelengths longer than L / low_freq_factor are multiplied by
    scaling_factor. Wavelengths shorter than L / high_freq_factor are unchanged. Between these two bounds the
    frequency is interpolated.
    """

    scaling_factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def shortened(self, most: int) -> Self:
        """Return args with the same frequencies and, if possible, an original length below `most`.

        The length is halved as long as it is even.
        """
        n, share = self.original_max_position_embeddings, 1.0
        while n >= most and n % 2 == 0:
            n, share = n // 2, share / 2  # halving is exact in floating point
        return replace(
            self,
            low_freq_factor=self.low_freq_factor * share,
            high_freq_factor=self.high_freq_factor * share,
            original_max_position_embeddings=n,
        )

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        """Return the stretched frequencies [D/2] in radians per token; theta is not used."""
        # Rotations of each pair within the context that the model was first trained on.
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        slow = frequencies / self.scaling_factor
        span = self.high_freq_factor - self.low_freq_factor
        if span == 0:  # a step instead of an interpolation
            return torch.where(turns < self.low_freq_factor, slow, frequencies)
        keep = ((turns - self.low_freq_factor) / span).clamp(0, 1)
        return torch.lerp(slow, frequencies, keep)


@dataclass
class YaRNArgs:
    """YaRN's scaling for longer contexts (Peng et al. 2023, arXiv:2309.00071, section 3.2).

    A dimension pair that rotates beta_fast times or more within original_seq_len tokens keeps its
    frequency. At beta_slow times or fewer the frequency is divided by `factor`. Between these bounds the two
    frequencies are interpolated linearly. truncate: round the bounds to whole pairs, as in DeepSeek's models.
    """

    factor: float
    original_seq_len: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        """Return the stretched frequencies [D/2] in radians per token."""
        if self.factor == 1:
            return frequencies
        n_pairs = len(frequencies)

        def pair_with(turns: float) -> float:
            """Return the fractional index of the pair that rotates `turns` times in the context."""
            wavelength = self.original_seq_len / turns
            return n_pairs * math.log(wavelength / (2 * math.pi)) / math.log(theta)

        low, high = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        # All published code limits the index by the number of dimensions, not of pairs.
        low, high = max(low, 0), min(high, 2 * n_pairs - 1)
        if low == high:
            high += 0.001
        pairs = torch.arange(n_pairs, dtype=torch.float32)
        slowed = ((pairs - low) / (high - low)).clamp(0, 1)
        return frequencies / self.factor * slowed + frequencies * (1 - slowed)


@dataclass(frozen=True)
class LinearRoPE:
    """All frequencies divided by `factor` (position interpolation; Chen et al. 2023, arXiv:2306.15595)."""

    factor: float

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        return frequencies / self.factor


@dataclass(frozen=True)
class LongRoPE:
    """Each frequency divided by a factor of its own (Ding et al. 2024, arXiv:2402.13753).

    short_factors [D/2] are for rows of up to original_seq_len tokens, long_factors [D/2] for longer rows. The
    model's max_seq_len (training.seq_len) selects one of the two, so no frequency depends on a batch.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_seq_len: int

    def for_length(self, length: int) -> "LongRoPE":
        """Return a scaling whose `short_factors` are the factors for rows of this length."""
        is_long = length > self.original_seq_len
        return replace(self, short_factors=self.long_factors) if is_long else self

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        factors = torch.tensor(self.short_factors, dtype=torch.float32)
        exponents = torch.arange(0, 2 * len(factors), 2, dtype=torch.float32) / (2 * len(factors))
        return 1.0 / (factors * theta**exponents)  # this order rounds as in published models


RoPEScaling = RoPEScalingArgs | YaRNArgs | LinearRoPE | LongRoPE


@dataclass(frozen=True)
class RoPEArgs:
    """The RoPE of all layers of one kind, with dimensions paired by halves.

    theta: None means the model's rope_theta. share: the fraction of a head's dimensions that is rotated: the
        first dimensions or, if proportional, the first pairs.
    proportional: pairs span the whole head (Gemma 4), not only the first `share` of its dimensions.
    magnitude: multiplies cosines and sines.
    """

    theta: float | None = None
    share: float = 1.0
    proportional: bool = False
    scaling: RoPEScaling | None = None
    magnitude: float = 1.0

    def size(self, head_dim: int) -> int:
        """Return R, the number of a head's dimensions that the table covers."""
        return head_dim if self.proportional else int(head_dim * self.share)

    def table(self, head_dim: int, length: int, theta: float, max_seq_len: int) -> Tensor:
        """Return the table fp32 [length, 2 R] for `apply_rotary_emb_to_halves`.

        theta, max_seq_len: the model's rope_theta and max_seq_len, which may be less than `length`.
        """
        size, scaling = self.size(head_dim), self.scaling
        if isinstance(scaling, LongRoPE):
            scaling = scaling.for_length(max_seq_len)
        theta = theta if self.theta is None else self.theta
        table = precompute_rope_cache(size, length, theta, scaling, self.magnitude)
        if self.proportional:
            is_still = torch.arange(size // 2) >= int(self.share * head_dim // 2)
            cos, sin = table.view(length, 2, 2, size // 2).unbind(1)
            cos.masked_fill_(is_still, self.magnitude)
            sin.masked_fill_(is_still, 0)
        return table


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's factor on queries and keys (equation 22), which scales attention scores by its square."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _angles(dim: int, length: int, theta: float, scaling_args: "RoPEScaling | None") -> Tensor:
    """Return the angles fp32 [length, dim/2] of each position and pair, in radians."""
    # Keep the published models' order of operations: at position 100,000 the last bit of a
    # frequency visibly changes the angle.
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if scaling_args is not None:
        frequencies = scaling_args.stretch(frequencies, theta)
    return torch.outer(torch.arange(length, dtype=torch.float32), frequencies)


def precompute_freqs_cis(
    dim: int,
    end: int,
    theta: float = 10000.0,
    scaling_args: RoPEScalingArgs | YaRNArgs | None = RoPEScalingArgs(),  # noqa: B008 (only read)
) -> Tensor:
    """Return the RoPE table complex64 [end, dim/2]: entry [p, i] rotates dimensions 2i and 2i + 1 at
    position p. dim: the head size."""
    angles = _angles(dim, end, theta, scaling_args)
    return torch.polar(torch.ones_like(angles), angles)


def select_positions(table: Tensor, positions: Tensor | None, seq_len: int) -> Tensor:
    """Return the table's row of each token: [1, T, ...] or [B, T, ...].

    table: [L, ...]. positions: None for 0..T-1, or int [1, T] or [B, T]; negative positions
        (padding) read row 0.
    Raises ValueError for positions beyond the table; on an accelerator a device assertion fails.
    """
    length = table.shape[0]
    if positions is None:
        if seq_len > length:
            raise ValueError(_beyond_table(seq_len, length))
        return table[None, :seq_len]
    if positions.device.type == "cpu":
        if not torch.compiler.is_compiling() and positions.numel() and positions.max() >= length:
            raise ValueError(_beyond_table(int(positions.max()) + 1, length))
    else:
        assert_on_device((positions < length).all(), _beyond_table("more", length))
    return table[positions.clamp(min=0)]


def _beyond_table(wanted: int | str, length: int) -> str:
    return (
        f"the RoPE table holds {length} positions and the batch needs {wanted}; raise "
        "training.seq_len, which sets the table's length, or shorten the sequences"
    )


def reshape_for_broadcast(freqs_cis: Tensor, x: Tensor, positions: Tensor | None = None) -> Tensor:
    """Return each token's table row with an axis for heads: [1 or B, T, 1, ...].

    freqs_cis: a table [L, ...] of either convention, or selected rows [1 or B, T, ...]. x: [B, T, ...].
    """
    if freqs_cis.dim() == 2:
        freqs_cis = select_positions(freqs_cis, positions, x.shape[1])
    return freqs_cis.unsqueeze(2)


def _rotate_neighbours(x: Tensor, rows: Tensor) -> Tensor:
    """Rotate x [B, T, heads, D] by complex rows [1 or B, T, 1, D/2] in fp32; returns x's dtype."""
    if torch.compiler.is_compiling():  # inductor has no complex kernels
        return _rotate_by_real_numbers(x, rows)
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rows).flatten(-2).to(x.dtype)


def _rotate_by_real_numbers(x: Tensor, rows: Tensor) -> Tensor:
    cos, sin = torch.view_as_real(rows).unbind(-1)
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return turned.flatten(-2).to(x.dtype)


def apply_rotary_emb(
    xq: Tensor, xk: Tensor, freqs_cis: Tensor, positions: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return xq [B, T, H, D] and xk [B, T, K, D], with neighbouring pairs rotated by their token's
    position. freqs_cis and positions as in `reshape_for_broadcast`."""
    rows = reshape_for_broadcast(freqs_cis, xq, positions)
    return _rotate_neighbours(xq, rows), _rotate_neighbours(xk, rows)


# ---- pairs of two halves ----


def precompute_rope_cache(
    dim: int,
    max_seq_len: int,
    base: float = 1_000_000.0,
    scaling_args: RoPEScaling | None = None,
    magnitude: float = 1.0,
) -> Tensor:
    """Return the table fp32 [max_seq_len, 2 * dim] for pairs of halves: (cosines, sines) * `magnitude`."""
    angles = _angles(dim, max_seq_len, base, scaling_args)
    cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
    return torch.cat((cos, cos, sin, sin), dim=-1)


def apply_rotary_emb_to_halves(
    xq: Tensor, xk: Tensor, rope_cache: Tensor, positions: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `apply_rotary_emb`, but rotates dimensions i and i + D/2 together. Computes in fp32."""
    cos, sin = reshape_for_broadcast(rope_cache, xq, positions).chunk(2, dim=-1)
    first, second = sin.chunk(2, dim=-1)
    sin = torch.cat((-first, second), dim=-1)
    return _rotate_halves(xq, cos, sin), _rotate_halves(xk, cos, sin)


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, T, heads, D] by cos, sin [1 or B, T, 1, D]; sin's first half is already negated."""
    numbers = x.float()
    partners = numbers.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(numbers * cos, partners, sin).to(x.dtype)


def rotate_columns(
    xq: Tensor,
    xk: Tensor,
    rows: Tensor,
    *,
    first: int,
    size: int | None,
    scale_column: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As `apply_rotary_emb_to_halves`, with the columns [first, first + 2 size) of the table `rows`.

    size: R; dimensions of a head after the first R pass unchanged. None: no rotation.
    scale_column: the column of `rows` with the queries' factor at each position; None: no factor.
    """
    if size is not None:
        columns = rows[..., first : first + 2 * size]
        turned = apply_rotary_emb_to_halves(xq[..., :size], xk[..., :size], columns)
        xq, xk = (
            x if size == old.shape[-1] else torch.cat((x, old[..., size:]), dim=-1)
            for x, old in zip(turned, (xq, xk), strict=True)
        )
    if scale_column is not None:
        xq = (xq * rows[..., scale_column, None, None]).to(xq.dtype)
    return xq, xk


def query_factors(positions: Tensor, scale: float, step: float) -> Tensor:
    """Return the queries' factor 1 + scale * ln(1 + floor(p / step)) at positions p [L], fp32 [L, 1]."""
    steps = positions.float().div(step).floor()
    return torch.log1p(steps).mul(scale).add(1)[:, None]


# ---- for `numerics.batch_invariant`: an element's rounding does not depend on its index in the tensor ----


def _batch_invariant_neighbours(xq: Tensor, xk: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    rows = rows.unsqueeze(2)
    return _rotate_by_real_numbers(xq, rows), _rotate_by_real_numbers(xk, rows)


def _batch_invariant_halves(xq: Tensor, xk: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = rows.unsqueeze(2).chunk(2, dim=-1)

    def rotate(x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        partners = torch.cat((-second, first), dim=-1)
        return (x.float() * cos + partners * sin).to(x.dtype)

    return rotate(xq), rotate(xk)


BATCH_INVARIANT_ROPE = {
    apply_rotary_emb: _batch_invariant_neighbours,
    apply_rotary_emb_to_halves: _batch_invariant_halves,
}
