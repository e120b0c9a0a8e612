"""Generators, which complete prompts with the policy's weights, and functions that build them."""

import contextlib
import copy
import math
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch

from torchtitan.adapters.multi_lora import MultiLoRA, reasons_for_turns
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.config.checks.common import refuse
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.seeded_init import seeded_init
from torchtitan.distributed.utils import maybe_enable_amp
from torchtitan.engine import TrainingEngine
from torchtitan.models.batch_invariant import use_batch_invariant
from torchtitan.models.decoder import Decoder
from torchtitan.numerics.products import use_onednn
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.rl.checks import reasons_not_to_share, weights_of_generator
from torchtitan.rl.decoding import LocalDecoder, continue_prompts
from torchtitan.rl.job_config import RL, JobConfig
from torchtitan.rl.types import Completion, SamplingConfig
from torchtitan.rl.weight_sync import NoWeightsError, OurNames, StaleWeightsError, copy_weights
from torchtitan.rl.weight_transport import PolicyWeights, StagedWeights
from torchtitan.tools.errors import ConfigError
from torchtitan.tools.lazy_names import load_on_access
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import set_default_dtype

# These modules import this module, so they are loaded on access.
__getattr__ = load_on_access(
    __name__,
    {
        "OpenAIGenerator": "torchtitan.integrations.openai",
        "VLLMGenerator": "torchtitan.integrations.vllm",
    },
)

Prompts = Sequence[Sequence[int]]


