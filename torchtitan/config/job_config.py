"""Every config section, its keys, their types and their defaults.

A TOML table `[training]` fills the field `training` of `JobConfig`; a nested class is a nested
table. `--help` prints the comment after or above a field. Annotations must stay real types (no
`from __future__ import annotations`) because the TOML loader checks values against them.
"""

import json
import os
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

import torch

from torchtitan.config.fields import (
    Count,
    Decay,
    Fraction,
    NotNegative,
    NumSteps,
    Positive,
    PositiveFloat,
    Range,
    Section,
    section,
)
from torchtitan.config.quantize import (  # noqa: F401 (clients import them from here)
    Float8GroupedMM,
    Float8Linear,
    MXGroupedMM,
    MXLinear,
    Quantize,
    QuantizedGroupedMM,
    QuantizedLinear,
)
from torchtitan.tools.files import open_file
from torchtitan.tools.logging import logger
from torchtitan.tools.storage import is_address


@dataclass
class Job(Section):
    config_file: str | None = None  # TOML file to read; command-line flags override its values
    dump_folder: str = "./outputs"  # Root folder of everything this job writes
    description: str = "default job"  # Free text about the job's purpose; logged when it starts
    print_config: bool = False  # Log the resolved config when the job starts
    # Write the resolved config as JSON to this file, under the dump folder
    save_config_file: str | None = None
    # Module with a dataclass JobConfig, whose sections and fields extend or replace the built-in ones
    custom_config_module: str = ""
    # Exit code of a run that a signal or the time limit ended after a save. Job schedulers that restart a
    # job only if its exit code is not 0 need another code, such as 75
    stopped_exit_code: Annotated[int, Range(0, 125)] = 0


@dataclass
class Profiling(Section):
    enable_profiling: bool = False  # Record traces with torch.profiler
    save_traces_folder: str = "profile_traces"  # Folder for the traces, under the dump folder
    profile_freq: NumSteps = 10  # Steps per profiling cycle, and between memory snapshots
    profiler_active: Positive = 1  # Steps recorded in each cycle
    profiler_warmup: Count = 3  # Steps the profiler warms up for before it records
    enable_memory_snapshot: bool = False  # Dump the history of device memory allocations
    # Folder for the memory snapshots, under the dump folder
    save_memory_snapshot_folder: str = "memory_snapshot"


@dataclass
class Metrics(Section):
    log_freq: NumSteps = 10  # Log metrics every this many steps
    enable_tensorboard: bool = False  # Write metrics for TensorBoard
    # Print metrics without colours; NO_COLOR in the environment does the same
    disable_color_printing: bool = False
    # Folder for TensorBoard and Weights & Biases files, under the dump folder
    save_tb_folder: str = "tb"
    # Every rank writes its own metrics, instead of one rank only
    save_for_all_ranks: bool = False
    enable_wandb: bool = False  # Send metrics to Weights & Biases
    enable_jsonl: bool = True  # Append metrics to a file, one JSON object per line
    save_jsonl_file: str = "metrics.jsonl"  # Metrics file, under the dump folder


@dataclass
class Model(Section):
    name: str = "llama3"  # Model family (train spec)
    flavor: str = "debugmodel"  # Size of the model, by its name in the family's flavor table
    # Fields of the flavor's args to change: [model.args] with dim = 512 in TOML, or all of them by the
    # flag --model.args "dim=512, n_layers=4"
    args: dict[str, Any] = field(default_factory=dict)
    # config.json of a Hugging Face model, or its folder, whose sizes replace the flavor's
    hf_config: str | None = None
    # Local folder with the Hugging Face tokenizer and, optionally, config, weights and index
    hf_assets_path: str = "./tests/assets/tokenizer"
    tokenizer_path: str | None = None  # Old name of hf_assets_path; used instead if set
    # Model converters to apply, in this order, e.g. quantize.linear.float8
    converters: list[str] = field(default_factory=list)
    print_after_conversion: bool = False  # Log the model's modules after the conversion
    # Attention kernel; None takes the flavor's kernel. On a GPU varlen needs a 16-bit dtype
    attn_type: Literal["sdpa", "flex", "varlen"] | None = None
    # Tokens attend to earlier tokens of their row (causal) or document. Documents end at end-of-text tokens
    # (block_causal), or where positions do not go up by one (position_block_causal). None: the flavor's type
    attn_mask_type: Literal["causal", "block_causal", "position_block_causal"] | None = None
    # Output values [B, T, 1] in place of logits, for critics; needs your own loss function
    value_head: bool = False
    # Compute the output projection in fp32; at |logit| 26 bf16 changes log-probs by up to 0.09
    fp32_head: bool = False


