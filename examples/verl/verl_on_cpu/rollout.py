"""Rollouts for verl's agent loop, from torchtitan's decoder: `actor_rollout_ref.rollout.name=torchtitan`.

Each data-parallel rank of the trainer has a server, a Ray actor with a whole model, and sends it
the weights after each step. It is meant for models that run on a laptop; vLLM is faster on GPUs.
"""

from collections.abc import Iterator
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from verl.plugin.platform import get_platform
from verl.utils import normalize_token_ids
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name
from verl.utils.fs import copy_to_local
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from torchtitan.generation.sampling import end_ids
from torchtitan.rl.weight_transport import buckets_of, copied
from verl_on_cpu.sampler import Sampler


def server_name(replica_rank: int, suffix: str = "") -> str:
    return f"torchtitan_server_{replica_rank}{suffix}"


class Server:
    """A Ray actor that continues prompts with the policy's weights.

    config: the section `rollout`. folder: the model's local folder.
    """

    def __init__(self, config: RolloutConfig, folder: str, replica_rank: int):
        self.config = config
        self.global_steps: int | None = None
        self.max_len = config.prompt_length + config.response_length
        if config.max_model_len:
            self.max_len = min(self.max_len, config.max_model_len)
        self.sampler = Sampler(
            folder,
            max_len=self.max_len,
            dtype={"half": "float16", "auto": "float32"}.get(config.dtype, config.dtype),
            max_rows=config.max_num_seqs,
            seed=(config.seed or 0) + replica_rank,
            eos_ids=end_ids(folder),
            records_experts=config.enable_rollout_routing_replay,
        )

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        **_: Any,
    ) -> TokenOutput:
        """Raises ValueError for images, videos and audio, and for settings that are not supported."""
        if image_data or video_data or audio_data:
            raise ValueError(
                "the torchtitan rollout continues text, got images, videos or audio; use another "
                "actor_rollout_ref.rollout.name"
            )
        prompt, settings = normalize_token_ids(prompt_ids), dict(sampling_params)
        wants_logprobs = settings.pop("logprobs", False) not in (None, False)
        if len(prompt) >= self.max_len:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens leaves no room for an answer within {self.max_len}; "
                "raise rollout.prompt_length or rollout.max_model_len"
            )
        wanted = settings.pop("max_tokens", None) or settings.pop("max_new_tokens", None)
        max_tokens = min(wanted or self.config.response_length, self.max_len - len(prompt))
        steps = self.global_steps
        completion = await self.sampler.draw(prompt, max_tokens, settings)
        tokens, log_probs, experts = (), (), None
        if completion is not None:
            tokens, log_probs = completion.token_ids, completion.token_logprobs
            experts = completion.routed_experts
        return TokenOutput(
            token_ids=list(tokens),
            log_probs=list(log_probs) if wants_logprobs else None,
            routed_experts=None if experts is None else experts.numpy(),
            stop_reason="aborted" if completion is None else "completed",
            extra_fields={"global_steps": steps},
        )

    async def load_weights(
        self, named_tensors: list[tuple[str, Tensor]], is_last: bool, global_steps: int | None
    ) -> None:
        await self.sampler.load_weights(named_tensors, is_last=is_last)
        if is_last:
            self.global_steps = global_steps

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        await self.sampler.abort(reject_request)

    async def resume_generation(self) -> None:
        await self.sampler.resume()

    async def _nothing(self, *_: Any, **__: Any) -> None:
        """Does nothing: weights are not released, and a cache lives only while a batch is drawn."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = _nothing
    start_profile = stop_profile = _nothing


class Replica(RolloutReplica):
    """Starts one server for verl."""

    async def launch_servers(self) -> None:
        if self.world_size != 1:
            raise ValueError(
                f"a torchtitan rollout is one process, got {self.world_size} by "
                "rollout.tensor_model_parallel_size, data_parallel_size and "
                "pipeline_model_parallel_size; set all three to 1"
            )
        (worker,) = self.workers
        resource = get_platform().ray_resource_name()

        def place(_: Any) -> tuple[str, list[str]]:
            context = ray.get_runtime_context()
            return context.get_node_id(), context.get_accelerator_ids().get(resource, [])

        node, devices = await worker.__ray_call__.remote(place)
        environment = {}
        if get_device_name() != "cpu":  # share the worker's devices
            environment = dict.fromkeys(get_platform().ray_noset_envvars(), "1")
            environment[get_platform().visible_devices_envvar()] = ",".join(devices)
        path = getattr(self.model_config, "local_path", None) or copy_to_local(
            self.model_config.path
        )
        name = server_name(self.replica_rank, self.name_suffix)
        actor = ray.remote(Server).options(
            name=name,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            runtime_env={"env_vars": environment},
            max_concurrency=self.max_concurrency,
        )
        server = actor.remote(self.config, path, self.replica_rank)
        self.servers = [server]
        self._server_handle, self._server_address = server, name


class WeightSender(BaseRollout):
    """Sends a training rank's weights to its server."""

    def __init__(
        self,
        config: RolloutConfig,
        model_config: HFModelConfig,
        device_mesh: DeviceMesh | None,
        replica_rank: int = -1,
    ):
        self.config = omega_conf_to_dataclass(config)
        self.model_config = model_config
        self.replica_rank = device_mesh["dp"].get_local_rank() if device_mesh else replica_rank

    async def resume(self, tags: list[str]) -> None:
        """Does nothing: the server never releases its weights."""

    async def release(self) -> None:
        """Does nothing, like `resume`."""

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Iterator[tuple[str, Tensor]],
        wire_format: str = "named_tensors",
        peft_config: Any = None,
        global_steps: int | None = None,
        **_: Any,
    ) -> None:
        """Send all weights to the server. weights: (Hugging Face name, whole tensor).

        Raises ValueError for adapters and for changes of weights.
        """
        if wire_format != "named_tensors" or peft_config is not None:
            raise ValueError(
                "the torchtitan rollout takes whole weights, got "
                f"{'LoRA adapters' if peft_config is not None else wire_format}; set "
                "actor_rollout_ref.rollout.checkpoint_engine.backend=naive and model.lora.merge=true"
            )
        server = ray.get_actor(server_name(self.replica_rank))
        # Copies, because the iterator may reuse a tensor's memory. verl's bucket size is for GPUs, and
        # not used.
        for bucket in buckets_of(copied(weights, torch.device("cpu"))):
            await server.load_weights.remote(bucket, False, global_steps)
        await server.load_weights.remote([], True, global_steps)
