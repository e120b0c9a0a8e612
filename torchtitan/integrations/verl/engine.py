"""A `TrainingEngine` behind verl's interface, for language models and critics.

S samples in a microbatch, N tokens of all samples together, V vocabulary entries. A jagged tensor [S, j]
has j tokens in each sample, where j differs between samples.
"""

import contextlib
import copy
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.engine.base import BaseEngine, BaseEngineCtx
from verl.workers.engine.utils import detach_tree, postprocess_batch_func, prepare_micro_batches

from torchtitan.batch.batch import Batch
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.engine import TrainingEngine
from torchtitan.integrations.verl import samples
from torchtitan.integrations.verl.config import (
    CHECKPOINT_CONTENTS,
    has_adapters,
    in_verls_words,
    job_config_of,
)
from torchtitan.integrations.verl.deltas import WeightDeltas
from torchtitan.loss.logprobs import TokenLogProbs, token_logprobs
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.rank_layout import RankLayout
from torchtitan.step.runner import Head
from torchtitan.tools.errors import ConfigError
from torchtitan.tools.logging import logger, warn_once

# Subfolders of the folder that verl gives for a step's checkpoint.
CHECKPOINT_FOLDER, HF_FOLDER, PEFT_FOLDER = "torchtitan", "huggingface", "lora_adapter"

LossFunction = Callable[..., tuple[Tensor, dict[str, Any]]]


