"""Sampling with vLLM, on this rank's own accelerator. vLLM is imported when one is built."""

import os
import random
from collections.abc import Sequence
from typing import Any

import torch

from torchtitan.rl.generator import Generator, Prompts
from torchtitan.rl.types import Completion, SamplingConfig
from torchtitan.rl.weight_sync import PolicyWeights, WeightMismatchError


class VLLMGenerator(Generator):
    """A generator on a vLLM engine inside this process; each rank has one.

    hf_assets_path: folder with the model's config.json and tokenizer; weights come from
        `update_weights`, not from there.
    dtype: of vLLM's weights; None for what config.json says, and for what is sent then.
    memory_share: of the device's memory, for weights and cache; the trainer needs the rest.
    options: further arguments of `vllm.LLM`.

    Log-probs are those after temperature. Truncation (top_p, top_k) is refused: vLLM does not
    report the mass of the tokens that it kept. Only the version and the names of an update are
    checked: vLLM changes the layout of weights, so they have no common digest.

    Raises ImportError if vLLM is not installed.
    """

    weight_names = "hf"

    def __init__(
        self,
        hf_assets_path: str,
        *,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        memory_share: float = 0.4,
        **options: Any,
    ):
        # Runs the engine in this process: it takes tensors, which another process would copy again.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        try:
            import vllm
        except ImportError as error:
            raise ImportError(
                "rl.generator.backend = 'vllm' needs vLLM, which is not installed; install it "
                "with `pip install vllm`, or set the backend to 'local'"
            ) from error
        self._vllm = vllm
        self.weight_dtype = dtype
        self._seed, self._n_calls = seed, 0
        self._llm = vllm.LLM(
            model=hf_assets_path,
            dtype="auto" if dtype is None else dtype,
            load_format="dummy",
            gpu_memory_utilization=memory_share,
            logprobs_mode="processed_logprobs",
            # Cached blocks would still hold keys and values of earlier weights.
            enable_prefix_caching=False,
            **options,
        )

    def _draw(
        self, prompts: Prompts, sampling: SamplingConfig, num_samples: int, rows: Sequence[int]
    ) -> list[Completion]:
        if sampling.top_p < 1 or sampling.top_k > 0:
            raise ValueError(
                f"rl.generator.backend = 'vllm' gives no log-probs of a truncated distribution, "
                f"got top_p = {sampling.top_p} and top_k = {sampling.top_k}; set them to 1 and 0, "
                "or the backend to 'local'"
            )
        seed = sampling.seed
        if seed is None:
            self._n_calls += 1
            seed = random.Random(f"{self._seed} {self._n_calls}").getrandbits(62)
        requests = [prompt for prompt in prompts for _ in range(num_samples)]
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in requests],
            [
                self._vllm.SamplingParams(
                    temperature=sampling.temperature,
                    max_tokens=sampling.max_tokens,
                    stop_token_ids=list(sampling.stop_token_ids),
                    stop=list(sampling.stop_strings) or None,
                    include_stop_str_in_output=True,
                    ignore_eos=True,
                    detokenize=bool(sampling.stop_strings),
                    logprobs=0,
                    seed=(seed + row) % 2**63,  # one for each completion
                )
                for row in rows
            ],
            use_tqdm=False,
        )
        completions = []
        for output in (request.outputs[0] for request in outputs):
            token_ids = tuple(output.token_ids)
            pairs = zip(output.logprobs, token_ids, strict=True)
            logprobs = tuple(of_place[token].logprob for of_place, token in pairs)
            kept_mass = None
            if sampling.temperature == 0:
                # Nothing else could be drawn; vLLM gives the log-probs at temperature 1.
                kept_mass = tuple(torch.tensor(logprobs).exp().tolist())
                logprobs = (0.0,) * len(logprobs)
            reason = "stop" if sampling.stops_at(token_ids) else "length"
            completions.append(
                Completion(token_ids, logprobs, reason, self.policy_version, kept_mass)
            )
        return completions

    def update_weights(self, weights: PolicyWeights, *, check_digest: bool = True) -> None:
        self.policy_version = -1  # a mixture until all have come
        self._llm.apply_model(lambda model: model.load_weights(iter(weights)))
        if weights.digest is None:
            raise WeightMismatchError(
                f"vLLM did not read version {weights.version} of the weights to the end; check "
                "that config.json in model.hf_assets_path is of the model that is trained"
            )
        self._llm.reset_prefix_cache()
        self.policy_version = weights.version

    def state_dict(self) -> dict[str, Any]:
        return {"n_calls": self._n_calls}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._n_calls = state_dict["n_calls"]
