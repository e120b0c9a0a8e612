"""The training engine: model, optimizer, schedule and checkpoints of one job, without data.

A program that has its own batches, loss and loop builds a `TrainingEngine` inside its own process;
`torchtitan.train.Trainer` is this engine plus tokenizer, data, metrics and a loop.

In its host process an engine is a guest: it draws no random numbers from the host's generators, and
seeds them only if `debug.seed` is set. The last `close()` of the process's engines restores the settings
that they changed, and destroys a default process group that they made. The groups of a mesh live as
long as the default group, because torch's caches may have passed them on to other users.

B sequences, T tokens, V vocabulary entries. Arguments that several steps take:

    microbatches    one batch on every rank, or a list of batches. Their rows and T may differ, and
                    data-parallel ranks may have lists of different lengths, empty ones too;
                    all ranks of a pipeline give the same list. A trainer calls
                    `forward_backward_step` once for each of a step's `gradient_accumulation_steps`
                    batches; under a pipeline the call splits one batch into microbatches by rows.
    labels          [B, T], or a list with one tensor per microbatch; None takes each batch's own entry
                    "labels", if it has one.
    head            computed in place of logits, such as `TokenLogProbs()`, so that the logits never
                    exist whole; functions get its outputs.
    functions       of the caller, for outputs or a loss: they get logits [B, T, V], or values
                    [B, T, 1] from a model with `model.value_head`, and the batch. Under tensor
                    parallelism logits are whole. Under context parallelism they are those of this
                    rank's tokens, [B, T/cp, ...], and so are the batch's tensors [B, T, ...].
"""

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Self, TypeVar, overload

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


class _Loaded(NamedTuple):
    """The counters of the checkpoint that was loaded last."""

    step: int = 0
    weights_version: int = 0


