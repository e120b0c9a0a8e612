"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864).

B rows, T tokens, D head size, L table length. Position p turns pair i of a head by the angle
p * f_i, where f_i = theta ** (-2 i / D). There are two conventions for which two of the D numbers
are a pair:
    neighbours (2i, 2i + 1), as in the original Llama weights; table complex64 [L, D/2] of unit
        numbers with these angles
    halves (i, i + D/2), as in Hugging Face; table fp32 [L, 2 D], the cosines for all D numbers
        and then the sines
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class RoPEScalingArgs:
    """Llama 3.1's stretching of slow frequencies to longer contexts.

    Wavelengths longer than original_max_position_embeddings / low_freq_factor are stretched by
    scaling_factor, those shorter than .../ high_freq_factor stay, and between the two the
    frequency is blended. scaling_factor 1.0 changes nothing.
    """

    scaling_factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        """Return frequencies [D/2], in radians per token, stretched; theta does not matter here."""
        # How often each pair turns within the context that the model was first trained on.
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        slow = frequencies / self.scaling_factor
        span = self.high_freq_factor - self.low_freq_factor
        if span == 0:  # no band to blend in: a step
            return torch.where(turns < self.low_freq_factor, slow, frequencies)
        keep = ((turns - self.low_freq_factor) / span).clamp(0, 1)
        return torch.lerp(slow, frequencies, keep)


@dataclass
class YaRNArgs:
    """YaRN's stretching to longer contexts (Peng et al. 2023, arXiv:2309.00071, section 3.2).

    A pair that turns beta_fast times or more within original_seq_len tokens keeps its frequency,
    one that turns beta_slow times or fewer is slowed down by `factor`, and between the two
    pairs the frequency is blended. factor 1.0 changes nothing.

    truncate: let the blend begin and end at whole pairs, as DeepSeek's models do.
    """

    factor: float
    original_seq_len: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        """Return frequencies [D/2], in radians per token, stretched."""
        if self.factor == 1:
            return frequencies
        n_pairs = len(frequencies)

        def pair_with(turns: float) -> float:
            """The pair, as a real number, that turns this often in the original context."""
            wavelength = self.original_seq_len / turns
            return n_pairs * math.log(wavelength / (2 * math.pi)) / math.log(theta)

        low, high = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        # The upper limit counts numbers, not pairs, in all published code.
        low, high = max(low, 0), min(high, 2 * n_pairs - 1)
        if low == high:
            high += 0.001
        pairs = torch.arange(n_pairs, dtype=torch.float32)
        slowed = ((pairs - low) / (high - low)).clamp(0, 1)
        return frequencies / self.factor * slowed + frequencies * (1 - slowed)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return the correction of attention's magnitude that goes with YaRN; 1 for factor 1.

    Equation 22 of the paper if mscale is 1. Multiply queries and keys by it, or the softmax scale
    by its square.
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _frequencies(dim: int, theta: float, scaling_args: RoPEScalingArgs | YaRNArgs | None) -> Tensor:
    """Frequencies fp32 [dim/2] in radians per token."""
    # The order of operations is that of the published models: the last bit of a frequency, times
    # a position of 100,000, is an angle that shows.
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return frequencies if scaling_args is None else scaling_args.stretch(frequencies, theta)


