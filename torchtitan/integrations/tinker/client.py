"""Training and sampling through Tinker's interface, in this process, without a server.

    client = LocalTrainingClient(job_config)
    client.forward_backward(data, "importance_sampling").result()
    client.optim_step(AdamParams(learning_rate=1e-3)).result()
    sampler = client.save_weights_and_get_sampling_client().result()
    sampler.sample(ModelInput.from_ints(prompt), 8, SamplingParams(max_tokens=16)).result()

Calls return futures and run in order on one thread. Losses are sums over tokens: to average, the
caller scales the weights or advantages. Under torchrun every rank runs the same program with the
same data.
"""

import contextlib
import functools
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchtitan.adapters.multi_lora import reasons_for_turns
from torchtitan.batch.batch import check_ids
from torchtitan.checkpoint.saver import is_rank_zero
from torchtitan.data.tokenizer import BaseTokenizer
from torchtitan.distributed.dtensor import local_tensor
from torchtitan.distributed.processes.ranks import all_ranks, from_rank_zero
from torchtitan.integrations.tinker.conversions import (
    adapters_of,
    check_finite,
    loss_of,
    only_targets,
    output_of,
    training_sample,
)
from torchtitan.integrations.tinker.local_sampling import CallThread, LocalSamplingClient, on_thread
from torchtitan.integrations.tinker.states import Limits, TrainingState
from torchtitan.integrations.tinker.types import (
    AdamParams,
    AsyncNames,
    ClientFuture,
    CustomLoss,
    Datum,
    ForwardBackwardOutput,
    GetInfoResponse,
    ModelData,
    OptimStepResponse,
    SaveWeightsResponse,
)
from torchtitan.numerics.products import avoid_onednn
from torchtitan.rl.batcher import Batcher
from torchtitan.rl.generator import build_generator
from torchtitan.rl.job_config import JobConfig
from torchtitan.rl.losses import CrossEntropyLoss, PolicyLoss
from torchtitan.rl.policy import PolicyTrainer
from torchtitan.rl.snapshots import Snapshots, WeightsKey, changing_weights, host_copy, swap_memory
from torchtitan.rl.types import OptimParams, TrainingSample
from torchtitan.step.forward import scalar_loss
from torchtitan.step.runner import on_error
from torchtitan.tools.logging import logger


