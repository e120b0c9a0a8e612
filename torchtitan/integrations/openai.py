"""Sampling with servers that speak OpenAI's `/v1/completions`, such as those of vLLM and SGLang.

A server gets prompts as token ids and returns tokens and log-probs. An update writes the weights to
a folder of Hugging Face files, or the adapters to a folder in PEFT's format, and posts the folder's path
to the server, which must be able to read the folder. `vllm_lane` sends weights without files.
"""

import base64
import http.client
import io
import json
import math
import os
import secrets
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchtitan.checkpoint.folder import HF_INDEX
from torchtitan.distributed.processes.ranks import from_rank_zero
from torchtitan.integrations.openai_servers import LostServerError, Servers
from torchtitan.integrations.vllm_lane import WeightLane
from torchtitan.rl.foreign_generator import ForeignGenerator
from torchtitan.rl.generator import Prompts
from torchtitan.rl.job_config import RLGenerator
from torchtitan.rl.types import Completion, SamplingConfig
from torchtitan.rl.weight_sync import WeightMismatchError
from torchtitan.rl.weight_transport import Pairs, PolicyWeights, buckets_of, copied
from torchtitan.tools.errors import RunError
from torchtitan.tools.files import open_file, save_tensors

_TRIES, _SECONDS_BETWEEN_TRIES = 3, 1.0
_DEV_MODE = "the server must be vLLM with VLLM_SERVER_DEV_MODE=1 in its environment"
_HOW_VLLM_RELOADS = {
    "hf": f"; without rl.generator.reload_url {_DEV_MODE}",
    "transfer": f"; with rl.generator.weight_transfer {_DEV_MODE}, and this backend in its "
    "--weight-transfer-config",
    "adapters": "; with rl.generator.adapters the server must be vLLM with --enable-lora, a "
    "--max-lora-rank of at least lora.rank, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its "
    "environment",
}
# The weights of larger models are written to several files.
_MAX_FILE_BYTES = 4 * 2**30