@dataclass
class ParameterGroup(Section):
    # Regular expression, such as "norm|bias", searched for in parameter names; a parameter belongs to
    # the first table whose pattern matches
    pattern: str = ""
    # Settings for these parameters; None takes the value in [optimizer]
    lr: NotNegative | None = None
    beta1: Decay | None = None
    beta2: Decay | None = None
    eps: NotNegative | None = None
    weight_decay: NotNegative | None = None
    muon: bool = True  # With optimizer.name = "Muon": false makes AdamW update the group's matrices


@dataclass
class Muon(Section):
    """Options of torch.optim.Muon, under the same names."""

    momentum: Decay = 0.95  # Decay of the average of gradients
    nesterov: bool = True  # Use Nesterov momentum
    # Coefficients a, b, c of the Newton-Schulz iteration: x <- a x + (b (x x^T) + c (x x^T)^2) x
    ns_coefficients: list[float] = field(default_factory=lambda: [3.4445, -4.775, 2.0315])
    ns_steps: Annotated[int, Range(1, 99)] = 5  # Newton-Schulz iterations
    # Factor on the learning rate of a matrix [m, n]: sqrt(max(1, m / n)) (original), or
    # 0.2 sqrt(max(m, n)), so AdamW's learning rate and weight decay can be used (match_rms_adamw)
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    # Dtype of the iteration; results agree to 1e-6 between parallel layouts only in float32
    ns_dtype: Literal["bfloat16", "float32"] = "bfloat16"


@dataclass
class Optimizer(Section):
    # Adam, AdamW, or Muon for the matrices in layers and AdamW for all other parameters
    name: str = "AdamW"
    lr: NotNegative = 8e-4  # Learning rate at the peak of the schedule
    beta1: Decay = 0.9  # Decay of the first moment
    beta2: Decay = 0.95  # Decay of the second moment
    eps: NotNegative = 1e-8  # Added to the denominator of the update
    weight_decay: NotNegative = 0.1  # Weight decay
    # Update all parameters in one kernel, in a few batched ones, or one by one (for debugging)
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    # Update each parameter as soon as its gradient is complete; saves memory, without gradient clipping
    early_step_in_backward: bool = False
    # Dtype of the moments, with stochastic rounding; None takes the dtype of the parameters
    state_dtype: Literal["bfloat16"] | None = None
    muon: Muon = section(Muon, 'Muon; for optimizer.name = "Muon"')
    # Settings of some parameters, one [[optimizer.groups]] table for each group
    groups: list[ParameterGroup] = field(default_factory=list)


@dataclass
class LRScheduler(Section):
    # Steps over which the learning rate rises linearly to its peak
    warmup_steps: Annotated[int, Range(0, 10**12)] = 200
    total_steps: NumSteps | None = None  # Steps the schedule spans; None takes training.steps
    # Fraction of the steps, at the end, in which the rate decays; None decays right after the warm-up
    decay_ratio: Fraction | None = None
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"  # Shape of the decay
    # Learning rate at the end of the decay, as a fraction of the peak
    min_lr_factor: Fraction = 0.0
    # Learning rate of the first step: 0 gives 1/warmup_steps of the peak, -1 gives 0, as in verl
    step_offset: Literal[0, -1] = 0
    # Learning rate where the warm-up begins, as a fraction of the peak
    init_lr_factor: Fraction = 0.0


@dataclass
class DataLoader(Section):
    # Processes that load data; 0 loads in the training process
    num_workers: Annotated[int, Range(0, 1024)] = 0
    # Keep the workers from one epoch to the next; needs num_workers > 0
    persistent_workers: bool = False
    # Put batches into pinned host memory, so that their copies to a GPU overlap with compute
    pin_memory: bool = False
    # Batches each worker prepares ahead; needs num_workers > 0; None is torch's default
    prefetch_factor: Positive | None = None


