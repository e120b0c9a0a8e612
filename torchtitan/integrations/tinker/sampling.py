"""Tinker's endpoints for sampling."""

import itertools
from collections.abc import Callable
from threading import Lock
from typing import Any

from torchtitan.data.tokenizer import BaseTokenizer
from torchtitan.integrations.tinker.lanes import Command
from torchtitan.integrations.tinker.policy import BASE
from torchtitan.integrations.tinker.requests import Refused, model_input, sampling_params, take
from torchtitan.integrations.tinker.results import Answer, Pending, Results, write_samples

_MAX_SAMPLERS = 4096
_MAX_SAMPLES = 4096  # of one request

# Options of a sample request that are refused -> the value that leaves them off.
_NOT_SUPPORTED = {
    "topk_prompt_logprobs": 0,
    "topk_sample_logprobs": 0,
    "target_prompt_logprobs": None,
    "prompt_alt_tokens_k": 0,
    "record_stability_info": False,
}


class Sampling:
    """Answers requests for samplers, from any thread.

    note: called with the name of each sampler that is used. find: returns the folder of a saved state,
    by its tinker:// path. max_len: tokens of a row. shares_samples: prompts of several samplers may be
    drawn in one batch.
    """

    def __init__(
        self,
        results: Results,
        put: Callable[[Command], None],
        note: Callable[[str], Any],
        find: Callable[[str], str],
        tokenizer: BaseTokenizer | None,
        vocab_size: int,
        max_len: int,
        shares_samples: bool,
    ):
        self._shares_samples = shares_samples
        self._results, self._put, self._note, self._find = results, put, note, find
        self._tokenizer, self._vocab_size, self._max_len = tokenizer, vocab_size, max_len
        self._lock = Lock()
        self._samplers: dict[str, str] = {}  # sampling session -> the policy's sampler
        self._clone_numbers = itertools.count(1)

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
            self._note(sampler)
            return self._samplers[sampler]

    def join(self, values: dict[str, Any]) -> Answer:
        self.source(take(values, "sampling_session_id", str))
        number = next(self._clone_numbers)
        return Answer({"type": "join_sampling_session", "client_counter": number})

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
        eos_id = None if self._tokenizer is None else self._tokenizer.eos_id
        params = sampling_params(values, room, eos_id, self._vocab_size)
        params.to_config(self._tokenizer)
        n_scored = None  # how many of the prompt's last tokens to score; None scores none
        if take(values, "prompt_logprobs", bool, False):
            n_scored = take(values, "prompt_logprobs_last_n", int, prompt.length)
        request_id = f"{session}:{number}"
        ids = [f"{request_id}:{i}" for i in range(n_samples)]
        pending = Pending(
            request_id,
            channel=(session, number // 1_000_000_000),
            extra={"sample_sequence_ids": ids},
        )
        if (answer := self._results.accept(pending)) is not None:
            return answer
        logprobs: list[float | None] | None = None

        def take_logprobs(result: Any) -> None:
            nonlocal logprobs
            if isinstance(result, Exception):
                self._results.finish(pending, result)
                return
            n_hidden = max(prompt.length - (n_scored or 0), 0)
            logprobs = [None] * n_hidden + result[0][n_hidden:]

        def finish(result: Any) -> None:
            if not isinstance(result, Exception):
                result = write_samples(result[0].sequences, logprobs)
            self._results.finish(pending, result)

        if n_scored is not None:
            key = ("logprobs", sampler)
            self._submit("logprobs", {"sampler": sampler}, take_logprobs, key, sampler, prompt)
        # Joined prompts would change what a seed draws, so a request with a seed runs by itself.
        of_sampler = "" if self._shares_samples else sampler
        key = ("sample", of_sampler, n_samples, params) if params.seed is None else object()
        arguments = {"num_samples": n_samples, "params": params}
        self._submit("sample", arguments, finish, key, sampler, (sampler, prompt))
        return pending.accepted()

    def _submit(
        self,
        method: str,
        arguments: dict[str, Any],
        answer: Callable[[Any], None],
        key: Any,
        lane: str,
        item: Any,
    ) -> None:
        self._put(Command(method, arguments, answer, key, [item], lane=lane, comes_in_bursts=True))

    def retrieve_many(self, values: dict[str, Any]) -> Answer:
        target = take(values, "target", dict)
        session = take(target, "sampling_session_id", str)
        self.source(session)
        clone = take(target, "cloned_sampler_id", int, 0)
        return self._results.retrieve_many(values, (session, clone))
