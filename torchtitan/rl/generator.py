"""Generators, which complete prompts with the policy's weights, and the choice between them."""

import copy
import os
import random
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch

from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.config.checks.common import refuse
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.seeded_init import seeded_init
from torchtitan.distributed.utils import maybe_enable_amp
from torchtitan.engine import TrainingEngine
from torchtitan.models.decoder import Decoder
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.rl.checks import reasons_not_to_share, rescoring, weight_sharing
from torchtitan.rl.decoding import LocalDecoder, continue_prompts
from torchtitan.rl.job_config import JobConfig
from torchtitan.rl.types import Completion, SamplingConfig
from torchtitan.rl.weight_sync import (
    NoWeightsError,
    OurNames,
    PolicyWeights,
    StagedWeights,
    StaleWeightsError,
    copy_weights,
)
from torchtitan.tools.lazy_names import load_on_access
from torchtitan.tools.logging import logger
from torchtitan.tools.products import use_onednn
from torchtitan.tools.utils import set_default_dtype

# They build on this module.
__getattr__ = load_on_access(
    __name__,
    {
        "OpenAIGenerator": "torchtitan.integrations.openai",
        "VLLMGenerator": "torchtitan.integrations.vllm",
    },
)

Prompts = Sequence[Sequence[int]]


class Generator(ABC):
    """Continues prompts with the weights of the last update.

    policy_version: of these weights; -1 before there are any.
    is_collective: whether all ranks have to call `generate` together, with the same arguments, and
        all get all completions; otherwise each rank calls it by itself, but for
    ranks_per_copy: as many consecutive ranks, which hold one copy of the model, call it together.
    weight_names: the naming of the weights it wants; "shared" if it has the trainer's own.
    weight_dtype: what parameters have to be cast to; None for no cast.
    takes_shards: whether it wants each rank's shards as they are, in place of whole tensors:
        `weight_sync.LiveWeights` under our names, `LocalShard`s under Hugging Face names.
    """

    policy_version: int = -1
    is_collective: bool = False
    ranks_per_copy: int = 1
    weight_names: Literal["shared", "ours", "hf"]
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
        """Return `num_samples` completions of each prompt (token ids), those of a prompt together.

        first_row: number of the first completion among those of all ranks, where ranks share them
            out, or for each prompt the number of its first; draws with `sampling.seed` belong to a
            completion's number, not to a rank.
        Raises ValueError for a prompt that cannot be continued, StaleWeightsError or NoWeightsError
        for weights of unknown version, FloatingPointError if a log-prob is not finite.
        """
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}")
        self.check_weights()
        if isinstance(first_row, int):
            first_row = range(first_row, first_row + len(prompts) * num_samples, num_samples)
        rows = [first + i for first in first_row for i in range(num_samples)]
        return self._draw(prompts, sampling, num_samples, rows)

    @abstractmethod
    def _draw(
        self, prompts: Prompts, sampling: SamplingConfig, num_samples: int, rows: Sequence[int]
    ) -> list[Completion]:
        """As `generate`, with weights of a known version. rows: numbers of the completions."""

    def check_weights(self) -> None:
        """Raise StaleWeightsError or NoWeightsError unless it has the weights of its version."""
        if self.policy_version < 0:
            raise NoWeightsError(
                "the generator's model has no weights, or only a part of an update; call "
                "update_weights before generate"
            )

    @abstractmethod
    def update_weights(
        self, weights: PolicyWeights | None = None, *, check_digest: bool = True
    ) -> None:
        """Take over all weights and their version; None where weights are shared.

        Raises WeightMismatchError if they are not those that were sent.
        """

    def pinned(self) -> "Generator":
        """What draws with today's weights later on, whatever was updated by then.

        The generator itself, unless it lets updates come before their turn.
        """
        return self

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What the next draws depend on, besides weights and arguments."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class _DecoderGenerator(Generator):
    """Samples with a `LocalDecoder`; keys and values are freed after each call.

    max_rows: how many completions a rank continues at once, which bounds its cache; 0 for all.
    """

    def __init__(self, decoder: LocalDecoder, vocab_size: int, seed: int, max_rows: int):
        if max_rows < 0:
            raise ValueError(f"max_rows must be at least 0, got {max_rows}; 0 takes all at once")
        self.decoder, self.vocab_size, self.max_rows = decoder, vocab_size, max_rows
        # Called before each forward; it may update the weights.
        self.before_forward: Callable[[], None] = lambda: None
        self._rng = torch.Generator().manual_seed(seed)

    @property
    def max_length(self) -> int:
        """Most tokens of a prompt and its completion; the last is drawn and not read."""
        return len(self.decoder.rope_table) + 1

    def check_prompts(self, prompts: Prompts, max_tokens: int) -> None:
        """Raise ValueError if one cannot be continued by so many tokens."""
        for i, prompt in enumerate(prompts):
            wrong = [x for x in prompt if type(x) is not int and not isinstance(x, np.integer)]
            if wrong:
                raise ValueError(
                    f"prompt {i} must be a list of token ids, got {wrong[0]!r} in it; encode texts, and "
                    "give tensors as tensor.tolist()"
                )
            if not len(prompt):
                raise ValueError(f"prompt {i} has no token; give every prompt one to begin with")
            if not 0 <= min(prompt) <= max(prompt) < self.vocab_size:
                raise ValueError(
                    f"prompt {i} has token ids from {min(prompt)} to {max(prompt)}, and the model "
                    f"has {self.vocab_size} tokens; use the tokenizer that it was trained with"
                )
            if len(prompt) + max_tokens > self.max_length:
                raise ValueError(
                    f"prompt {i} of {len(prompt)} tokens with max_tokens = {max_tokens} "
                    f"does not fit the model's RoPE table of {self.max_length - 1} positions; "
                    "lower rl.sampling.max_tokens, or raise training.seq_len, which sets the "
                    "table's length"
                )

    def _draw(
        self, prompts: Prompts, sampling: SamplingConfig, num_samples: int, rows: Sequence[int]
    ) -> list[Completion]:
        self.check_prompts(prompts, sampling.max_tokens)
        prompt_of_row = [i for i in range(len(prompts)) for _ in range(num_samples)]
        # The same numbers on every rank, one for each token that a completion may get: neither the
        # layout of ranks nor the end of other rows changes them.
        seed = sampling.seed
        rng = self._rng if seed is None else torch.Generator().manual_seed(seed)
        n_rows = max(rows, default=-1) + 1
        uniform = torch.rand(n_rows, sampling.max_tokens, dtype=torch.float64, generator=rng)
        if not prompt_of_row:
            return []
        drawn, versions_of_rows = continue_prompts(
            self.decoder,
            prompts,
            prompt_of_row,
            uniform[rows],
            sampling,
            self.max_rows,
            self._next_version,
        )
        if not torch.isfinite(drawn).all():
            raise FloatingPointError(
                f"the policy of version {self.policy_version} gives log-probs that are not finite; look at the "
                "last optimizer steps, or at how its weights were copied"
            )
        fields = drawn[..., 0].long().tolist(), drawn[..., 1].tolist(), drawn[..., 2].tolist()
        return [
            Completion(
                token_ids=tuple(tokens[:n]),
                token_logprobs=tuple(logprobs[:n]),
                finish_reason="stop" if sampling.stops_at(tokens[:n]) else "length",
                policy_version=min(versions),
                token_kept_mass=tuple(masses[:n]) if sampling.truncates else None,
                token_versions=tuple(versions) if len(set(versions)) > 1 else None,
            )
            for tokens, logprobs, masses, versions in zip(*fields, versions_of_rows, strict=True)
            for n in [len(versions)]
        ]

    def _next_version(self) -> int:
        self.before_forward()
        return self.policy_version

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self._rng.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._rng.set_state(state_dict["rng"])