class Generator(ABC):
    """Completes prompts with the weights of the last update; a `weight_sync.TakesWeights`.

    is_collective: True if all ranks have to call `generate` together, with the same arguments; then
        every rank gets all completions.
    ranks_per_copy: number of consecutive ranks over which one copy of the model is sharded. If
        `is_collective` is False, these ranks have to call `generate` together.
    """

    policy_version: int = -1
    is_collective: bool = False
    ranks_per_copy: int = 1
    weight_names: Literal["shared", "ours", "hf", "adapters"]
    weight_dtype: torch.dtype | None = None
    takes_shards: bool = False

    def generate(
        self,
        prompts: Prompts,
        sampling: SamplingConfig,
        num_samples: int = 1,
        *,
        first_row: int | Sequence[int] = 0,
    ) -> list[Completion]:
        """Return `num_samples` completions of each prompt (token ids), prompt by prompt.

        first_row: index of the first completion among the completions of all ranks, or one such index per
            prompt. With `sampling.seed`, completions depend on this index, not on the rank.
        Raises ValueError for a prompt that cannot be continued, FloatingPointError if a log-prob is not
        finite, and the errors of `check_weights`.
        """
        self.check_weights()
        if isinstance(first_row, int):
            first_row = [first_row + i * num_samples for i in range(len(prompts))]
        rows = [first + i for first in first_row for i in range(num_samples)]
        return self._draw(prompts, sampling, num_samples, rows)

    @abstractmethod
    def _draw(
        self, prompts: Prompts, sampling: SamplingConfig, num_samples: int, rows: Sequence[int]
    ) -> list[Completion]:
        """Return what `generate` returns. rows: each completion's index among the completions of all ranks."""

    def check_weights(self) -> None:
        """Raise StaleWeightsError or NoWeightsError unless the weights have the version `policy_version`."""
        if self.policy_version < 0:
            raise NoWeightsError(
                "the generator's model has no weights, or only a part of an update; call "
                "update_weights before generate"
            )

    @abstractmethod
    def update_weights(self, weights: Any, *, check_digest: bool = True) -> None:
        """Load all weights, and record their version. weights: the result of `weight_sync.weights_for`.

        Raises WeightMismatchError if the received weights differ from the sent weights.
        """

    def pinned(self) -> "Generator":
        """Return a generator that keeps sampling from the current weights, even after updates."""
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return the state that later calls without `sampling.seed` need to draw the same tokens.

        The state does not include weights.
        """
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: B027, for no state
        """Restore a `state_dict`."""


class DecoderGenerator(Generator):
    """Samples with a `LocalDecoder`; keys and values are freed after each call.

    max_rows: number of completions that a rank continues at the same time; 0 means no limit.
    records_experts: completions include the experts of their tokens. Raises ConfigError for a dense model.
    """

    def __init__(
        self,
        decoder: LocalDecoder,
        vocab_size: int,
        *,
        seed: int = 0,
        max_rows: int = 0,
        records_experts: bool = False,
    ):
        if records_experts and not decoder.runner.model_parts[0].moe_layers:
            raise ConfigError(
                "only a mixture of experts has experts to replay, and this model is dense; set "
                "rl.generator.replay_experts, or verl's enable_rollout_routing_replay, to false"
            )
        self.decoder, self.vocab_size, self.max_rows = decoder, vocab_size, max_rows
        self.records_experts = records_experts
        # Called before each forward; may update the weights.
        self.before_forward: Callable[[], None] = lambda: None
        self._on_rows: Callable[[list[int]], None] = lambda _: None
        self._rng = torch.Generator().manual_seed(seed)

    @property
    def max_length(self) -> int:
        """Length limit of prompt plus completion: RoPE table + 1, as the model never reads the last token."""
        return self.decoder.max_length + 1

    def check_prompts(self, prompts: Prompts, max_tokens: int) -> None:
        """Raise ValueError if a prompt cannot be continued by `max_tokens` tokens."""
        for i, prompt in enumerate(prompts):
            are_ids = all(type(x) is int or isinstance(x, np.integer) for x in prompt)
            if not (len(prompt) and are_ids and 0 <= min(prompt) <= max(prompt) < self.vocab_size):
                raise ValueError(
                    f"prompt {i} must be a list of at least one token id, each below the model's "
                    f"{self.vocab_size}, got {prompt!r:.200}; encode texts with the tokenizer that the "
                    "model was trained with, and pass tensors as tensor.tolist()"
                )
            if len(prompt) + max_tokens > self.max_length:
                raise ValueError(
                    f"prompt {i} of {len(prompt)} tokens with max_tokens = {max_tokens} "
                    f"does not fit the model's RoPE table of {self.max_length - 1} positions; lower "
                    "rl.sampling.max_tokens, or raise training.seq_len, which sets its length"
                )

    def _draw(
        self, prompts: Prompts, sampling: SamplingConfig, num_samples: int, rows: Sequence[int]
    ) -> list[Completion]:
        self.check_prompts(prompts, sampling.max_tokens)
        # A row's random numbers depend neither on the layout nor on when other rows end.
        seed = sampling.seed
        rng = self._rng if seed is None else torch.Generator().manual_seed(seed)
        n_rows = max(rows, default=-1) + 1
        uniform = torch.rand(n_rows, sampling.max_tokens, dtype=torch.float64, generator=rng)
        if not rows:
            return []

        def next_version() -> int:
            self.before_forward()
            return self.policy_version

        drawn = continue_prompts(
            self.decoder,
            prompts,
            [i for i in range(len(prompts)) for _ in range(num_samples)],
            uniform[rows],
            sampling,
            self.max_rows,
            next_version,
            self.records_experts,
            self._on_rows,
        )
        if not all(math.isfinite(x) for completion in drawn for x in completion.token_logprobs):
            raise FloatingPointError(
                f"the policy of version {self.policy_version} has log-probs that are not finite; look "
                "at the last optimizer steps, or at how its weights were copied"
            )
        return drawn

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self._rng.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._rng.set_state(state_dict["rng"])


class LocalGenerator(DecoderGenerator):
    """Samples from an engine's own modules, in any layout; weights are never copied.

    Call `update_weights` after every change of the weights, or `generate` raises StaleWeightsError.
    Data-parallel ranks continue different prompts; each makes as many forwards as the rank with the
    longest completion. options: arguments of `DecoderGenerator`.
    """

    is_collective = True
    weight_names = "shared"

    def __init__(self, engine: TrainingEngine, **options: Any):
        decoder = LocalDecoder.from_engine(engine)
        super().__init__(decoder, engine.model_args.vocab_size, **options)
        self.engine = engine
        self.update_weights()

    @contextlib.contextmanager
    def with_adapters(
        self, weights: Sequence[Mapping[str, torch.Tensor]], of_prompts: Sequence[int]
    ) -> Iterator[None]:
        """Inside the context, `generate` uses the adapters `weights[of_prompts[i]]` for prompt i. Collective.

        weights: for each model, this rank's shards of the LoRA matrices, from `snapshots.host_copy`.
        Raises ValueError if the models cannot share a batch; see `reasons_for_turns`.
        """
        parts, dims = self.engine.model_parts, self.engine.parallel_dims
        if reasons := reasons_for_turns(self.engine.job_config, dims, parts):
            raise ValueError(
                f"models with adapters cannot share a batch, because {reasons[0]}; sample from one "
                "model after the other"
            )
        passes = MultiLoRA(parts, None)
        self._on_rows = lambda prompts: passes.set_rows([of_prompts[i] for i in prompts])
        try:
            with torch.no_grad(), passes.adapters(weights, trains=False):
                yield
        finally:
            self._on_rows = lambda _: None

    def update_weights(self, weights: Any = None, *, check_digest: bool = True) -> None:
        """Record the version of the engine's weights; nothing is copied."""
        self.policy_version = self.engine.weights_version

    def check_weights(self) -> None:
        if self.engine.weights_version != self.policy_version:
            raise StaleWeightsError(
                f"the trainer's weights are of version {self.engine.weights_version} and the "
                f"generator's last update was version {self.policy_version}; call update_weights "
                "after each optimizer step and after loading"
            )


