"""The training engine: model, optimizer, schedule and checkpoints of one job, without data.

A program with its own batches, loss and loop builds a `TrainingEngine` in its own process;
`torchtitan.train.Trainer` is this engine plus tokenizer, data, metrics and a loop.

An engine draws no random numbers from the host program's generators, and seeds them only if
`debug.seed` is set. When the last engine of a process closes, the settings that the engines changed are
restored, and a default process group that they created is destroyed.

B sequences, T tokens, V vocabulary entries. Arguments that several steps take:

    microbatches    one batch, or a list of batches whose B and T may differ. Data-parallel ranks may
                    pass lists of different lengths, also empty lists; all ranks of a pipeline pass the
                    same list.
    labels          [B, T], or one tensor per microbatch; None uses each batch's entry "labels".
    head            computes outputs in place of logits, such as `TokenLogProbs()`, so the whole
                    logits never exist; output_fn and loss_fn get these outputs.
    output_fn,      functions of the caller. They get logits [B, T, V], or values [B, T, 1] from a model
    loss_fn         with `model.value_head`, and the batch. Tensor parallelism gives them whole logits.
                    Context parallelism gives them this rank's tokens only: logits [B, T/cp, ...], and
                    a batch with tensors sliced in the same way.
"""

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, TypeVar, overload

import torch

from torchtitan import build, rank_layout
from torchtitan.batch.batch import Batch, Entries, Microbatches, TokenBatch, tensor_to
from torchtitan.batch.policy import DocumentPolicy
from torchtitan.checkpoint.states import USER_STATE, UserState
from torchtitan.checkpoint.stream import WeightStream
from torchtitan.compat import is_overridden
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.processes.failure_watch import Watch
from torchtitan.job import resolve_job
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.rank_layout import RankLayout, has_last_stage, set_device
from torchtitan.step.forward import Labels, Step
from torchtitan.step.outputs import Reductions, StepOutput
from torchtitan.step.runner import Head, Microbatch, ModelInputs, model_inputs, on_error
from torchtitan.step.update import OptimStepResult
from torchtitan.tools import host, torch_parts, torch_versions
from torchtitan.tools.logging import logger, saying_once_per

ENGINE_API_VERSION = 1

Outputs = TypeVar("Outputs")
Result = TypeVar("Result")


