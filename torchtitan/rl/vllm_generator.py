"""Sampling with vLLM, on the ranks' own accelerators. vLLM is imported when one is built."""

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.distributed.processes.ranks import num_ranks
from torchtitan.rl.generator import ForeignGenerator, Prompts
from torchtitan.rl.types import Completion, SamplingConfig
from torchtitan.rl.weight_sync import PolicyWeights, WeightMismatchError, hand_over
from torchtitan.tools import host
from torchtitan.tools.errors import ConfigError, RunError


class VLLMGenerator(ForeignGenerator):
    """A generator on a vLLM engine inside this process; each rank has one, on its own device.

    hf_assets_path: folder with the model's config.json and tokenizer; weights come from
        `update_weights`, not from there.
    dtype: of vLLM's weights; None for what config.json says, and for what is sent then.
    memory_share: of the device's memory, for weights and cache; the trainer needs the rest.
    tensor_parallel_degree: consecutive ranks that split one model. Their engines get the same
        prompts and draw the same completions.
    max_seq_len: the longest prompt and completion, in tokens; None for what config.json says.
    options: further arguments of `vllm.LLM`.

    Log-probs are those after temperature. Truncation (top_p, top_k) is refused: vLLM does not
    report the mass of the tokens that it kept. Only the version and the names of an update are
    checked: vLLM changes the layout of weights, so they have no common digest.

    Raises ImportError if vLLM is not installed, ConfigError if ranks are left over from groups of
    tensor_parallel_degree.
    """

    def __init__(
        self,
        hf_assets_path: str,
        *,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        memory_share: float = 0.4,
        tensor_parallel_degree: int = 1,
        max_seq_len: int | None = None,
        **options: Any,
    ):
        n_ranks = num_ranks()
        if n_ranks % tensor_parallel_degree:
            raise ConfigError(
                f"rl.generator.tensor_parallel_degree must divide the ranks that generate, got "
                f"{tensor_parallel_degree} with {n_ranks} ranks; change one of them"
            )
        if n_ranks > 1:
            # The engine takes its place from torchrun's RANK and LOCAL_RANK, and joins our process
            # group. Otherwise every process would begin with the machine's first device.
            options["distributed_executor_backend"] = "external_launcher"
        if max_seq_len is not None:
            options["max_model_len"] = max_seq_len
        self.ranks_per_copy = tensor_parallel_degree
        # Runs the engine in this process: it takes tensors, which another process would copy again.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        try:
            import vllm
        except ImportError as error:
            raise ImportError(
                "rl.generator.backend = 'vllm' needs vLLM, which is not installed; install it "
                "with `pip install vllm`, or set the backend to 'local'"
            ) from error
        super().__init__(dtype, seed)
        self._vllm = vllm
        self._llm = vllm.LLM(
            model=hf_assets_path,
            dtype="auto" if dtype is None else dtype,
            load_format="dummy",
            gpu_memory_utilization=memory_share,
            tensor_parallel_size=tensor_parallel_degree,
            seed=seed,  # the engines of one model have to draw alike
            logprobs_mode="processed_logprobs",
            # A prompt is read once for all its samples. `update_weights` empties the cache.
            enable_prefix_caching=True,
            **options,
        )
        # When an engine is collected, vLLM would destroy the default process group, which is the
        # trainer's or its host's, and fail if that is gone by then.
        engine_core = getattr(getattr(self._llm, "llm_engine", None), "engine_core", None)
        finalizer = getattr(engine_core, "_finalizer", None)
        if finalizer is not None:
            finalizer.detach()
        host.at_last_move_out(_destroy_groups_of_vllm)

    def _draw(
        self, prompts: Prompts, sampling: SamplingConfig, num_samples: int, rows: Sequence[int]
    ) -> list[Completion]:
        if sampling.top_p < 1 or sampling.top_k > 0:
            raise ValueError(
                f"rl.generator.backend = 'vllm' gives no log-probs of a truncated distribution, "
                f"got top_p = {sampling.top_p} and top_k = {sampling.top_k}; set them to 1 and 0, "
                "or the backend to 'local'"
            )
        seed = self._seed_of_call(sampling)
        requests = self._llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            [
                self._vllm.SamplingParams(
                    n=num_samples,
                    temperature=sampling.temperature,
                    max_tokens=sampling.max_tokens,
                    stop_token_ids=list(sampling.stop_token_ids),
                    stop=list(sampling.stop_strings) or None,
                    include_stop_str_in_output=True,
                    ignore_eos=True,
                    detokenize=bool(sampling.stop_strings),
                    logprobs=0,
                    # vLLM adds a sample's index: each completion has a seed of its own.
                    seed=(seed + first_row) % 2**62,
                )
                for first_row in rows[::num_samples]
            ],
            use_tqdm=False,
        )
        completions = []
        for output in (output for request in requests for output in request.outputs):
            token_ids = tuple(output.token_ids)
            pairs = zip(output.logprobs, token_ids, strict=True)
            logprobs = [of_place[token].logprob for of_place, token in pairs]
            completions.append(self._completion(token_ids, logprobs, sampling))
        return completions

    def update_weights(self, weights: PolicyWeights, *, check_digest: bool = True) -> None:
        self.policy_version = -1  # a mixture until all have come

        def load(pairs: Iterator[tuple[str, Tensor]]) -> None:
            # Not the model's own `load_weights`, whose parameters vLLM has laid out in another way.
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": pairs})
            if next(pairs, None) is not None:
                raise RunError("it did not read them to the end")
            # Here and not after `hand_over`, so that a rank that cannot tells the others.
            if self._llm.reset_prefix_cache() is False:
                raise RunError(
                    "it kept its prefix cache, which holds keys and values of earlier weights, as a "
                    "request was still running; end all of them before an update"
                )

        failure = hand_over(weights, load)
        if failure is not None:
            raise WeightMismatchError(
                f"vLLM did not take version {weights.version} of the weights ({failure!r}); if "
                "names or shapes differ, check that config.json in model.hf_assets_path is of the "
                "model that is trained"
            ) from failure
        self.policy_version = weights.version


def _destroy_groups_of_vllm() -> None:
    """Before the default group is destroyed: vLLM would go on with them in a later one."""
    groups = sys.modules.get("vllm.distributed.parallel_state")
    if groups is not None and dist.is_initialized():
        groups.destroy_model_parallel()
        if groups._WORLD is not None:
            groups._WORLD.destroy()
            groups._WORLD = None