class OpenAIGenerator(ForeignGenerator):
    """Samples with HTTP servers. Each rank sends the requests for its own share of prompts.

    Each completion has its own seed, so it is the same on every server. A lost server is skipped until the
    next update, or until no other server is left.

    The server has to return log-probs after temperature (vLLM: --logprobs-mode processed_logprobs).
    settings: `[rl.generator]`. dtype: dtype of the weights in the files; None keeps the trainer's.
    folder: gets a subfolder per weight version; each update removes the other subfolders.
    hf_assets_path: folder whose config.json and tokenizer are copied to each version's folder.
    vocab_size: token ids in answers must be below this number; None turns this check off.
    delta: with `weight_transfer` = "gloo", send only the changes since the last update.
    """

    engine_name = "the server"

    def __init__(
        self,
        settings: RLGenerator,
        folder: str,
        hf_assets_path: str,
        *,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        vocab_size: int | None = None,
        delta: bool = False,
    ):
        super().__init__(dtype, seed, folder, settings.adapters, settings.replay_experts)
        self._settings, self._hf_assets_path = settings, hf_assets_path
        self._vocab_size = vocab_size
        self._delta = delta and settings.weight_transfer == "gloo"
        self._lane: WeightLane | None = None
        if not settings.reload_url:
            way = "transfer" if settings.weight_transfer else self.weight_names
            self.remedy = _HOW_VLLM_RELOADS[way]
        # Each run draws a name for its adapters, because the server may hold adapters of an earlier run.
        self._run = from_rank_zero(lambda: secrets.token_hex(4)) if settings.adapters else ""
        # Name of the adapters of the last update.
        self._adapter = ""
        self._servers = Servers(settings.url, settings.timeout_seconds)

    def _complete_all(
        self, prompts: Prompts, sampling: SamplingConfig, num_samples: int, seeds: Sequence[int]
    ) -> list[Completion]:
        requests = [
            {
                "model": self._name_of(self.policy_version),
                "prompt": list(prompts[i // num_samples]),
                "n": 1,
                "seed": seed,
                "temperature": sampling.temperature,
                "max_tokens": sampling.max_tokens,
                "stop": list(sampling.stop_strings) or None,
                "logprobs": 0,
                # vLLM's extensions: also return special tokens, and stop only at the stops of `sampling`.
                "stop_token_ids": list(sampling.stop_token_ids),
                "include_stop_str_in_output": True,
                "ignore_eos": True,
                "skip_special_tokens": False,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
            }
            for i, seed in enumerate(seeds)
        ]
        self._servers.forget_restarted()
        threads = ThreadPoolExecutor(self._settings.max_requests, "completions")
        try:
            futures = [threads.submit(self._complete, request, sampling) for request in requests]
            return [future.result() for future in futures]
        finally:
            # After a failure, don't wait for requests in flight: the other ranks wait for this one.
            threads.shutdown(wait=False, cancel_futures=True)

    def _complete(self, request: dict[str, Any], sampling: SamplingConfig) -> Completion:
        def ask(server: str) -> tuple[str, Any]:
            url = f"{server}/v1/completions"
            return url, _post(url, request, self._settings.timeout_seconds)

        url, answer = self._servers.call(ask)
        try:
            choice = answer["choices"][0]
            token_ids = choice.get("token_ids")
            details = choice.get("logprobs") or {}
            logprobs = [float(value) for value in details.get("token_logprobs") or ()]
            # The server writes tokens as "token_id:17".
            if token_ids is None:
                texts = details.get("tokens") or ()
                parts = [text.rpartition(":") for text in texts]
                is_id = all(x == "token_id" and number.isdecimal() for x, _, number in parts)
                token_ids = [int(number) for _, _, number in parts] if is_id else []
        except (AttributeError, LookupError, TypeError, ValueError):
            choice, token_ids, logprobs = {}, [], []
        if not isinstance(token_ids, list) or not 0 < len(token_ids) == len(logprobs):
            raise RunError(
                f"{url} has to answer with the id and the log-prob of every new token, got "
                f'{json.dumps(answer)[:500]}; use a server that supports "return_token_ids" or '
                '"return_tokens_as_token_ids", and "logprobs"'
            )
        limit = math.inf if self._vocab_size is None else self._vocab_size
        wrong = [x for x in token_ids if type(x) is not int or not 0 <= x < limit]
        if wrong:
            raise RunError(
                f"{url} has to answer with ids of the model's {self._vocab_size} tokens, got "
                f"{wrong[:8]}; check that rl.generator.model serves the model that is trained"
            )
        experts = _array(choice.get("routed_experts")) if self.records_experts else None
        return self._completion(token_ids, logprobs, sampling, request["prompt"], experts)

    def update_weights(self, weights: PolicyWeights, *, check_digest: bool = True) -> None:
        failure = None
        try:
            super().update_weights(weights, check_digest=check_digest)
        except WeightMismatchError as error:
            # Only rank 0 gets here; the other ranks wait in `share`.
            failure = error
        if self._settings.weight_transfer and failure is None:
            self._servers.trust(self._servers.addresses())
        self._servers.share()
        if failure is not None:
            raise failure

    def _load(self, pairs: Pairs, version: int) -> None:
        is_sender = not dist.is_initialized() or dist.get_rank() == 0
        if self._settings.weight_transfer:
            if is_sender:
                self._send(pairs, version)
            return self._servers.update(_has_no_files, now=False)
        previous, self._adapter = self._adapter, self._name_of(version) if self._run else ""
        if is_sender:
            if self._run:
                self._write_adapters(pairs, version)
            else:
                _write(pairs, self._folder_of(version), self._hf_assets_path)
        self._servers.update(lambda server: self._load_on(server, version, previous), now=is_sender)
        if is_sender:
            self._remove_other_versions(version)

    def _load_on(self, server: str, version: int, previous: str) -> None:
        """Make a server load the files of a version. previous: name of the adapters to unload."""
        folder = self._folder_of(version)
        if url := self._settings.reload_url:
            # If the setting is only a path, post to this path on each server.
            url = f"{server}{url}" if url.startswith("/") else url
            self._command(url, {"path": folder, "version": version})
        elif self._run:
            lora = {"lora_name": self._name_of(version), "lora_path": folder}
            try:
                self._command(f"{server}/v1/load_lora_adapter", lora)
            except RunError as error:
                # Ignore this error: an earlier try loaded this version, and the server's answer was lost.
                if "has already been loaded" not in str(error):
                    raise
            if previous:
                # RunError: a restarted server does not have the previous adapters.
                with suppress(RunError):
                    self._command(f"{server}/v1/unload_lora_adapter", {"lora_name": previous})
        else:
            rpc = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
            self._command(f"{server}/collective_rpc", rpc)
            # reload_weights does not empty vLLM's prefix cache.
            self._command(f"{server}/reset_prefix_cache", {})

    def _send(self, pairs: Pairs, version: int) -> None:
        (server,) = self._servers.addresses()
        settings, seconds = self._settings, self._settings.timeout_seconds

        def call(name: str, message: dict[str, Any] | None) -> Any:
            # Don't retry, because a second transfer would find no sender.
            return _post(f"{server}/{name}", message, seconds, tries=1)

        if self._lane is None:
            self._lane = WeightLane(settings.weight_transfer, call, server, seconds, self._delta)
        try:
            self._lane.send(pairs, version)
        except BaseException:
            # Part of the update may be in transit, so do not reuse the connection.
            self._lane.close()
            self._lane = None
            raise
        call("reset_prefix_cache", {})

    def _command(self, url: str, message: dict[str, Any]) -> None:
        seconds = self._settings.timeout_seconds
        answer = _post(url, message, seconds, is_json=not self._run)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise RunError(f"{url} refused with {json.dumps(answer)[:500]}")

    def _name_of(self, version: int) -> str:
        """Return the server's name for a version of the policy."""
        model = self._settings.model
        return f"{model}-{self._run}-{version}" if self._run else model


def _array(text: Any) -> np.ndarray | None:
    """Decode `routed_experts`, a NumPy file in base64; return None unless it holds integers."""
    try:
        array = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    except (TypeError, ValueError, EOFError, OSError):
        return None
    return array if isinstance(array, np.ndarray) and array.dtype.kind in "iu" else None


def _write(pairs: Pairs, folder: str, hf_assets_path: str) -> None:
    """Write a model's folder: weights, the index of the weights, and the other files of `hf_assets_path`."""
    # An earlier run may have left this folder.
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    for entry in os.scandir(hf_assets_path) if os.path.isdir(hf_assets_path) else ():
        if entry.is_file() and not entry.name.endswith((".safetensors", ".bin", "index.json")):
            shutil.copy(entry.path, folder)
    weight_map: dict[str, str] = {}
    n_bytes = 0
    files = buckets_of(copied(pairs, torch.device("cpu")), _MAX_FILE_BYTES)
    for number, tensors in enumerate(files, start=1):
        name = f"model-{number:05}.safetensors"
        save_tensors(dict(tensors), os.path.join(folder, name))
        weight_map |= {key: name for key, _ in tensors}
        n_bytes += sum(tensor.nbytes for _, tensor in tensors)
    index = {"metadata": {"total_size": n_bytes}, "weight_map": weight_map}
    with open_file(os.path.join(folder, HF_INDEX), "w", encoding="utf-8") as text:
        json.dump(index, text)


def _has_no_files(server: str) -> None:
    raise RunError(
        f"{server} ended or was restarted, and rl.generator.weight_transfer leaves no files to load; start "
        "the run again"
    )


def _post(
    url: str,
    message: dict[str, Any] | None,
    timeout_seconds: float,
    is_json: bool = True,
    tries: int = _TRIES,
) -> Any:
    """POST a message and return the answer's JSON, or None for an empty answer. Raises RunError.

    message: None makes a GET request.
    """
    body = None if message is None else json.dumps(message).encode()
    # The server is on our own network, so a configured proxy is not used.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for number in range(1, tries + 1):
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        try:
            with opener.open(request, timeout=timeout_seconds) as response:
                text = response.read()
            return json.loads(text) if is_json and text.strip() else None
        except urllib.error.HTTPError as error:
            problem, is_gone = f"HTTP {error.code}", error.code in (502, 503, 504)
            with error, suppress(OSError, http.client.HTTPException):
                problem += f": {error.read(500).decode(errors='replace')}"
            may_recover = error.code in (408, 429) or error.code >= 500
        except (OSError, http.client.HTTPException) as error:
            # urllib's errors are subclasses of OSError.
            problem, may_recover, is_gone = f"{type(error).__name__}: {error}", True, True
        except ValueError as error:
            problem, may_recover, is_gone = f"the answer is not JSON: {error}", False, False
        if not may_recover:
            break
        if number < tries:
            time.sleep(_SECONDS_BETWEEN_TRIES * number)
    sentence = f"{url} did not answer ({problem}), tried {number} times; look at the server's log"
    raise LostServerError(sentence, is_gone) if may_recover else RunError(sentence)
