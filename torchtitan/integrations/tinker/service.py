"""Tinker's endpoints, which check requests and turn them into commands for the policy.

The server trains all weights of one policy, or several LoRA models. A session is a connected client program,
a model is a training run of a session, and a sampling session samples from one snapshot of the weights.
"""

import math
import os
import re
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from torchtitan.integrations.tinker import wire
from torchtitan.integrations.tinker.client import LocalTrainingClient
from torchtitan.integrations.tinker.conversions import adapters_of, has_output_adapter
from torchtitan.integrations.tinker.policy import BASE, MOST_SAMPLERS, drop_oldest
from torchtitan.integrations.tinker.request_queue import Command
from torchtitan.integrations.tinker.requests import (
    Answer,
    Refused,
    adam_params,
    folder_of,
    model_input,
    read_json,
    sampling_params,
    take,
)
from torchtitan.integrations.tinker.results import Results
from torchtitan.integrations.tinker.saved import EXTERNAL, SavedFiles
from torchtitan.rl.job_config import JobConfig, batch_seq_len
from torchtitan.tools.logging import logger

# A session ends after this time without a request; clients send a heartbeat every 10 s.
SECONDS_UNTIL_GONE = 20
_MAX_SESSIONS = 4096
# Limits of one sample request.
_MAX_SAMPLES = 4096
_MAX_TOP_K = 1024
# Unsupported options of a sample request -> the value that turns the option off.
_NOT_SUPPORTED = {
    "topk_sample_logprobs": 0,
    "target_prompt_logprobs": None,
    "prompt_alt_tokens_k": 0,
    "record_stability_info": False,
}


