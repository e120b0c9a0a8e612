"""Tinker's endpoints for sampling."""

from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any

from torchtitan.data.tokenizer import BaseTokenizer
from torchtitan.integrations.tinker.policy import BASE
from torchtitan.integrations.tinker.request_queue import Command
from torchtitan.integrations.tinker.requests import Refused, model_input, sampling_params, take
from torchtitan.integrations.tinker.results import (
    Answer,
    Pending,
    Results,
    digest_of,
    write_samples,
)
from torchtitan.integrations.tinker.sessions import Sessions

_MAX_SAMPLERS = 4096
_MAX_SAMPLES = 4096  # of one request
_TOP_K, _MAX_TOP_K = "topk_prompt_logprobs", 1024

# Options of a sample request that are refused -> the value that leaves them off.
_NOT_SUPPORTED = {
    "topk_sample_logprobs": 0,
    "target_prompt_logprobs": None,
    "prompt_alt_tokens_k": 0,
    "record_stability_info": False,
}


class Sampling:
    """Answers requests for samplers, from any thread.

    find: returns the folder of a saved state, by its tinker:// path. max_len: tokens of a row.
    """

    def __init__(
        self,
        results: Results,
        put: Callable[[Command], None],
        sessions: Sessions,
        find: Callable[[str], str],
        tokenizer: BaseTokenizer | None,
        vocab_size: int,
        max_len: int,
    ):
        self._results, self._put, self._sessions, self._find = results, put, sessions, find
        self._tokenizer, self._vocab_size, self._max_len = tokenizer, vocab_size, max_len
        self._lock = Lock()
        self._samplers: dict[str, str] = {}  # sampling session -> the policy's sampler

    def create(self, sampler: str, path: str | None) -> None:
        """Make a sampler of a saved state, or of the base, unless there is one of this name."""
        if sampler in self._samplers:
            return
        folder = None if path is None else self._find(path)
        self.add(sampler, BASE if path is None else sampler)
        if folder is not None:
            arguments = {"sampler": sampler, "path": folder}
            self._put(Command("open", arguments, lane=sampler))

    def add(self, name: str, source: str) -> None:
        with self._lock:
            self._samplers[name] = source
            old = list(self._samplers)[:-_MAX_SAMPLERS]
            for sampler in old:
                del self._samplers[sampler]
        if old:
            self._put(Command("forget", {"samplers": old}))

    def source(self, sampler: str) -> str:
        with self._lock:
            if sampler not in self._samplers:
                raise Refused(
                    f"sampling session {sampler} is unknown; make a new sampling client", 404
                )
            self._sessions.note(sampler)
            return self._samplers[sampler]

    def sample(self, values: dict[str, Any]) -> Answer:
        for name, off in _NOT_SUPPORTED.items():
            if values.get(name) not in (None, off):
                raise Refused(f"{name} is not supported by this server, got {values[name]!r}")
        session = take(values, "sampling_session_id", str)
        sampler, prompt = self.source(session), model_input(values, "prompt")
        number, n_samples = take(values, "seq_id", int), take(values, "num_samples", int, 1)
        if not 1 <= n_samples <= _MAX_SAMPLES:
            raise Refused(f"num_samples must be 1 to {_MAX_SAMPLES}, got {n_samples}")
        if max(prompt.tokens) >= self._vocab_size:
            raise Refused(
                f"token ids of the prompt must be below the model's vocabulary size "
                f"{self._vocab_size}, got {max(prompt.tokens)}; use the model's tokenizer"
            )
        room = self._max_len + 1 - prompt.length  # the last token is drawn and not read
        if room < 1:
            raise Refused(
                f"the prompt must have at most {self._max_len} tokens, a row's length, got "
                f"{prompt.length}; shorten it, or raise training.seq_len"
            )
        params = sampling_params(values, room, self._vocab_size)
        params.to_config(self._tokenizer)
        is_scored, k = take(values, "prompt_logprobs", bool, False), take(values, _TOP_K, int, 0)
        if not 0 <= k <= (limit := min(_MAX_TOP_K, self._vocab_size)):
            raise Refused(f"{_TOP_K} must be 0 to {limit}, got {k}")
        last_n = take(values, "prompt_logprobs_last_n", int, prompt.length)
        if not 1 <= last_n <= prompt.length:
            raise Refused(f"prompt_logprobs_last_n must be 1 to {prompt.length}, got {last_n}")
        request_id = f"{session}:{number}"
        ids = [f"{request_id}:{i}" for i in range(n_samples)]
        pending = Pending(
            request_id,
            digest_of(values),
            channel=(session, number // 1_000_000_000),
            extra={"sample_sequence_ids": ids},
        )
        if (answer := self._results.accept(pending)) is not None:
            return answer

        def finish(result: Any) -> None:
            is_error = isinstance(result, Exception)
            self._results.finish(pending, result if is_error else write_samples(result[0], k))

        settings = n_samples, params, is_scored, k
        # Joined prompts would change what a seed draws, so a request with a seed runs by itself.
        key = ("sample", sampler, settings) if params.seed is None else object()
        command = Command(
            "sample",
            {"sampler": sampler, "settings": settings},
            finish,
            key,
            items=[(prompt, last_n)],
            lane=sampler,
            comes_in_bursts=True,
            is_wanted=partial(self._sessions.has_client, session),
        )
        self._put(command)
        return pending.accepted()

    def retrieve_many(self, values: dict[str, Any]) -> Answer:
        target = take(values, "target", dict)
        session = take(target, "sampling_session_id", str)
        self.source(session)
        clone = take(target, "cloned_sampler_id", int, 0)
        return self._results.retrieve_many(values, (session, clone))
