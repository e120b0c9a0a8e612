"""Training and sampling under Tinker's names, in this process: no server, no HTTP.

    client = LocalTrainingClient(job_config)
    client.forward_backward(data, "importance_sampling").result()
    client.optim_step(AdamParams(learning_rate=1e-3)).result()
    sampler = client.save_weights_and_get_sampling_client().result()
    sampler.sample(ModelInput.from_ints(prompt), 8, SamplingParams(max_tokens=16)).result()

Calls return futures and run in order on one thread. Losses are sums over tokens: the caller
averages them through its weights or advantages. Under torchrun every rank runs the same program
with the same data.
"""

import contextlib
import functools
import math
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from torchtitan.adapters.together import AdaptersTogether, reasons_for_turns
from torchtitan.batch.batch import check_ids
from torchtitan.data.tokenizer import BaseTokenizer
from torchtitan.distributed.dtensor import is_dtensor, local_tensor
from torchtitan.distributed.processes.ranks import all_ranks, num_ranks
from torchtitan.integrations.tinker.states import Limits, TrainingState
from torchtitan.integrations.tinker.together import Call, LossesOfModels
from torchtitan.integrations.tinker.types import (
    AdamParams,
    CustomLoss,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    SaveWeightsResponse,
)
from torchtitan.numerics.products import avoid_onednn
from torchtitan.rl.batcher import Batcher
from torchtitan.rl.generator import LocalGenerator, build_generator
from torchtitan.rl.job_config import JobConfig
from torchtitan.rl.losses import CrossEntropyLoss, GSPOLoss, PolicyLoss, build_loss
from torchtitan.rl.snapshots import (
    Snapshots,
    WeightsKey,
    changing_weights,
    host_copy,
    swap,
)
from torchtitan.rl.trainer import PolicyTrainer
from torchtitan.rl.types import OptimParams, TrainingBatch, TrainingSample
from torchtitan.step.forward import on_error, scalar_loss
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import use_device

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Thread:
    """Runs calls one by one in their order, on one thread; joins calls that share a key."""

    def __init__(self, device: torch.device):
        self._pool = ThreadPoolExecutor(
            1, "training client", initializer=use_device, initargs=(device,)
        )
        self._lock = threading.Lock()
        # The key and the (item, future) pairs of the last call, while more items may join it.
        self._joinable: tuple[Any, list[tuple[Any, Future]]] | None = None

    def submit(self, call: Callable[..., _T], *args: Any, **kwargs: Any) -> Future[_T]:
        with self._lock:
            self._joinable = None
            return self._pool.submit(call, *args, **kwargs)

    def submit_item(self, call: Callable[[list[Any]], list[_T]], item: Any, key: Any) -> Future[_T]:
        """Pass items that were submitted in a row with the same key to one `call`.

        Items join while the thread is busy with an earlier call. Under torchrun each item gets its
        own call, because the ranks, which have to make the same calls, are not busy equally long.
        """
        future: Future[_T] = Future()
        with self._lock:
            if self._joinable is None or self._joinable[0] != key or num_ranks() > 1:
                self._joinable = key, []
                self._pool.submit(self._run, call, self._joinable[1])
            self._joinable[1].append((item, future))
        return future

    def _run(self, call: Callable[[list[Any]], list[_T]], items: list[tuple[Any, Future]]) -> None:
        with self._lock:
            if self._joinable is not None and self._joinable[1] is items:
                self._joinable = None
        items = [entry for entry in items if entry[1].set_running_or_notify_cancel()]
        try:
            results = call([item for item, _ in items]) if items else []
        except BaseException as error:
            for _, future in items:
                future.set_exception(error)
            return
        for (_, future), result in zip(items, results, strict=True):
            future.set_result(result)

    def shutdown(self) -> None:
        self._pool.shutdown()