@dataclass
class Loss(Section):
    # What to minimize: the model's own loss (empty), the loss of preference pairs (dpo), or the divergence
    # from a teacher (distillation)
    name: Literal["", "dpo", "distillation"] = ""
    # For dpo: factor on the difference between the two answers' log-ratios to the reference
    beta: PositiveFloat = 0.1
    # Probability that a pair is labelled the wrong way round
    label_smoothing: Annotated[float, Range(0, 0.5, excluded=0.5)] = 0.0
    # Take the mean over an answer's tokens in place of the sum; needs a larger beta, about 5
    length_normalized: bool = False
    # Model that the policy is compared with: the run's initial weights (initial), the model without its
    # LoRA adapters (adapters_off), log-probs in the data (precomputed), or a folder with weights
    reference: str = "initial"
    # For distillation: folder of the Hugging Face model that scores the rows, with the same tokenizer
    teacher: str = ""
    # For distillation: KL(teacher || student), or KL(student || teacher)
    divergence: Literal["forward", "reverse"] = "forward"
    # For distillation: compare the teacher's k most probable tokens, and the sum of the rest; 0: all tokens
    top_k: Count = 0
    kl_weight: PositiveFloat = 1.0  # For distillation: weight of the divergence
    label_weight: NotNegative = 0.0  # For distillation: weight of the cross entropy of the labels
    # For distillation: temperature of both models in the divergence, which is multiplied by temperature^2
    temperature: PositiveFloat = 1.0


@dataclass
class MixtureSource(Section):
    dataset: str = "local"  # Dataset, by its registered name
    dataset_path: str | None = None  # File or folder of the dataset
    # Share of the mixture's tokens, relative to the weights of the other sources
    weight: Annotated[float, Range(0, 1e38, excluded=0)] = 1.0
    # Passes over this source; afterwards the mixture continues without it
    epochs: PositiveFloat | None = None


@dataclass
class Training(Section):
    dataset: str = "c4_test"  # Dataset, by its registered name
    dataset_path: str | None = None  # File or folder of the dataset; None takes the registered path
    # Token that ends each document; None takes the eos_token of tokenizer_config.json
    eos_token: str | None = None
    # Token that begins each document; None takes the bos_token of tokenizer_config.json
    bos_token: str | None = None
    # Sequences per data-parallel rank in one forward and backward; a pipeline splits them further
    local_batch_size: Positive = 8
    # Sequences per optimizer step over all ranks; -1 accumulates no gradients
    global_batch_size: Annotated[int, Range(1, 10**9, special=-1)] = -1
    # Sum gradients over data-parallel ranks only after a step's last microbatch. Saves communication,
    # but under FSDP each rank holds the gradients of the whole model, 4 bytes per parameter
    defer_gradient_sync: bool = False
    seq_len: Positive = 2048  # Tokens per sequence
    # Clip the gradient norm to this value
    max_norm: Annotated[float | int, Range(0, 1e38, excluded=0, special=float("inf"))] = 1.0
    steps: NumSteps = 10000  # Optimizer steps to train for
    # Save and end before the process has run this long; 0 is no limit. Needs checkpoint.enable
    time_limit_minutes: Annotated[float, Range(0, 10**8)] = 0.0
    # Keep parameters, gradients and optimizer state in host memory (with FSDP)
    enable_cpu_offload: bool = False
    # Dtype in which parameters are stored and updated
    dtype: Literal["bfloat16", "float32"] = "float32"
    # Dtype of parameters in forward and backward: FSDP casts them, or autocast without FSDP
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    mixed_precision_reduce: Literal["float32"] = "float32"  # Type in which FSDP sums gradients
    # How to reduce gradients over data-parallel ranks: sum, if the loss is divided by a count over all
    # ranks, or mean, if your program computes a mean loss on each rank
    gradient_reduction: Literal["sum", "mean"] = "sum"
    # If a step's gradient norm is inf or nan: leave the weights unchanged and continue (skip), stop the
    # job (stop), or update anyway (ignore)
    nonfinite_grad_norm: Literal["skip", "stop", "ignore"] = "skip"
    # Count RoPE positions from 0 in each document, if the attention mask keeps documents apart
    restart_positions: bool = True
    # Mask the label of a document's last token, which belongs to the next document; None masks it if
    # the attention mask keeps documents apart
    mask_boundary_loss: bool | None = None
    # Compute the loss in the output projection, with the logits of this many tokens at a time; 0: of all
    # tokens; -1: 1,024 on a CPU and 4,096 elsewhere, but 0 if the vocabulary is smaller than 4,096
    loss_chunk: Annotated[int, Range(-1, 10**12)] = -1
    gc_freq: NumSteps = 50  # Collect Python garbage every this many steps, on all ranks at once
    gc_debug: bool = False  # Collect after every step and warn about reference cycles
    dataloader: DataLoader = section(DataLoader, "How training data is loaded")
    # Shuffle the documents, differently in every pass, with data_seed
    shuffle: bool = False
    data_seed: Annotated[int, Range(0, 2**53)] = 0  # Seed for training.shuffle
    # Passes over the data to train for; replaces training.steps
    epochs: PositiveFloat | None = None
    # How to pack documents into rows: end to end (concat), whole documents that are split only if longer
    # than a row (fit), or one document per row (none). With fit and none, rows are padded
    packing: Literal["concat", "fit", "none"] = "concat"
    # Jinja template of chats; None takes the chat template in model.hf_assets_path
    chat_template: str | None = None
    # Rename keys and roles of chat files, such as "conversations=messages", "from=role", "human=user".
    # If a sample's key is renamed to a role, its value becomes a turn of that role
    chat_keys: list[str] = field(default_factory=list)
    # A chat of more than seq_len tokens stops the run (error), is truncated (cut), or dropped (skip)
    too_long: Literal["error", "cut", "skip"] = "error"
    # Several datasets in place of training.dataset: one [[training.mixture]] table per dataset
    mixture: list[MixtureSource] = field(default_factory=list)


