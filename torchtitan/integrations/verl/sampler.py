"""A model that continues prompts for others: requests that come together are drawn together."""

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

# How long no further request has to come before those that wait are drawn.
_SECONDS_OF_QUIET = 0.02
# What a request may ask for, under the names of vLLM, and what each means by default.
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
    sampling: SamplingConfig  # its max_tokens is not asked
    answer: "asyncio.Future[Completion | None]"

    def tell(self, result: Completion | Exception | None) -> None:
        """Answer, unless the caller has gone."""
        if self.answer.done():
            return
        if isinstance(result, Exception):
            self.answer.set_exception(result)
        else:
            self.answer.set_result(result)


class Sampler:
    """Continues prompts with the weights of the last `load_weights`.

    folder: Hugging Face config.json and weights, which it has until then.
    dtype: of the weights and of what is computed with them, such as "float32".
    max_len: tokens of the longest prompt with its completion.
    max_rows: how many completions are drawn at once, which bounds the cache; others of the batch
        begin as these end.
    eos_ids: tokens that end a completion, and are part of it.

    Draws of a batch begin and end together: a request that comes later waits. All methods are for
    one event loop; the model computes in a thread beside it.
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
    ):
        config = JobConfig()
        config.training.dtype = config.training.mixed_precision_param = dtype
        config.training.seq_len = max_len
        config.parallelism.always_fsdp = False
        config.activation_checkpoint.mode = "none"
        self.engine = TrainingEngine.from_hf(folder, config, forward_only=True)
        self.generator = LocalGenerator(self.engine, seed=seed, max_rows=max_rows)
        self.eos_ids = tuple(eos_ids)
        self._waiting: list[_Request] = []
        self._model_is_free = asyncio.Lock()
        self._may_draw = asyncio.Event()
        self._may_draw.set()
        self._refuses = False
        self._drawing: asyncio.Task[None] | None = None
        self._received: dict[str, Tensor] = {}

    async def draw(
        self, prompt: Sequence[int], max_tokens: int, asked: dict[str, Any]
    ) -> Completion | None:
        """Continue a prompt (token ids) by at most `max_tokens` tokens; None if aborted.

        asked: temperature, top_p, top_k and the like, as vLLM names them.
        Raises ValueError for what cannot be drawn so.
        """
        sampling = self._sampling(asked)
        self.generator.check_prompts([prompt], max_tokens)  # not with the others of its batch
        if self._refuses:
            return None
        request = _Request(
            list(prompt), max_tokens, sampling, asyncio.get_running_loop().create_future()
        )
        self._waiting.append(request)
        if self._drawing is None or self._drawing.done():
            self._drawing = asyncio.create_task(self._draw_waiting())
        return await request.answer

    def _sampling(self, asked: dict[str, Any]) -> SamplingConfig:
        if unknown := sorted(asked.keys() - _DEFAULTS):
            raise ValueError(
                f"this sampler draws by {', '.join(_DEFAULTS)}, got {', '.join(unknown)}; leave "
                "these out"
            )
        asked = _DEFAULTS | asked
        if asked["repetition_penalty"] != 1:
            raise ValueError(
                f"this sampler has no repetition_penalty, got {asked['repetition_penalty']}; set "
                "it to 1.0"
            )
        return SamplingConfig(
            temperature=asked["temperature"],
            top_p=asked["top_p"],
            top_k=max(0, asked["top_k"]),
            stop_token_ids=(
                *(() if asked["ignore_eos"] else self.eos_ids),
                *asked["stop_token_ids"],
            ),
            seed=asked["seed"],
        )

    async def _draw_waiting(self) -> None:
        """Draw all that wait, those with the same settings at once, until none is left."""
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
                    request.tell(answer)

    def _next_batch(self) -> list[_Request]:
        """Take those that wait, have the settings of the first, and fit the model at once.

        All may draw as many tokens as the one with the most, which is too many behind the longest
        prompts.
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
            _cut(completion, request.max_tokens)
            for completion, request in zip(completions, batch, strict=True)
        ]

    # ---- weights ----

    async def load_weights(
        self, named_tensors: Iterable[tuple[str, Tensor]], *, is_last: bool = True
    ) -> None:
        """Take a part of the weights, under Hugging Face names; with the last one all are changed.

        Waits for the batch that is being drawn. Raises ValueError if they are not those of the
        model, which keeps its own then.
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
        wrong = sorted(
            [name for name in ours if name not in targets]
            + [
                name
                for name, x in ours.items()
                if name in targets and x.shape != targets[name].shape
            ]
            # Tied weights come once.
            + [name for name, p in model.named_parameters() if p.data_ptr() not in filled]
        )
        if wrong:
            raise ValueError(
                f"the weights that were sent are not those of the model in "
                f"{self.engine.job_config.model.hf_assets_path}: {', '.join(wrong[:4])} are "
                "missing, unknown or of another shape; give trainer and rollout the same model"
            )
        for name, tensor in ours.items():
            targets[name].copy_(tensor)
        self.engine.weights_version += 1
        self.generator.update_weights()

    # ---- interruptions ----

    async def abort(self, refuses: bool = False) -> None:
        """Answer waiting requests with None, wait for the batch being drawn, and hold new ones.

        refuses: answer new ones with None, too.
        """
        self._may_draw.clear()
        self._refuses = refuses
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            request.tell(None)
        async with self._model_is_free:
            pass

    async def resume(self) -> None:
        """Go on after `abort`."""
        self._refuses = False
        self._may_draw.set()

    def close(self) -> None:
        self.engine.close()


def _cut(completion: Completion, max_tokens: int) -> Completion:
    if len(completion.token_ids) <= max_tokens:
        return completion
    masses = completion.token_kept_mass
    return dataclasses.replace(
        completion,
        token_ids=completion.token_ids[:max_tokens],
        token_logprobs=completion.token_logprobs[:max_tokens],
        finish_reason="length",
        token_kept_mass=None if masses is None else masses[:max_tokens],
    )