def _on_thread(method: Callable[_P, _T]) -> Callable[_P, Future[_T]]:
    """Make a method run on the client's thread, after all earlier calls, and return a future."""

    @functools.wraps(method)
    def submit(self: Any, *args: Any, **kwargs: Any) -> Future[_T]:
        return self._thread.submit(method, self, *args, **kwargs)

    return submit


class LocalTrainingClient:
    """A policy in this process.

    Raises ConfigError for a config that cannot run. The future of a call raises the call's errors.
    After a failed forward_backward, `optim_step` fails too, because the gradients are incomplete.
    The next step starts from zero gradients.
    """

    def __init__(self, job_config: JobConfig):
        self._trainer = PolicyTrainer(job_config)
        engine = self._trainer.engine
        with on_error(engine.close):
            # Callers get log-probs of every target of every Datum, so none is skipped.
            batcher = Batcher.from_config(job_config, engine.dp_size)
            self._batcher = replace(batcher, skip_zero_advantage=False, scores_masked=True)
            self._generator = build_generator(job_config, engine)
        # Checkpoints hold the generator's state, from which unseeded sampling continues.
        engine.checkpointer.states["rl_generator"] = self._generator
        self.checkpointer = engine.checkpointer
        self.vocab_size = engine.model_args.vocab_size
        self.states_folder = os.path.join(job_config.job.dump_folder, "states")
        self._snapshots = Snapshots(engine, job_config.rl.generator.max_snapshots)
        self._pushed: WeightsKey | None = None  # of the weights in the generator
        self._failure: Exception | None = None  # of a forward_backward in this step
        self._thread = _Thread(engine.device)
        self._trained = list(
            changing_weights(engine)
        )  # kept, because collecting them takes as long
        # Weights, gradients, and AdamW's two moments.
        own_bytes = 4 * sum(local_tensor(weight).nbytes for _, weight in self._trained)
        self.limits = Limits.of(job_config.rl.serve, max(all_ranks(own_bytes)), engine.device)
        self.shares_passes = self.shares_samples = False
        if self.checkpointer.has_adapters:
            reasons = reasons_for_turns(job_config, engine.parallel_dims, engine.model_parts)
            self.shares_passes = not reasons
            if self.shares_passes:
                avoid_onednn()
            self.shares_samples = not reasons and isinstance(self._generator, LocalGenerator)
            for reason in reasons[:1]:
                logger.info("models take turns, and share no pass over the base: %s", reason)

    def forward(
        self, data: Sequence[Datum], loss_fn: str = "cross_entropy"
    ) -> Future[ForwardBackwardOutput]:
        """Return log-probs of the targets, without gradients.

        loss_fn: a name as for forward_backward; it does not change the result.
        """
        _loss(loss_fn, {})
        data = list(data)
        return self._thread.submit(lambda: _output(self._logprobs(data), {}))

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: dict[str, float] | None = None,
    ) -> Future[ForwardBackwardOutput]:
        """Add the gradients of a loss to the gradients of this step.

        loss_fn: cross_entropy, importance_sampling, ppo, cispo or gspo.
        loss_fn_config: `clip_low_threshold` and `clip_high_threshold`, bounds of the ratio.

        Raises ValueError unless every input has one finite number per token, and if the loss is not
        finite, which can happen because ratios are not bounded.
        """
        loss = _loss(loss_fn, loss_fn_config or {})
        return self._add_gradients(self._forward_backward, list(data), loss)

    def forward_backward_custom(
        self, data: Sequence[Datum], loss_fn: CustomLoss
    ) -> Future[ForwardBackwardOutput]:
        """Add the gradients of any function of the targets' log-probs; costs one more forward.

        Under torchrun `loss_fn` runs on every rank, and must return the same loss on each.
        """
        return self._add_gradients(self._forward_backward_custom, list(data), loss_fn)

    @_on_thread
    def optim_step(self, adam_params: AdamParams) -> OptimStepResponse:
        """Update the weights with the gradients of this step, then zero the gradients."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            self._trainer.zero_grad()
            raise RuntimeError(
                f"a forward_backward of this step failed ({failure}), so the gradients are "
                "incomplete; they were zeroed and the weights not changed: correct the call and "
                "repeat all calls of the step"
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

    @_on_thread
    def save_state(self, name: str, rank: int | None = None) -> SaveWeightsResponse:
        """Save weights and optimizer in the folder `name` below `states_folder`.

        Adapters are also saved there in PEFT's format, in the folder `peft`.
        rank: what `start_adapters` got; None is `lora.rank`.
        Raises ValueError for a name that leads out of `states_folder`.
        """
        path = self._state_path(name)
        self._trainer.save_checkpoint(path)
        checkpointer = self.checkpointer
        if checkpointer.has_adapters and checkpointer.sd_adapter is not None:
            checkpointer.save_peft(os.path.join(path, "peft"), rank=rank)
        return SaveWeightsResponse(path)

    @_on_thread
    def save_external(self, name: str, rank: int | None = None) -> SaveWeightsResponse:
        """Save, as `save_state`, files of other programs: adapters in PEFT's format, or Hugging Face's
        files of a model without adapters.
        """
        path = self._state_path(name)
        if self.checkpointer.has_adapters:
            self.checkpointer.save_peft(path, rank=rank)
        else:
            self._trainer.engine.save_hf(path)
        return SaveWeightsResponse(path)

    def _state_path(self, name: str) -> str:
        path = os.path.join(self.states_folder, name)
        folder, target = os.path.realpath(self.states_folder), os.path.realpath(path)
        if target == folder or os.path.commonpath([folder, target]) != folder:
            raise ValueError(
                f"save_state takes the name of a folder in {self.states_folder}, got {name!r}, which "
                "is outside of it; give a name without '..' or a leading path"
            )
        return path

    @_on_thread
    def load_state(self, path: str) -> None:
        """Load the weights of a saved state, and reset the optimizer."""
        self._load(path, model_only=True)

    @_on_thread
    def load_state_with_optimizer(self, path: str) -> None:
        """Load weights and optimizer of a saved state, to continue exactly from there."""
        self._load(path, model_only=False)

    @_on_thread
    def load_initial_state(self) -> bool:
        """Load the config's newest checkpoint, else its initial one; False if there is none."""
        return self._load(None, model_only=False)

    @_on_thread
    def load_sampler_weights(self, sampler: "LocalSamplingClient") -> None:
        """Copy a sampling client's weights into the policy, and reset the optimizer."""
        with sampler.weights():
            weights = host_copy(self._trainer.engine)
        self._failure = None
        with self._changing():
            self._trainer.replace_weights(weights)

    @_on_thread
    def start_adapters(self, seed: int, rank: int, layers: Sequence[str]) -> None:
        """Begin with new adapters of a rank up to `lora.rank`, and reset the optimizer.

        layers: names, as in `lora.target_modules`; the adapters of other layers don't train.
        """
        self._failure = None
        with self._changing():
            self._trainer.start_adapters(seed, rank, layers)

    @_on_thread
    def new_state(self) -> TrainingState:
        """Return a state with the current weights, no optimizer state and no gradients."""
        engine = self._trainer.engine
        weights = {n: local_tensor(w).detach().clone() for n, w in changing_weights(engine)}
        optimizers: list[Any] = [defaultdict(dict) for _ in engine.optimizers]
        return TrainingState(weights, optimizers, dict.fromkeys(weights))

    @_on_thread
    def exchange_state(self, state: TrainingState) -> None:
        """Swap the policy's state with another one, so that policies take turns on one model.

        Adapters take turns beside one base. Nothing is copied but what trains.
        """
        trainer, engine = self._trainer, self._trainer.engine
        with self._changing():
            if any(is_dtensor(weight) for _, weight in self._trained):
                swap(self._trained, state.weights)
            else:  # without a copy
                for name, weight in self._trained:
                    state.weights[name], weight.data = weight.data, state.weights[name]
        engine.weights_version += 1
        for number, optimizer in enumerate(engine.optimizers):
            state.optimizers[number], optimizer.state = optimizer.state, state.optimizers[number]
        for name, weight in self._trained:
            state.gradients[name], weight.grad = weight.grad, state.gradients[name]
        before = trainer._denominator, trainer._num_accumulated
        (trainer._denominator, trainer._num_accumulated), state.step = state.step, before
        self._failure, state.failure = state.failure, self._failure

    @_on_thread
    def fail_step(self, error: Exception) -> None:
        """Make `optim_step` fail as if a forward_backward of this step had raised the error."""
        self._failure = self._failure or error

    @_on_thread
    def save_weights_and_get_sampling_client(
        self, name: str = "", *, pinned: bool = False
    ) -> "LocalSamplingClient":
        """Return a client that keeps sampling from today's weights when the policy's change.

        name: ignored, because nothing is written.
        pinned: exempt these weights from `rl.generator.max_snapshots`.
        """
        return LocalSamplingClient(self, self._snapshots.key(pinned=pinned))

    @_on_thread
    def create_sampling_client(self, model_path: str) -> "LocalSamplingClient":
        """Return a client that samples from a saved state; the policy keeps its weights."""
        sampler = LocalSamplingClient(self, None, model_path)
        with sampler.weights():  # raises if the state cannot be loaded
            return sampler

    @functools.cached_property
    def tokenizer(self) -> BaseTokenizer | None:
        """The model's tokenizer, or None for a model without one."""
        build = self._trainer.engine.train_spec.build_tokenizer_fn
        return None if build is None else build(self._trainer.job_config)

    def close(self) -> None:
        """Finish all calls. Safe to call twice."""
        self._thread.shutdown()
        self._trainer.close()

    def __enter__(self) -> "LocalTrainingClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- on the thread ----

    @_on_thread
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
        return _finite_output(output.logprobs, output.loss, output.metrics)

    def _forward_backward_custom(
        self, data: list[Datum], loss_fn: CustomLoss
    ) -> ForwardBackwardOutput:
        if not data:
            raise ValueError(
                "forward_backward_custom needs at least one Datum for its loss, got no Datum; "
                "leave the call out"
            )
        logprobs = [values.requires_grad_() for values in self._logprobs(data)]
        loss, metrics = loss_fn(data, logprobs)
        loss = scalar_loss(loss)
        # sum(gradient * log-prob) has the gradients of this loss, on any layout and split.
        gradients = torch.autograd.grad(loss, logprobs, allow_unused=True, materialize_grads=True)
        if not all(values.isfinite().all() for values in (loss, *gradients)):
            raise ValueError(
                f"loss_fn must have a finite loss and finite gradients, got loss {loss.item()}; "
                "correct the function"
            )
        surrogate = self.samples(
            [
                _targets_of(datum, weights=-gradient)
                for datum, gradient in zip(data, gradients, strict=True)
            ]
        )
        self._trainer.forward_backward(self._batcher.batch(surrogate), CrossEntropyLoss())
        metrics = {"loss:sum": loss.item(), **metrics}
        return _output([values.detach() for values in logprobs], metrics)

    def _logprobs(self, data: Sequence[Datum]) -> list[Tensor]:
        """The log-probs [n] of each datum's targets, including masked ones."""
        samples = self.samples([_targets_of(datum) for datum in data])
        logprobs = self._trainer.forward(self._batcher.batch(samples))
        _check_finite(logprobs)
        return logprobs

    def samples(
        self, data: Sequence[Datum], loss: PolicyLoss | None = None
    ) -> list[TrainingSample]:
        """Raises ValueError for data that the model, or the loss, cannot use."""
        samples = []
        for number, datum in enumerate(data):
            for name in (
                ("logprobs", "advantages") if loss is not None and loss.has_generator else ()
            ):
                if name not in datum.loss_fn_inputs:
                    raise ValueError(
                        f"a policy loss needs {name} in loss_fn_inputs, got "
                        f"{sorted(datum.loss_fn_inputs)} in datum {number}; give one number per "
                        "target"
                    )
            samples.append(sample := _sample(datum, loss))
            if len(sample) > self._batcher.seq_len:
                raise ValueError(
                    f"every Datum must fit into a row of {self._batcher.seq_len} tokens, got "
                    f"{len(sample)} in number {number}; raise training.seq_len, or shorten it"
                )
            check_ids("the tokens of samples", sample.token_ids, self.vocab_size)
            check_ids("labels", sample.labels, self.vocab_size)
        return samples

    def _load(self, path: str | None, model_only: bool) -> bool:
        self._failure = None
        with self._changing():
            return self._trainer.load_checkpoint(path, model_only=model_only)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Change the weights inside: sampling clients that still need them get a copy first."""
        self._pushed = None
        with self._snapshots.changing():
            yield


_Prepared = tuple[PolicyLoss, list[TrainingSample]]


class SharedPasses:
    """Calls of several models with adapters in one pass over their base, on the client's thread.

    The models' states are not in the policy: see `LocalTrainingClient.exchange_state`.
    """

    def __init__(self, client: LocalTrainingClient):
        engine = client._trainer.engine
        self._client, self._thread = client, client._thread
        dims = engine.parallel_dims
        has_ddp = dims.dp_replicate_enabled and not (dims.uses_fsdp or dims.pp_enabled)
        self._adapters = AdaptersTogether(engine.model_parts, engine.loss_group, has_ddp)

    @_on_thread
    def run(self, calls: Sequence[Call]) -> list[ForwardBackwardOutput | Exception]:
        """Return of each call what `forward_backward`, or `forward`, returns or raises alone.

        calls: all are forward-only, or none is. A model may have several.
        """
        results: list[Any] = [self._prepared(call) for call in calls]
        good = [n for n, result in enumerate(results) if not isinstance(result, Exception)]
        if good:
            run = self._forward if calls[0].request.forward_only else self._forward_backward
            found = run([calls[n].state for n in good], [results[n] for n in good])
            for number, result in zip(good, found, strict=True):
                results[number] = result
        for call, result in zip(calls, results, strict=True):
            if isinstance(result, Exception) and not call.request.forward_only:
                call.state.failure = call.state.failure or result
        return results

    @_on_thread
    def sample(
        self,
        samplers: "Sequence[LocalSamplingClient]",
        prompts: list[ModelInput],
        num_samples: int,
        params: SamplingParams,
    ) -> list[SampleResponse]:
        """Return each prompt's response from its sampler, all drawn in one batch."""
        client, generator = self._client, self._client._generator
        assert isinstance(generator, LocalGenerator)
        keys = {sampler: sampler.key() for sampler in dict.fromkeys(samplers)}
        weights = [client._snapshots.weights(key) for key in keys.values()]
        client._pushed = None
        client._trainer.push_model_state_dict(generator)
        models = list(keys)
        with generator.with_adapters(weights, [models.index(sampler) for sampler in samplers]):
            return _responses(client, prompts, num_samples, params)

    def _prepared(self, call: Call) -> _Prepared | Exception:
        """Return the loss and the samples of a call, or why its data cannot be used."""
        request = call.request
        try:
            if request.problem is not None:
                raise ValueError(request.problem)
            loss, data = _loss(request.loss_fn, request.loss_fn_config), request.data
            if not request.forward_only:
                return loss, self._client.samples(data, loss)
            return loss, self._client.samples([_targets_of(datum) for datum in data])
        except ValueError as error:
            return error

    def _forward(self, states: Sequence[TrainingState], prepared: Sequence[_Prepared]) -> list[Any]:
        with self._adapters_of(states, prepared, trains=False) as (batch, _):
            logprobs = iter(self._client._trainer.forward(batch))
        own = [[next(logprobs) for _ in samples] for _, samples in prepared]
        return [_error_or(lambda x=x: _output(_check_finite(x), {})) for x in own]

    def _forward_backward(
        self, states: Sequence[TrainingState], prepared: Sequence[_Prepared]
    ) -> list[Any]:
        trainer, loss = self._client._trainer, LossesOfModels([loss for loss, _ in prepared])
        try:
            with self._adapters_of(states, prepared, trains=True) as (batch, gradients):
                output = trainer.forward_backward(batch, loss, return_logprobs=True)
        finally:
            trainer.zero_grad()  # forget the call: its gradients are the states'
        logprobs = iter(output.logprobs)
        results = []
        for i, (state, (_, samples)) in enumerate(zip(states, prepared, strict=True)):
            own = [next(logprobs) for _ in samples]
            numbers = loss.of_model(i, output.metrics, int(sum(x.loss_mask.sum() for x in samples)))
            results.append(_error_or(lambda o=own, n=numbers: _finite_output(o, *n)))
            if not isinstance(results[-1], Exception):
                state.add_gradients(gradients[i])
        return results

    @contextlib.contextmanager
    def _adapters_of(
        self, states: Sequence[TrainingState], prepared: Sequence[_Prepared], trains: bool
    ) -> Iterator[tuple[TrainingBatch, list[dict[str, Tensor]]]]:
        """Yield the batch of all samples, for a forward with each sample's model's adapters; and a list
        that gets the models' gradients at the end."""
        adapters, runner = self._adapters, self._client._trainer.engine.runner
        samples = [sample for _, own in prepared for sample in own]
        models = [i for i, (_, own) in enumerate(prepared) for _ in own]
        batch = self._client._batcher.batch(samples, models)
        batch = replace(batch, num_measured_tokens=1)  # metrics stay sums; see `of_model`
        runner.around = lambda mb: adapters.set_rows(mb.batch.get("models") or [0] * len(mb.inputs))
        try:
            with adapters.adapters([state.weights for state in states], trains) as gradients:
                yield batch, gradients
        finally:
            runner.around = None