class LocalTrainingClient(AsyncNames):
    """Tinker's TrainingClient for a policy in this process.

    Raises ConfigError for a config that cannot run. The future of a call raises the call's errors.
    After a failed forward_backward, `optim_step` fails too, because the gradients are incomplete.
    The next step starts from zero gradients.
    """

    def __init__(self, job_config: JobConfig):
        self._config, self._trainer = job_config, PolicyTrainer(job_config)
        engine = self._trainer.engine
        with on_error(engine.close):
            # Callers get the log-probs of all targets, so the batcher must not skip a Datum.
            batcher = Batcher.from_config(job_config, engine.dp_size)
            self._batcher = replace(batcher, skip_zero_advantage=False, scores_masked=True)
            self._generator = build_generator(job_config, engine)
        # Checkpoints include the generator's state, so unseeded sampling continues after a resume.
        engine.checkpointer.states["rl_generator"] = self._generator
        self.checkpointer = engine.checkpointer
        self.vocab_size = engine.model_args.vocab_size
        self.states_folder = os.path.join(job_config.job.dump_folder, "states")
        self._snapshots = Snapshots(engine, job_config.rl.generator.max_snapshots)
        self._pushed: WeightsKey | None = None  # key of the weights that the generator has
        self._failure: Exception | None = None  # error of a forward_backward call in this step
        self._thread = CallThread(engine.device)
        # Cached, because finding the trained weights takes as long as swapping them in `exchange_state`.
        self._trained = list(changing_weights(engine))
        # Weights, gradients, and AdamW's two moments.
        own_bytes = 4 * sum(local_tensor(weight).nbytes for _, weight in self._trained)
        self.limits = Limits.from_config(
            job_config.rl.serve, max(all_ranks(own_bytes)), engine.device
        )
        self.shares_passes = False
        if self.checkpointer.has_adapters:
            reasons = reasons_for_turns(job_config, engine.parallel_dims, engine.model_parts)
            self.shares_passes = not reasons
            if self.shares_passes:
                avoid_onednn()
            for reason in reasons[:1]:
                logger.info("models with adapters cannot share forward passes: %s", reason)

    def forward(
        self, data: Sequence[Datum], loss_fn: str = "cross_entropy"
    ) -> ClientFuture[ForwardBackwardOutput]:
        """Return the targets' log-probs, without gradients; loss_fn is only validated."""
        loss_of(loss_fn, {})
        data = list(data)
        return self._thread.submit(lambda: output_of(self._logprobs(data), {}))

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: dict[str, float] | None = None,
    ) -> ClientFuture[ForwardBackwardOutput]:
        """Add the gradients of a loss to the gradients of this step.

        loss_fn: cross_entropy, importance_sampling, ppo, cispo, gspo or dro.
        loss_fn_config: `clip_low_threshold` and `clip_high_threshold`, bounds of the ratio; for dro
            `beta`.
        Raises ValueError unless every input has one finite number per token. Raises ValueError if the
        loss is not finite, which can happen because ratios are not bounded.
        """
        loss = loss_of(loss_fn, loss_fn_config or {})
        return self._add_gradients(self._forward_backward, list(data), loss)

    def forward_backward_custom(
        self, data: Sequence[Datum], loss_fn: CustomLoss
    ) -> ClientFuture[ForwardBackwardOutput]:
        """Add the gradients of any function of the targets' log-probs; costs an extra forward pass.

        Under torchrun, `loss_fn` runs on every rank and must return the same loss on all ranks.
        """
        return self._add_gradients(self._forward_backward_custom, list(data), loss_fn)

    @on_thread
    def optim_step(self, adam_params: AdamParams) -> OptimStepResponse:
        """Update the weights with the gradients of this step, then zero the gradients."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            self._trainer.zero_grad()
            raise RuntimeError(
                f"a forward_backward of this step failed ({failure}): the gradients were zeroed and the "
                "weights not changed; correct the call and repeat all calls of the step"
            ) from failure
        params = OptimParams(
            lr=adam_params.learning_rate,
            betas=(adam_params.beta1, adam_params.beta2),
            eps=adam_params.eps,
            weight_decay=adam_params.weight_decay,
            max_norm=adam_params.grad_clip_norm or math.inf,
        )
        with self._changing():
            update = self._trainer.optim_step(params)
        if update.skipped:
            raise FloatingPointError(
                f"the gradient norm is {update.grad_norm}: the weights and the optimizer were left "
                "as they are, and the gradients zeroed; look at the data of this step"
            )
        return OptimStepResponse({"grad_norm": update.grad_norm, "lr": update.lr})

    @on_thread
    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        *,
        rank: int | None = None,
        external: bool = False,
    ) -> SaveWeightsResponse:
        """Save weights and optimizer in the folder `name` below `states_folder`.

        Adapters are also saved in PEFT's format, in the subfolder `peft` of this folder.
        ttl_seconds: ignored; states never expire. rank: LoRA rank of the adapters; None takes `lora.rank`.
        external: save only files for other programs: adapters in PEFT's format, or HF weights.
        Raises ValueError for a name that leads out of `states_folder`.
        """
        checkpointer = self.checkpointer
        with self._writing(name) as folder:
            if not external:
                self._trainer.save_checkpoint(folder)
                if checkpointer.has_adapters and checkpointer.sd_adapter is not None:
                    checkpointer.save_peft(os.path.join(folder, "peft"), rank=rank)
            elif checkpointer.has_adapters:
                checkpointer.save_peft(folder, rank=rank)
            else:
                self._trainer.engine.save_hf(folder)
        return SaveWeightsResponse(self._state_path(name))

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None
    ) -> ClientFuture[SaveWeightsResponse]:
        """Save a state under `sampler_weights/<name>`, for `create_sampling_client`."""
        return self.save_state(os.path.join("sampler_weights", name))

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[str]:
        """Yield a new folder, which replaces the saved state `name` if the block succeeds."""
        path = self._state_path(name)
        parent, last = os.path.split(path)
        new, old = os.path.join(parent, f".{last}"), os.path.join(parent, f".{last}.old")

        def replace() -> None:
            shutil.rmtree(old, ignore_errors=True)
            if os.path.isdir(path):
                os.rename(path, old)
            os.rename(new, path)
            shutil.rmtree(old, ignore_errors=True)

        from_rank_zero(lambda: shutil.rmtree(new, ignore_errors=True))
        try:
            yield new
            from_rank_zero(replace)
        except Exception:
            if is_rank_zero():
                shutil.rmtree(new, ignore_errors=True)
            raise

    def _state_path(self, name: str) -> str:
        path = os.path.normpath(os.path.join(self.states_folder, name))
        folder, target = os.path.realpath(self.states_folder), os.path.realpath(path)
        if target == folder or os.path.commonpath([folder, target]) != folder:
            raise ValueError(
                f"save_state takes the name of a folder in {self.states_folder}, got {name!r}, which "
                "is outside of it; give a name without '..' or a leading path"
            )
        return path

    @on_thread
    def load_state(self, path: str | None, *, optimizer: bool = False) -> bool:
        """Load the weights of a saved state, and reset the optimizer unless `optimizer` is True.

        path: None loads the newest checkpoint in the config's folder, or else the initial checkpoint.
        The result is False if there is no checkpoint.
        """
        with self._changing():
            found = self._trainer.load_checkpoint(path, model_only=not optimizer)
        self._failure = None
        return found

    def load_state_with_optimizer(self, path: str | None) -> ClientFuture[bool]:
        """Load weights and optimizer of a saved state, to continue exactly from there."""
        return self.load_state(path, optimizer=True)

    @on_thread
    def load_sampler_weights(self, sampler: LocalSamplingClient) -> None:
        """Copy a sampling client's weights into the policy, and reset the optimizer."""
        with sampler.weights():
            weights = host_copy(self._trainer.engine)
        with self._changing():
            self._trainer.replace_weights(weights)
        self._failure = None

    @on_thread
    def start_adapters(self, seed: int, rank: int, layers: Sequence[str]) -> None:
        """Initialise new adapters, and reset the optimizer.

        rank: LoRA rank, at most `lora.rank`. layers: names of the layers whose adapters train, as in
            `lora.target_modules`.
        """
        with self._changing():
            self._trainer.start_adapters(seed, rank, layers)
        self._failure = None

    @on_thread
    def new_state(self) -> TrainingState:
        """Return a state with the current weights, no optimizer state and no gradients."""
        engine = self._trainer.engine
        weights = {n: local_tensor(w).detach().clone() for n, w in changing_weights(engine)}
        optimizers: list[Any] = [defaultdict(dict) for _ in engine.optimizers]
        return TrainingState(weights, optimizers, dict.fromkeys(weights))

    @on_thread
    def exchange_state(self, state: TrainingState) -> None:
        """Swap the policy's trained weights, optimizer state and gradients with those of `state`."""
        trainer, engine = self._trainer, self._trainer.engine
        with self._changing():
            swap_memory(self._trained, state.weights)
        engine.weights_version += 1
        for number, optimizer in enumerate(engine.optimizers):
            state.optimizers[number], optimizer.state = optimizer.state, state.optimizers[number]
        for name, weight in self._trained:
            state.gradients[name], weight.grad = weight.grad, state.gradients[name]
        state.passes, trainer.passes = trainer.passes, state.passes
        self._failure, state.failure = state.failure, self._failure

    @on_thread
    def fail_step(self, error: Exception) -> None:
        """Make the next `optim_step` fail as if a forward_backward call had raised `error`."""
        self._failure = self._failure or error

    @on_thread
    def save_weights_and_get_sampling_client(
        self, name: str | None = None, *, pinned: bool = False
    ) -> LocalSamplingClient:
        """Return a client that samples from the current weights, even after later updates.

        name: ignored, because nothing is written.
        pinned: these weights never expire, whatever `rl.generator.max_snapshots` is.
        """
        return LocalSamplingClient(self, self._snapshots.key(pinned=pinned))

    @on_thread
    def create_sampling_client(self, model_path: str) -> LocalSamplingClient:
        """Return a client that samples from a saved state; the policy's weights don't change."""
        sampler = LocalSamplingClient(self, None, model_path)
        # Load the state once, to raise here if it cannot be loaded.
        with sampler.weights():
            return sampler

    @functools.cached_property
    def tokenizer(self) -> BaseTokenizer | None:
        """The model's tokenizer, or None for a model without one."""
        build = self._trainer.engine.train_spec.build_tokenizer_fn
        return None if build is None else build(self._trainer.job_config)

    def get_tokenizer(self) -> Any:
        """Return the tokenizer in `model.hf_assets_path`, loaded by `transformers`."""
        if self.tokenizer is None:
            raise ValueError(f"model.name = {self._config.model.name!r} has no tokenizer")
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._config.model.hf_assets_path)

    def get_info(self) -> GetInfoResponse:
        """Return a description of the model; its name is the value of `rl.serve.base_model`."""
        model, name = self._config.model, self._config.rl.serve.base_model
        assets = None if self.tokenizer is None else os.path.abspath(model.hf_assets_path)
        rank = self._config.lora.rank if self.checkpointer.has_adapters else None
        data = ModelData(f"{model.name} {model.flavor}", name, assets)
        return GetInfoResponse(data, "policy", rank is not None, rank)

    def close(self) -> None:
        """Finish all calls, then free the policy. Safe to call twice."""
        self._thread.shutdown()
        self._trainer.close()

    # ---- on the thread ----

    @on_thread
    def _add_gradients(
        self, call: Callable[..., ForwardBackwardOutput], *args: Any
    ) -> ForwardBackwardOutput:
        try:
            return call(*args)
        except Exception as error:
            self._failure = self._failure or error
            raise

    def _forward_backward(self, data: list[Datum], loss: PolicyLoss) -> ForwardBackwardOutput:
        batch = self._batcher.batch(self.samples(data, loss))
        output = self._trainer.forward_backward(batch, loss, return_logprobs=True)
        assert output.logprobs is not None
        of_loss = {name: output.metrics[name] for name in loss.metric_names}
        return output_of(output.logprobs, {"loss:sum": output.loss, **of_loss})

    def _forward_backward_custom(
        self, data: list[Datum], loss_fn: CustomLoss
    ) -> ForwardBackwardOutput:
        if not data:
            raise ValueError(
                "forward_backward_custom needs at least one Datum, got none; skip the call"
            )
        logprobs = [values.requires_grad_() for values in self._logprobs(data)]
        loss, metrics = loss_fn(data, logprobs)
        loss = scalar_loss(loss)
        # On any parallel layout, sum(d loss / d log-prob * log-prob) has the gradients of loss_fn.
        gradients = torch.autograd.grad(loss, logprobs, allow_unused=True, materialize_grads=True)
        if not all(values.isfinite().all() for values in (loss, *gradients)):
            got = f"got loss {loss.item()}; correct the function"
            raise ValueError(f"loss_fn must have a finite loss and finite gradients, {got}")
        pairs = zip(data, gradients, strict=True)
        surrogate = self.samples([only_targets(datum, weights=-grad) for datum, grad in pairs])
        self._trainer.forward_backward(self._batcher.batch(surrogate), CrossEntropyLoss())
        return output_of([x.detach() for x in logprobs], {"loss:sum": loss.item(), **metrics})

    def _logprobs(self, data: Sequence[Datum], k: int = 0) -> list[Tensor]:
        """Return each datum's target log-probs [n]; with k > 0, top k token ids and log-probs [n, 2 k]."""
        batch = self._batcher.batch(self.samples([only_targets(datum) for datum in data]))
        found = self._trainer.top_tokens(batch, k) if k else self._trainer.forward(batch)
        return check_finite(found)

    def samples(
        self, data: Sequence[Datum], loss: PolicyLoss | None = None
    ) -> list[TrainingSample]:
        """Return the data as samples. Raises ValueError for data that the model or loss cannot use."""
        samples = [training_sample(datum, loss) for datum in data]
        for number, sample in enumerate(samples):
            if len(sample) > self._batcher.seq_len:
                raise ValueError(
                    f"every Datum must fit into a row of {self._batcher.seq_len} tokens, got "
                    f"{len(sample)} in Datum {number}; raise training.seq_len, or shorten it"
                )
            check_ids("the tokens of samples", sample.token_ids, self.vocab_size)
            check_ids("labels", sample.labels, self.vocab_size)
        return samples

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Wrap code that changes the weights; first copies the old weights if sampling clients need them."""
        self._pushed = None
        with self._snapshots.changing():
            yield


class LocalServiceClient(AsyncNames):
    """Tinker's ServiceClient in this process, so a program can run with or without a server.

    There is one policy, so there is one training client. Each `create_..._training_client` call resets
    and returns this client. Arguments that describe a run (`user_metadata`, ...) are ignored.
    Raises ConfigError for a config that cannot run.
    """

    def __init__(self, job_config: JobConfig):
        self._config = job_config
        self._training = LocalTrainingClient(job_config)
        self._training.load_state_with_optimizer(None).result()
        self._base = self._training.save_weights_and_get_sampling_client(pinned=True).result()

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        **_: Any,
    ) -> ClientFuture[LocalTrainingClient]:
        """Reset the policy to its initial weights. If the policy has LoRA, initialise new adapters.

        base_model: ignored. Raises ValueError for adapters that the model cannot have.
        """
        lora = self._config.lora if self._training.checkpointer.has_adapters else None
        adapters = adapters_of(lora, rank, seed, train_attn, train_mlp, train_unembed)
        calls: list[Future] = [self._training.load_sampler_weights(self._base)]
        if adapters is not None:
            calls.append(self._training.start_adapters(**adapters))
        return self._started(*calls)

    def create_training_client_from_state(
        self, path: str, **_: Any
    ) -> ClientFuture[LocalTrainingClient]:
        """Start from the weights of a saved state, without its optimizer."""
        return self._started(self._training.load_state(path))

    def create_training_client_from_state_with_optimizer(
        self, path: str, **_: Any
    ) -> ClientFuture[LocalTrainingClient]:
        """Continue exactly from a saved state."""
        return self._started(self._training.load_state_with_optimizer(path))

    def create_sampling_client(
        self, model_path: str | None = None, base_model: str | None = None, **_: Any
    ) -> ClientFuture[LocalSamplingClient]:
        """Return a sampling client for a saved state, or for the policy's initial weights."""
        if model_path is not None:
            return self._training.create_sampling_client(model_path)
        return self._training._thread.submit(lambda: self._base)

    def _started(self, *calls: Future) -> ClientFuture[LocalTrainingClient]:
        """Return a future of the training client; the future raises if one of `calls` raised."""
        # `result()` doesn't block: the client's thread has run the earlier calls by then.
        return self._training._thread.submit(lambda: [x.result() for x in calls] and self._training)

    def close(self, status: str = "success", detail: str | None = None) -> ClientFuture[None]:
        """Finish all calls, then free the policy. Safe to call twice."""
        self._training.close()
        closed: ClientFuture[None] = ClientFuture()
        closed.set_result(None)
        return closed
