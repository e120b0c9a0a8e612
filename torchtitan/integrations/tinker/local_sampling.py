"""Sampling from a weight snapshot of a local training client, or from saved weights.

`CallThread` runs the calls of training and sampling clients, one after another.
"""

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from torchtitan.distributed.processes.ranks import num_ranks
from torchtitan.integrations.tinker.types import (
    AsyncNames,
    ClientFuture,
    Datum,
    ModelInput,
    SampledSequence,
    SampleResponse,
    SamplingParams,
)
from torchtitan.rl.snapshots import WeightsKey
from torchtitan.tools.utils import use_device

if TYPE_CHECKING:
    from torchtitan.integrations.tinker.client import LocalTrainingClient

_P = ParamSpec("_P")
_T = TypeVar("_T")


class CallThread:
    """Runs calls in order on one thread; merges adjacent calls that have the same key."""

    def __init__(self, device: torch.device):
        self._pool = ThreadPoolExecutor(
            1, "training client", initializer=use_device, initargs=(device,)
        )
        self.shutdown = self._pool.shutdown
        self._lock = threading.Lock()
        # The key and the (item, future) pairs of the last call, while more items may join it.
        self._joinable: tuple[Any, list[tuple[Any, Future]]] = None, []

    def submit(self, call: Callable[..., _T], *args: Any, **kwargs: Any) -> ClientFuture[_T]:
        return self.submit_item(lambda _: [call(*args, **kwargs)], None, object())

    def submit_item(
        self, call: Callable[[list[Any]], list[_T]], item: Any, key: Any
    ) -> ClientFuture[_T]:
        """Queue an item. If consecutive items have the same key, one `call` may process all of them.

        Items are merged while the thread is busy with an earlier call. Under torchrun each item gets
        its own call: ranks have to make the same calls, but their threads are busy for different times.
        """
        future: ClientFuture[_T] = ClientFuture()
        with self._lock:
            if self._joinable[0] != key or num_ranks() > 1:
                self._joinable = key, []
                self._pool.submit(self._run, call, self._joinable[1])
            self._joinable[1].append((item, future))
        return future

    def _run(self, call: Callable[[list[Any]], list[_T]], items: list[tuple[Any, Future]]) -> None:
        with self._lock:
            if self._joinable[1] is items:
                self._joinable = None, []
        items = [entry for entry in items if entry[1].set_running_or_notify_cancel()]
        try:
            results = call([item for item, _ in items]) if items else []
        except BaseException as error:
            for _, future in items:
                future.set_exception(error)
            return
        for (_, future), result in zip(items, results, strict=True):
            future.set_result(result)


def on_thread(method: Callable[_P, _T]) -> Callable[_P, ClientFuture[_T]]:
    """Make a method run on the client's thread, after all earlier calls, and return a future."""

    @functools.wraps(method)
    def submit(self: Any, *args: Any, **kwargs: Any) -> ClientFuture[_T]:
        return self._thread.submit(method, self, *args, **kwargs)

    return submit


