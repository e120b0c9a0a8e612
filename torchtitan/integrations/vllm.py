"""Sampling with vLLM on the ranks' own accelerators. Building a generator imports vLLM."""

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.distributed.processes.ranks import num_ranks
from torchtitan.rl.foreign_generator import ForeignGenerator
from torchtitan.rl.generator import Prompts
from torchtitan.rl.job_config import RLGenerator
from torchtitan.rl.types import Completion, SamplingConfig
from torchtitan.tools import host
from torchtitan.tools.errors import ConfigError, RunError


class VLLMGenerator(ForeignGenerator):
    """Samples with a vLLM engine inside this process; each rank has an engine on its own device.

    settings: `[rl.generator]`. folder: each rank writes adapters to a subfolder of it.
    hf_assets_path: folder with the model's config.json and tokenizer. Its weights are read only if
        updates bring adapters; otherwise all weights come from `update_weights`.
    dtype: dtype of vLLM's weights; None takes config.json's dtype, and sends weights without a cast.
    seq_len: the length limit if the settings have none. lora_rank: largest rank of the adapters.

    Raises ImportError if vLLM is not installed, ConfigError if tensor_parallel_degree does not
    divide the number of ranks.
    """

    engine_name = "vLLM"
    remedy = (
        "; if names or shapes differ, check that config.json in model.hf_assets_path describes the "
        "model that is trained"
    )

    def __init__(
        self,
        settings: RLGenerator,
        hf_assets_path: str,
        folder: str = "",
        *,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        seq_len: int | None = None,
        lora_rank: int = 0,
    ):
        n_ranks, degree = num_ranks(), settings.tensor_parallel_degree
        if n_ranks % degree:
            raise ConfigError(
                f"rl.generator.tensor_parallel_degree must divide the number of ranks that "
                f"generate, got {degree} with {n_ranks} ranks; change one of them"
            )
        options: dict[str, Any] = {}
        if n_ranks > 1:
            # With this executor vLLM reads torchrun's RANK and LOCAL_RANK and joins our process
            # group. With its default executor, every process would start at the machine's first device.
            options["distributed_executor_backend"] = "external_launcher"
        if max_len := settings.max_seq_len or seq_len:
            options["max_model_len"] = max_len
        if settings.adapters:
            # vLLM allows these LoRA ranks, and 512.
            choices = (8, 16, 32, 64, 128, 256, 320)
            rank = next((n for n in choices if n >= lora_rank), 512)
            options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
        if settings.replay_experts:
            options["enable_return_routed_experts"] = True
        self.ranks_per_copy = degree
        # Run vLLM's engine in this process, so that it can read our tensors without a copy.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        try:
            import vllm
        except ImportError as error:
            raise ImportError(
                "rl.generator.backend = 'vllm' needs vLLM, which is not installed; install it "
                "with `pip install vllm`, or set the backend to 'local'"
            ) from error
        # Each rank writes the adapters by itself, because sampling ahead of training must not communicate.
        folder = os.path.join(folder, f"rank-{dist.get_rank() if n_ranks > 1 else 0}")
        super().__init__(dtype, seed, folder, settings.adapters, settings.replay_experts)
        self._vllm = vllm
        # vLLM's LoRARequest for the last update.
        self._adapters: Any = None
        self._llm = vllm.LLM(
            model=hf_assets_path,
            dtype="auto" if dtype is None else dtype,
            load_format="auto" if settings.adapters else "dummy",
            gpu_memory_utilization=settings.memory_share,
            tensor_parallel_size=degree,
            seed=seed,  # equal on all ranks: engines that split a model must sample the same tokens
            logprobs_mode="processed_logprobs",
            # vLLM reads a prompt once for all its samples. `update_weights` empties the cache.
            enable_prefix_caching=True,
            **options,
        )
        # When the engine is garbage-collected, vLLM would destroy the trainer's process group.
        engine_core = getattr(getattr(self._llm, "llm_engine", None), "engine_core", None)
        if finalizer := getattr(engine_core, "_finalizer", None):
            finalizer.detach()
        host.at_last_move_out(_destroy_groups_of_vllm)

    def _complete_all(
        self, prompts: Prompts, sampling: SamplingConfig, num_samples: int, seeds: Sequence[int]
    ) -> list[Completion]:
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
                    # vLLM adds the index of a sample to the seed, so each completion has its own seed.
                    seed=seed,
                )
                for seed in seeds[::num_samples]
            ],
            use_tqdm=False,
            lora_request=self._adapters,
        )
        completions = []
        for i, output in enumerate(output for request in requests for output in request.outputs):
            pairs = zip(output.logprobs, output.token_ids, strict=True)
            logprobs = [by_token[token].logprob for by_token, token in pairs]
            experts, prompt = getattr(output, "routed_experts", None), prompts[i // num_samples]
            completions.append(
                self._completion(output.token_ids, logprobs, sampling, prompt, experts)
            )
        return completions

    def _load(self, pairs: Iterator[tuple[str, Tensor]], version: int) -> None:
        if self.weight_names == "adapters":
            # Adapter ids begin at 1. vLLM's prefix cache distinguishes adapters by name.
            self._write_adapters(pairs, version)
            name, path = f"version-{version}", self._folder_of(version)
            self._adapters = self._vllm.lora.request.LoRARequest(name, version + 1, path)
            # Load the adapters now, to raise here if vLLM cannot use them.
            self._llm.llm_engine.add_lora(self._adapters)
            self._remove_other_versions(version)
            return
        self._llm.collective_rpc(_pack_experts_again)
        # The model's own `load_weights` cannot be used, because vLLM has rearranged the parameters.
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": pairs})
        if next(pairs, None) is not None:
            raise RunError("vLLM did not read all weights")
        if self._llm.reset_prefix_cache() is False:
            raise RunError(
                "vLLM kept its prefix cache, with keys and values of earlier weights, because a request "
                "was still running; end all requests before an update"
            )


def _pack_experts_again(worker: Any) -> None:
    """Make a CPU worker of vLLM 0.32.0 pack new expert weights.

    By default, the worker would copy unpacked weights over the packed weights.
    """
    if worker.device.type != "cpu":
        return
    for module in worker.model_runner.model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _destroy_groups_of_vllm() -> None:
    """Destroy vLLM's process groups. vLLM 0.32.0 would use them even after the default group is gone."""
    groups = sys.modules.get("vllm.distributed.parallel_state")
    if groups is not None and dist.is_initialized():
        groups.destroy_model_parallel()
        if groups._WORLD is not None:
            groups._WORLD.destroy()
            groups._WORLD = None