class EngineState(build.EngineParts):
    """An engine's parts, layout of ranks, counters and checkpoints."""

    step: int = 0
    ntokens_seen: int = 0
    _loaded = (0, 0)  # (step, weights_version) of the last loaded checkpoint
    watch = Watch()
    _said: set[Any]  # warnings that this engine has logged already

    # ---- the layout ----

    @property
    def dp_size(self) -> int:
        """The data-parallel size: how many different batches the ranks read at a time."""
        return self.layout.dp_size

    @property
    def dp_rank(self) -> int:
        """This rank's data-parallel rank; ranks with an equal dp_rank read the same batches."""
        return self.layout.dp_rank

    @property
    def dp_group(self) -> torch.distributed.ProcessGroup | None:
        """The data-parallel group: ranks that read different batches of one step; None if dp_size is 1."""
        return self.layout.dp_group if self.dp_size > 1 else None

    @property
    def loss_group(self) -> torch.distributed.ProcessGroup | None:
        """The ranks whose losses add up to the global batch's loss; None if this rank's loss is that sum."""
        mesh = self.parallel_dims.get_optional_mesh("loss")
        return None if mesh is None else mesh.get_group()

    @property
    def has_outputs(self) -> bool:
        """True if this rank gets the model's outputs: without a pipeline, or with its last stage."""
        return self.runner.has_outputs

    @property
    def lr(self) -> float:
        """The schedule's learning rate for the next step."""
        return float(self.lr_schedulers.schedulers[0].get_last_lr()[0])

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, which checkpoints hold as `train_state`."""
        return {
            "step": self._steps_done,
            "ntokens_seen": self.ntokens_seen,
            "weights_version": self.weights_version,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the counters; weights_version may be missing (0.2.x). ValueError for a bad count."""
        state_dict = {"weights_version": state_dict["step"], **state_dict}
        for name in ("step", "ntokens_seen", "weights_version"):
            count = state_dict[name]
            if not isinstance(count, int) or not 0 <= count < 2**63:
                raise ValueError(
                    f"train_state.{name} of a checkpoint must be a whole number of at least 0, got "
                    f"{count!r}: the checkpoint is damaged; load another one"
                )
        self.step, self.ntokens_seen = state_dict["step"], state_dict["ntokens_seen"]
        self.weights_version = state_dict["weights_version"]
        self._loaded = (self.step, state_dict["weights_version"])

    def add_state(self, name: str, state: Any) -> None:
        """Add an object of the caller to full checkpoints, which save and restore it.

        state: has `load_state_dict()` and `state_dict()`; the dict may hold numbers, strings, tensors
            and containers of these. All ranks add the same names before saving or loading; only one rank's
            state is saved. To load a checkpoint that lacks it, add "user_state" to
            `checkpoint.exclude_from_loading`.
        Raises ValueError for a name that is taken, and for other types in the dict.
        """
        self.checkpointer.states.setdefault(USER_STATE, UserState()).add(name, state)

    @property
    def _steps_done(self) -> int:
        """`step` if the caller sets it, else the loaded step plus the optimizer steps since loading."""
        step, version = self._loaded
        return self.step if self.step != step else step + self.weights_version - version

    @property
    def weights_version(self) -> int:
        """The number of optimizer steps, plus the number of loads that restored only weights.

        Waits until the device knows whether the last step was skipped; raises the errors of `optim_step`.
        """
        return self.update.weights_version

    @weights_version.setter
    def weights_version(self, version: int) -> None:
        self.update.weights_version = version

    def save(self, path: str | None = None, *, force: bool = True) -> None:
        """Save model, optimizer, schedule and counters. Collective.

        path: the folder to write, which `keep_latest_k` never deletes. None: `step-N` of
            `checkpoint.folder`. force: False saves only if a save is due, see `CheckpointManager.save`.
        """
        self.update.settle()
        self.checkpointer.save(self._steps_done, path=path, force=force)

    def save_hf(self, path: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> None:
        """Write the model to a folder that `transformers` opens. Collective.

        The folder gets safetensors files with an index, config.json and the tokenizer files; existing
        config.json and tokenizer files are kept. dtype: cast floating-point tensors to this; None: keep
        each tensor's dtype. Raises ValueError without a state_dict_adapter, RunError if writing fails.
        """
        self.update.settle()
        self.checkpointer.save_hf(os.fspath(path), dtype)

    def save_peft(self, path: str | os.PathLike[str], *, base_model: str | None = None) -> None:
        """Write the adapters to a folder that the library `peft` opens. Collective.

        base_model: the base model's name or folder, for adapter_config.json; None: the loaded model.
        Raises ValueError without adapters, and for experts that PEFT's format cannot store.
        """
        self.update.settle()
        self.checkpointer.save_peft(os.fspath(path), base_model)

    def load_peft(self, path: str | os.PathLike[str]) -> None:
        """Load the adapters from a folder in PEFT's format, and zero gradients. Collective.

        Raises ValueError for a model without adapters, and if layers, ranks, scales or sizes differ.
        """
        self.update.settle()
        self.checkpointer.load_peft(os.fspath(path))
        self.weights_version += 1
        self._forget_gradients()

    def adapters_off(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model runs without its adapters, e.g. as the reference
        model of a KL loss.

        Training steps inside the context raise. Raises ValueError without adapters, or if other weights are trained.
        """
        return self.checkpointer.adapters.off()

    def load(self, path: str | None = None, *, model_only: bool = False) -> bool:
        """Load a checkpoint, and return whether there was one. Collective.

        path: the folder of one checkpoint, with DCP or Hugging Face files. None: the checkpoint that a
            run starts from: `checkpoint.load_step` in its own folder, else the config's initial checkpoint.
        model_only: keep optimizer, schedule and counters. Gradients are zeroed.
        """
        step = -1 if path is not None else self.job_config.checkpoint.load_step
        with contextlib.suppress(FloatingPointError, ValueError):
            # Ignore a late error of the last optimizer step, whose result the load replaces.
            self.update.settle()
        loaded_before = self._loaded
        found = self.checkpointer.load(step, path=path, model_only=model_only)
        if found and self._loaded is loaded_before:  # the counters were not restored
            self.weights_version += 1
            step, version = self._loaded
            self._loaded = (step, version + 1)  # so `_steps_done` does not count the load as a step
        if found:
            self._forget_gradients()
        return found

    def _forget_gradients(self) -> None:
        """Discard the gradients of the current step, which belong to replaced weights."""
        self.optimizers.zero_grad()
        self.update.forget_microbatches()

    def to(
        self,
        device: torch.device | str,
        *,
        model: bool = True,
        optimizer: bool = True,
        grad: bool = True,
    ) -> None:
        """Move states to host memory ("cpu") or back to the device. No effect for an engine on the CPU.

        model: move parameters (they stay the same objects) and buffers. optimizer: move its state.
        States in host memory can be saved, loaded and exported; steps need them on the device.
        Raises ValueError for another device, and if hooks on parameters would be lost.
        """
        target = self.offloader.check_target(device)
        if self.offloader.can_move(self.job_config):
            self.checkpointer.maybe_wait_for_staging()
            self.offloader.move(target, model=model, optimizer=optimizer, grad=grad)

    def iter_hf_weights(
        self, *, dtype: torch.dtype | None = None, sharded: bool = False
    ) -> WeightStream:
        """Return an iterator over (HF name, tensor) of all weights, with a version and a digest.

        dtype: cast parameters, except routers, to this. sharded: True yields only this rank's shards,
        without communication; False is collective. Raises ValueError without a state_dict_adapter.
        """
        adapter = self.checkpointer.require_adapter()
        return WeightStream.from_engine(self, adapter, dtype=dtype, sharded=sharded)

    # ---- a call ----

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """Wrap a step: log each warning once per engine, and report a failure to all ranks."""
        with saying_once_per(self._said), self.watch.call():
            yield

    def _check_ready(self, step: str, *needs: str, trains: bool = True) -> None:
        """Raise if the engine is closed, if `needs` are not on the device, or, with `trains`, if it cannot train."""
        if self not in host.engines():
            raise RuntimeError(f"{step} was called after close(); build a new engine")
        if trains and self.forward_only:
            raise RuntimeError(f"{step} needs an engine that was built with forward_only=False")
        if trains and step != "optim_step" and self.checkpointer.adapters.are_off:
            raise ValueError(f"{step} was called in a context of adapters_off; leave it first")
        self.offloader.check_here(step, *needs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Finish pending checkpoint writes and restore the host's settings. Safe to call twice."""
        self.watch.close()
        try:
            if hasattr(self, "checkpointer"):  # the constructor may have failed early
                self.checkpointer.close()
        finally:
            host.move_out(self)


class TrainingEngine(EngineState):
    """A model with optimizer, schedule and checkpoints, built from a config; the caller runs the steps.

    Builds no tokenizer, dataloader or validator. Reuses an existing default process group. Checks the
    config before it touches a device or a process group; `job_config` is a frozen copy.
    As a context manager the engine closes itself.
    train_spec: replaces the registered spec of `model.name`.
    layout: from `RankLayout.join`; the engine shares its groups. None creates new groups.
    forward_only: True makes an engine for scoring, without optimizer and training steps, which loads and
        saves only weights and counters.
    Raises ConfigError for a config that cannot run, ValueError for a layout with other parallel degrees.
    """

    metrics_processor: Any = None  # `Trainer` sets this attribute

    def __init__(
        self,
        job_config: JobConfig,
        *,
        train_spec: TrainSpec | None = None,
        layout: RankLayout | None = None,
        forward_only: bool = False,
    ):
        logger.info("job: %s", job_config.job.description)
        job_config, self.train_spec, *_ = resolve_job(job_config, self.builds_data, train_spec)
        self.job_config, self.num_steps = job_config, job_config.training.steps
        self.forward_only = forward_only
        self._given_layout = layout
        self._said = set()
        torch_versions.warn_if_newer(torch.__version__)
        host.move_in(self)
        with saying_once_per(self._said), on_error(self.close):
            # The failure watch watches only the groups that this engine creates.
            groups_before = set(torch_parts.world.pg_map)
            self.device = set_device() if layout is None else layout.device
            self.parallel_dims = self.init_distributed()
            self.layout = layout or RankLayout(
                self.device, self.parallel_dims, has_last_stage(job_config, self.parallel_dims)
            )
            job_config.maybe_log()
            self.seed = build.choose_seed(job_config, self.parallel_dims, self.device)
            self.build_data()
            build.build(self, groups_before, self._client_inputs)
        weakref.finalize(self, self.watch.close)

    @classmethod
    def from_hf(
        cls, folder: str | os.PathLike[str], job_config: JobConfig | None = None, **options: Any
    ) -> Self:
        """Return an engine with the model and the weights of a Hugging Face folder. Collective.

        folder: has config.json and safetensors files.
        job_config: all other settings; its `model.name`, `.flavor` and `.hf_assets_path` are ignored.
        options: arguments of the constructor.
        Raises ValueError if the model is not supported, or if the files do not fit its config.json.
        """
        spec = options.pop("train_spec", None)
        job_config, spec = build.job_of_hf(folder, job_config, spec, cls.builds_data)
        engine = cls(job_config, train_spec=spec, **options)
        with on_error(engine.close):
            engine.load(os.fspath(folder), model_only=True)
        return engine

    def init_distributed(self) -> ParallelDims:
        """Join or reuse the process group and return the layout of ranks."""
        if self._given_layout is not None:
            return self._given_layout.dims_for(self.job_config, self.train_spec)
        return rank_layout.join_ranks(self.job_config, self.train_spec, self.device)

    def build_data(self) -> None:
        """Hook for subclasses that read data; called before the model is built."""

    @property
    def packing(self) -> DocumentPolicy:
        """The document policy of the job with the current tokenizer; unrelated to `training.packing`."""
        config, said = self.job_config, self._said
        return DocumentPolicy.from_job(config.training, self.model_args, self.tokenizer, said)

    def train_mode(self) -> contextlib.ExitStack:
        """Put the model into training mode now. A `with` block around the result restores the mode at its end."""
        return self.runner.mode(training=True)

    def eval_mode(self) -> contextlib.ExitStack:
        """Put the model into evaluation mode now. A `with` block around the result restores the mode at its end."""
        return self.runner.mode(training=False)

    # ---- one step ----

    def to_device(self, batch: Mapping[str, Any]) -> Entries:
        """Return a copy of `batch` with its tensors on the engine's device; other values are kept."""
        return {key: tensor_to(x, self.device) for key, x in batch.items()}

    def post_dataloading_process(
        self, input_dict: Batch | TokenBatch, labels: torch.Tensor | None
    ) -> ModelInputs:
        """Return (inputs [B, T], labels, extra_inputs, extra_kwargs) for the model's forward.

        Under context parallelism all tensors are this rank's slice, [B, T/cp]. A
        subclass that overrides this method gets a dict as input_dict.
        """
        batch = self.packing.token_batch(input_dict, labels)
        return model_inputs(self.packing, batch, self.model_parts[0], self.context_sharding)

    def _client_inputs(self, batch: TokenBatch) -> ModelInputs | None:
        """Return the result of a client's `post_dataloading_process`; None if it is not overridden."""
        if not is_overridden(self, "post_dataloading_process", TrainingEngine):
            return None
        as_dict: Any = batch.as_dict()
        return ModelInputs(*self.post_dataloading_process(as_dict, batch.labels))

    def _step_parts(self) -> Step:
        """Return this engine's `Step`, made in each call because clients may replace loss_fn or tokenizer."""
        config, loss = self.job_config, (self.loss_fn, self.has_token_loss, self.loss_group)
        return Step(config, self.packing, self.runner, self.update, *loss)

    @overload
    def forward_step(
        self, microbatches: Microbatches, *, labels: Labels = None
    ) -> list[torch.Tensor] | None: ...

    @overload
    def forward_step(
        self, microbatches: Microbatches, *, labels: Labels = None, head: Head[Outputs]
    ) -> list[Outputs] | None: ...

    @overload
    def forward_step(
        self,
        microbatches: Microbatches,
        *,
        labels: Labels = None,
        output_fn: Callable[[torch.Tensor, Any], Result],
        head: None = None,
    ) -> list[Result] | None: ...

    @overload
    def forward_step(
        self,
        microbatches: Microbatches,
        *,
        labels: Labels = None,
        output_fn: Callable[[Outputs, Any], Result],
        head: Head[Outputs],
    ) -> list[Result] | None: ...

    @torch.no_grad()
    def forward_step(
        self,
        microbatches: Microbatches,
        *,
        labels: Labels = None,
        output_fn: Callable[[Any, Any], Any] | None = None,
        head: Head[Any] | None = None,
    ) -> list[Any] | None:
        """Return the model's output for each microbatch, in order, without gradients.

        output_fn: (logits, batch) -> result, which is returned in place of the logits, to save memory.
            Under context parallelism the result's tensors [B, T/cp, ...] are joined to [B, T, ...].
        Returns None on a pipeline's ranks without the last stage. Raises ValueError if `head` is given
        and a batch has no labels, or the model has a value head. If output_fn fails on some ranks, the
        other ranks raise RunError, and the engine stays usable.
        """
        self._check_ready("forward_step", "model", trains=False)
        with self._call():
            return self._step_parts().forward(microbatches, labels, output_fn, head)

    def from_last_stage(self, outputs: Result | None) -> Result:
        """Return, on all ranks of a pipeline, the `outputs` of the rank with the last stage.

        outputs: tensors and picklable objects; ignored on the other ranks. Tensors are returned on the
            engine's device. Collective over the pipeline, if there is one.
        """
        schedule: Any = self.pp_schedule
        whole: Any = outputs
        return whole if schedule is None else schedule.tree_from_last_stage(whole)

    @overload
    def forward_backward_step(
        self,
        *,
        input_dict: Microbatches,
        labels: Labels = None,
        global_valid_tokens: torch.Tensor | float | None = None,
        loss_fn: Callable[[Outputs, torch.Tensor, Any], Any] | None = None,
        head: Head[Outputs] | None = None,
        whole_rows: bool = False,
        metrics: None = None,
    ) -> torch.Tensor: ...

    @overload
    def forward_backward_step(
        self,
        *,
        input_dict: Microbatches,
        labels: Labels = None,
        global_valid_tokens: torch.Tensor | float | None = None,
        loss_fn: Callable[[Outputs, torch.Tensor, Any], Any] | None = None,
        head: Head[Outputs] | None = None,
        whole_rows: bool = False,
        metrics: Reductions,
    ) -> StepOutput: ...

    def forward_backward_step(
        self,
        *,
        input_dict: Microbatches,
        labels: Labels = None,
        global_valid_tokens: torch.Tensor | float | None = None,
        loss_fn: Callable[[Any, torch.Tensor, Any], Any] | None = None,
        head: Head[Any] | None = None,
        whole_rows: bool = False,
        metrics: Reductions | None = None,
    ) -> torch.Tensor | StepOutput:
        """Add the gradients of one or several microbatches to those accumulated for `optim_step`.

        input_dict, labels: see the top of this module. A pipeline splits one batch, not a list.
        global_valid_tokens: the loss denominator: the count over all microbatches of the step and all
            data-parallel ranks. None: no division, because the weights in loss_fn include the
            denominator, or because `optim_step(denominator=...)` divides.
        loss_fn: (logits, labels, batch) -> sum over tokens; with `metrics` also (sum, metrics) or
            (sum, metrics, output), see `StepOutput`. None: with a head, minus the sum of its
            log-probabilities; else the train spec's loss, which under tensor parallelism gets a DTensor
            sharded along V, unless `disable_loss_parallel` is set.
        whole_rows: under context parallelism, gather whole rows of logits and batch for loss_fn. All
            context-parallel ranks compute the whole loss; each one gets the gradient of its own tokens,
            and an equal share of the loss.
        metrics: name of a metric of loss_fn -> "sum" or "max", its reduction over microbatches and
            ranks. Metrics are not divided.
        Returns this rank's sum divided by the denominator, fp32; summed over `loss_group` it is the
        loss of the global batch. All ranks of a pipeline return the same value. With `metrics`, returns
        a `StepOutput`, which has the loss of the global batch.
        Raises ValueError for the default loss without `global_valid_tokens` or with a value head, for
        a metric of loss_fn that is not in `metrics`, and under `optimizer.early_step_in_backward` for a
        second microbatch before `optim_step`. If loss_fn fails on some ranks, the other ranks raise
        RunError at the end of the call. The engine stays usable, but gradients lack some microbatches:
        call `optimizers.zero_grad()`. If anything else fails on some ranks, all ranks raise, and the
        engine is unusable. See `torchtitan.distributed.processes.failure_watch`.
        """
        self._check_ready("forward_backward_step", "model", "grad")
        with self._call():
            return self._step_parts().forward_backward(
                input_dict, labels, global_valid_tokens, loss_fn, head, whole_rows, metrics
            )

    def prepare(
        self, batch: Batch, labels: torch.Tensor | None = None, *, head: Head[Any] | None = None
    ) -> Microbatch:
        """Return the inputs for the caller's own forward pass; works in all layouts without a pipeline.

        with engine.train_context(), engine.maybe_enable_amp:
            outputs = engine.model_parts[0](microbatch.inputs, **microbatch.kwargs)
            loss = ...  # from outputs, microbatch.labels, microbatch.batch
        engine.backward(loss)

        For the arguments see `forward_backward_step`. Under context parallelism inputs, labels and batch
        hold this rank's tokens; `microbatch.join` joins outputs to whole rows.
        Raises ValueError under a pipeline, and for batches that `forward_backward_step` refuses.
        """
        self._check_ready("prepare", trains=False)
        with saying_once_per(self._said):
            return self._step_parts().prepare(batch, labels, head)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a loss that the caller computed to those accumulated for `optim_step`.

        loss: this rank's share, divided by the denominator of the whole step; summed over `loss_group`
            it is the loss of the global batch. Every rank must alternate forward and backward passes,
            and run the same number of passes.
        Raises ValueError under a pipeline, and for a loss that is not a scalar with a gradient.
        """
        self._check_ready("backward", "model", "grad")
        with self._call():
            self._step_parts().backward(loss)

    def optim_step(
        self,
        *,
        lr: float | None = None,
        max_norm: float | None = None,
        denominator: torch.Tensor | float | None = None,
        advance_schedule: bool = True,
    ) -> OptimStepResult:
        """Clip, update the weights, advance the schedule and zero the gradients.

        lr, max_norm: replace the config's values in this step; parameter groups keep their multiples
            of lr.
        denominator: gradients are first divided by the sum of `denominator` over the data-parallel
            ranks, or by its mean if `training.gradient_reduction` is "mean"; 0 leaves them
            undivided.
        advance_schedule: False leaves the learning rate to `lr_schedulers.step()`.

        `training.nonfinite_grad_norm` decides about a non-finite norm: "skip" leaves weights and
        optimizer state unchanged (at most 10 times in a row), "stop" raises FloatingPointError,
        "ignore" updates anyway. On an accelerator the host learns of such a norm a step late.
        Raises ValueError if no rank has a gradient and `forward_backward_step` was not called, for an
        argument outside its range, and for lr, max_norm or denominator under early_step_in_backward.
        """
        self._check_ready("optim_step", "model", "optimizer", "grad")
        self.update.check_arguments(lr, max_norm, denominator)
        # Outside `_call`, which reports errors to the other ranks, because here all ranks raise together.
        self.update.settle()
        # A caller that sets `step` does so before this call.
        number = self._steps_done + (self.step == self._loaded[0])
        with self._call():
            # A client's forward pass may have left parameters gathered; only shards have gradients.
            self.runner.reshard()
            grad_norm, skip = self.update.decide(number, max_norm, denominator)
        if not isinstance(skip, torch.Tensor):  # the host already knows whether to skip
            self.update.settle()
        with self._call():
            return self.update.apply(grad_norm, skip, lr, advance_schedule)