class LocalSamplingClient:
    """Samples from the weights that the policy had when this client was made, or from saved ones.

    When the policy's weights change, the client's are copied to host memory. The copy is dropped
    once sampling clients were made for `rl.generator.max_snapshots` later versions: from then on
    calls raise ValueError, or load the weights again if they were saved.
    """

    def __init__(self, client: LocalTrainingClient, key: WeightsKey | None, path: str = ""):
        self._client, self._key, self._path = client, key, path
        self._thread = client._thread

    def sample(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams
    ) -> Future[SampleResponse]:
        """Continue a prompt; log-probs are of the distribution that tokens were drawn from.

        Calls in a row with the same settings and without a seed are drawn together: make all
        calls before you wait for the first result.
        """
        key: Any = object()  # joined prompts would change what a seed draws
        if sampling_params.seed is None:
            stop = sampling_params.stop
            params = replace(sampling_params, stop=stop if isinstance(stop, str) else tuple(stop))
            key = self._key or self, num_samples, params
        return self._thread.submit_item(
            lambda prompts: self._sample(prompts, num_samples, sampling_params), prompt, key
        )

    @_on_thread
    def sample_all(
        self, prompts: list[ModelInput], num_samples: int, sampling_params: SamplingParams
    ) -> list[SampleResponse]:
        """Return the response to each prompt, as from `sample`, all drawn together."""
        return self._sample(prompts, num_samples, sampling_params)

    def _sample(
        self, prompts: list[ModelInput], num_samples: int, sampling_params: SamplingParams
    ) -> list[SampleResponse]:
        client = self._client
        with self.weights():
            if client._pushed is not self._key:
                client._trainer.push_model_state_dict(client._generator)
                client._pushed = self._key
            return _responses(client, prompts, num_samples, sampling_params)

    def compute_logprobs(self, prompt: ModelInput) -> Future[list[float | None]]:
        """Return the log-prob of each token given the tokens before it; None for the first."""
        return self._thread.submit(lambda: self._compute_logprobs([prompt])[0])

    @_on_thread
    def compute_all_logprobs(self, prompts: list[ModelInput]) -> list[list[float | None]]:
        """Return `compute_logprobs` of each prompt, from one forward."""
        return self._compute_logprobs(prompts)

    def _compute_logprobs(self, prompts: list[ModelInput]) -> list[list[float | None]]:
        # The first token has no context, so it is only an input.
        data = [
            Datum(ModelInput(prompt.tokens[:-1]), {"target_tokens": prompt.tokens[1:]})
            for prompt in prompts
            if prompt.length > 1
        ]
        with self.weights():
            scored = iter(self._client._logprobs(data) if data else ())
        return [
            [None, *next(scored).tolist()] if prompt.length > 1 else [None] * prompt.length
            for prompt in prompts
        ]

    @contextlib.contextmanager
    def weights(self) -> Iterator[None]:
        """Give the policy this client's weights inside. Collective; call on the client's thread."""
        with self._client._snapshots.using(self.key()):
            yield

    def key(self) -> WeightsKey:
        """Return the key of this client's weights; saved ones are loaded first. Collective, as `weights`."""
        client = self._client
        if self._path and (self._key is None or client._snapshots.is_expired(self._key)):
            client._pushed = None
            engine = client._trainer.engine
            self._key = client._snapshots.loaded(lambda: engine.load(self._path, model_only=True))
        assert self._key is not None
        return self._key