class EngineState:
    """The parts of an engine, its place among the ranks, its counters and its checkpoints."""

    job_config: JobConfig
    device: torch.device
    layout: RankLayout
    parallel_dims: ParallelDims
    forward_only: bool

    step: int = 0
    num_steps: int  # the last step: training.steps, or where training.epochs end
    ntokens_seen: int = 0
    _loaded = _Loaded()
    watch: Watch = Watch()
    _said: set[Any]  # what is said once per engine

    def _adopt(self, parts: build.EngineParts) -> None:
        self.context_sharding = parts.context_sharding
        self.model_args = parts.model_args
        self.model_converters = parts.model_converters
        self.num_params = parts.num_params
        self.num_flops_per_token = parts.num_flops_per_token
        self.flops_without_attention = parts.flops_without_attention
        self.global_batch_size = parts.global_batch_size
        self.gradient_accumulation_steps = parts.gradient_accumulation_steps
        self.loss_fn = parts.loss_fn
        self.has_token_loss = parts.has_token_loss
        self.model_parts = parts.model_parts
        self.pp_schedule = parts.pp_schedule
        self.pp_has_first_stage = parts.pp_has_first_stage
        self.pp_has_last_stage = parts.pp_has_last_stage
        self.optimizers = parts.optimizers
        self.lr_schedulers = parts.lr_schedulers
        self.offloader = parts.offloader
        self.checkpointer = parts.checkpointer
        self.update = parts.update
        self.train_context = parts.train_context
        self.maybe_enable_amp = parts.maybe_enable_amp
        self.watch = parts.watch
        self.runner = parts.runner

    # ---- the layout ----

    @property
    def dp_size(self) -> int:
        """The number of groups of ranks that read different batches."""
        return self.layout.dp_size

    @property
    def dp_rank(self) -> int:
        """This rank's place among them; ranks with the same number read the same batches."""
        return self.layout.dp_rank

    @property
    def dp_group(self) -> torch.distributed.ProcessGroup | None:
        """The ranks that read different batches of one step; None if there is only one."""
        return self.layout.dp_group if self.dp_size > 1 else None

    @property
    def loss_group(self) -> torch.distributed.ProcessGroup | None:
        """The ranks whose shares of the loss add up to the loss of the global batch.

        They read different batches, or other tokens of the same rows. None if this rank has the whole
        loss.
        """
        mesh = self.parallel_dims.get_optional_mesh("loss")
        return None if mesh is None else mesh.get_group()

    @property
    def has_outputs(self) -> bool:
        """True if this rank gets the model's outputs: not on a pipeline's earlier stages."""
        return self.runner.has_outputs

    @property
    def lr(self) -> float:
        """The learning rate that the schedule has for the next step."""
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
        """Restore the counters. Raises ValueError if one is no count."""
        # Older checkpoints count steps only.
        state_dict = {"weights_version": state_dict["step"], **state_dict}
        for name in ("step", "ntokens_seen", "weights_version"):
            count = state_dict[name]
            if not isinstance(count, int) or not 0 <= count < 2**63:
                raise ValueError(
                    f"train_state.{name} of a checkpoint must be a whole number of at least 0, got "
                    f"{count!r}: the checkpoint is damaged; load another one"
                )
        self.step = state_dict["step"]
        self.ntokens_seen = state_dict["ntokens_seen"]
        self.weights_version = state_dict["weights_version"]
        self._loaded = _Loaded(self.step, state_dict["weights_version"])

    def add_state(self, name: str, state: Any) -> None:
        """Have full checkpoints save and restore an object of the caller's.

        state: has `state_dict()`, of numbers, strings, tensors and containers of these, and
            `load_state_dict()`. All ranks add the same names before they save or load. Only one rank's
            state of each name is saved: give states that differ between ranks different names. A
            checkpoint without it loads with "user_state" in `checkpoint.exclude_from_loading`.
        Raises ValueError for a name that is taken, and for a state that holds other data.
        """
        self.checkpointer.states.setdefault(USER_STATE, UserState()).add(name, state)

    @property
    def _steps_done(self) -> int:
        """`step` if the caller sets it, else the loaded step plus the optimizer steps since the load."""
        if self.step != self._loaded.step:
            return self.step
        return self.step + self.weights_version - self._loaded.weights_version

    @property
    def weights_version(self) -> int:
        """The number of changes of the weights: optimizer steps, and loads that restore only weights.

        Waits for the device's verdict on the last step, and raises as the next `optim_step` would.
        """
        return self.update.weights_version

    @weights_version.setter
    def weights_version(self, version: int) -> None:
        self.update.weights_version = version

    def save(self, path: str | None = None, *, force: bool = True) -> None:
        """Save model, optimizer, schedule and counters. Collective.

        path: the folder to write; retention never deletes it. None is a step folder of
            `checkpoint.folder`, named after `step`, or after the optimizer steps if the caller never
            sets `step`.
        force: False saves only when a save is due: never without `checkpoint.enable`; with a dataloader
            at every `checkpoint.interval`; without a dataloader always.
        """
        self.update.settle()
        self.checkpointer.save(self._steps_done, path=path, force=force)

    def save_hf(self, path: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> None:
        """Write the model to a folder that `transformers` opens. Collective.

        The folder gets safetensors files with an index, config.json and the tokenizer; a tokenizer
        or a config.json of this model that is already in it is kept.
        dtype: floating-point tensors are cast to it; None keeps the dtype of each.
        Raises ValueError for a model without a state_dict_adapter, RunError if it fails.
        """
        self.update.settle()
        self.checkpointer.save_hf(os.fspath(path), dtype)

    def save_peft(self, path: str | os.PathLike[str], *, base_model: str | None = None) -> None:
        """Write the adapters to a folder that the library `peft` opens. Collective.

        base_model: the name or folder of the base, for adapter_config.json; None is the one loaded.
        Raises ValueError for a model without adapters, and for experts that PEFT's files have no
        place for.
        """
        self.update.settle()
        self.checkpointer.save_peft(os.fspath(path), base_model)

    def load_peft(self, path: str | os.PathLike[str]) -> None:
        """Read the adapters, and nothing else, from a folder in PEFT's format. Collective.

        Gradients are zeroed, because they belong to the weights before.
        Raises ValueError for a model without adapters, and if layers, ranks, scales or sizes differ.
        """
        self.update.settle()
        self.checkpointer.load_peft(os.fspath(path))
        self.weights_version += 1
        self._forget_gradients()

    def adapters_off(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model computes without its adapters, as a KL reference does.

        Nothing is copied, and nothing trains in it: forward_backward_step and backward raise ValueError.
        Raises ValueError for a model without adapters, and if weights outside of adapters train, too.
        """
        return self.checkpointer.adapters.off()

    def load(self, path: str | None = None, *, model_only: bool = False) -> bool:
        """Load a checkpoint, and return whether there was one. Collective.

        path: the folder of one checkpoint, DCP or Hugging Face files. None loads the checkpoint
            that a run starts with: `checkpoint.load_step` of its own folder, else the config's initial one.
        model_only: leave optimizer, schedule and counters as they are.

        If the checkpoint does not restore `weights_version`, it goes up by one. Gradients are zeroed,
        because they belong to the weights before.
        """
        step = -1 if path is not None else self.job_config.checkpoint.load_step
        with contextlib.suppress(FloatingPointError, ValueError):
            self.update.settle()  # a bad last step does not matter: its weights are replaced
        loaded_before = self._loaded
        found = self.checkpointer.load(step, path=path, model_only=model_only)
        if found and self._loaded is loaded_before:  # the counters were not restored
            self.weights_version += 1
            # The change is no optimizer step.
            step, version = self._loaded
            self._loaded = _Loaded(step, version + 1)
        if found:
            self._forget_gradients()
        return found

    def _forget_gradients(self) -> None:
        """Begin the step again: its gradients belong to weights that are replaced."""
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
        """Move states to host memory ("cpu"), or back to the engine's device.

        model: parameters and buffers. optimizer: its state. grad: gradients.

        Parameters stay the same objects. States in host memory can be saved, loaded and exported;
        steps need them on the device. On the CPU nothing ever moves.
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

        dtype: parameters are cast to it; buffers and routers keep their dtype.
        sharded: only this rank's blocks, without communication. Whole tensors are collective.
        See `WeightStream`. Raises ValueError for a model without a state_dict_adapter.
        """
        adapter = self.checkpointer.require_adapter()
        return WeightStream.from_engine(self, adapter, dtype=dtype, sharded=sharded)

    # ---- around a call ----

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """Wrap a step: this engine's warnings are said once, and a failure reaches all ranks."""
        with saying_once_per(self._said), self.watch.call():
            yield

    # ---- the end ----

    def _check_open(self, step: str) -> None:
        """Raise RuntimeError if the engine was closed."""
        if self not in host.engines():
            raise RuntimeError(
                f"{step} was called after close(), which gives back what the engine needs; close it "
                "after the last step, or build a new one"
            )

    def _check_trains(self, step: str) -> None:
        """Raise RuntimeError if the engine was closed, or only runs forwards."""
        self._check_open(step)
        if self.forward_only:
            raise RuntimeError(
                f"{step} needs gradients and an optimizer, which this engine was built without; "
                "build it with forward_only=False"
            )
        if step != "optim_step" and self.checkpointer.adapters.are_off:
            raise ValueError(
                f"{step} was called in a context of adapters_off, where the adapters, which train, "
                "have no gradients; leave the context first"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Finish pending checkpoint writes and restore the host's settings. Safe to call twice."""
        self.watch.close()
        try:
            if hasattr(self, "checkpointer"):  # the construction may have failed before it
                self.checkpointer.close()
        finally:
            host.move_out(self)


class TrainingEngine(EngineState):
    """Everything between a config and an optimizer step, wired once.

    Never builds a tokenizer, dataloader or validator. An existing default process group is
    reused. A config that is not resolved yet is checked here, before a device or a process group
    is touched; `job_config` is then a frozen copy. As a context manager it closes itself.

    train_spec: in place of the registered spec of `model.name`; nothing is registered.
    layout: from `RankLayout.join`, whose groups this engine then shares; None makes new groups.
    forward_only: an engine for scoring. It has no optimizer state, takes no training step, and
        reads and writes only weights and counters in checkpoints.

    Raises ConfigError for a config that cannot run, ValueError for a layout of other degrees.
    """

    # `Trainer` sets these; an engine has no data.
    builds_data = False
    tokenizer: Any = None
    dataloader: Any = None
    metrics_processor: Any = None

    def __init__(
        self,
        job_config: JobConfig,
        *,
        train_spec: TrainSpec | None = None,
        layout: RankLayout | None = None,
        forward_only: bool = False,
    ):
        logger.info("job: %s", job_config.job.description)
        job = resolve_job(job_config, self.builds_data, train_spec)
        self.job_config = job_config = job.config
        self.train_spec = job.train_spec
        self.num_steps = job_config.training.steps
        self.forward_only = forward_only
        self._given_layout = layout
        self._said = set()
        torch_versions.warn_if_newer(torch.__version__)
        host.move_in(self)
        with saying_once_per(self._said), on_error(self.close):
            # torch keeps every process group in pg_map and offers no other list (read in torch 2.13);
            # the failure watch needs the groups that this engine makes.
            groups_before = set(torch_parts.world.pg_map)
            self.device = set_device() if layout is None else layout.device
            self.parallel_dims = self.init_distributed()
            self.layout = layout or RankLayout(
                self.device, self.parallel_dims, has_last_stage(job_config, self.parallel_dims)
            )
            job_config.maybe_log()
            self.seed = build.choose_seed(job_config, self.parallel_dims, self.device)
            self.build_data()
            parts = build.build(
                job_config,
                self.train_spec,
                self.layout,
                seed=self.seed,
                tokenizer=self.tokenizer,
                dataloader=self.dataloader,
                train_state=self,
                client_inputs=self._client_inputs,
                num_steps=self.num_steps,
                forward_only=forward_only,
                has_clients_backward=self.builds_data and self.dataloader is None,
                groups_before=groups_before,
            )
            self._adopt(parts)
        weakref.finalize(self, self.watch.close)

    @classmethod
    def from_hf(
        cls, folder: str | os.PathLike[str], job_config: JobConfig | None = None, **options: Any
    ) -> Self:
        """Return an engine with the model and the weights of a Hugging Face folder. Collective.

        folder: with config.json and safetensors files.
        job_config: everything but the model; its `model.name`, `.flavor` and `.hf_assets_path` are
            ignored. options: those of the constructor; a train_spec, of the folder's family, gives
            everything but the model's arguments.
        Raises ValueError for a folder that describes no model of ours, or whose files do not fit
        its config.json.
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
        """Hook for subclasses that own data; called before the model is built."""

    @property
    def packing(self) -> DocumentPolicy:
        """How the job treats documents in a batch (not `training.packing`), with the current tokenizer."""
        config, said = self.job_config, self._said
        return DocumentPolicy.from_job(config.training, self.model_args, self.tokenizer, said)

    # ---- training or evaluating ----

    def train_mode(self) -> contextlib.ExitStack:
        """Put the model into training mode, at once; as a context manager, until its end."""
        return self.runner.mode(training=True)

    def eval_mode(self) -> contextlib.ExitStack:
        """Put the model into evaluation mode, at once; as a context manager, until its end."""
        return self.runner.mode(training=False)

    # ---- one step ----

    def to_device(self, batch: Mapping[str, Any]) -> Entries:
        """Return a copy of `batch` with its tensors on the engine's device; other values are kept."""
        return {key: tensor_to(x, self.device) for key, x in batch.items()}

    def post_dataloading_process(
        self, input_dict: Batch | TokenBatch, labels: torch.Tensor | None
    ) -> ModelInputs:
        """Return (inputs [B, T], labels, extra_inputs, extra_kwargs) for the model's forward.

        Every pipeline stage gets extra_inputs and extra_kwargs, which hold positions and masks. Under
        context parallelism all four hold this rank's tokens, [B, T/cp]. A client's override gets a dict.
        """
        batch = self.packing.token_batch(input_dict, labels)
        return model_inputs(self.packing, batch, self.model_parts[0], self.context_sharding)

    def _client_inputs(self, batch: TokenBatch) -> ModelInputs | None:
        """Return what a client's own `post_dataloading_process` makes of the batch, else None."""
        if not is_overridden(self, "post_dataloading_process", TrainingEngine):
            return None
        as_dict: Any = batch.as_dict()
        return ModelInputs(*self.post_dataloading_process(as_dict, batch.labels))

    def _step_parts(self) -> Step:
        """The parts for one call; a client may have replaced the loss or the tokenizer since the last."""
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

        For callers: scoring, evaluation and RL. `Trainer` trains with `forward_backward_step` and
        validates with its validator, so an override of this method runs in neither; override
        `forward_backward_step` or `post_dataloading_process`, or give the train spec a validator.

        microbatches, labels, head: see the top of this module; labels are the head's.
        output_fn: (logits, batch) -> a result that is returned instead, so that logits need not be kept.
            Under context parallelism its tensors [B, T/cp, ...] are joined to [B, T, ...].

        Under pipeline parallelism the result is None on the ranks without the last stage, and
        microbatches are not split: give several, because one batch keeps only one stage at work.
        Raises ValueError for a head and a batch without labels, or a model with a value head. If
        output_fn fails on some ranks, the other ranks raise RunError and the engine stays usable; see
        `torchtitan.distributed.processes.failure_watch`.
        """
        self._check_open("forward_step")
        self.offloader.check_here("forward_step", "model")
        with self._call():
            return self._step_parts().forward(microbatches, labels, output_fn, head)

    def from_last_stage(self, outputs: Result | None) -> Result:
        """Return on all ranks the `outputs` of the rank with the pipeline's last stage.

        outputs: what `forward_step` returned, or anything made of tensors and objects that can be
            pickled; ignored on the other ranks. Tensors are returned on the engine's device.
        Collective over the pipeline; without a pipeline, `outputs` are returned as they are.
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
        """Accumulate gradients of one or several microbatches until `optim_step`.

        input_dict, labels: microbatches and their labels, see the top of this module.
            Under pipeline parallelism one batch is split into microbatches of
            `pipeline_parallel_microbatch_size` rows; a list is not split.
        global_valid_tokens: the loss denominator, counted over the whole global batch: all
            microbatches of the step. Rows are counted once per data-parallel rank, not per TP, CP or PP
            rank. None does not divide a loss_fn's sums: for weights that hold
            the denominator already, or for `optim_step(denominator=...)`.
        loss_fn: (logits, labels, batch) -> sum over tokens; with `metrics` also (sum, metrics) or
            (sum, metrics, output), see `StepOutput`. The default is the train spec's loss, which
            under tensor parallelism gets a DTensor split along V, unless `disable_loss_parallel`
            is set.
        head: without a loss_fn the loss is minus the sum of its log-probs.
        whole_rows: under context parallelism loss_fn gets whole rows of outputs, labels and batch.
            Tensors [B, T/cp, ...] are gathered for that, logits included. All ranks that share the
            rows compute the whole loss; each has the gradient of its own tokens, and an equal part
            of the loss.
        metrics: name -> "sum" or "max", of the numbers that loss_fn returns: how they are reduced
            over microbatches and ranks. They are not divided by the denominator. {} for no numbers.
        Returns this rank's sum divided by the denominator, fp32; summed over `loss_group` it is the
        loss of the global batch. All ranks of a pipeline return the same. With `metrics`, returns a
        `StepOutput`, which has the loss of the global batch.

        Raises ValueError for the default loss without `global_valid_tokens`, for metrics that
        `metrics` does not name, and under `optimizer.early_step_in_backward` for a second microbatch
        before `optim_step`. A model with a value head raises it for a head, and without a loss_fn if
        the train spec's loss needs logits.

        If loss_fn fails on some ranks, the other ranks raise RunError at the end of the call. The
        engine stays usable, as after any error that all ranks raise, but some microbatches are missing
        in the gradients: call `optimizers.zero_grad()`. If anything else fails on some ranks, all
        ranks raise, and the engine is lost. Inside a pipeline schedule any failure loses the engine,
        unless it is a failure of a caller's function. See `torchtitan.distributed.processes.failure_watch`.
        """
        self._check_trains("forward_backward_step")
        self.offloader.check_here("forward_backward_step", "model", "grad")
        with self._call():
            return self._step_parts().forward_backward(
                input_dict, labels, global_valid_tokens, loss_fn, head, whole_rows, metrics
            )

    def prepare(
        self, batch: Batch, labels: torch.Tensor | None = None, *, head: Head[Any] | None = None
    ) -> Microbatch:
        """Return the inputs for a forward of the caller's own, in every layout without a pipeline.

        with engine.train_context(), engine.maybe_enable_amp:
            outputs = engine.model_parts[0](microbatch.inputs, **microbatch.kwargs)
            loss = ...  # from outputs, microbatch.labels, microbatch.batch
        engine.backward(loss)

        batch, labels, head: as in `forward_backward_step`. Under context parallelism inputs, labels
        and batch hold this rank's tokens, and `microbatch.join` makes whole rows of outputs.
        Raises ValueError under a pipeline, and as `forward_backward_step` does for bad batches.
        """
        self._check_open("prepare")
        with saying_once_per(self._said):
            return self._step_parts().prepare(batch, labels, head)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a loss that the caller computed, until `optim_step`.

        loss: this rank's share, already divided by the denominator of the whole step; summed over
            `loss_group` it is the loss of the global batch. Every rank alternates forwards and
            backwards, and makes the same number of them.
        Raises ValueError under a pipeline, and for a loss that is not a scalar with a gradient.
        """
        self.offloader.check_here("backward", "model", "grad")
        self._check_trains("backward")
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

        lr: the learning rate of this step only, in place of the schedule's. `optimizer.groups` with
            rates of their own get the same multiple of theirs.
        max_norm: the norm that this step's gradients are clipped to, in place of `training.max_norm`.
        denominator: this rank's share of a number that the gradients are divided by first, for callers
            that learn it only while they go through the microbatches. The gradients are divided by the
            sum over the data-parallel ranks, or by the mean if `training.gradient_reduction` is
            "mean"; not if that is 0.
        advance_schedule: False leaves the learning rate to `lr_schedulers.step()`, for callers
            with several updates per step of the schedule.

        A norm that is not finite is handled by `training.nonfinite_grad_norm`: "skip" leaves
        weights and optimizer state as they are and goes on (at most 10 times in a row),
        "stop" raises FloatingPointError, "ignore" updates all the same. On an accelerator the host
        learns of it a step late; see `OptimStepResult`.
        Raises ValueError if no rank has a gradient and there was no `forward_backward_step`, for any
        of lr, max_norm and denominator under `optimizer.early_step_in_backward`, for an `lr` or a sum
        of denominators that is negative or not finite, and for a `max_norm` that is not above 0.
        """
        self._check_trains("optim_step")
        self.offloader.check_here("optim_step", "model", "optimizer", "grad")
        self.update.check_arguments(lr, max_norm, denominator)
        # All ranks have the same verdicts and raise together, so the watch need not compare them.
        self.update.settle()
        # A caller that sets `step` does so before this call.
        sets_step = self.step != self._loaded.step
        number = self._steps_done + (0 if sets_step else 1)
        with self._call():
            # Parameters that a client's forward left gathered have no gradients.
            self.runner.reshard()
            grad_norm, skip = self.update.decide(number, max_norm, denominator)
        if not isinstance(skip, torch.Tensor):  # the host knows it
            self.update.settle()
        with self._call():
            return self.update.apply(grad_norm, skip, lr, advance_schedule)