@dataclass
class Parallelism(Section):
    # Replicas of the weights: more than 1 is DDP, or HSDP if the shard degree is above 1 too
    data_parallel_replicate_degree: Positive = 1
    # Ranks that share one replica of the weights (FSDP); -1 takes all remaining ranks
    data_parallel_shard_degree: Annotated[int, Range(1, 10**9, special=-1)] = -1
    # Free a layer's gathered weights after its forward; default: not with pipelines or on one rank
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    # Let NCCL allocate and register FSDP's buffers for zero-copy transfers, if supported
    fsdp_register_buffers: bool = False
    # Wrap the model in FSDP even if there is nothing to shard. None wraps it if the train spec has no
    # dataloader, or on an accelerator without replicas, where FSDP is faster than autocast
    always_fsdp: bool | None = None
    tensor_parallel_degree: Positive = 1  # Ranks that split each matrix multiplication; 1 is off
    # Gather the logits before the loss instead of computing it on vocabulary shards
    disable_loss_parallel: bool = False
    # Overlap tensor-parallel communication with compute; needs compile.enable
    enable_async_tensor_parallel: bool = False
    pipeline_parallel_degree: Positive = 1  # Ranks that hold successive groups of layers; 1 is off
    # Names of the modules in each pipeline stage, e.g. [["tok_embeddings", "layers.0"], ["layers.1",
    # "norm", "output"]]; None splits evenly
    module_fqns_per_model_part: list[list[str]] | None = None
    # The first stage has this many fewer layers than a middle stage, because it also embeds
    pipeline_parallel_first_stage_less_layers: Count = 1
    # The last stage has this many fewer layers, because it also computes logits and loss
    pipeline_parallel_last_stage_less_layers: Count = 1
    # Layers per stage; None makes the fewest stages that the schedule allows
    pipeline_parallel_layers_per_stage: Positive | None = None
    # Pipeline schedule, by its name in torch.distributed.pipelining
    pipeline_parallel_schedule: str = "1F1B"
    # CSV file with a schedule of your own, for the PipelineScheduleMulti class
    pipeline_parallel_schedule_csv: str | None = ""
    pipeline_parallel_microbatch_size: Positive = 1  # Sequences per pipeline microbatch
    # Accepted because configs of torchtitan 0.2.x have it; no effect in this version
    pipeline_parallel_expert_parallel_overlap: bool = True
    context_parallel_degree: Positive = 1  # Ranks that split each sequence; 1 is off
    # How to balance attention work over ranks: headtail or ptrr; None: consecutive slices
    context_parallel_load_balancer: str | None = "headtail"
    # Collective that exchanges keys and values between context-parallel ranks
    context_parallel_rotate_method: Literal["allgather", "alltoall"] = "allgather"
    expert_parallel_degree: Positive = 1  # Ranks that the experts are spread over; 1 is off
    # Tensor parallelism inside the experts: 1, or the same as tensor_parallel_degree
    expert_tensor_parallel_degree: Positive = 1
    expert_parallel_comm_backend: Literal["standard"] = "standard"  # torch's all-to-all

    def __post_init__(self) -> None:
        if self.context_parallel_load_balancer == "":
            raise ValueError(
                "parallelism.context_parallel_load_balancer must be 'headtail', 'ptrr' or None, got "
                "''; use None for no load balancing"
            )