def _responses(
    client: LocalTrainingClient, prompts: list[ModelInput], num_samples: int, params: SamplingParams
) -> list[SampleResponse]:
    """Draw from the generator's weights, and return the response to each prompt."""
    sampling = params.to_config(client.tokenizer if params.stop else None)
    tokens = [prompt.to_ints() for prompt in prompts]
    sequences = [
        SampledSequence(list(c.token_ids), list(c.token_logprobs), c.finish_reason)
        for c in client._generator.generate(tokens, sampling, num_samples)
    ]
    return [
        SampleResponse(sequences[first : first + num_samples])
        for first in range(0, len(sequences), num_samples)
    ]


# ---- to the trainer's types, and back ----

# Tinker's name -> ours
_LOSSES = {
    "cross_entropy": "cross_entropy",
    "importance_sampling": "importance_sampling",
    "ppo": "dapo",
    "cispo": "cispo",
    "gspo": "gspo",
}
_LARGEST_LOG_RATIO = 88.0  # exp(88) is near the largest float32
_INPUTS = ("target_tokens", "weights", "mask", "logprobs", "advantages")


def _loss(name: str, config: dict[str, float]) -> PolicyLoss:
    if name not in _LOSSES:
        raise ValueError(
            f"loss_fn must be one of {', '.join(_LOSSES)}, got {name!r}; for any other function of "
            "log-probs call forward_backward_custom"
        )
    if unknown := sorted(set(config) - {"clip_low_threshold", "clip_high_threshold"}):
        raise ValueError(
            f"loss_fn_config takes clip_low_threshold and clip_high_threshold, got {unknown[0]!r}"
        )
    for key, value in config.items():
        if math.isnan(value):
            raise ValueError(f"{key} of loss_fn_config must be a number, got nan; correct it")
    # Tinker's thresholds are ratios, ours are distances from 1. The defaults are Tinker's.
    bounds = {}
    if name != "cross_entropy":
        # Tinker does not bound ratios. A clipped loss stays finite only if exp is finite, too.
        bounds["max_log_ratio"] = math.inf if name == "importance_sampling" else _LARGEST_LOG_RATIO
    if name not in ("cross_entropy", "importance_sampling"):
        bounds["ratio_clip_low"] = 1 - config.get("clip_low_threshold", 0.8)
        bounds["ratio_clip_high"] = config.get("clip_high_threshold", 1.2) - 1
    if name in ("ppo", "gspo"):
        bounds["dual_clip"] = 0.0  # Tinker has no dual clip
    return build_loss(_LOSSES[name], **bounds)


