"""Tinker's endpoints for sampling."""

from collections.abc import Callable
from threading import Lock
from typing import Any

from torchtitan.integrations.tinker import wire
from torchtitan.integrations.tinker.client import LocalTrainingClient
from torchtitan.integrations.tinker.policy import BASE
from torchtitan.integrations.tinker.request_queue import Command
from torchtitan.integrations.tinker.requests import Refused, model_input, sampling_params, take
from torchtitan.integrations.tinker.results import Answer, Results
from torchtitan.integrations.tinker.sessions import Sessions

_MAX_SAMPLERS = 4096
_MAX_SAMPLES = 4096  # of one request
_MAX_TOP_K = 1024

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
        client: LocalTrainingClient,
        max_len: int,
    ):
        self._results, self._put, self._sessions, self._find = results, put, sessions, find
        self._client, self._max_len = client, max_len
        self._lock = Lock()
        self._samplers: dict[str, str] = {}  # sampling session -> the policy's sampler

    def create(self, sampler: str, path: str | None) -> None:
        """Make a sampler of a saved state, or of the base, unless there is one of this name."""
        if sampler in self._samplers:
            return
        if path is None:
            return self.add(sampler, BASE)
        arguments = {"sampler": sampler, "path": self._find(path)}
        self.add(sampler, sampler)
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
        session, vocab_size = take(values, "sampling_session_id", str), self._client.vocab_size
        sampler, prompt = self.source(session), model_input(values, "prompt")
        number, n_samples = take(values, "seq_id", int), take(values, "num_samples", int, 1)
        if max(prompt.tokens) >= vocab_size:
            raise Refused(
                f"token ids of the prompt must be below the model's vocabulary size {vocab_size}, got "
                f"{max(prompt.tokens)}; use the model's tokenizer"
            )
        room = self._max_len + 1 - prompt.length  # the last token is drawn and not read
        if room < 1:
            raise Refused(
                f"the prompt must have at most {self._max_len} tokens, a row's length, got "
                f"{prompt.length}; shorten it, or raise training.seq_len"
            )
        params = sampling_params(values, room)
        params.to_config(self._client.tokenizer)
        is_scored = take(values, "prompt_logprobs", bool, False)
        k = take(values, "topk_prompt_logprobs", int, 0)
        last_n = take(values, "prompt_logprobs_last_n", int, prompt.length)
        for name, value, least, most in (
            ("num_samples", n_samples, 1, _MAX_SAMPLES),
            ("max_tokens", params.max_tokens, 1, room),
            ("top_k", params.top_k, -1, vocab_size),
            ("topk_prompt_logprobs", k, 0, min(_MAX_TOP_K, vocab_size)),
            ("prompt_logprobs_last_n", last_n, 1, prompt.length),
        ):
            if not least <= value <= most:
                raise Refused(f"{name} must be {least} to {most}, got {value}")
        request_id, settings = f"{session}:{number}", (n_samples, params, is_scored, k)
        command = Command(
            "sample",
            {"sampler": sampler, "settings": settings},
            # Joined prompts would change what a seed draws, so a request with a seed runs by itself.
            joins=("sample", sampler, settings) if params.seed is None else object(),
            items=[(prompt, last_n)],
            lane=sampler,
            comes_in_bursts=True,
        )
        return self._results.submit(
            request_id,
            values,
            command,
            lambda responses: Answer(protobuf=wire.write_samples(responses[0], k)),
            channel=(session, number // 1_000_000_000),
            sample_sequence_ids=[f"{request_id}:{i}" for i in range(n_samples)],
        )

    def retrieve_many(self, values: dict[str, Any]) -> Answer:
        target = take(values, "target", dict)
        session = take(target, "sampling_session_id", str)
        self.source(session)
        clone = take(target, "cloned_sampler_id", int, 0)
        return self._results.retrieve_many(values, (session, clone))