class LocalGenerator(_DecoderGenerator):
    """Samples from an engine's own modules, in any layout; weights are never copied.

    Every change of the weights must be followed by `update_weights`, or it refuses to sample.
    All ranks call it together. Those that train on different data continue different prompts;
    each makes as many forwards as the one with the longest completion.
    """

    is_collective = True
    weight_names = "shared"

    def __init__(self, engine: TrainingEngine, *, seed: int = 0, max_rows: int = 0):
        decoder = LocalDecoder.of_engine(engine)
        super().__init__(decoder, engine.model_args.vocab_size, seed, max_rows)
        self.engine = engine
        self.policy_version = engine.weights_version

    def update_weights(
        self, weights: PolicyWeights | None = None, *, check_digest: bool = True
    ) -> None:
        """Note the version of the engine's weights; nothing is copied."""
        self.policy_version = self.engine.weights_version

    def check_weights(self) -> None:
        if self.engine.weights_version != self.policy_version:
            raise StaleWeightsError(
                f"the trainer's weights are of version {self.engine.weights_version} and the "
                f"generator was told of {self.policy_version}; call update_weights after each "
                "optimizer step and after loading"
            )


class CopyGenerator(_DecoderGenerator):
    """Samples from a separate, whole model on this process, with weights from `update_weights`.

    model: a decoder, with parameters in the dtype that weights are sent in.
    autocast: a context for the model's forward.

    `generate` does not communicate, so a thread may call it while another trains.
    """

    weight_names = "ours"

    def __init__(
        self,
        model: Decoder,
        *,
        seed: int = 0,
        max_rows: int = 0,
        autocast: AbstractContextManager | None = None,
    ):
        super().__init__(LocalDecoder.of_model(model, autocast), model.vocab_size, seed, max_rows)
        self.model = model
        self.weight_dtype = model.tok_embeddings.weight.dtype

    @classmethod
    def of_engine(
        cls,
        engine: TrainingEngine,
        *,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        max_rows: int = 0,
    ) -> "CopyGenerator":
        """A generator with a copy of the engine's model on every rank; it has no weights yet.

        dtype: of its parameters except routers, which keep the engine's; None for what the
            trainer computes in.
        """
        return cls.of_model_of(PolicyModel.of_engine(engine), dtype, seed, max_rows)

    @classmethod
    @torch.no_grad()
    def of_model_of(
        cls, policy: "PolicyModel", dtype: torch.dtype | None, seed: int, max_rows: int
    ) -> "CopyGenerator":
        """The same, where the policy's engine need not be on this rank."""
        training = policy.job_config.training
        with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[training.dtype]):
            model = policy.train_spec.model_cls(copy.deepcopy(policy.model_args))
        use_onednn(model, policy.device)  # or draws would depend on whether this rank has an engine
        model.to_empty(device=policy.device)
        with seeded_init(model, 0):  # for the buffers; weights are overwritten
            model.init_weights()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(False)
            if not OurNames().keeps_dtype(name):
                parameter.data = parameter.data.to(dtype or policy.compute_dtype)
        # Not the engine's own context, which a thread that trains may be in.
        autocast = maybe_enable_amp(
            policy.parallel_dims, training.mixed_precision_param, policy.device.type
        )
        return cls(model.eval(), seed=seed, max_rows=max_rows, autocast=autocast)

    def update_weights(self, weights: PolicyWeights, *, check_digest: bool = True) -> None:
        self.policy_version = -1  # a mixture until all have come
        copy_weights(weights, self.model, check_digest=check_digest)
        self.policy_version = weights.version


