"""Base class of generators on another project's engine: vLLM in this process, or an HTTP server."""

import os
import random
import shutil
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchtitan.rl.generator import Generator, Prompts
from torchtitan.rl.types import Completion, SamplingConfig
from torchtitan.rl.weight_sync import WeightMismatchError
from torchtitan.rl.weight_transport import Pairs, PolicyWeights, hand_over
from torchtitan.tools.errors import RunError


class ForeignGenerator(Generator):
    """A generator on another project's engine, which takes Hugging Face weights and a seed per row.

    folder: gets a subfolder per weight version, from which the engine reads weight files.
    adapters: updates bring `weight_sync.AdapterWeights` instead of whole weights.
    records_experts: the engine returns the experts of each token.
    engine_name, remedy: parts of the error message of a failed update.
    """

    engine_name: str
    remedy = ""

    def __init__(
        self,
        dtype: torch.dtype | None,
        seed: int,
        folder: str = "",
        adapters: bool = False,
        records_experts: bool = False,
    ):
        self.weight_dtype, self._folder = dtype, os.path.abspath(folder)
        self.weight_names = "adapters" if adapters else "hf"
        self.records_experts = records_experts
        self._seed, self._n_calls = seed, 0

    def update_weights(self, weights: PolicyWeights, *, check_digest: bool = True) -> None:
        """Make the engine load the weights. Collective.

        check_digest is ignored, because engines change the layout of weights.
        """
        # Until the update is complete, there is no valid version.
        self.policy_version = -1
        failure = hand_over(weights, lambda pairs: self._load(pairs, weights.version))
        if failure is not None:
            raise WeightMismatchError(
                f"{self.engine_name} did not load version {weights.version} of the weights "
                f"({type(failure).__name__}: {failure}){self.remedy}"
            ) from failure
        self.policy_version = weights.version

    @abstractmethod
    def _load(self, pairs: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Load weights into the engine. May leave pairs unread, because `hand_over` reads the rest."""

    def _draw(
        self, prompts: Prompts, sampling: SamplingConfig, num_samples: int, rows: Sequence[int]
    ) -> list[Completion]:
        if sampling.top_p < 1 or sampling.top_k > 0:
            raise ValueError(
                f"{self.engine_name} gives no log-probs of a truncated distribution, got top_p = "
                f"{sampling.top_p} and top_k = {sampling.top_k}; set them to 1 and 0, or "
                "rl.generator.backend to 'local'"
            )
        seed = sampling.seed
        if seed is None:
            self._n_calls += 1
            seed = random.Random(f"{self._seed} {self._n_calls}").getrandbits(62)
        seeds = [(seed + row) % 2**62 for row in rows]
        return self._complete_all(prompts, sampling, num_samples, seeds)

    @abstractmethod
    def _complete_all(
        self, prompts: Prompts, sampling: SamplingConfig, num_samples: int, seeds: Sequence[int]
    ) -> list[Completion]:
        """Return what `generate` returns. seeds: one per completion."""

    def _folder_of(self, version: int) -> str:
        return os.path.join(self._folder, f"version-{version}")

    def _write_adapters(self, pairs: Pairs, version: int) -> None:
        """Write the files of `AdapterWeights` to the version's folder."""
        os.makedirs(self._folder_of(version), exist_ok=True)
        for name, content in pairs:
            Path(self._folder_of(version), name).write_bytes(content.cpu().numpy().tobytes())

    def _remove_other_versions(self, version: int) -> None:
        for folder in Path(self._folder).glob("version-*"):
            if folder.name != f"version-{version}":
                shutil.rmtree(folder, ignore_errors=True)

    def _completion(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        sampling: SamplingConfig,
        prompt: Sequence[int],
        experts: np.ndarray | None,
    ) -> Completion:
        """Return a completion. Raises RunError if experts are required and missing.

        experts: [tokens of prompt and completion, MoE layers, experts per token].
        """
        routed_experts, n_read = None, len(prompt) + len(token_ids) - 1
        if self.records_experts:
            if experts is None or experts.ndim != 3 or len(experts) < n_read:
                raise RunError(
                    f"rl.generator.replay_experts needs the experts of {n_read} tokens [tokens, layers, "
                    f"experts per token], got {'none' if experts is None else list(experts.shape)}; "
                    "use a vLLM with enable_return_routed_experts, and a mixture of experts"
                )
            routed_experts = torch.from_numpy(experts[:n_read].astype(np.int16))
        if sampling.temperature == 0:
            # At temperature 0 the token has log-prob 0; engines return the log-prob at temperature 1.
            logprobs = [0.0] * len(logprobs)
        return Completion(
            token_ids=tuple(token_ids),
            token_logprobs=tuple(logprobs),
            finish_reason="stop" if sampling.stops_at(token_ids) else "length",
            policy_version=self.policy_version,
            routed_experts=routed_experts,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"n_calls": self._n_calls}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._n_calls = state_dict["n_calls"]