@dataclass
class Checkpoint(Section):
    enable: bool = False  # Save checkpoints, and continue from the newest one found
    # With torchft, save the data position of every replica separately
    enable_ft_dataloader_checkpoints: bool = True
    # Folder for checkpoints, under the dump folder. An address such as s3://bucket/run (extra "cloud"):
    # steps are written under the dump folder, then uploaded there in the background
    folder: str = "checkpoint"
    interval: NumSteps = 500  # Save every this many steps
    # Step folder of a checkpoint, or its address, to start from if this job has no checkpoint of its own
    initial_load_path: str | None = None
    # Load only the weights of the initial checkpoint, not optimizer, step or data position
    initial_load_model_only: bool = True
    # Start from Hugging Face safetensors, at initial_load_path or else at model.hf_assets_path
    initial_load_in_hf: bool = False
    # Dequantize the Hugging Face safetensors to start from
    initial_load_in_hf_quantized: bool = False
    # Untrained parts of the Hugging Face model, such as a vision tower: copy them to exports, drop them from
    # exports, or refuse to load the model
    untrained_weights: Literal["copy", "drop", "refuse"] = "drop"
    # The last checkpoint holds only the weights; no job can resume from it
    last_save_model_only: bool = True
    last_save_in_hf: bool = False  # Write the last checkpoint as Hugging Face safetensors
    # Also write LoRA adapters as a PEFT folder, peft-step-N in `folder`, after the last step
    last_save_peft: bool = False
    # Also write the PEFT folder every this many steps; 0 is never. keep_latest_k does not remove it
    save_peft_interval: Annotated[int, Range(0, 10**12)] = 0
    # Dtype of the weights in a last checkpoint that holds only weights
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    # Training waits for the whole save (disabled), for the copy to host memory (async), or does not wait
    # (async_with_pinned_mem)
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    # Number of newest checkpoints to keep; 0 keeps all. 1 is refused: a crash while saving could leave none
    keep_latest_k: Annotated[int, Range(2, 10**9, special=0)] = 10
    load_step: Annotated[int, Range(-1, 10**12)] = -1  # Step to continue from; -1 is the newest
    # Parts of a checkpoint to leave out when loading, e.g. optimizer,lr_scheduler,dataloader
    exclude_from_loading: list[str] = field(default_factory=list)
    # Settings that may differ from the checkpoint's, though they change the model, such as lora.alpha
    allow_changed: list[str] = field(default_factory=list)
    # Also save after step 1, to test early that saving works
    enable_first_step_checkpoint: bool = False
    # Initialise the model, save it as step 0 and exit; needs a single process
    create_seed_checkpoint: bool = False
    load_only: bool = False  # Load, but never save
    # Compare the files' hashes with those recorded when the checkpoint was saved
    verify_on_load: bool = True

    def places(self) -> tuple[str, str]:
        """Return (the folder under the dump folder, the address to which its steps are uploaded, or "")."""
        return (Checkpoint.folder, self.folder) if is_address(self.folder) else (self.folder, "")


@dataclass
class ActivationCheckpoint(Section):
    # Activations to recompute in backward instead of keeping them
    mode: Literal["selective", "full", "memory_budget", "none"] = "selective"
    # For mode selective: a number n recomputes every n-th layer, "op" decides per operator
    selective_ac_option: str = "2"
    # For option "op": parts of names of linear layers; matmuls with their weight shapes are recomputed
    per_op_sac_force_recompute_mm_shapes_by_fqns: list[str] = field(
        default_factory=lambda: ["moe.router.gate"]
    )
    early_stop: bool = False  # Stop recomputing a layer once backward has all it needs
    # For mode memory_budget: 0 recomputes everything, 1 keeps everything. Needs compile.enable
    memory_budget: Fraction = 0.5
    # Plot memory against recompute time, into memory_budget_pareto under the dump folder
    visualize_memory_budget_pareto: bool = False
    preserve_rng_state: bool = True  # Draw the same random numbers when recomputing
    # Compare recomputed tensors with the originals: their metadata (default), or nothing (none)
    determinism_check: Literal["default", "none"] = "default"
    debug: bool = False  # Record operators, to explain a mismatch in recomputation; slow