class BufferedGenerator(Generator):
    """Lets updates come while another thread draws: neither waits for the other.

    An update is copied aside. The next draw of a `pinned` generator that was pinned after it takes
    it over first. So what a draw uses depends on when it was asked for, and not on how long others
    took. Draws happen in the order of their pins, on one thread.

    generator: has weights of its own. Besides its own copy there are as many as versions that were
    pinned and not yet taken over: at most `rl.async_steps`, and one.
    in_flight: take over the newest update before each token instead, whatever was pinned. For
        generators with a `before_forward`.
    """

    def __init__(self, generator: Generator, *, in_flight: bool = False):
        self._generator, self._in_flight = generator, in_flight
        if in_flight:
            assert isinstance(generator, CopyGenerator)
            this = weakref.proxy(self)  # a cycle would keep the model until a collection
            generator.before_forward = lambda: this._take_over()
        self.weight_names, self.weight_dtype = generator.weight_names, generator.weight_dtype
        self.ranks_per_copy = generator.ranks_per_copy
        self._staged: StagedWeights | None = None
        self._checks_digest = True

    def pinned(self) -> Generator:
        return self if self._in_flight else copy.copy(self)

    def _take_over(self) -> None:
        staged = self._staged  # read once: another thread may put a newer one there
        assert staged is not None
        if staged.failure is not None:  # there is nothing left to read
            raise copy.copy(staged.failure)
        if self._generator.policy_version != staged.version:
            try:
                self._generator.update_weights(staged, check_digest=self._checks_digest)
            except Exception as error:
                # A copy has no traceback, whose frames would keep the model until a collection.
                staged.failure = copy.copy(error)
                raise

    def _draw(
        self, prompts: Prompts, sampling: SamplingConfig, num_samples: int, rows: Sequence[int]
    ) -> list[Completion]:
        self._take_over()
        first_rows = rows[::num_samples]
        return self._generator.generate(prompts, sampling, num_samples, first_row=first_rows)

    def update_weights(self, weights: PolicyWeights, *, check_digest: bool = True) -> None:
        """Copy the weights aside. Their names and digest are checked when they are taken over."""
        self._staged, self._checks_digest = StagedWeights(weights), check_digest
        self.policy_version = weights.version

    def state_dict(self) -> dict[str, Any]:
        return self._generator.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._generator.load_state_dict(state_dict)


