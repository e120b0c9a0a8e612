"""Sampling from a decoder, token by token.

B rows, T tokens, V vocabulary.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchtitan.generation.kv_cache import kv_cache
from torchtitan.loss.chunked_logits import exponentials_, logprobs_of_logits
from torchtitan.tools.files import find_shipped, read_json_object


class Drawn(NamedTuple):
    """Tokens [B], and their log-probs, fp32 [B], under the distribution that they were drawn from."""

    tokens: Tensor
    logprobs: Tensor


def draw(
    logits: Tensor,
    uniform: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Drawn:
    """Draw one token per row of logits [B, V] by inverting the cumulative distribution.

    uniform: fp64 [B], from [0, 1). The same numbers draw the same tokens on every device and in
        every split of the rows, unless rounding moves a cumulative probability past `uniform`.
    temperature: divides the logits; 0 takes the most probable token (the first of equal tokens).
    top_k: keep only this many of the most probable tokens (the first of equal tokens); 0 keeps all.
    top_p: of the tokens that top_k keeps, keep the fewest most probable tokens with this total
        probability; 1 keeps all.
    """
    if temperature == 0:
        is_finite = logits.amax(dim=-1).isfinite()
        return Drawn(logits.argmax(dim=-1), torch.where(is_finite, 0.0, torch.nan))
    exps = logits.float() / temperature
    highest, sums = exponentials_(exps)
    is_truncated = 0 < top_k < logits.shape[-1] or top_p < 1
    if is_truncated:
        in_order, tokens = exps.sort(dim=-1, descending=True, stable=True)
        if top_k > 0:
            in_order[:, top_k:] = 0
        if top_p < 1:
            before = in_order.cumsum(dim=-1, dtype=torch.float64) - in_order
            in_order = in_order.masked_fill(before >= top_p * in_order.sum(-1, keepdim=True), 0)
        exps = torch.zeros_like(exps).scatter_(-1, tokens, in_order)
    cumulative = exps.cumsum(dim=-1, dtype=torch.float64)
    # Keep the target below the sum even after rounding, because tokens past it have probability 0.
    target = uniform[:, None] * cumulative[:, -1:] * (1 - 1e-12)
    tokens = torch.searchsorted(cumulative, target, right=True)
    # NaN logits give an index past the end, so clamp the index.
    tokens.clamp_(max=logits.shape[-1] - 1)
    chosen = logits.gather(-1, tokens).squeeze(-1).float() / temperature
    # Renormalise over the kept tokens.
    kept_sums = exps.sum(dim=-1) if is_truncated else sums
    return Drawn(tokens.squeeze(-1), logprobs_of_logits(chosen, highest, kept_sums))


def end_ids(folder: str) -> list[int]:
    """Return the end-of-text ids in generation_config.json or else config.json, as transformers does."""
    for name in ("generation_config.json", "config.json"):
        if os.path.exists(path := os.path.join(find_shipped(folder), name)):
            ids = read_json_object(path).get("eos_token_id")
            if ids is not None:
                return ids if isinstance(ids, list) else [ids]
    return []


def generate(model: nn.Module, input_ids: Tensor, **options: Any) -> Tensor:
    """Return the prompts and their continuations: [T] or [B, T] -> [B, T + new]. options: see `stream`."""
    return torch.cat([torch.atleast_2d(input_ids), *stream(model, input_ids, **options)], dim=1)


@torch.no_grad()
def stream(
    model: nn.Module,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int | None = None,
    eos_id: int | Sequence[int] | None = None,
) -> Iterator[Tensor]:
    """Yield the next token of each row, [B, 1], one after another; input_ids: [T] or [B, T].

    temperature: a temperature between 0 and 1e-5 is raised to 1e-5.
    seed: None draws from torch's default generator.
    eos_id: end-of-text id or ids. A row that has drawn an end-of-text token is padded with this token.
        Generation ends when all rows have ended. None always generates `max_new_tokens` tokens.
    Raises ValueError for an empty prompt, options out of range, and in the cases of `kv_cache`;
    FloatingPointError for logits that are not finite.
    """
    least = {"max_new_tokens": (max_new_tokens, 1), "temperature": (temperature, 0)}
    for name, (value, at_least) in (least | {"top_k": (top_k, 1)}).items():
        if value is not None and value < at_least:
            raise ValueError(f"{name} must be at least {at_least}, got {value}; raise it")
    token = prompt = torch.atleast_2d(input_ids)
    if prompt.shape[1] == 0:
        raise ValueError("a prompt must have at least one token, got none")
    rng = None if seed is None else torch.Generator(prompt.device).manual_seed(seed)
    temperature = temperature and max(temperature, 1e-5)

    ends = None if eos_id is None else prompt.new_tensor(eos_id)
    is_finished = torch.zeros_like(prompt[:, :1], dtype=torch.bool)
    with kv_cache(model, prompt.shape[1] + max_new_tokens) as cached_forward:
        for _ in range(max_new_tokens):
            before = token[:, -1:]
            logits = cached_forward(token, last_only=True)[:, -1]
            uniform = torch.rand(
                len(prompt), dtype=torch.float64, device=prompt.device, generator=rng
            )
            drawn = draw(logits, uniform, temperature=temperature, top_k=top_k or 0)
            if not drawn.logprobs.isfinite().all():
                raise FloatingPointError(
                    "the model's logits are not finite, so no token can be drawn; check its weights"
                )
            token = drawn.tokens[:, None]
            if ends is not None:
                token = torch.where(is_finished, before, token)
                is_finished |= torch.isin(token, ends)
            yield token
            if ends is not None and is_finished.all():
                break