def precompute_freqs_cis(
    dim: int,
    end: int,
    theta: float = 10000.0,
    scaling_args: RoPEScalingArgs | YaRNArgs | None = RoPEScalingArgs(),  # noqa: B008 (only read)
) -> Tensor:
    """Return the table complex64 [end, dim/2] for heads of size `dim`; see the module's top.

    scaling_args: None leaves the frequencies as they are.
    """
    if torch.get_default_device().type == "meta":  # arange there would load torch's compiler
        return torch.empty((end, dim // 2), dtype=torch.complex64)
    frequencies = _frequencies(dim, theta, scaling_args)
    angles = torch.outer(torch.arange(end, dtype=torch.float32), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def select_positions(table: Tensor, positions: Tensor | None, seq_len: int) -> Tensor:
    """Return the table's rows for each token: [1, T, ...] or [B, T, ...].

    table: [L, ...]. positions: None for 0..T-1, or int [1, T] or [B, T]; negative ones
        (padding) read row 0.
    Raises ValueError for positions beyond the table. On an accelerator looking at positions
    would mean waiting for it, so there the check runs on the device and stops the process.
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
        torch._assert_async((positions < length).all(), _beyond_table("more", length))
    return table[positions.clamp(min=0)]


def _beyond_table(wanted: int | str, length: int) -> str:
    return (
        f"the RoPE table holds {length} positions and the batch needs {wanted}; raise "
        "training.seq_len, which sets the table's length, or shorten the sequences"
    )


def reshape_for_broadcast(freqs_cis: Tensor, x: Tensor, positions: Tensor | None = None) -> Tensor:
    """Return each token's table row with an axis for heads: [1 or B, T, 1, ...].

    freqs_cis: a table [L, ...] of either convention, or rows already selected [1 or B, T, ...].
    x: [B, T, heads, ...].
    """
    if freqs_cis.dim() == 2:
        freqs_cis = select_positions(freqs_cis, positions, x.shape[1])
    return freqs_cis.unsqueeze(2)


def _rotate_neighbours(x: Tensor, rows: Tensor) -> Tensor:
    """x: [B, T, heads, D]; rows: complex [1 or B, T, 1, D/2]. fp32 inside, x's dtype out."""
    pairs = x.float().unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():
        # inductor has no complex kernels; written out, this fuses with its surroundings
        cos, sin = torch.view_as_real(rows).unbind(-1)
        first, second = pairs.unbind(-1)
        turned = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * rows)
    return turned.flatten(-2).to(x.dtype)


def apply_rotary_emb(
    xq: Tensor, xk: Tensor, freqs_cis: Tensor, positions: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return queries and keys, neighbouring numbers turned by their token's position.

    xq: [B, T, H, D], xk: [B, T, K, D]. freqs_cis and positions as in `reshape_for_broadcast`.
    """
    rows = reshape_for_broadcast(freqs_cis, xq, positions)
    return _rotate_neighbours(xq, rows), _rotate_neighbours(xk, rows)


# ---- the same on halves ----


def precompute_rope_cache(
    dim: int,
    max_seq_len: int,
    base: float = 1_000_000.0,
    scaling_args: RoPEScalingArgs | YaRNArgs | None = None,
    magnitude: float = 1.0,
) -> Tensor:
    """Return the table fp32 [max_seq_len, 2 * dim] for heads of size `dim`; see the module's top.

    scaling_args: None leaves the frequencies as they are. magnitude: multiplies all numbers.
    """
    if torch.get_default_device().type == "meta":
        return torch.empty((max_seq_len, 2 * dim), dtype=torch.float32)
    frequencies = _frequencies(dim, base, scaling_args)
    angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float32), frequencies)
    cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
    return torch.cat((cos, cos, sin, sin), dim=-1)


def apply_rotary_emb_to_halves(
    xq: Tensor, xk: Tensor, rope_cache: Tensor, positions: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return queries and keys, the two halves of each head turned by their token's position.

    xq: [B, T, H, D], xk: [B, T, K, D]. rope_cache and positions as in `reshape_for_broadcast`.
    fp32 inside, the inputs' dtype out.
    """
    cos, sin = reshape_for_broadcast(rope_cache, xq, positions).chunk(2, dim=-1)
    first, second = sin.chunk(2, dim=-1)
    sin = torch.cat((-first, second), dim=-1)
    return _rotate_halves(xq, cos, sin), _rotate_halves(xk, cos, sin)


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [B, T, heads, D]; cos and sin, negative for the first half: [1 or B, T, 1, D]."""
    numbers = x.float()
    partners = numbers.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(numbers * cos, partners, sin).to(x.dtype)