class CopyGenerator(DecoderGenerator):
    """Samples from a separate, whole model on this process, with weights from `update_weights`.

    `generate` does not communicate, so a thread may call it while another thread trains.
    options: arguments of `DecoderGenerator`.
    """

    weight_names = "ours"

    def __init__(
        self, model: Decoder, *, autocast: AbstractContextManager | None = None, **options: Any
    ):
        super().__init__(LocalDecoder.from_model(model, autocast), model.vocab_size, **options)
        self.model = model
        self.weight_dtype = model.tok_embeddings.weight.dtype

    @classmethod
    @torch.no_grad()
    def from_policy(
        cls, policy: "PolicyModel", *, dtype: torch.dtype | None = None, **options: Any
    ) -> "CopyGenerator":
        """Return a generator with a new model of the policy's class, without weights.

        dtype: dtype of the weights; None takes the policy's `compute_dtype`.
        """
        training = policy.job_config.training
        with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[training.dtype]):
            model = policy.train_spec.model_cls(copy.deepcopy(policy.model_args))
        # Engines also call this. Otherwise samples would differ between ranks with and without an engine.
        use_onednn(model, policy.device)
        model.to_empty(device=policy.device)
        # Fill the buffers. `update_weights` overwrites the weights.
        with seeded_init(model, 0):
            model.init_weights()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(False)
            if not OurNames().keeps_dtype(name):
                parameter.data = parameter.data.to(dtype or policy.compute_dtype)
        # Don't use the engine's own autocast context, because another thread may be inside it.
        autocast = maybe_enable_amp(
            policy.parallel_dims, training.mixed_precision_param, policy.device.type
        )
        return cls(model.eval(), autocast=autocast, **options)

    def update_weights(self, weights: PolicyWeights, *, check_digest: bool = True) -> None:
        # Until all weights are copied, the model mixes two versions.
        self.policy_version = -1
        copy_weights(weights, self.model, check_digest=check_digest)
        self.policy_version = weights.version


class BufferedGenerator(Generator):
    """Accepts weight updates while another thread samples; neither thread waits for the other.

    `update_weights` stores a copy of the weights, and `pinned` returns a generator that loads this copy
    before it samples, so the weights for a request do not depend on timing. One thread samples, in the
    order of the `pinned` calls. in_flight: load the newest copy before each token, not only before the first.
    """

    def __init__(self, generator: Generator, *, in_flight: bool = False):
        self._generator, self._in_flight = generator, in_flight
        if in_flight:
            assert isinstance(generator, DecoderGenerator)
            # A weak reference: a cycle would keep the model in memory until garbage collection.
            this = weakref.proxy(self)
            generator.before_forward = lambda: this._take_over()
        self.weight_names, self.weight_dtype = generator.weight_names, generator.weight_dtype
        self.ranks_per_copy = generator.ranks_per_copy
        self._staged: StagedWeights | None = None
        self._checks_digest = True

    def pinned(self) -> Generator:
        return self if self._in_flight else copy.copy(self)

    def _take_over(self) -> None:
        # Read the attribute once, because another thread may replace it.
        staged = self._staged
        assert staged is not None
        if self._generator.policy_version != staged.version:
            self._generator.update_weights(staged, check_digest=self._checks_digest)

    def _draw(
        self, prompts: Prompts, sampling: SamplingConfig, num_samples: int, rows: Sequence[int]
    ) -> list[Completion]:
        self._take_over()
        first_rows = rows[::num_samples]
        return self._generator.generate(prompts, sampling, num_samples, first_row=first_rows)

    def update_weights(self, weights: PolicyWeights, *, check_digest: bool = True) -> None:
        """Store a copy of the weights; names and digest are checked when the copy is loaded."""
        self._staged, self._checks_digest = StagedWeights(weights), check_digest
        self.policy_version = weights.version