class ForeignGenerator(Generator):
    """A generator on somebody else's engine, which gets Hugging Face weights and a seed per row."""

    weight_names = "hf"

    def __init__(self, dtype: torch.dtype | None, seed: int):
        self.weight_dtype = dtype
        self._seed, self._n_calls = seed, 0

    def _seed_of_call(self, sampling: SamplingConfig) -> int:
        """A row's number is added to it."""
        if sampling.seed is not None:
            return sampling.seed
        self._n_calls += 1
        return random.Random(f"{self._seed} {self._n_calls}").getrandbits(62)

    def _completion(
        self, token_ids: Sequence[int], logprobs: Sequence[float], sampling: SamplingConfig
    ) -> Completion:
        kept_mass = None
        if sampling.temperature == 0:
            # Nothing else could be drawn; engines give the log-probs at temperature 1.
            kept_mass = tuple(torch.tensor(logprobs).exp().tolist())
            logprobs = [0.0] * len(logprobs)
        reason = "stop" if sampling.stops_at(token_ids) else "length"
        return Completion(tuple(token_ids), tuple(logprobs), reason, self.policy_version, kept_mass)

    def state_dict(self) -> dict[str, Any]:
        return {"n_calls": self._n_calls}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._n_calls = state_dict["n_calls"]


@dataclass(frozen=True)
class PolicyModel:
    """What a generator with weights of its own has to know of the model that is trained.

    parallel_dims: of the trainer. device: this rank's.
    """

    job_config: JobConfig
    train_spec: TrainSpec
    model_args: Any
    parallel_dims: ParallelDims
    device: torch.device

    @classmethod
    def of_engine(cls, engine: TrainingEngine) -> "PolicyModel":
        return cls(*(getattr(engine, field.name) for field in fields(cls)))

    @property
    def compute_dtype(self) -> torch.dtype:
        """What the trainer's matrix products get: FSDP casts to it, elsewhere autocast does."""
        training, uses_fsdp = self.job_config.training, self.parallel_dims.uses_fsdp
        return TORCH_DTYPE_MAP[training.mixed_precision_param if uses_fsdp else training.dtype]

    @property
    def compute_dtype_name(self) -> str:
        return str(self.compute_dtype).removeprefix("torch.")

    @property
    def generator_dtype(self) -> torch.dtype | None:
        dtype = self.job_config.rl.generator.dtype
        return TORCH_DTYPE_MAP[dtype] if dtype else None


def build_generator(job_config: JobConfig, engine: TrainingEngine) -> Generator:
    """The generator that `[rl.generator]` and `[rl.weight_sync]` describe, on the trainer's ranks.

    Raises ConfigError if they contradict each other, ImportError if vLLM is not installed.
    """
    rl, policy = job_config.rl, replace(PolicyModel.of_engine(engine), job_config=job_config)
    trainer_dtype = policy.compute_dtype_name
    refuse(rescoring(rl, trainer_dtype), weight_sharing(rl, trainer_dtype))
    if rl.weight_sync.mode != "broadcast" and not reasons_not_to_share(rl, trainer_dtype):
        return LocalGenerator(engine, seed=rl.seed, max_rows=rl.generator.max_batch_size)
    return build_copy(policy)


def build_copy(policy: PolicyModel) -> Generator:
    """A generator with weights of its own, which it has not got yet.

    Raises ImportError if vLLM is wanted and not installed.
    """
    config, rl = policy.job_config, policy.job_config.rl
    if rl.generator.backend != "local" and config.model.fp32_head:
        name = "vLLM" if rl.generator.backend == "vllm" else "the server"
        logger.warning(
            "model.fp32_head holds for the trainer; %s's output projection keeps its own type", name
        )
    if rl.generator.backend == "vllm":
        return __getattr__("VLLMGenerator")(
            config.model.hf_assets_path,
            # vLLM's own choice may be bf16 where config.json says float32.
            dtype=policy.generator_dtype or policy.compute_dtype,
            seed=rl.seed,
            memory_share=rl.generator.memory_share,
            tensor_parallel_degree=rl.generator.tensor_parallel_degree,
            max_seq_len=rl.generator.max_seq_len or config.training.seq_len,
        )
    if rl.generator.backend == "openai":
        return __getattr__("OpenAIGenerator")(
            rl.generator.url,
            rl.generator.model,
            rl.generator.reload_url,
            os.path.join(config.job.dump_folder, "generator_weights"),
            config.model.hf_assets_path,
            dtype=policy.generator_dtype,
            seed=rl.seed,
            max_requests=rl.generator.max_requests,
            timeout_seconds=rl.generator.timeout_seconds,
            vocab_size=policy.model_args.vocab_size,
        )
    return CopyGenerator.of_model_of(
        policy, policy.generator_dtype, rl.seed, rl.generator.max_batch_size
    )