class VerlEngine(BaseEngine):
    """Base class of the engines for language models and critics; each rank has one engine.

    engine: the `TrainingEngine`; exists after `initialize()`. layout: this rank's place in the mesh.
    Raises ConfigError, with verl's field names, for settings that cannot run.
    """

    model_type: str
    engine: TrainingEngine

    def __init__(
        self,
        model_config: Any,
        engine_config: Any,
        optimizer_config: Any,
        checkpoint_config: Any,
    ) -> None:
        super().__init__()
        self.model_config = model_config
        self.engine_config = engine_config
        self.optimizer_config = optimizer_config
        self.checkpoint_config = checkpoint_config
        self.mode: str | None = None  # set by verl's context managers
        self._checkpoints: list[str] = []  # folders that this run has saved, oldest first
        job, spec = self._job()
        with _errors_in_verls_words():
            self.layout = RankLayout.join(job, spec)

    # ---- building ----

    def initialize(self) -> None:
        """Build the model and load `model_config.local_path`. A second call builds a new engine."""
        if hasattr(self, "engine"):
            self.engine.close()
            del self.engine
        job, spec = self._job()
        with _errors_in_verls_words():
            self.engine = TrainingEngine(
                job,
                train_spec=spec,
                layout=self.layout,
                forward_only=self.engine_config.forward_only,
            )
        # None: all model args may differ from the folder's config.json, because verl may override them.
        self.engine.checkpointer.chosen_args = None
        self.engine.load(self.model_config.local_path, model_only=True)
        self.to(
            "cpu",
            model=self.is_param_offload_enabled,
            optimizer=self.is_optimizer_offload_enabled,
            grad=self.is_param_offload_enabled,
        )

    def _job(self) -> tuple[JobConfig, TrainSpec]:
        """Return (job config, train spec) of verl's current settings.

        verl sets the number of steps after it has constructed this object, so call `_job` again
        before building.
        """
        return job_config_of(
            self.engine_config,
            self.optimizer_config,
            self.model_config,
            self.checkpoint_config,
            self.model_type,
        )

    # ---- this rank's place in the job ----

    def get_data_parallel_size(self) -> int:
        return self.layout.dp_size

    def get_data_parallel_rank(self) -> int:
        return self.layout.dp_rank

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.layout.dp_group

    def is_mp_src_rank_with_outputs(self) -> bool:
        return self.layout.is_output_source

    @property
    def is_param_offload_enabled(self) -> bool:
        return self.engine_config.param_offload

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return self.engine_config.optimizer_offload and not self.engine_config.forward_only

    # ---- modes and devices ----

    def train_mode(self, **kwargs: Any) -> "EngineMode":
        return EngineMode(self, mode="train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> "EngineMode":
        return EngineMode(self, mode="eval", **kwargs)

    def to(
        self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        trains = not self.engine_config.forward_only
        self.engine.to(device, model=model, optimizer=optimizer and trains, grad=grad and trains)

    # ---- a batch ----

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Run the microbatches of a batch, and add their gradients to the existing gradients.

        Returns {"model_output": jagged tensors [samples, tokens], "loss": one per microbatch,
        "metrics": lists}. On ranks without the last pipeline stage, the three values are empty.
        """
        replays = self.engine_config.router_replay.mode == "R3"
        samples.check(data, forward_only, replays)
        # Entries that verl's microbatch split and verl's losses read.
        settings = {"sp_size": self.layout.parallel_dims.cp, "dp_size": self.layout.dp_size}
        if "loss_mask" in data.keys():
            mask = data["loss_mask"]
            num_tokens = (mask.values() if mask.is_nested else mask).sum().to(get_device_id())
            dist.all_reduce(num_tokens, group=self.layout.dp_group)
            settings["batch_num_tokens"] = num_tokens.item()
        tu.assign_non_tensor(data, **settings)
        microbatches, indices = prepare_micro_batches(
            data=data, dp_group=self.layout.dp_group, same_micro_num_in_dp=True
        )
        keeps_outputs = forward_only or samples.setting(data, "return_model_output", False)
        results: list[dict[str, Any]] = []

        def loss_of(outputs: Any, index: int) -> Tensor:
            """Compute a microbatch's loss. Called in order, on every rank that has outputs."""
            microbatch = microbatches[index].to(get_device_id())
            model_output = self._model_output(outputs, microbatch)
            loss, metrics = torch.ones((), device=self.engine.device), {}
            if loss_function is not None:
                loss, metrics = loss_function(
                    model_output=model_output, data=microbatch, dp_group=self.layout.dp_group
                )
            result = {"loss": loss.detach().item(), "metrics": detach_tree(metrics)}
            if keeps_outputs:
                result["model_output"] = detach_tree(model_output)
            results.append(result)
            return loss

        how = replays, getattr(self.engine_config, "share_prefixes", False)
        rows = [samples.pack(microbatch, i, *how) for i, microbatch in enumerate(microbatches)]
        if forward_only:
            for index, outputs in enumerate(self._forward(data, rows) or []):
                loss_of(outputs, index)
        else:
            self.engine.forward_backward_step(
                input_dict=rows,
                loss_fn=lambda outputs, _labels, row: loss_of(outputs, row["index"]),
                head=self._head(data),
                whole_rows=True,
            )
        return postprocess_batch_func(output_lst=results, indices=indices, data=data)

    def _forward(self, data: TensorDict, rows: list[Batch]) -> list[Any] | None:
        return self.engine.forward_step(rows, head=self._head(data))

    def _head(self, data: TensorDict) -> Head | None:
        """Return the head that replaces the output projection; None for the model's own outputs."""
        raise NotImplementedError

    def _model_output(self, outputs: Any, microbatch: TensorDict) -> dict[str, Tensor]:
        """Convert a microbatch's outputs to {verl's name of an output: jagged tensor [S, j]}."""
        raise NotImplementedError

    # ---- the optimizer ----

    @property
    def optimizer(self) -> Any:
        """The optimizers; callers may change their `param_groups`."""
        return self.engine.optimizers

    def optimizer_zero_grad(self) -> None:
        if not self.engine_config.forward_only:
            self.engine.optimizers.zero_grad()

    def optimizer_step(self) -> float:
        """Clip the gradients and update the weights; return the gradient norm before clipping.

        A step with a non-finite norm is skipped. More than ten skipped steps in a row raise
        FloatingPointError.
        """
        return self.engine.optim_step(advance_schedule=False).grad_norm.item()

    def lr_scheduler_step(self) -> float:
        """Advance the schedule; return the learning rate of the next step."""
        self.engine.lr_schedulers.step()
        return self.engine.lr

    # ---- checkpoints ----

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Save the parts in `checkpoint.save_contents` below `local_path`. Collective.

        With LoRA, "model" saves only the adapters, also in PEFT's format, and "hf_model" the merged model.
        max_ckpt_to_keep: after saving, remove this run's oldest checkpoints until this number is left.
        """
        if hdfs_path is not None:
            warn_once(logger, f"checkpoints are not copied to {hdfs_path} by torchtitan's engine")
        contents = self._contents("save")
        folder = os.path.join(local_path, CHECKPOINT_FOLDER)
        self.engine.step = global_step
        if {"optimizer", "extra"} & contents:
            self.engine.save(folder)
        elif "model" in contents:
            self.engine.checkpointer.save(global_step, last_step=True, path=folder)
        if "model" in contents and self.has_adapters:
            self.engine.save_peft(os.path.join(local_path, PEFT_FOLDER))
        if "hf_model" in contents:
            folder = os.path.join(local_path, HF_FOLDER)
            self.engine.save_hf(folder)
            config = copy.deepcopy(self.model_config.hf_config)
            if self.model_type == "value_model":
                config.num_labels = 1
                family = config.architectures[0].partition("For")[0]
                config.architectures = [f"{family}ForTokenClassification"]
            for part in (config, self.model_config.tokenizer, self.model_config.generation_config):
                if part is not None and dist.get_rank() == 0:
                    part.save_pretrained(folder)
        path, number = os.path.abspath(local_path), max_ckpt_to_keep or 0
        self._checkpoints = [saved for saved in self._checkpoints if saved != path] + [path]
        # Delete old checkpoints only after the new checkpoint is complete.
        if number > 0:
            self._checkpoints, old = self._checkpoints[-number:], self._checkpoints[:-number]
            for folder in old if dist.get_rank() == 0 else ():
                shutil.rmtree(folder, ignore_errors=True)

    def load_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        del_local_after_load: bool = True,
        **kwargs: Any,
    ) -> None:
        """Load the parts in `checkpoint.load_contents`. Collective.

        The checkpoint may come from any parallel layout. `del_local_after_load` is ignored.
        """
        if local_path is None:
            return
        contents = self._contents("load")
        if "model" in contents:
            only_model = not {"optimizer", "extra"} & contents
            self.engine.load(os.path.join(local_path, CHECKPOINT_FOLDER), model_only=only_model)
        elif "hf_model" in contents:
            if self.has_adapters:
                raise ValueError(
                    "checkpoint.load_contents = ['hf_model'] would load weights with merged adapters "
                    "into a model that applies its adapters again; add 'model'"
                )
            self.engine.load(os.path.join(local_path, HF_FOLDER), model_only=True)
        path = os.path.abspath(local_path)
        if path not in self._checkpoints:
            self._checkpoints.append(path)

    def _contents(self, action: str) -> set[str]:
        return set(getattr(self.checkpoint_config, f"{action}_contents", CHECKPOINT_CONTENTS[:3]))

    # ---- adapters ----

    @property
    def has_adapters(self) -> bool:
        return has_adapters(self.model_config)

    def disable_adapter(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that turns the adapters off, so that the model is the reference model."""
        return self.engine.adapters_off() if self.has_adapters else contextlib.nullcontext()

    # ---- weights for a rollout ----

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **kwargs: Any
    ) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Return (iterator of (Hugging Face name, unsharded tensor), None for no adapter config).

        Every rank has to exhaust the iterator. Weights are cast to `engine.dtype`, except buffers
        and routers. Adapters are merged into the weights.
        Raises ValueError for a model with adapters unless `model.lora.merge` is set, because rollouts
        would expect separate adapters.
        """
        if self.has_adapters and not self.model_config.lora.get("merge", False):
            raise ValueError(
                "torchtitan's engine sends rollouts weights with adapters merged, and "
                "model.lora.merge = false makes rollouts expect separate adapters; set it to "
                "true"
            )
        dtype = TORCH_DTYPE_MAP[self.engine_config.dtype]
        return iter(self.engine.iter_hf_weights(dtype=dtype)), None

    def prime_delta_snapshots(self) -> None:
        """Record the current weights, which rollouts have just received, for deltas. Collective."""
        self._deltas = WeightDeltas(self.engine, TORCH_DTYPE_MAP[self.engine_config.dtype])
        self._deltas.prime()

    def get_per_tensor_param_delta_shard(self, **kwargs: Any) -> tuple[Iterator[Any], None]:
        """Return (iterator over the changes since the last call, None); see `WeightDeltas`."""
        return iter(self._deltas), None


@contextlib.contextmanager
def _errors_in_verls_words() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(in_verls_words(str(error))) from None


class EngineMode(BaseEngineCtx):
    """Context manager: sets train or eval mode, and keeps offloaded states on the device meanwhile."""

    def __enter__(self) -> None:
        super().__enter__()
        engine = self.engine.engine
        self._modules = engine.train_mode() if self.mode == "train" else engine.eval_mode()

    def __exit__(self, *error: Any) -> None:
        self._modules.close()
        if self.mode == "train" and self.zero_grad_on_exit:
            self.engine.optimizer_zero_grad()
        super().__exit__(*error)


class LanguageModelEngine(VerlEngine):
    """Computes the log-probability of each next token, and entropies if the batch requests them."""

    model_type = "language_model"

    def _head(self, data: TensorDict) -> TokenLogProbs:
        temperature = samples.setting(data, samples.TEMPERATURE, 1.0)
        is_per_sample = isinstance(temperature, Tensor)
        config = self.engine_config
        is_chunked = config.entropy_from_logits_with_chunking
        return TokenLogProbs(
            temperature=samples.TEMPERATURE if is_per_sample else float(temperature),
            entropy=samples.setting(data, "calculate_entropy", False),
            chunk_tokens=config.entropy_from_logits_chunk_size if is_chunked else None,
        )

    def _forward(self, data: TensorDict, rows: list[Batch]) -> list[Any] | None:
        if not samples.setting(data, "calculate_sum_pi_squared", False):
            return super()._forward(data, rows)
        head = self._head(data)

        def from_logits(logits: Tensor, row: Batch) -> tuple[Any, Tensor]:
            """Convert logits [1, N, V] to (the head's output, sums of squared probabilities [1, N])."""
            temperature = row.get(samples.TEMPERATURE)
            divisor = head.temperature if temperature is None else temperature[..., None]
            logits = logits.float() / divisor
            outputs = token_logprobs(logits, row["labels"], entropy=head.entropy)
            return outputs, logits.softmax(-1).square().sum(-1)

        return self.engine.forward_step(rows, output_fn=from_logits)

    def _model_output(self, outputs: Any, microbatch: TensorDict) -> dict[str, Tensor]:
        sum_pi_squared = None
        if not hasattr(outputs, "logprobs"):
            outputs, sum_pi_squared = outputs
        model_output = {
            "log_probs": outputs.logprobs,
            "entropy": outputs.entropy,
            "sum_pi_squared": sum_pi_squared,
        }
        return {
            name: samples.unpack(values, microbatch)
            for name, values in model_output.items()
            if values is not None
        }


class ValueModelEngine(VerlEngine):
    """A critic: computes a value at each token."""

    model_type = "value_model"

    def _head(self, data: TensorDict) -> None:
        return None

    def _model_output(self, outputs: Tensor, microbatch: TensorDict) -> dict[str, Tensor]:
        return {"values": samples.unpack(outputs.squeeze(-1).float(), microbatch)}