class Sessions:
    """The live sessions. Ids of models, samplers and results begin with their session's id."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._alive_until: dict[str, float] = {}  # session -> time at which it expires

    def create(self) -> str:
        session_id, now = str(uuid.uuid4()), time.monotonic()
        with self._lock:
            self._alive_until = {k: until for k, until in self._alive_until.items() if now < until}
            if len(self._alive_until) >= _MAX_SESSIONS:
                raise Refused(f"{_MAX_SESSIONS} sessions are alive; finish some of them", 429)
            self._alive_until[session_id] = now + SECONDS_UNTIL_GONE
        return session_id

    def note(self, id_in_session: str) -> bool:
        """Record a request, which keeps its session alive; return False for an unknown session."""
        session_id = id_in_session.partition(":")[0]
        with self._lock:
            if is_known := session_id in self._alive_until:
                self._alive_until[session_id] = time.monotonic() + SECONDS_UNTIL_GONE
        return is_known

    def check(self, session_id: str) -> None:
        """Record a request of a session; raise Refused for an unknown session."""
        if not self.note(session_id):
            raise Refused(f"session {session_id} is unknown; make a new ServiceClient", 410)

    def seconds_left(self, id_in_session: str) -> float:
        """Return the seconds until the session ends if no request comes; 0 if the session has ended."""
        until = self._alive_until.get(id_in_session.partition(":")[0], 0.0)
        return max(0.0, until - time.monotonic())

    def finish(self, session_id: str) -> None:
        self.check(session_id)
        with self._lock:
            self._alive_until.pop(session_id, None)


class Service:
    """Answers requests, from any thread. put: a function that queues a command for the policy."""

    def __init__(
        self, job_config: JobConfig, client: LocalTrainingClient, put: Callable[[Command], None]
    ):
        self._config, self._client, self._put = job_config, client, put
        self._name = self._trained_name = job_config.rl.serve.base_model
        self._max_len = batch_seq_len(job_config)
        self._lora = job_config.lora if "lora" in job_config.model.converters else None
        # Model id -> (LoRA rank, name of the base model). Without adapters there is one model.
        self._models: dict[str, tuple[int, str]] = {}
        self._results, self._sessions = Results(put), Sessions()
        self._lock = threading.Lock()
        self._runs: dict[str, Any] = {}  # model id -> the client's user_metadata
        self.files = SavedFiles(client.states_folder)
        self._samplers: dict[str, str] = {}  # sampling session -> the policy's sampler
        limit = job_config.rl.serve.max_request_mib * 2**20
        client_config = {
            "pjwt_auth_enabled": False,
            # The policy runs one call at a time.
            "parallel_fwdbwd_chunks": False,
            "fwdbwd_max_chunk_bytes_count": min(5_000_000, limit // 2),
            "sample_use_retrieve_futures": True,
            # Samples may wait a long time while the policy trains.
            "sample_enable_stuck_detection": False,
        }
        self._routes: list[tuple[str, Callable[..., Answer]]] = [
            ("GET healthz", lambda _: Answer({"status": "ok"})),
            ("GET get_server_capabilities", self._capabilities),
            ("POST client/config", lambda _: Answer(client_config)),
            ("POST client/dynamic_config", lambda _: Answer({})),
            ("POST telemetry", lambda _: Answer({"status": "accepted"})),
            ("POST create_session", self._create_session),
            ("POST session_heartbeat", self._heartbeat),
            ("POST sessions/([^/]+)/finish", self._finish_session),
            ("POST create_model", self._create_model),
            ("POST get_info", self._get_info),
            ("POST weights_info", self._weights_info),
            ("GET training_runs/([^/]+)", self._training_run),
            ("POST optim_step", self._optim_step),
            ("POST save_weights", lambda x: self._save(x, "weights", "save_weights")),
            ("POST save_weights_external", self._save_external),
            ("POST load_weights", self._load_weights),
            ("POST save_weights_for_sampler", self._save_for_sampler),
            ("POST create_sampling_session", self._create_sampling_session),
            ("GET samplers/([^/]+)", self._get_sampler),
            ("POST asample", self._sample),
            ("POST retrieve_future", self._retrieve),
            ("POST retrieve_futures", self._retrieve_many),
            *self.files.routes,
        ]

    def answer(self, method: str, path: str, body: bytes) -> Answer:
        """Return the answer to a request. Raises Refused or another ValueError for a wrong request."""
        route = f"{method} {path.removeprefix('/api/v1/')}"
        if route == "POST forward_backward":
            return self._forward_backward(body)
        for pattern, handler in self._routes:
            if match := re.fullmatch(pattern, route):
                return handler(read_json(body), *match.groups())
        raise Refused(f"{method} {path} is not supported by this server", 404)

    def close(self) -> None:
        """Answer all waiting requests with an error."""
        self._models.clear()
        self._results.close(Refused("the server was shut down before this was done", 503))

    def _retrieve(self, values: dict[str, Any]) -> Answer:
        request_id = take(values, "request_id", str)
        self._sessions.note(request_id)
        return self._results.retrieve(request_id)

    # ---- sessions and models ----

    def _capabilities(self, _: Any) -> Answer:
        model = {"model_name": self._name, "max_context_length": self._max_len}
        return Answer({"supported_models": [model | {"trainable": True, "sampleable": True}]})

    def _create_session(self, values: dict[str, Any]) -> Answer:
        model = self._config.model
        trained, advice = "all weights", ": a LoRA rank is accepted and ignored"
        if self._lora is not None:
            trained, advice = f"adapters of ranks up to {self._lora.rank}", ""
            if not has_output_adapter(self._lora):
                advice = "; the output projection has no adapter, and train_unembed has no effect"
        message = f"this server trains {trained} of {model.name} {model.flavor}{advice}"
        session = {"session_id": self._sessions.create(), "info_message": message}
        return Answer({"type": "create_session"} | session)

    def _heartbeat(self, values: dict[str, Any]) -> Answer:
        self._sessions.check(take(values, "session_id", str))
        return Answer({"type": "session_heartbeat"})

    def _finish_session(self, _: Any, session_id: str) -> Answer:
        self._sessions.finish(session_id)
        return Answer({})

    def _start_model(
        self,
        values: dict[str, Any],
        name: str,
        arguments: dict[str, Any],
        result: dict[str, Any],
        rank: int = 0,
    ) -> Answer:
        """Submit the command that starts a session's new model. rank: LoRA rank; ignored without adapters."""
        session_id, number = take(values, "session_id", str), take(values, "model_seq_id", int)
        request_id, model_id = f"{session_id}:model:{number}", f"{session_id}:train:{number}"
        # The client has sent this request before.
        if (answer := self._results.known(request_id, values)) is not None:
            return answer
        if (optimizer := values.get("optimizer_config")) not in (None, {"type": "adamw"}):
            raise Refused(f"the optimizer is AdamW, got optimizer_config = {optimizer!r}")
        base_model = take(values, "base_model", str, self._name)
        metadata = take(values, "user_metadata", dict, None)
        if self._config.rl.serve.only_base_model and base_model != self._name:
            raise Refused(f"base_model must be {self._name!r}, got {base_model!r}; correct it")
        self._wait_for_owner(session_id)
        with self._lock:
            self._sessions.check(session_id)
            before = self._models.copy()
            self._make_room(model_id)
            self._models[model_id], self._trained_name = (rank, base_model), base_model
            self._runs[model_id] = metadata
            drop_oldest(self._runs, _MAX_SESSIONS)
        logger.info("model %s trains the policy under the name %r", model_id, base_model)
        result = result | {"model_id": model_id}
        command = self._command(name, model_id, **arguments)

        def undo() -> None:
            with self._lock:
                self._models.pop(model_id, None)
                # Without adapters, put the replaced model back.
                if self._lora is None and not self._models:
                    self._models.update(before)

        return self._results.submit(
            request_id, values, command, lambda _: Answer(result), undo, model_id=model_id
        )

    def _create_model(self, values: dict[str, Any]) -> Answer:
        config, lora = take(values, "lora_config", dict, {}), self._lora
        rank = take(config, "rank", int, 1 if lora is None else lora.rank)
        parts = (take(config, f"train_{part}", bool, True) for part in ("attn", "mlp", "unembed"))
        arguments = {"adapters": adapters_of(lora, rank, take(config, "seed", int, None), *parts)}
        return self._start_model(values, "start_model", arguments, {"type": "create_model"}, rank)

    def _wait_for_owner(self, session_id: str) -> None:
        """Wait until the session that owns the only policy ends, or sends another request."""
        owner = next(iter(self._models), session_id)
        if self._lora is None and owner.partition(":")[0] != session_id:
            before, left = math.inf, self._sessions.seconds_left(owner)
            while owner in self._models and 0 < left <= before:
                time.sleep(0.05)
                before, left = left, self._sessions.seconds_left(owner)

    def _make_room(self, model_id: str) -> None:
        """Drop models whose session has ended; raise Refused if no further model fits."""
        gone = [old for old in self._models if not self._sessions.seconds_left(old)]
        if self._lora is None:
            for old in set(self._models) - set(gone):
                if old.partition(":")[0] != model_id.partition(":")[0]:
                    raise Refused(
                        f"model {old} of another session owns this server's only policy; close that "
                        "ServiceClient or end its program, or start another server"
                    )
                logger.warning("model %s takes the policy over from %s", model_id, old)
            self._models.clear()
            return
        for old in gone:
            del self._models[old]
        if gone:
            self._put(Command("drop_models", {"models": gone}))
        if len(self._models) >= self._client.limits.n_models:
            raise Refused(self._client.limits.full, 429)

    def _command(self, method: str, model_id: str, /, items: Any = (), **options: Any) -> Command:
        """Return a command in a model's lane.

        Without `items`, `options` are arguments of the method. With `items` the command may be merged
        with commands of other models, and `options` are fields of the `Command`.
        """
        model = "" if self._lora is None else model_id
        lane = model or "the policy"
        if not items:
            return Command(method, options | {"model": model}, lane=lane)
        items = [(model, item) for item in items]
        return Command(method, {}, items=items, lane=lane, **options)

    def _lora_info(self, rank: int | None = None) -> dict[str, Any]:
        if self._lora is None:
            return {"is_lora": False}
        return {"is_lora": True, "lora_rank": rank or self._lora.rank}

    def _model(self, values: dict[str, Any]) -> str:
        """Return the id of a request's model. Raises Refused if the model is unknown or replaced."""
        return self._check_model(take(values, "model_id", str))

    def _check_model(self, model_id: str) -> str:
        with self._lock:
            if model_id not in self._models:
                raise Refused(
                    f"model {model_id} is unknown, or its session has ended, or a newer model took the "
                    "policy over; create a training client",
                    404,
                )
            self._sessions.note(model_id)
        return model_id

    def _get_info(self, values: dict[str, Any]) -> Answer:
        model_id, model = self._model(values), self._config.model
        rank, base_model = self._models[model_id]
        data = {"arch": f"{model.name} {model.flavor}", "model_name": base_model}
        if self._client.tokenizer is not None:
            data["tokenizer_id"] = os.path.abspath(model.hf_assets_path)
        info = {"type": "get_info", "model_id": model_id, "model_data": data}
        return Answer(info | self._lora_info(rank) | {"model_name": base_model})

    def _weights_info(self, values: dict[str, Any]) -> Answer:
        rank = self.files.lora_rank(take(values, "tinker_path", str))
        return Answer({"base_model": self._trained_name} | self._lora_info(rank))

    def _training_run(self, _: Any, model_id: str) -> Answer:
        """Describe a current or past run. The request does not keep the run's session alive."""
        saved = folder_of(f"tinker://{model_id}/weights/any").partition("/")[0]
        if model_id not in self._runs and not self.files.exists(saved):
            raise Refused(f"model {model_id} is unknown and has no saved states", 404)
        return Answer(
            {
                "training_run_id": model_id,
                "base_model": self._trained_name,
                "model_owner": "local",
                **self._lora_info(),
                "last_request_time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "user_metadata": self._runs.get(model_id),
            }
        )

    # ---- training ----

    def _forward_backward(self, body: bytes) -> Answer:
        request = wire.read_forward_backward(body, self._check_model)
        kind = "forward" if request.forward_only else "forward_backward"
        command = self._command(
            "forward_backward",
            request.model_id,
            [request],
            joins=kind if self._client.shares_passes else None,
            size=len(request.data),
        )
        return self._results.submit(
            f"{request.model_id}:{request.seq_id}",
            body,
            command,
            lambda outputs: Answer(protobuf=wire.write_forward_backward(outputs[0])),
        )

    def _optim_step(self, values: dict[str, Any]) -> Answer:
        params = adam_params(values)
        command = self._command("optim_step", self._model(values), [params], joins="optim_step")
        return self._results.submit(
            self._seq_id(values), values, command, lambda found: Answer({"metrics": found[0]})
        )

    def _seq_id(self, values: dict[str, Any]) -> str:
        return f"{self._model(values)}:{take(values, 'seq_id', int)}"

    def _save(self, values: dict[str, Any], kind: str, response: str) -> Answer:
        model_id, seq_id = self._model(values), self._seq_id(values)
        path = f"tinker://{model_id}/{kind}/{take(values, 'path', str)}"
        folder, is_new = folder_of(path), self._results.known(seq_id, values) is None
        if is_new and self.files.exists(folder) and not take(values, "overwrite", bool, False):
            raise Refused(f"{path} exists already; choose another name, or set overwrite")
        command = self._command("save", model_id, name=folder, external=kind == EXTERNAL)
        return self._results.submit(
            seq_id, values, command, lambda _: Answer({"type": response, "path": path})
        )

    def _save_external(self, values: dict[str, Any]) -> Answer:
        if values.get("age_encryption_recipients"):
            raise Refused("age_encryption_recipients are not supported; leave them out")
        return self._save(values, EXTERNAL, "save_weights_external")

    def _load_weights(self, values: dict[str, Any]) -> Answer:
        path, optimizer = take(values, "path", str), take(values, "optimizer", bool, False)
        arguments = {"path": self.files.loadable(path), "optimizer": optimizer}
        result = {"type": "load_weights", "path": path}
        rank = self.files.lora_rank(path) or self._config.lora.rank
        arguments["rank"] = None if self._lora is None else rank
        if values.get("session_id") is not None:
            return self._start_model(values, "load", arguments, result, rank)
        seq_id, model_id = self._seq_id(values), self._model(values)
        command = self._command("load", model_id, **arguments)
        result |= {"model_id": model_id}

        def write(_: Any) -> Answer:
            with self._lock:
                # Another request may have dropped the model.
                if model_id in self._models:
                    self._models[model_id] = rank, self._models[model_id][1]
            return Answer(result)

        return self._results.submit(seq_id, values, command, write, model_id=model_id)

    # ---- sampling ----

    def _save_for_sampler(self, values: dict[str, Any]) -> Answer:
        if values.get("path") is not None:
            return self._save(values, "sampler_weights", "save_weights_for_sampler")
        model_id, number = self._model(values), take(values, "sampling_session_seq_id", int)
        sampler = f"{model_id.partition(':')[0]}:sample:{number}"
        self._add_sampler(sampler, sampler)
        result = {"type": "save_weights_for_sampler", "sampling_session_id": sampler}
        command = self._command("snapshot", model_id, sampler=sampler)
        return self._results.submit(self._seq_id(values), values, command, lambda _: Answer(result))

    def _create_sampling_session(self, values: dict[str, Any]) -> Answer:
        session_id = take(values, "session_id", str)
        self._sessions.check(session_id)
        sampler = f"{session_id}:sample:{take(values, 'sampling_session_seq_id', int)}"
        path = take(values, "model_path", str, None)
        if path is not None and sampler not in self._samplers:
            arguments = {"sampler": sampler, "path": self.files.loadable(path)}
            self._add_sampler(sampler, sampler)
            self._put(Command("open", arguments, lane=sampler))
        elif path is None:
            # A training client may use any base_model name; its session may sample under that name too.
            name, models = take(values, "base_model", str, self._name), list(self._models.items())
            trained = {own for model, (_, own) in models if model.startswith(f"{session_id}:")}
            if name not in {self._name, *trained}:
                raise Refused(
                    f"base_model must be {self._name!r}, the model that this server samples, got "
                    f"{name!r}; start a server with {name!r}, or set rl.serve.base_model = {name!r} if this "
                    "server has that model"
                )
            self._add_sampler(sampler, BASE)
        return Answer({"type": "create_sampling_session", "sampling_session_id": sampler})

    def _add_sampler(self, session: str, source: str) -> None:
        self._samplers[session] = source
        drop_oldest(self._samplers, MOST_SAMPLERS)

    def _sampler(self, session: str) -> str:
        source = self._samplers.get(session)
        if source is None:
            raise Refused(f"sampling session {session} is unknown; make a new sampling client", 404)
        self._sessions.note(session)
        return source

    def _get_sampler(self, _: Any, sampler: str) -> Answer:
        self._sampler(sampler)
        return Answer({"sampler_id": sampler, "base_model": self._trained_name})

    def _sample(self, values: dict[str, Any]) -> Answer:
        for name, off in _NOT_SUPPORTED.items():
            if values.get(name) not in (None, off):
                raise Refused(f"{name} is not supported by this server, got {values[name]!r}")
        session, vocab_size = take(values, "sampling_session_id", str), self._client.vocab_size
        sampler, prompt = self._sampler(session), model_input(values, "prompt")
        number, n_samples = take(values, "seq_id", int), take(values, "num_samples", int, 1)
        # The model doesn't read the last sampled token, so a completion may be one token longer.
        room = self._max_len + 1 - prompt.length
        params = sampling_params(values, room)
        is_scored = take(values, "prompt_logprobs", bool, False)
        k = take(values, "topk_prompt_logprobs", int, 0)
        last_n = take(values, "prompt_logprobs_last_n", int, prompt.length)
        for name, value, least, most in (
            ("the prompt's number of tokens", prompt.length, 1, self._max_len),
            ("token ids of the prompt", max(prompt.tokens), 0, vocab_size - 1),
            ("num_samples", n_samples, 1, _MAX_SAMPLES),
            ("max_tokens", params.max_tokens, 1, room),
            ("top_k", params.top_k, -1, vocab_size),
            ("topk_prompt_logprobs", k, 0, min(_MAX_TOP_K, vocab_size)),
            ("prompt_logprobs_last_n", last_n, 1, prompt.length),
        ):
            if not least <= value <= most:
                raise Refused(f"{name} must be {least} to {most}, got {value}")
        # Raise ValueError early for bad settings.
        params.to_config(self._client.tokenizer)
        request_id, settings = f"{session}:{number}", (n_samples, params, is_scored, k)
        # A request with a seed runs by itself, because batching changes the sampled tokens.
        key = ("sample", sampler, settings) if params.seed is None else object()
        command = Command(
            "sample",
            {"sampler": sampler, "settings": settings},
            joins=key,
            items=[(prompt, last_n)],
            lane=key,
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

    def _retrieve_many(self, values: dict[str, Any]) -> Answer:
        target = take(values, "target", dict)
        session = take(target, "sampling_session_id", str)
        self._sampler(session)
        clone = take(target, "cloned_sampler_id", int, 0)
        return self._results.retrieve_many(values, (session, clone))