def _targets_of(datum: Datum, **inputs: Tensor) -> Datum:
    """The datum with only its targets and `inputs` as inputs of the loss."""
    targets = {k: v for k, v in datum.loss_fn_inputs.items() if k == "target_tokens"}
    return Datum(datum.model_input, targets | inputs)


def _sample(datum: Datum, loss: PolicyLoss | None = None) -> TrainingSample:
    """loss: whose mask to make, if the datum has none: a prompt's targets, which were not sampled, have
    log-prob and advantage 0 and are in no ratio and no metric.
    """
    given = dict(datum.loss_fn_inputs)
    if isinstance(loss, GSPOLoss) and "sequence_ratio_mask" in given:
        given["mask"] = given.pop("sequence_ratio_mask")  # Tinker's name of it
    if unknown := sorted(set(given) - set(_INPUTS)):
        raise ValueError(
            f"loss_fn_inputs of a Datum may be {', '.join(_INPUTS)}, got {unknown[0]!r}; "
            "remove it, or correct its name"
        )
    n, inputs = datum.model_input.length, {}
    for name, values in given.items():
        try:
            inputs[name] = torch.as_tensor(values)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{name} of a Datum must be a list or a tensor of numbers ({error}); correct it"
            ) from error
        if (shape := list(inputs[name].shape)) != [n]:
            raise ValueError(
                f"{name} of a Datum must have one number per input token, [{n}], got {shape}; for a "
                "sequence of n + 1 tokens give its first n as input and its last n as targets"
            )
        if not (finite := inputs[name].isfinite()).all():
            place = int(finite.logical_not().nonzero()[0])
            raise ValueError(
                f"{name} of a Datum must be finite, got {inputs[name][place].item()} at token "
                f"{place}; remove or correct the Datum"
            )
    if "target_tokens" not in inputs:
        raise ValueError(
            f"loss_fn_inputs of a Datum needs target_tokens, got {sorted(inputs)}; give the token "
            "that follows each input token"
        )
    targets = inputs["target_tokens"]
    labels = targets.long()
    if not torch.equal(labels.to(targets.dtype), targets):
        raise ValueError(
            f"target_tokens of a Datum must be token ids, got {targets.flatten().tolist()[:8]}; give "
            "integers"
        )
    mask = inputs.get("mask", torch.ones(n)).float()
    if loss is not None and loss.has_generator and "mask" not in inputs:
        mask = ((inputs["logprobs"] != 0) | (inputs["advantages"] != 0)).float()
    return TrainingSample(
        token_ids=torch.tensor(datum.model_input.to_ints()),
        labels=labels,
        loss_mask=(mask != 0).float(),
        logprobs=inputs.get("logprobs", torch.zeros(n)).float(),
        advantages=inputs.get("advantages", torch.zeros(n)).float(),
        weights=inputs.get("weights", torch.ones(n)).float() * mask,
    )


def _check_finite(logprobs: list[Tensor]) -> list[Tensor]:
    for number, values in enumerate(logprobs):
        if not values.isfinite().all():
            raise FloatingPointError(
                f"the policy gives log-probs that are not finite in Datum {number}; look at the "
                "last optimizer steps, or load a saved state"
            )
    return logprobs


def _error_or(call: Callable[[], _T]) -> _T | Exception:
    try:
        return call()
    except (ValueError, FloatingPointError) as error:
        return error


def _finite_output(
    logprobs: list[Tensor], loss: float, metrics: dict[str, float]
) -> ForwardBackwardOutput:
    _check_finite(logprobs)
    if not math.isfinite(loss):
        raise ValueError(
            f"the loss is {loss}: logprobs of the data are too far from the policy's, or "
            "advantages or weights too large; leave such tokens out with mask"
        )
    return _output(logprobs, {"loss:sum": loss, **metrics})


def _output(logprobs: list[Tensor], metrics: dict[str, float]) -> ForwardBackwardOutput:
    return ForwardBackwardOutput([{"logprobs": values} for values in logprobs], metrics)