@dataclass(frozen=True)
class PolicyModel:
    """What a generator needs to build its own copy of the trained model. device: this rank's device."""

    job_config: JobConfig
    train_spec: TrainSpec
    model_args: Any
    parallel_dims: ParallelDims
    device: torch.device

    @classmethod
    def from_engine(cls, engine: TrainingEngine) -> "PolicyModel":
        return cls(*(getattr(engine, field.name) for field in fields(cls)))

    @property
    def compute_dtype_name(self) -> str:
        """The dtype of weights in the trainer's forward.

        With FSDP it is `training.mixed_precision_param`, to which FSDP casts; else `training.dtype`.
        """
        training, uses_fsdp = self.job_config.training, self.parallel_dims.uses_fsdp
        return training.mixed_precision_param if uses_fsdp else training.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        return TORCH_DTYPE_MAP[self.compute_dtype_name]

    @property
    def generator_dtype(self) -> torch.dtype | None:
        dtype = self.job_config.rl.generator.dtype
        return TORCH_DTYPE_MAP[dtype] if dtype else None


def build_generator(job_config: JobConfig, engine: TrainingEngine) -> Generator:
    """Return the generator that `[rl.generator]` and `[rl.weight_sync]` describe, on the trainer's ranks.

    Raises ConfigError if their settings conflict, or vLLM is needed and not installed.
    """
    rl, policy = job_config.rl, replace(PolicyModel.from_engine(engine), job_config=job_config)
    dtype = policy.compute_dtype_name
    refuse(weights_of_generator(rl, dtype))
    if rl.weight_sync.mode != "broadcast" and not reasons_not_to_share(rl, dtype):
        return LocalGenerator(engine, **_local_options(rl))
    return build_copy(policy)


def _local_options(rl: RL) -> dict[str, Any]:
    settings = rl.generator
    options = {"max_rows": settings.max_batch_size, "records_experts": settings.replay_experts}
    return options | {"seed": rl.seed}


def build_copy(policy: PolicyModel) -> Generator:
    """Return a generator with its own model, without weights yet. Raises what `build_generator` raises."""
    config, rl = policy.job_config, policy.job_config.rl
    settings = rl.generator
    if settings.backend == "local":
        dtype = policy.generator_dtype
        own = CopyGenerator.from_policy(policy, dtype=dtype, **_local_options(rl))
        if settings.exact:
            use_batch_invariant([own.model])
        return own
    if config.model.fp32_head:
        logger.warning(
            "model.fp32_head applies to the trainer; rl.generator.backend = %r keeps the dtype of its "
            "own output projection",
            settings.backend,
        )
    options: dict[str, Any] = {
        "dtype": policy.generator_dtype,
        "seed": rl.seed,
        "folder": os.path.join(config.job.dump_folder, "generator_weights"),
    }
    if settings.backend == "vllm":
        # Without a dtype, vLLM may choose bf16 although config.json says float32.
        options["dtype"] = options["dtype"] or policy.compute_dtype
        options |= {"seq_len": config.training.seq_len, "lora_rank": config.lora.rank}
        try:
            return __getattr__("VLLMGenerator")(settings, config.model.hf_assets_path, **options)
        except ImportError as error:
            raise ConfigError(str(error)) from error
    return __getattr__("OpenAIGenerator")(
        settings,
        hf_assets_path=config.model.hf_assets_path,
        vocab_size=policy.model_args.vocab_size,
        delta=rl.weight_sync.delta,
        **options,
    )
