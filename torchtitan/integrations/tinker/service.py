"""Tinker's endpoints, which check requests and turn them into commands for the policy.

The server trains one policy at a time: all its weights, or adapters. A session is a client program, a model
is the session's training run, and a sampling session is a sampler of the weights of one moment.
"""

import itertools
import math
import os
import re
import secrets
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from torchtitan.integrations.tinker import wire
from torchtitan.integrations.tinker.client import LocalTrainingClient
from torchtitan.integrations.tinker.policy import BASE, Command
from torchtitan.integrations.tinker.requests import (
    Refused,
    adam_params,
    folder_of,
    model_input,
    read_json,
    sampling_params,
    take,
)
from torchtitan.integrations.tinker.results import (
    Answer,
    Pending,
    Results,
    write_output,
    write_samples,
)
from torchtitan.rl.job_config import JobConfig, batch_seq_len
from torchtitan.tools.logging import logger

_SECONDS_UNTIL_GONE = 30  # without a heartbeat, which clients send every 10 s
_MAX_SESSIONS = _MAX_SAMPLERS = 4096
_MAX_SAMPLES = 4096  # of one request
_MAX_MODELS = 64  # with adapters; each has its optimizer's state and gradients

# Options of a sample request that are refused -> the value that leaves them off.
_NOT_SUPPORTED = {
    "topk_prompt_logprobs": 0,
    "topk_sample_logprobs": 0,
    "target_prompt_logprobs": None,
    "prompt_alt_tokens_k": 0,
    "record_stability_info": False,
}


class _Sessions:
    """The sessions that are not finished. A session lives until it is silent for too long."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._seen_at: dict[str, float] = {}

    def create(self) -> str:
        session_id = str(uuid.uuid4())
        with self._lock:
            self._seen_at = {k: t for k, t in self._seen_at.items() if self.is_alive(k)}
            if len(self._seen_at) >= _MAX_SESSIONS:
                raise Refused(f"{_MAX_SESSIONS} sessions are alive; finish some of them", 429)
            self._seen_at[session_id] = time.monotonic()
        return session_id

    def check(self, session_id: str) -> None:
        """Note a request of a session; raise Refused for an unknown session."""
        if not self.note(session_id):
            raise Refused(
                f"session {session_id} is unknown or finished; make a new ServiceClient", 410
            )

    def note(self, id_in_session: str) -> bool:
        """Note a request for a session's model or sampler; return False for an unknown session."""
        session_id = id_in_session.partition(":")[0]
        with self._lock:
            if session_id not in self._seen_at:
                return False
            self._seen_at[session_id] = time.monotonic()
            return True

    def is_alive(self, session_id: str) -> bool:
        with self._lock:
            seen_at = self._seen_at.get(session_id, -math.inf)
        return time.monotonic() - seen_at < _SECONDS_UNTIL_GONE

    def finish(self, session_id: str) -> None:
        with self._lock:
            self.check(session_id)
            del self._seen_at[session_id]