@dataclass
class Compile(Section):
    enable: bool = False  # Compile with torch.compile
    # Parts to compile: model, loss
    components: list[str] = field(default_factory=lambda: ["model", "loss"])
    backend: str = "inductor"  # Backend of torch.compile

    def applies_to(self, component: str) -> bool:
        """True if this component, "model" or "loss", is compiled."""
        return self.enable and component in self.components

    def backend_of(self, component: str) -> str | None:
        """Return the backend that compiles this component; None if it is not compiled."""
        return self.backend if self.applies_to(component) else None


@dataclass
class LoRA(Section):
    rank: Positive = 8  # Rows of A and columns of B
    # An adapter's product is multiplied by alpha / rank
    alpha: PositiveFloat = 16.0
    use_rslora: bool = False  # Multiply the product by alpha / sqrt(rank) instead
    # Dropout probability of an adapter's input; a resumed run draws other dropout masks
    dropout: Annotated[float, Range(0, 1, excluded=1)] = 0.0
    # Layers with an adapter: "all-linear", or dotted parts of their names, such as q_proj, wq, layers.0
    target_modules: list[str] | str = field(default_factory=lambda: ["all-linear"])
    # Ranks and alphas of some layers, by dotted parts of their names; the first match applies
    rank_pattern: dict[str, Any] = field(default_factory=dict)
    alpha_pattern: dict[str, Any] = field(default_factory=dict)
    # Modules whose own weights are trained, such as embed_tokens; also "norms" and "biases"
    also_train: list[str] | str = field(default_factory=list)
    adapter_path: str | None = None  # Folder in PEFT's format with the initial adapters
    # Store frozen linear layers and experts in 4 bits (QLoRA's NF4), quantized while they are loaded
    base_format: Literal["nf4"] | None = None

    @staticmethod
    def names(setting: list[str] | str) -> list[str]:
        """Return the names in `target_modules` or `also_train`, either of which may be one string."""
        return [setting] if isinstance(setting, str) else list(setting)


@dataclass
class Comm(Section):
    # Timeout of collectives through the end of step 1
    init_timeout_seconds: Annotated[int, Range(1, 10**8)] = 300
    # Timeout of collectives after step 1
    train_timeout_seconds: Annotated[int, Range(1, 10**8)] = 100
    # Seconds, at most a third of the timeout, after which a rank that keeps the others waiting is logged
    # with its stack; 0 logs none
    stuck_rank_seconds: Annotated[float, Range(0, 10**8)] = 30.0
    # The slowest rank is logged after a step (of a second or more) that took this many times the median
    # of the last steps; 0 logs none
    slow_step_factor: Annotated[float, Range(1, 10**6, special=0)] = 3.0
    # Events that NCCL's flight recorder keeps; 0 turns it off
    trace_buf_size: Count = 20000
    # Folder for flight recorder dumps, under the dump folder
    save_traces_folder: str = "comm_traces"
    save_traces_file_prefix: str = "rank_"  # Prefix of the dumps' file names
    # Communication between ranks: real (default), none, for dry runs (fake_backend), or simulated, with
    # all ranks in one process (local_tensor)
    mode: Literal["default", "fake_backend", "local_tensor"] = "default"


@dataclass
class MemoryEstimation(Section):
    enable: bool = False  # Estimate the memory a job needs, without allocating it
    disable_fake_mode: bool = False  # Estimate with real tensors


@dataclass
class FaultTolerance(Section):
    enable: bool = False  # Train with torchft replicas; refused in this version
    process_group: str = "gloo"  # Process group between replicas: gloo or nccl
    process_group_timeout_ms: int = 10000  # Timeout of this process group, in milliseconds
    replica_id: int = 0  # Index of this replica
    group_size: int = 0  # Number of replicas
    min_replica_size: int = 1  # Replicas that have to take part in a step
    # Algorithm for replicas that do not synchronise every step: local_sgd or diloco
    semi_sync_method: str | None = None


@dataclass
class Experimental(Section):
    custom_import: str = ""  # Dotted name of a module to import when the trainer starts
    custom_args_module: str = ""  # Old name of job.custom_config_module