class LocalSamplingClient(AsyncNames):
    """Samples from the weights that the policy had when this client was created, or from saved weights.

    When the policy's weights change, this client's weights are copied to host memory. The copy is
    dropped after sampling clients were created for more than `rl.generator.max_snapshots` later versions.
    Then calls raise ValueError, or load the weights again if this client is for a saved state.
    """

    def __init__(self, client: "LocalTrainingClient", key: WeightsKey | None, path: str = ""):
        self._client, self._key, self._path = client, key, path
        self._thread = client._thread

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        *,
        prompt_logprobs_last_n: int | None = None,
    ) -> ClientFuture[SampleResponse]:
        """Sample completions of a prompt; log-probs are of the distribution that was sampled from.

        include_prompt_logprobs: also return the prompt's log-probs, as `compute_logprobs` does.
        topk_prompt_logprobs: also return this number of most probable tokens per prompt position.
        prompt_logprobs_last_n: return prompt log-probs and top tokens for the last n positions only.
        Consecutive calls with the same settings and without a seed are sampled together: make all
        calls before you wait for the first result.
        """
        if not 0 <= topk_prompt_logprobs <= (most := self._client.vocab_size):
            raise ValueError(
                f"topk_prompt_logprobs must be 0 to {most}, got {topk_prompt_logprobs}"
            )
        # The model doesn't read the last sampled token, so a completion may be one token longer.
        room = self._client._batcher.seq_len + 1 - prompt.length
        params = SamplingParams.from_attributes(sampling_params, room)
        settings = num_samples, params, include_prompt_logprobs, topk_prompt_logprobs
        # A call with a seed runs by itself, because batching changes the sampled tokens.
        key = object() if params.seed is not None else (self._key or self, *settings)
        return self._thread.submit_item(
            lambda prompts: self._sample(prompts, *settings), (prompt, prompt_logprobs_last_n), key
        )

    def sample_all(
        self, prompts: list[tuple[ModelInput, int | None]], *settings: Any
    ) -> ClientFuture[list[SampleResponse]]:
        """Return the result of `sample` for each (prompt, prompt_logprobs_last_n), sampled together."""
        return self._thread.submit(self._sample, prompts, *settings)

    def _sample(
        self,
        prompts: list[tuple[ModelInput, int | None]],
        num_samples: int,
        params: SamplingParams,
        is_scored: bool,
        k: int,
    ) -> list[SampleResponse]:
        client, inputs = self._client, [prompt.to_ints() for prompt, _ in prompts]
        sampling = params.to_config(client.tokenizer)
        with self.weights():
            if client._pushed is not self._key:
                client._trainer.push_model_state_dict(client._generator)
                client._pushed = self._key
            completions = iter(client._generator.generate(inputs, sampling, num_samples))
            scores = self._scores(inputs) if is_scored else [None] * len(inputs)
            top = self._scores(inputs, k) if k else [None] * len(inputs)
        responses = []
        for (_, last_n), *of_prompt in zip(prompts, scores, top, strict=True):
            sequences = [
                SampledSequence(list(c.token_ids), list(c.token_logprobs), c.finish_reason)
                for c in itertools.islice(completions, num_samples)
            ]
            responses.append(SampleResponse(sequences, *(_last(x, last_n) for x in of_prompt)))
        return responses

    @on_thread
    def compute_logprobs(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> list[float | None]:
        """Return the log-prob of each token given the tokens before it; None for the first token.

        prompt_logprobs_last_n: n; return None for all but the last n tokens.
        """
        with self.weights():
            return _last(self._scores([prompt.to_ints()])[0], prompt_logprobs_last_n)

    def _scores(self, prompts: list[list[int]], k: int = 0) -> list[list[Any]]:
        """Return, for each prompt, each token's log-prob, or with k > 0 the (token id, log-prob) of the
        k most probable tokens at its position. The first token's entry is None."""
        # The first token has no context, so it is never a target.
        data = [
            Datum(ModelInput.from_ints(prompt[:-1]), {"target_tokens": prompt[1:]})
            for prompt in prompts
            if len(prompt) > 1
        ]
        found = iter(self._client._logprobs(data, k) if data else ())
        scores: list[list[Any]] = []
        for prompt in prompts:
            rows = next(found).tolist() if len(prompt) > 1 else []
            if k:
                rows = [[(int(i), x) for i, x in zip(r[:k], r[k:], strict=True)] for r in rows]
            scores.append([None] * min(len(prompt), 1) + rows)
        return scores

    def get_tokenizer(self) -> Any:
        """Return the policy's tokenizer; see `LocalTrainingClient.get_tokenizer`."""
        return self._client.get_tokenizer()

    def get_base_model(self) -> str:
        """Return `rl.serve.base_model`."""
        return self._client.get_info().model_data.model_name

    @contextlib.contextmanager
    def weights(self) -> Iterator[None]:
        """Give the policy this client's weights inside a `with`. Collective; call on the client's thread."""
        client = self._client
        if self._path and (self._key is None or client._snapshots.is_expired(self._key)):
            client._pushed = None
            # `engine.load` would drop the gradients of the policy's own weights.
            load = functools.partial(client.checkpointer.load, path=self._path, model_only=True)
            self._key = client._snapshots.loaded(load)
        assert self._key is not None
        with client._snapshots.using(self._key):
            yield


def _last(values: list[Any] | None, n: int | None) -> Any:
    """Replace all but the last n values by None; n = None keeps all values."""
    if values is None or n is None:
        return values
    n_hidden = max(len(values) - n, 0)
    return [None] * n_hidden + values[n_hidden:]