class Service:
    """Answers requests, from any thread. put: queues a command for the policy."""

    def __init__(
        self, job_config: JobConfig, client: LocalTrainingClient, put: Callable[[Command], None]
    ):
        self._config, self._put = job_config, put
        self._name = self._base_model = job_config.rl.serve.base_model
        self._states = client.states_folder
        self._tokenizer = client.tokenizer
        self._vocab_size = client.vocab_size
        self._max_len = batch_seq_len(job_config)
        self._lora = job_config.lora if "lora" in job_config.model.converters else None
        self._models: dict[str, tuple[int, str]] = {}  # with adapters: rank, name of the base model
        self._results = Results(put)
        self._lock = threading.Lock()
        self._sessions = _Sessions()
        self._runs: dict[str, Any] = {}  # model id -> its client's user_metadata
        self._model_id = ""  # of the training run that owns the policy
        self._samplers: dict[str, str] = {}  # sampling session -> the policy's sampler
        self._clone_numbers = itertools.count(1)
        post, get = "POST", "GET"
        self._routes: list[tuple[str, re.Pattern[str], Callable[..., Answer]]] = [
            (method, re.compile("/api/v1/" + path), handler)
            for method, path, handler in (
                (get, "healthz", lambda *_: Answer({"status": "ok"})),
                (get, "get_server_capabilities", self._capabilities),
                (post, "client/config", self._client_config),
                (post, "client/dynamic_config", lambda *_: Answer({})),
                (post, "telemetry", lambda *_: Answer({"status": "accepted"})),
                (post, "create_session", self._create_session),
                (post, "session_heartbeat", self._heartbeat),
                (post, r"sessions/([^/]+)/finish", self._finish_session),
                (post, "create_model", self._create_model),
                (post, "get_info", self._get_info),
                (post, "weights_info", self._weights_info),
                (get, r"training_runs/([^/]+)", self._training_run),
                (post, "optim_step", self._optim_step),
                (post, "save_weights", lambda x: self._save(x, "weights", "save_weights")),
                (post, "load_weights", self._load_weights),
                (post, "save_weights_for_sampler", self._save_for_sampler),
                (post, "create_sampling_session", self._create_sampling_session),
                (post, "join_sampling_session", self._join_sampling_session),
                (get, r"samplers/([^/]+)", self._get_sampler),
                (post, "asample", self._sample),
                (post, "retrieve_future", self._results.retrieve),
                (post, "retrieve_futures", self._retrieve_many),
            )
        ]

    def answer(self, method: str, path: str, body: bytes) -> Answer:
        """Return the answer to a request. Raises Refused or another ValueError for a wrong request."""
        if (method, path) == ("POST", "/api/v1/forward_backward"):
            return self._forward_backward(body)
        for verb, pattern, handler in self._routes:
            match = pattern.fullmatch(path)
            if match and verb == method:
                return handler(read_json(body), *match.groups())
        raise Refused(f"{method} {path} is not supported by this server", 404)

    def close(self) -> None:
        """Answer all waiting requests with an error."""
        self._results.close(Refused("the server was shut down before this was done", 503))

    # ---- sessions and models ----

    def _capabilities(self, _: Any) -> Answer:
        model = {"model_name": self._name, "max_context_length": self._max_len}
        return Answer({"supported_models": [model | {"trainable": True, "sampleable": True}]})

    def _client_config(self, _: Any) -> Answer:
        limit = self._config.rl.serve.max_request_mib * 2**20
        return Answer(
            {
                "pjwt_auth_enabled": False,
                "parallel_fwdbwd_chunks": False,  # one policy, one call at a time
                "fwdbwd_max_chunk_bytes_count": min(5_000_000, limit // 2),
                "sample_use_retrieve_futures": True,
                "sample_join_sampling_session": True,
                # Samples wait for the policy while it trains.
                "sample_enable_stuck_detection": False,
            }
        )

    def _create_session(self, values: dict[str, Any]) -> Answer:
        model, trained = self._config.model, "all weights"
        advice = ": a LoRA rank is accepted and ignored"
        if self._lora is not None:
            trained, advice = f"adapters of ranks up to {self._lora.rank}", ""
        return Answer(
            {
                "type": "create_session",
                "session_id": self._sessions.create(),
                "info_message": f"this server trains {trained} of {model.name} {model.flavor}{advice}",
            }
        )

    def _heartbeat(self, values: dict[str, Any]) -> Answer:
        self._sessions.check(take(values, "session_id", str))
        return Answer({"type": "session_heartbeat"})

    def _finish_session(self, _: Any, session_id: str) -> Answer:
        self._sessions.finish(session_id)
        return Answer({})

    def _start_model(
        self, values: dict[str, Any], command: Command, result: dict[str, Any], rank: int = 0
    ) -> Answer:
        """Submit the command that begins a session's new model, after giving it the policy.

        rank: of its adapters, if the server trains adapters, and so several models.
        """
        session_id, number = take(values, "session_id", str), take(values, "model_seq_id", int)
        request_id, model_id = f"{session_id}:model:{number}", f"{session_id}:train:{number}"
        if (answer := self._results.known(request_id)) is not None:  # a repeated request
            return answer
        if (optimizer := values.get("optimizer_config")) not in (None, {"type": "adamw"}):
            raise Refused(f"the optimizer is AdamW, got optimizer_config = {optimizer!r}")
        base_model = take(values, "base_model", str, self._name)
        metadata = take(values, "user_metadata", dict, None)
        if self._config.rl.serve.only_base_model and base_model != self._name:
            raise Refused(
                f"base_model must be {self._name!r}, the model that this server trains, got "
                f"{base_model!r}"
            )
        with self._lock:
            self._sessions.check(session_id)
            if self._lora is not None:
                self._add_model(model_id, rank, base_model)
                command.arguments["model"] = model_id
            owner = session_id if self._lora is not None else self._model_id.partition(":")[0]
            if owner != session_id and self._sessions.is_alive(owner):
                raise Refused(
                    f"model {self._model_id} of another session owns this server's only policy; "
                    f"close that ServiceClient (or end its program, and wait "
                    f"{_SECONDS_UNTIL_GONE} s), or start another server"
                )
            if self._lora is None and owner == session_id:
                logger.warning("model %s takes the policy over from %s", model_id, self._model_id)
            self._model_id, self._base_model = model_id, base_model
            self._runs[model_id] = metadata
            for old in list(self._runs)[:-_MAX_SESSIONS]:
                del self._runs[old]
        logger.info("model %s trains the policy under the name %r", model_id, base_model)
        result = result | {"model_id": model_id}
        return self._results.submit(
            request_id, command, lambda _: Answer(result), model_id=model_id
        )

    def _create_model(self, values: dict[str, Any]) -> Answer:
        config, lora = take(values, "lora_config", dict, {}), self._lora
        arguments: dict[str, Any] = {}
        rank = take(config, "rank", int, 1 if lora is None else lora.rank)
        if rank < 1:
            raise Refused(f"lora_config.rank must be at least 1, got {rank}; correct it")
        if lora is not None:
            if rank > lora.rank:
                raise Refused(
                    f"lora_config.rank must be 1 to {lora.rank}, this server's lora.rank, got {rank}; "
                    "ask for less, or start the server with a larger one"
                )
            parts = {"train_attn": "self_attn", "train_mlp": "mlp"}
            layers = [name for key, name in parts.items() if take(config, key, bool, True)]
            if not layers:
                raise Refused(
                    "lora_config must train attention or feed-forward, got train_attn and train_mlp "
                    "false: the output projection has no adapter; set one of them to true"
                )
            seed = take(config, "seed", int, secrets.randbits(31))
            arguments["adapters"] = {"seed": seed, "rank": rank, "layers": layers}
        command = Command("start_model", arguments)
        return self._start_model(values, command, {"type": "create_model"}, rank)

    def _add_model(self, model_id: str, rank: int, base_model: str) -> None:
        """Add a model with adapters, and drop those whose session has ended. Holds the lock."""
        gone = [old for old in self._models if not self._sessions.is_alive(old.partition(":")[0])]
        for old in gone:
            del self._models[old]
        if gone:
            self._put(Command("drop_models", {"models": gone}))
        if len(self._models) >= _MAX_MODELS:
            raise Refused(
                f"{_MAX_MODELS} models train on this server; close the ServiceClient of one of them",
                429,
            )
        self._models[model_id] = rank, base_model

    def _of(self, model_id: str) -> dict[str, Any]:
        """Return the argument of commands that says whose turn it is."""
        return {} if self._lora is None else {"model": model_id}

    def _lora_info(self, rank: int | None = None) -> dict[str, Any]:
        if self._lora is None:
            return {"is_lora": False}
        return {"is_lora": True, "lora_rank": rank or self._lora.rank}

    def _model(self, values: dict[str, Any]) -> str:
        """Return the id of a request's model; refuse a model that does not own the policy."""
        model_id = take(values, "model_id", str)
        self._check_model(model_id)
        return model_id

    def _check_model(self, model_id: str) -> None:
        with self._lock:
            if self._lora is not None and model_id not in self._models:
                raise Refused(
                    f"model {model_id} is unknown, or its session has ended; create a training client",
                    404,
                )
            if self._lora is None and (model_id != self._model_id or not model_id):
                raise Refused(
                    f"model {model_id} does not own the policy: "
                    + (f"{self._model_id} does" if self._model_id else "no model does")
                    + "; create a training client",
                    404,
                )
            self._sessions.note(model_id)

    def _get_info(self, values: dict[str, Any]) -> Answer:
        model_id, model = self._model(values), self._config.model
        rank, base_model = self._models.get(model_id, (None, self._base_model))
        data = {"arch": f"{model.name} {model.flavor}", "model_name": base_model}
        if self._tokenizer is not None:
            data["tokenizer_id"] = os.path.abspath(model.hf_assets_path)
        info = {"type": "get_info", "model_id": model_id, "model_data": data}
        return Answer(info | self._lora_info(rank) | {"model_name": base_model})

    def _weights_info(self, values: dict[str, Any]) -> Answer:
        self._existing(take(values, "tinker_path", str))
        return Answer({"base_model": self._base_model} | self._lora_info())

    def _training_run(self, _: Any, model_id: str) -> Answer:
        """Describe a run, past or present; the request does not keep the run's session alive."""
        with self._lock:
            known, metadata = model_id in self._runs, self._runs.get(model_id)
        saved = folder_of(f"tinker://{model_id}/weights/any").partition("/")[0]
        if not known and not os.path.isdir(os.path.join(self._states, saved)):
            raise Refused(f"model {model_id} is unknown and has no saved states", 404)
        return Answer(
            {
                "training_run_id": model_id,
                "base_model": self._base_model,
                "model_owner": "local",
                **self._lora_info(),
                "last_request_time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "user_metadata": metadata,
            }
        )

    # ---- training ----

    def _forward_backward(self, body: bytes) -> Answer:
        request = wire.read_forward_backward(body, self._check_model)
        arguments = {"request": request} | self._of(request.model_id)
        command = Command("forward_backward", arguments)
        return self._results.submit(f"{request.model_id}:{request.seq_id}", command, write_output)

    def _optim_step(self, values: dict[str, Any]) -> Answer:
        arguments = {"params": adam_params(values)} | self._of(self._model(values))
        command = Command("optim_step", arguments)
        return self._results.submit(
            self._seq_id(values), command, lambda metrics: Answer({"metrics": metrics})
        )

    def _seq_id(self, values: dict[str, Any]) -> str:
        return f"{self._model(values)}:{take(values, 'seq_id', int)}"

    def _save(self, values: dict[str, Any], kind: str, response: str) -> Answer:
        path = f"tinker://{self._model(values)}/{kind}/{take(values, 'path', str)}"
        folder, seq_id = folder_of(path), self._seq_id(values)
        is_there = os.path.exists(os.path.join(self._states, folder))
        is_new = self._results.known(seq_id) is None
        if is_there and is_new and not take(values, "overwrite", bool, False):
            raise Refused(f"{path} exists already; choose another name, or set overwrite")
        command = Command("save", {"path": folder} | self._of(self._model(values)))
        return self._results.submit(
            seq_id, command, lambda _: Answer({"type": response, "path": path})
        )

    def _existing(self, path: str) -> str:
        folder = os.path.join(self._states, folder_of(path))
        if not os.path.isdir(folder):
            raise Refused(f"{path} is not among this server's saved states in {self._states}", 404)
        return folder

    def _load_weights(self, values: dict[str, Any]) -> Answer:
        path, optimizer = take(values, "path", str), take(values, "optimizer", bool, False)
        folder = self._existing(path)
        command = Command("load", {"path": folder, "with_optimizer": optimizer})
        result = {"type": "load_weights", "path": path}
        if values.get("session_id") is not None:
            if self._lora is not None:
                command.arguments["is_new"] = True
            return self._start_model(values, command, result, self._config.lora.rank)
        seq_id, model_id = self._seq_id(values), self._model(values)
        command.arguments.update(self._of(model_id))
        result |= {"model_id": model_id}
        return self._results.submit(seq_id, command, lambda _: Answer(result), model_id=model_id)

    # ---- sampling ----

    def _save_for_sampler(self, values: dict[str, Any]) -> Answer:
        if values.get("path") is not None:
            return self._save(values, "sampler_weights", "save_weights_for_sampler")
        seq_id = self._seq_id(values)
        number = take(values, "sampling_session_seq_id", int)
        sampler = f"{seq_id.partition(':')[0]}:sample:{number}"
        self._add_sampler(sampler, sampler)
        result = {"type": "save_weights_for_sampler", "sampling_session_id": sampler}
        return self._results.submit(
            seq_id,
            Command("snapshot", {"sampler": sampler} | self._of(self._model(values))),
            lambda _: Answer(result),
        )

    def _create_sampling_session(self, values: dict[str, Any]) -> Answer:
        session_id = take(values, "session_id", str)
        self._sessions.check(session_id)
        number = take(values, "sampling_session_seq_id", int)
        sampler, path = f"{session_id}:sample:{number}", take(values, "model_path", str, None)
        if path is None:
            self._check_base_model(session_id, take(values, "base_model", str, self._name))
        if sampler not in self._samplers:
            self._add_sampler(sampler, BASE if path is None else sampler)
            if path is not None:
                folder = self._existing(path)
                self._put(Command("open", {"sampler": sampler, "path": folder}))
        return Answer({"type": "create_sampling_session", "sampling_session_id": sampler})

    def _check_base_model(self, session_id: str, name: str) -> None:
        """Refuse to sample from this server's base model under another model's name.

        A training client may give any name, and then its session may sample under that name, too.
        """
        with self._lock:
            models = dict(self._models)
            if self._lora is None:
                models = {self._model_id: (0, self._base_model)}
        trained = {own for model, (_, own) in models.items() if model.startswith(f"{session_id}:")}
        if name not in {self._name, *trained}:
            raise Refused(
                f"base_model must be {self._name!r}, the model that this server samples, got {name!r}; "
                "start a server with that model, or name it in rl.serve.base_model if it is this one"
            )

    def _add_sampler(self, name: str, source: str) -> None:
        with self._lock:
            self._samplers[name] = source
            old = list(self._samplers)[:-_MAX_SAMPLERS]
            for sampler in old:
                del self._samplers[sampler]
        if old:
            self._put(Command("forget", {"samplers": old}))

    def _sampler(self, sampler: str) -> str:
        with self._lock:
            if sampler not in self._samplers:
                raise Refused(
                    f"sampling session {sampler} is unknown; make a new sampling client", 404
                )
            self._sessions.note(sampler)
            return self._samplers[sampler]

    def _join_sampling_session(self, values: dict[str, Any]) -> Answer:
        self._sampler(take(values, "sampling_session_id", str))
        number = next(self._clone_numbers)
        return Answer({"type": "join_sampling_session", "client_counter": number})

    def _get_sampler(self, _: Any, sampler: str) -> Answer:
        self._sampler(sampler)
        return Answer({"sampler_id": sampler, "base_model": self._base_model})

    def _sample(self, values: dict[str, Any]) -> Answer:
        for name, off in _NOT_SUPPORTED.items():
            if values.get(name) not in (None, off):
                raise Refused(f"{name} is not supported by this server, got {values[name]!r}")
        session = take(values, "sampling_session_id", str)
        sampler, prompt = self._sampler(session), model_input(values, "prompt")
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
            self._put(Command("logprobs", {"sampler": sampler}, take_logprobs, key, [prompt]))
        # Joined prompts would change what a seed draws, so a request with a seed runs by itself.
        key = ("sample", sampler, n_samples, params) if params.seed is None else object()
        arguments = {"sampler": sampler, "num_samples": n_samples, "params": params}
        self._put(Command("sample", arguments, finish, key, [prompt]))
        return pending.accepted()

    def _retrieve_many(self, values: dict[str, Any]) -> Answer:
        target = take(values, "target", dict)
        session = take(target, "sampling_session_id", str)
        self._sampler(session)
        clone = take(target, "cloned_sampler_id", int, 0)
        return self._results.retrieve_many(values, (session, clone))
