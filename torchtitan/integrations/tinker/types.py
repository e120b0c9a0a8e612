"""Arguments and results of the clients, with Tinker's names."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from torchtitan.data.tokenizer import BaseTokenizer
from torchtitan.rl.types import SamplingConfig
from torchtitan.tools import torch_parts

_T = TypeVar("_T")


class ClientFuture(Future[_T]):
    """The future of a call, which can also be awaited.

    Attributes of the result are available on the future; reading one waits for the result.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.result(), name)

    def __await__(self) -> Any:
        return asyncio.wrap_future(self).__await__()

    async def result_async(self, timeout: float | None = None) -> _T:
        async with asyncio.timeout(timeout):
            return await self

    def future(self) -> Future[_T]:
        return self


class AsyncNames:
    """Adds a coroutine `x_async` for each method `x` of a class, like the tinker client.

    The coroutine returns the future of `x`, so a program can make further calls before it awaits the
    result. For methods that sample, compute log-probs or create a client, the coroutine returns the
    result itself. `with` closes the client.
    """

    close: Callable[..., Any]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method_name = name.removesuffix("_async")
        if name.startswith("_") or method_name == name or not hasattr(type(self), method_name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        returns_future = not name.startswith(("create_", "sample", "compute_", "save_weights_and"))

        async def call(*args: Any, **kwargs: Any) -> Any:
            result = getattr(self, method_name)(*args, **kwargs)
            return await result if isinstance(result, Future) and not returns_future else result

        return call

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- arguments and results ----


class TensorData(Tensor):
    """A tensor with the methods of Tinker's TensorData; torch functions return plain tensors."""

    __torch_function__ = torch_parts.plain_results

    @classmethod
    def from_torch(cls, tensor: Tensor) -> "TensorData":
        return tensor.detach().as_subclass(cls)

    @classmethod
    def from_numpy(cls, array: np.ndarray) -> "TensorData":
        return cls.from_torch(torch.from_numpy(array))

    def to_torch(self) -> Tensor:
        return self.as_subclass(Tensor)

    def to_numpy(self) -> np.ndarray:
        return self.to_torch().numpy()


@dataclass(frozen=True)
class EncodedTextChunk:
    tokens: Sequence[int]


@dataclass(frozen=True)
class ModelInput:
    """The tokens that a model reads."""

    tokens: tuple[int, ...]

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> "ModelInput":
        return cls(tuple(tokens))

    @classmethod
    def empty(cls) -> "ModelInput":
        return cls(())

    def append(self, chunk: EncodedTextChunk) -> "ModelInput":
        """Return the input with the chunk's tokens appended."""
        return ModelInput((*self.tokens, *chunk.tokens))

    def append_int(self, token: int) -> "ModelInput":
        return ModelInput((*self.tokens, token))

    @property
    def chunks(self) -> list[EncodedTextChunk]:
        return [EncodedTextChunk(list(self.tokens))] if self.tokens else []

    def to_ints(self) -> list[int]:
        return list(self.tokens)

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Datum:
    """One training sequence: n input tokens, and the loss's inputs for each token.

    loss_fn_inputs: name -> tensor [n] or list of n numbers. `target_tokens`: the token to predict
        after each input token. `logprobs` and `advantages`: for policy losses, both 0 for targets in
        the prompt. Optional: `weights` of the targets, and `mask`, 0 for targets that the loss
        ignores.
    """

    model_input: ModelInput
    loss_fn_inputs: dict[str, Any]


@dataclass(frozen=True)
class AdamParams:
    """Settings of one optimizer step. grad_clip_norm: 0 turns clipping off."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True)
class SamplingParams:
    """Settings of sampling. top_k: -1 keeps all tokens.

    max_tokens: None limits prompt and completion together to one row.
    stop: token ids, or strings in the completion's text, that end a completion. The tokenizer's
        end-of-text token also ends a completion, unless `stop` is an empty list.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop: str | Sequence[int] | Sequence[str] | None = None
    seed: int | None = None

    @classmethod
    def from_attributes(cls, params: Any, room: int) -> "SamplingParams":
        """Return hashable settings from any object with these attributes, such as the tinker package's
        SamplingParams. room: the value for `max_tokens` = None."""
        values = {name: getattr(params, name) for name in cls.__dataclass_fields__}
        if values["max_tokens"] is None:
            values["max_tokens"] = room
        if not isinstance(stop := values["stop"], str | None):
            values["stop"] = tuple(stop)
        return cls(**values)

    def to_config(self, tokenizer: BaseTokenizer | None = None) -> SamplingConfig:
        """Convert to the generator's settings.

        Raises ValueError for stops of a wrong type, and for stop strings without a tokenizer.
        """
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if tokenizer is not None and tokenizer.eos_id is not None and (self.stop is None or stops):
            stops = (*stops, tokenizer.eos_id)
        strings = tuple(stop for stop in stops if isinstance(stop, str))
        token_ids = tuple(stop for stop in stops if isinstance(stop, int))
        if len(strings) + len(token_ids) < len(stops) or (strings and tokenizer is None):
            raise ValueError(
                f"SamplingParams.stop must be token ids, or strings if the model has a tokenizer, got "
                f"{self.stop!r}; encode the strings"
            )
        assert self.max_tokens is not None, "`from_attributes` sets it"
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


class ForwardBackwardOutput(NamedTuple):
    """The result of a forward_backward or forward call.

    loss_fn_outputs: for each datum, `{"logprobs": log-probs [n] of the targets}`. metrics: `loss:sum`, ...
    """

    loss_fn_outputs: list[dict[str, TensorData]]
    metrics: dict[str, float]


class OptimStepResponse(NamedTuple):
    metrics: dict[str, float]


class SaveWeightsResponse(NamedTuple):
    """The result of saving a state. path: the argument for `load_state`."""

    path: str


class SampledSequence(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    stop_reason: str


class SampleResponse(NamedTuple):
    """Completions, and the scores of the prompt if they were requested.

    prompt_logprobs, topk_prompt_logprobs: None, or an entry per prompt token. Entries are None for
        tokens that were not scored, such as the first. An entry of topk_prompt_logprobs is a list of
        (token id, log-prob), most probable token first.
    """

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None


class ModelData(NamedTuple):
    arch: str
    model_name: str
    tokenizer_id: str | None


class GetInfoResponse(NamedTuple):
    """A description of the model. lora_rank: largest rank of the adapters; None if all weights train."""

    model_data: ModelData
    model_id: str
    is_lora: bool
    lora_rank: int | None


CustomLoss = Callable[[list[Datum], list[Tensor]], tuple[Tensor, dict[str, float]]]
"""(data, log-probs of each datum's targets [n]) -> (loss, metrics)"""