@dataclass
class Validation(Section):
    enable: bool = False  # Measure the loss on held-out data
    # Dataset, by its registered name; None takes training.dataset, its held-out part if there is one
    dataset: str | None = None
    # File or folder of the dataset; None takes training.dataset_path if dataset is None too
    dataset_path: str | None = None
    local_batch_size: Positive = 8  # Maximum sequences per data-parallel rank in one forward pass
    seq_len: Positive | None = None  # Tokens per sequence; None takes training.seq_len
    freq: NumSteps = 10  # Validate every this many steps
    # Batches per validation; -1 takes all data. A batch has training.global_batch_size sequences, or, if
    # that is not set, local_batch_size per data-parallel rank
    steps: Annotated[int, Range(1, 10**12, special=-1)] = -1
    dataloader: DataLoader = section(DataLoader, "How validation data is loaded")

    def __post_init__(self) -> None:
        assert self.steps > 0 or self.steps == -1, (
            f"validation.steps must be positive, or -1 for the whole dataset, got {self.steps}"
        )


@dataclass
class Debug(Section):
    # Seed of all random numbers; None lets rank 0 draw one
    seed: Annotated[int, Range(0, 2**64 - 1)] | None = None
    deterministic: bool = False  # Use deterministic algorithms only; slower
    # Warn instead of failing if an operation has no deterministic algorithm
    deterministic_warn_only: bool = False
    # Send the same number of tokens to every expert, whatever the router decides
    moe_force_load_balance: bool = False
    # At the first step, and every this many steps, replace a token of the batch, and stop if logits of
    # other documents or earlier tokens change. Costs two forward passes; 0 turns it off
    check_document_isolation_freq: Annotated[int, Range(0, 10**12)] = 0


@dataclass
class JobConfig(Section):
    """All settings of a job; `torchtitan.job.resolve_job` checks and freezes a copy of them."""

    job: Job = section(Job)
    profiling: Profiling = section(Profiling)
    metrics: Metrics = section(Metrics)
    model: Model = section(Model)
    optimizer: Optimizer = section(Optimizer)
    lr_scheduler: LRScheduler = section(LRScheduler)
    training: Training = section(Training)
    loss: Loss = section(Loss)
    parallelism: Parallelism = section(Parallelism)
    checkpoint: Checkpoint = section(Checkpoint)
    activation_checkpoint: ActivationCheckpoint = section(ActivationCheckpoint)
    compile: Compile = section(Compile)
    quantize: Quantize = section(Quantize)
    lora: LoRA = section(LoRA, 'Low-rank adapters; for model.converters = ["lora"]')
    comm: Comm = section(Comm)
    memory_estimation: MemoryEstimation = section(MemoryEstimation)
    fault_tolerance: FaultTolerance = section(FaultTolerance)
    experimental: Experimental = section(Experimental)
    validation: Validation = section(Validation)
    debug: Debug = section(Debug)

    @property
    def validation_data(self) -> Validation:
        """A copy of `[validation]` with unset dataset, dataset_path and seq_len taken from `[training]`."""
        own, training = self.validation, self.training
        is_training_data = own.dataset is None and own.dataset_path is None
        return replace(
            own,
            dataset=own.dataset or training.dataset,
            dataset_path=training.dataset_path if is_training_data else own.dataset_path,
            seq_len=own.seq_len or training.seq_len,
        )

    @property
    def ranks_apart(self) -> int:
        """The number of ranks that do not train: the last ranks of the job."""
        return 0

    def trainer_ranks(self, world_size: int) -> int:
        """Return the number of ranks that train: the first ranks, which the parallel degrees cover."""
        return world_size

    def to_dict(self) -> dict[str, Any]:
        """Return the whole config as nested dicts, a deep copy."""
        return asdict(self)

    def maybe_log(self) -> None:
        """Log the config if `job.print_config`; rank 0 writes it to `job.save_config_file`, if set."""
        if self.job.print_config:
            text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False)
            logger.info(f"Running with configs: {text}")
        if self.job.save_config_file is None:
            return
        if not torch.distributed.is_initialized():
            logger.warning("job.save_config_file is not written without a process group")
            return
        path = os.path.join(self.job.dump_folder, self.job.save_config_file)
        if torch.distributed.get_rank() == 0:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            with open_file(path, "w") as config_file:
                json.dump(self.to_dict(), config_file, indent=2)
        logger.info(f"Config is saved to {path}")
