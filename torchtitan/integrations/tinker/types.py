"""Arguments and results of the clients, under Tinker's names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchtitan.data.tokenizer import BaseTokenizer
from torchtitan.rl.types import SamplingConfig

# ---- arguments and results ----


@dataclass(frozen=True)
class ModelInput:
    """The tokens that a model reads."""

    tokens: tuple[int, ...]

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> "ModelInput":
        return cls(tuple(tokens))

    def to_ints(self) -> list[int]:
        return list(self.tokens)

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Datum:
    """One sequence to learn from: n input tokens, and the loss's inputs for each of them.

    loss_fn_inputs: name -> tensor [n] or list of n entries: `target_tokens`, the token to predict
        after each input token; `logprobs` and `advantages` for policy losses, both 0 for targets of
        the prompt; optionally `weights` of the targets, and `mask`, 0 for targets that the loss
        leaves out.
    """

    model_input: ModelInput
    loss_fn_inputs: dict[str, Any]


@dataclass(frozen=True)
class AdamParams:
    """Settings of one optimizer step. grad_clip_norm: 0 does not clip."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True)
class SamplingParams:
    """Settings of a draw. top_k: -1 keeps all tokens.

    stop: token ids, or strings in the completion's text, that end a completion.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop: str | Sequence[int] | Sequence[str] = ()
    seed: int | None = None

    def to_config(self, tokenizer: BaseTokenizer | None = None) -> SamplingConfig:
        """Raises ValueError for stops of another type, and for strings without a tokenizer."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        strings = tuple(stop for stop in stops if isinstance(stop, str))
        token_ids = tuple(stop for stop in stops if isinstance(stop, int))
        if len(strings) + len(token_ids) < len(stops):
            raise ValueError(f"SamplingParams.stop must be token ids or strings, got {self.stop!r}")
        if strings and tokenizer is None:
            raise ValueError(
                f"SamplingParams.stop must be token ids where the model has no tokenizer, got "
                f"{self.stop!r}; encode it"
            )
        return SamplingConfig(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            max_tokens=self.max_tokens,
            stop_token_ids=token_ids,
            stop_strings=strings,
            decode=tokenizer.decode if strings and tokenizer is not None else None,
            seed=self.seed,
        )


@dataclass(frozen=True)
class ForwardBackwardOutput:
    """loss_fn_outputs: `{"logprobs": [n]}` of each datum's targets. metrics: `loss:sum`, ..."""

    loss_fn_outputs: list[dict[str, Tensor]]
    metrics: dict[str, float]


@dataclass(frozen=True)
class OptimStepResponse:
    metrics: dict[str, float]


@dataclass(frozen=True)
class SaveWeightsResponse:
    """path: the argument for `load_state`."""

    path: str


@dataclass(frozen=True)
class SampledSequence:
    tokens: list[int]
    logprobs: list[float]
    stop_reason: str


@dataclass(frozen=True)
class SampleResponse:
    sequences: list[SampledSequence]


CustomLoss = Callable[[list[Datum], list[Tensor]], tuple[Tensor, dict[str, float]]]
"""(data, log-probs of each datum's targets [n]) -> (loss, metrics)"""
