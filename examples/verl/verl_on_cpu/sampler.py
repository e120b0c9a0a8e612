"""A model that continues prompts: requests that arrive together are drawn as one batch."""

import asyncio
import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan.config import JobConfig
from torchtitan.engine import TrainingEngine
from torchtitan.rl.generator import LocalGenerator
from torchtitan.rl.types import Completion, SamplingConfig

# Waiting requests are drawn once no further request has come for this long.
_SECONDS_OF_QUIET = 0.02
# vLLM's names of the settings that a request may have, and their defaults.
_DEFAULTS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "repetition_penalty": 1.0,
    "ignore_eos": False,
    "stop_token_ids": (),
    "seed": None,
}


@dataclasses.dataclass(eq=False)
class _Request:
    prompt: list[int]
    max_tokens: int
    sampling: SamplingConfig  # its max_tokens is ignored
    answer: "asyncio.Future[Completion | None]"

    def finish(self, result: Completion | Exception | None) -> None:
        """Answer, unless the caller has cancelled the request."""
        if self.answer.done():
            return
        if isinstance(result, Exception):
            self.answer.set_exception(result)
        else:
            self.answer.set_result(result)


class Sampler:
    """Continues prompts with the weights of the last `load_weights`.

    folder: Hugging Face config.json, and the weights to use before the first `load_weights`.
    dtype: of weights and computation, such as "float32".
    max_len: most tokens of a prompt and its completion.
    max_rows: the most completions drawn at once, which bounds the cache; further completions of a
        batch begin as earlier ones end.
    eos_ids: tokens that end a completion, and are part of it.
    records_experts: completions tell which experts their tokens went to; ValueError for a dense model.

    A request that comes while a batch is drawn waits for the batch's end. Call all methods on one
    event loop; the model computes in another thread.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        max_len: int,
        dtype: str = "float32",
        max_rows: int = 256,
        seed: int = 0,
        eos_ids: Iterable[int] = (),
        records_experts: bool = False,
    ):
        config = JobConfig()
        config.training.dtype = config.training.mixed_precision_param = dtype
        config.training.seq_len = max_len
        config.parallelism.always_fsdp = False
        config.activation_checkpoint.mode = "none"
        self.engine = TrainingEngine.from_hf(folder, config, forward_only=True)
        options = {"seed": seed, "max_rows": max_rows, "records_experts": records_experts}
        self.generator = LocalGenerator(self.engine, **options)
        self.eos_ids = tuple(eos_ids)
        self._waiting: list[_Request] = []
        self._model_is_free = asyncio.Lock()
        self._may_draw = asyncio.Event()
        self._may_draw.set()
        self._refuses = False
        self._drawing: asyncio.Task[None] | None = None
        self._received: dict[str, Tensor] = {}

    async def draw(
        self, prompt: Sequence[int], max_tokens: int, settings: dict[str, Any]
    ) -> Completion | None:
        """Continue a prompt (token ids) by at most `max_tokens` tokens; None if aborted.

        settings: temperature, top_p, top_k and so on, under vLLM's names.
        Raises ValueError for settings or prompts that are not supported.
        """
        sampling = self._sampling(settings)
        # Checked here, because an error in the batch would reach all its callers.
        self.generator.check_prompts([prompt], max_tokens)
        if self._refuses:
            return None
        request = _Request(
            list(prompt), max_tokens, sampling, asyncio.get_running_loop().create_future()
        )
        self._waiting.append(request)
        if self._drawing is None or self._drawing.done():
            self._drawing = asyncio.create_task(self._draw_waiting())
        return await request.answer

    def _sampling(self, settings: dict[str, Any]) -> SamplingConfig:
        if unknown := sorted(settings.keys() - _DEFAULTS):
            raise ValueError(
                f"this sampler takes the settings {', '.join(_DEFAULTS)}, got {', '.join(unknown)}; "
                "leave these out"
            )
        settings = _DEFAULTS | settings
        if settings["repetition_penalty"] != 1:
            raise ValueError(
                f"this sampler has no repetition_penalty, got {settings['repetition_penalty']}; set "
                "it to 1.0"
            )
        eos_ids = () if settings["ignore_eos"] else self.eos_ids
        return SamplingConfig(
            temperature=settings["temperature"],
            top_p=settings["top_p"],
            top_k=max(0, settings["top_k"]),
            stop_token_ids=(*eos_ids, *settings["stop_token_ids"]),
            seed=settings["seed"],
        )

    async def _draw_waiting(self) -> None:
        """Draw waiting requests, batch by batch, until none is left."""
        while self._waiting:
            n_before = 0
            while n_before != len(self._waiting):
                n_before = len(self._waiting)
                await asyncio.sleep(_SECONDS_OF_QUIET)
            await self._may_draw.wait()
            async with self._model_is_free:
                if not self._waiting:  # aborted
                    return
                batch = self._next_batch()
                answers: list[Completion | Exception]
                try:
                    answers = await asyncio.to_thread(self._draw, batch)
                except Exception as error:  # each caller gets it
                    answers = [error] * len(batch)
                for request, answer in zip(batch, answers, strict=True):
                    request.finish(answer)

    def _next_batch(self) -> list[_Request]:
        """Take waiting requests that have the first one's settings and fit the model together.

        The batch draws the largest max_tokens behind every prompt, so the longest prompt plus the
        largest max_tokens must fit.
        """
        sampling, batch, left = self._waiting[0].sampling, [], []
        n_prompt = n_new = 0
        for request in self._waiting:
            longest = max(n_prompt, len(request.prompt)), max(n_new, request.max_tokens)
            if request.sampling == sampling and sum(longest) <= self.generator.max_length:
                batch.append(request)
                n_prompt, n_new = longest
            else:
                left.append(request)
        self._waiting = left
        return batch

    def _draw(self, batch: list[_Request]) -> list[Completion]:
        longest = max(request.max_tokens for request in batch)
        sampling = dataclasses.replace(batch[0].sampling, max_tokens=longest)
        completions = self.generator.generate([request.prompt for request in batch], sampling)
        return [
            _shorten(completion, request.max_tokens)
            for completion, request in zip(completions, batch, strict=True)
        ]

    # ---- weights ----

    async def load_weights(
        self, named_tensors: Iterable[tuple[str, Tensor]], *, is_last: bool = True
    ) -> None:
        """Receive a part of the weights, under Hugging Face names; after the last part, use them.

        Waits for the batch that is being drawn. Raises ValueError, and keeps the model's weights,
        if names or shapes are not the model's.
        """
        self._received.update(named_tensors)
        if not is_last:
            return
        received, self._received = self._received, {}
        async with self._model_is_free:
            await asyncio.to_thread(self._copy_weights, received)

    @torch.no_grad()
    def _copy_weights(self, received: dict[str, Tensor]) -> None:
        (model,) = self.engine.model_parts
        adapter = self.engine.checkpointer.require_adapter().spelled_like(received)
        ours = adapter.from_hf(received)
        targets = model.state_dict()
        filled = {targets[name].data_ptr() for name in ours.keys() & targets.keys()}
        wrong = [n for n, x in ours.items() if n not in targets or x.shape != targets[n].shape]
        # Tied weights share memory and are sent once.
        wrong += [n for n, p in model.named_parameters() if p.data_ptr() not in filled]
        if wrong:
            raise ValueError(
                f"the weights that were sent do not fit the model in "
                f"{self.engine.job_config.model.hf_assets_path}: {', '.join(sorted(wrong)[:4])} are "
                "missing, unknown or of another shape; give trainer and rollout the same model"
            )
        for name, tensor in ours.items():
            targets[name].copy_(tensor)
        self.engine.weights_version += 1
        self.generator.update_weights()

    # ---- interruptions ----

    async def abort(self, refuses: bool = False) -> None:
        """Answer waiting requests with None, and wait for the batch that is being drawn.

        New requests wait for `resume`; with `refuses` they are answered with None, too.
        """
        self._may_draw.clear()
        self._refuses = refuses
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            request.finish(None)
        async with self._model_is_free:
            pass

    async def resume(self) -> None:
        """Draw again after `abort`."""
        self._refuses = False
        self._may_draw.set()

    def close(self) -> None:
        self.engine.close()


def _shorten(completion: Completion, max_tokens: int) -> Completion:
    if len(completion.token_ids) <= max_tokens:
        return completion
    return dataclasses.replace(
        completion,
        token_ids=completion.token_ids[:max_tokens],
        token_logprobs=completion.token_logprobs[:max_tokens],
        finish_reason="length",
    )
