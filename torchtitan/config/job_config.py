"""Every config section, its keys, their types and their defaults.

A TOML table `[training]` fills the field `training` of `JobConfig`; a nested class is a nested
table. `--help` prints the comment behind or above a field. Annotations must stay real types (no
`from __future__ import annotations`): the TOML loader reads them to check the values.
"""

import json
import os
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch

from torchtitan.tools.files import open_file
from torchtitan.tools.logging import logger


def section(kind: type, text: str = "") -> Any:
    """A field that is a nested table; `--help` prints `text` above its keys.

    In its metadata: for a comment, the parser would read the source again at every start.
    """
    return field(default_factory=kind, metadata={"help": text})


@dataclass
class Job:
    config_file: str | None = None  # TOML file to read; flags on the command line win over it
    dump_folder: str = "./outputs"  # Root folder of everything this job writes
    # Free text that says what this job is for; logged when it starts
    description: str = "default job"
    print_config: bool = False  # Log the resolved config when the job starts
    # Write the resolved config as JSON to this file under the dump folder
    save_config_file: str | None = None
    # Dotted name of a module with a dataclass called JobConfig, whose sections and fields are
    # merged over the built-in ones, e.g. tests.assets.extended_job_config_example
    custom_config_module: str = ""


@dataclass
class Profiling:
    enable_profiling: bool = False  # Record traces with torch.profiler
    save_traces_folder: str = "profile_traces"  # Folder for the traces, under the dump folder
    profile_freq: int = 10  # Steps per profiling cycle; memory snapshots follow the same cycle
    profiler_active: int = 1  # Steps recorded in each cycle
    profiler_warmup: int = 3  # Steps the profiler warms up for before it records
    enable_memory_snapshot: bool = False  # Dump the history of device memory allocations
    # Folder for the memory snapshots, under the dump folder
    save_memory_snapshot_folder: str = "memory_snapshot"


@dataclass
class Metrics:
    log_freq: int = 10  # Log metrics every this many steps
    enable_tensorboard: bool = False  # Write metrics for TensorBoard
    # Print metrics without terminal colours, which a terminal gets unless NO_COLOR is set
    disable_color_printing: bool = False
    # Folder for TensorBoard and Weights & Biases files, under the dump folder
    save_tb_folder: str = "tb"
    # Let every rank write its own metrics, instead of one rank
    save_for_all_ranks: bool = False
    enable_wandb: bool = False  # Send metrics to Weights & Biases
    enable_jsonl: bool = True  # Append metrics to a file, one JSON object per line
    save_jsonl_file: str = "metrics.jsonl"  # Name of that file, under the dump folder


@dataclass
class Model:
    name: str = "llama3"  # Which model family (train spec) to train
    flavor: str = "debugmodel"  # Which size of it, by its name in the family's flavor table
    # Fields of the flavor's args to change, as a table: [model.args] with dim = 512, n_layers = 4, ...
    # in TOML, --model.args "dim=512, n_layers=4" as a flag, which replaces the table
    args: dict[str, Any] = field(default_factory=dict)
    # A config.json of Hugging Face, or its folder, that gives the sizes in place of the flavor
    hf_config: str | None = None
    # Local folder with the Hugging Face tokenizer and, if wanted, config, weights and index
    hf_assets_path: str = "./tests/assets/tokenizer"
    tokenizer_path: str | None = None  # Old name of hf_assets_path; when set it takes its place
    # Model converters to apply, in this order, e.g. quantize.linear.float8
    converters: list[str] = field(default_factory=list)
    print_after_conversion: bool = False  # Log the model's modules after the converters ran
    # Attention kernel; None keeps what the flavor says. varlen is for 16-bit numbers on a GPU
    attn_type: Literal["sdpa", "flex", "varlen"] | None = None
    # Which tokens see each other: the whole row (causal), one document that ends with the
    # end-of-text token (block_causal), or one document whose positions count up by one
    # (position_block_causal); None keeps what the flavor says
    attn_mask_type: Literal["causal", "block_causal", "position_block_causal"] | None = None
    # One value per token, [B, T, 1], in place of logits, for critics and reward models. They need a
    # loss of their own, so an engine that is driven from Python
    value_head: bool = False
    # Compute the output projection in fp32 from weights and hidden states of any type, in training
    # and generation: at |logit| 26 rounding to bf16 changes log-probs by up to 0.09
    fp32_head: bool = False


@dataclass
class Optimizer:
    name: str = "AdamW"  # Adam or AdamW
    lr: float = 8e-4  # Learning rate at the peak of the schedule
    beta1: float = 0.9  # Decay of the first moment
    beta2: float = 0.95  # Decay of the second moment
    eps: float = 1e-8  # Added to the denominator of the update
    weight_decay: float = 0.1  # Weight decay
    # fused updates in one kernel, foreach in a few horizontally batched ones, for-loop one
    # parameter at a time (slow, for debugging)
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    # Update each parameter as soon as its gradient is there, and free the gradient. Saves memory;
    # gradients are not clipped
    early_step_in_backward: bool = False


@dataclass
class LRScheduler:
    warmup_steps: int = 200  # Steps over which the learning rate rises linearly to its peak
    total_steps: int | None = None  # Steps the schedule spans; None takes training.steps
    # Share of the span spent decaying, at its end; None decays from the end of warm-up on
    decay_ratio: float | None = None
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"  # Shape of the decay
    min_lr_factor: float = 0.0  # Where the decay ends, as a fraction of the peak learning rate
    # Steps by which the warm-up is ahead. With 0 the first step has 1/warmup_steps of the peak, with -1
    # it has 0, as in transformers and verl
    step_offset: int = 0
    init_lr_factor: float = 0.0  # Where the warm-up begins, as a fraction of the peak learning rate


@dataclass
class DataLoader:
    num_workers: int = 0  # Processes that load data; 0 loads in the training process
    # Keep the workers from one epoch to the next; needs num_workers > 0
    persistent_workers: bool = False
    # Put batches into pinned host memory, from which copies to a GPU can overlap
    pin_memory: bool = False
    # Batches each worker prepares ahead; needs num_workers > 0; None is torch's default
    prefetch_factor: int | None = None


@dataclass
class Training:
    dataset: str = "c4_test"  # Dataset, by its registered name
    dataset_path: str | None = None  # Where the dataset lies, if not where its registration says
    # Token of the tokenizer's vocabulary that ends each document, such as "<|endoftext|>"; None takes
    # the eos_token of its tokenizer_config.json
    eos_token: str | None = None
    bos_token: str | None = None  # Token that begins each document; None takes the file's bos_token
    local_batch_size: int = 8  # Sequences per data-parallel rank in one forward pass
    # Sequences per optimizer step over all ranks, reached by accumulating gradients; -1 is
    # local_batch_size times the data-parallel ranks, without accumulation
    global_batch_size: int = -1
    # Where several microbatches make a step, sum gradients over data-parallel ranks with the last
    # one only. Saves communication; under FSDP each rank then holds the gradients of the whole
    # model, 4 bytes per parameter. Without it replicas of HSDP are summed with the last one only
    defer_gradient_sync: bool = False
    seq_len: int = 2048  # Tokens per sequence
    max_norm: float | int = 1.0  # Gradients are scaled down to this norm when theirs is larger
    steps: int = 10000  # Optimizer steps to train for
    # Save and end before the process is this old, with time left for a step and the save; 0 is no
    # limit. For batch schedulers; needs checkpoint.enable
    time_limit_minutes: float = 0.0
    # Keep parameters, gradients and optimizer state in host memory (with FSDP)
    enable_cpu_offload: bool = False
    # Type the model is built in, and the optimizer steps in
    dtype: Literal["bfloat16", "float32"] = "float32"
    # Type parameters are cast to for compute, by FSDP, or by autocast without it
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    mixed_precision_reduce: Literal["float32"] = "float32"  # Type in which FSDP sums gradients
    # How gradients of data-parallel ranks are combined: their sum, for a loss divided by a count
    # over all ranks, or their mean, for a program with its own batches and a loss that is a mean on
    # each rank
    gradient_reduction: Literal["sum", "mean"] = "sum"
    # What to do in a step whose gradient norm is inf or nan: leave the weights alone and go on,
    # stop the job, or step all the same
    nonfinite_grad_norm: Literal["skip", "stop", "ignore"] = "skip"
    # Count RoPE positions from 0 in each document where the model keeps documents apart and the
    # batch has no positions; under a causal mask there is one count per row anyway
    restart_positions: bool = True
    # Leave out of the loss what a document's last token predicts, the first token of the next; None
    # does so where the model keeps documents apart, and not under a causal mask
    mask_boundary_loss: bool | None = None
    # Tokens whose logits exist at a time, where the loss is computed inside the output projection,
    # chunk by chunk. 0 computes logits of the whole microbatch; -1 does so for vocabularies below
    # 32,768, and takes 1,024 tokens on a CPU and 4,096 elsewhere for larger ones
    loss_chunk: int = -1
    gc_freq: int = 50  # Collect Python garbage every this many steps, on all ranks at once
    gc_debug: bool = False  # Collect after every step and warn about reference cycles
    dataloader: DataLoader = section(DataLoader, "How training data is loaded")


@dataclass
class Parallelism:
    # Copies of the weights: more than 1 is DDP, or HSDP together with a shard degree above 1
    data_parallel_replicate_degree: int = 1
    # Ranks that share one copy of the weights (FSDP); -1 takes all ranks that are left
    data_parallel_shard_degree: int = -1
    # Whether a layer frees its gathered weights between forward and backward: always, never, or
    # default, which is always except under pipeline parallelism. A number, such as the ranks of a
    # node, keeps them sharded over that many ranks, among which backward gathers them
    fsdp_reshard_after_forward: int | str = "default"
    # Have NCCL allocate what FSDP sends and receives, registered for zero-copy transfers; takes
    # memory that is not shared with the rest. Without effect where the backend has none to give
    fsdp_register_buffers: bool = False
    # Let FSDP hold the parameters even where it has nothing to shard, as on one rank. None does so
    # for a train spec without a dataloader, whose caller may rely on FSDP modules, and on an
    # accelerator without replicas, where it is faster than autocast
    always_fsdp: bool | None = None
    tensor_parallel_degree: int = 1  # Ranks that split each matrix multiplication; 1 is off
    # Gather the logits before the loss instead of computing it on vocabulary shards
    disable_loss_parallel: bool = False
    # Overlap tensor-parallel communication with compute; needs compile.enable
    enable_async_tensor_parallel: bool = False
    pipeline_parallel_degree: int = 1  # Ranks that hold successive groups of layers; 1 is off
    # Names of the modules in each pipeline stage, one list per stage, e.g. [["tok_embeddings",
    # "layers.0"], ["layers.1", "norm", "output"]]; None splits evenly
    module_fqns_per_model_part: list[list[str]] | None = None
    # Layers the first stage has fewer than the others, as it also embeds
    pipeline_parallel_first_stage_less_layers: int = 1
    # Layers the last stage has fewer than the others, as it also computes logits and loss
    pipeline_parallel_last_stage_less_layers: int = 1
    # Layers per stage; None makes the fewest stages that the schedule takes
    pipeline_parallel_layers_per_stage: int | None = None
    # Pipeline schedule, by the name torch.distributed.pipelining gives it
    pipeline_parallel_schedule: str = "1F1B"
    # CSV file with your own schedule, for the PipelineScheduleMulti class
    pipeline_parallel_schedule_csv: str | None = ""
    pipeline_parallel_microbatch_size: int = 1  # Sequences per pipeline microbatch
    # Accepted for configs of the reference; without effect in this version
    pipeline_parallel_expert_parallel_overlap: bool = True
    context_parallel_degree: int = 1  # Ranks that split each sequence; 1 is off
    # How a sequence is divided so that every rank has equal work: headtail, ptrr, or None for plain
    # consecutive slices
    context_parallel_load_balancer: str | None = "headtail"
    # Collective that exchanges keys and values between context-parallel ranks
    context_parallel_rotate_method: Literal["allgather", "alltoall"] = "allgather"
    expert_parallel_degree: int = 1  # Ranks the experts are spread over; 1 is off
    # Tensor parallelism inside the experts: 1, or the same as tensor_parallel_degree
    expert_tensor_parallel_degree: int = 1
    # How tokens travel to their experts: torch's all-to-all, or the DeepEP kernels
    expert_parallel_comm_backend: Literal["standard", "deepep"] = "standard"

    def __post_init__(self) -> None:
        balancer = self.context_parallel_load_balancer
        if balancer is not None and not balancer:
            raise ValueError(
                "parallelism.context_parallel_load_balancer = '' names no way to balance rows; take "
                "'headtail' or 'ptrr', or None for none"
            )


@dataclass
class Checkpoint:
    enable: bool = False  # Save checkpoints, and continue from the newest one found
    # With torchft, save the data position of every replica separately
    enable_ft_dataloader_checkpoints: bool = True
    folder: str = "checkpoint"  # Folder for checkpoints, under the dump folder
    interval: int = 500  # Save every this many steps
    # Checkpoint (the step folder itself) to start from. Read only if this job has no checkpoint
    # folder yet
    initial_load_path: str | None = None
    # From the initial checkpoint take the weights only, not optimizer, step or data position
    initial_load_model_only: bool = True
    # Start from Hugging Face safetensors, at initial_load_path or else at model.hf_assets_path
    initial_load_in_hf: bool = False
    # Those safetensors are quantized and have to be dequantized
    initial_load_in_hf_quantized: bool = False
    # The last checkpoint holds the weights only. It cannot be resumed from
    last_save_model_only: bool = True
    last_save_in_hf: bool = False  # Write the last checkpoint as Hugging Face safetensors
    # Type the weights are cast to in a last checkpoint that holds the weights only
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    # Training waits for the whole save (disabled), for the copy to host memory (async), or not even
    # for that (async_with_pinned_mem, which keeps a pinned buffer)
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    # Keep this many of the newest checkpoints; 0 keeps all. 1 is refused: a crash while the only
    # one is replaced would leave none
    keep_latest_k: int = 10
    load_step: int = -1  # Step to continue from; -1 is the newest
    # Parts of a checkpoint to leave out when loading, e.g. optimizer,lr_scheduler,dataloader
    exclude_from_loading: list[str] = field(default_factory=list)
    # Save after step 1 too, to find out early that saving works
    enable_first_step_checkpoint: bool = False
    # Initialise the model, save it as step 0 and exit; on one process
    create_seed_checkpoint: bool = False
    load_only: bool = False  # Load, but never save
    # Compare what is read with the hashes that were recorded when it was saved
    verify_on_load: bool = True


@dataclass
class ActivationCheckpoint:
    # Which activations are recomputed in backward instead of kept
    mode: Literal["selective", "full", "memory_budget", "none"] = "selective"
    # For mode selective: a number n recomputes every n-th layer, "op" decides per operator
    selective_ac_option: str = "2"
    # For option "op": matrix multiplications with the weight shapes of the linears that have one of
    # these in their name are always recomputed
    per_op_sac_force_recompute_mm_shapes_by_fqns: list[str] = field(
        default_factory=lambda: ["moe.router.gate"]
    )
    early_stop: bool = False  # Stop recomputing a layer as soon as all that backward needs is there
    # For mode memory_budget: 0 recomputes everything, 1 keeps everything. Needs compile.enable
    memory_budget: float = 0.5
    # Draw memory against recompute time, into memory_budget_pareto under the dump folder
    visualize_memory_budget_pareto: bool = False
    preserve_rng_state: bool = True  # Draw the same random numbers when recomputing
    # How recomputed tensors are compared with the first ones: default (metadata) or none
    determinism_check: str = "default"
    debug: bool = False  # Record operators to explain a mismatch when recomputing; slow


@dataclass
class Compile:
    enable: bool = False  # Compile with torch.compile
    # What to compile: model, loss
    components: list[str] = field(default_factory=lambda: ["model", "loss"])
    backend: str = "inductor"  # Backend of torch.compile

    def applies_to(self, component: str) -> bool:
        """Whether this component, "model" or "loss", is compiled."""
        return self.enable and component in self.components


@dataclass
class Float8Linear:
    enable_fsdp_float8_all_gather: bool = False  # Gather weights over FSDP ranks in float8
    # Compute all float8 scales in one go after the optimizer step
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    # Named float8 recipe of torchao
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    # Linears with one of these in their name stay as they are
    filter_fqns: list[str] = field(default_factory=list)
    # Compute in float32 with float8 rounding, for devices without float8; for tests only
    emulate: bool = False


@dataclass
class MXLinear:
    # Kernel that casts along the first dimension
    mxfp8_dim1_cast_kernel_choice: Literal["triton", "cuda", "torch"] = "triton"
    recipe_name: str = "mxfp8_cublas"  # Named MX recipe of torchao
    # Linears with one of these in their name stay as they are
    filter_fqns: list[str] = field(default_factory=lambda: ["output"])


@dataclass
class QuantizedLinear:
    float8: Float8Linear = section(Float8Linear, "Float8 linears")
    mx: MXLinear = section(MXLinear, "MX linears")


@dataclass
class Float8GroupedMM:
    # Grouped matrix multiplications in modules with one of these names use float8
    fqns: list[str] | str = field(default_factory=list)


@dataclass
class MXGroupedMM:
    recipe_name: Literal["mxfp8"] = "mxfp8"  # Named MX recipe of torchao
    # Grouped matrix multiplications in modules with one of these names use MX types
    fqns: list[str] | str = field(default_factory=list)


@dataclass
class QuantizedGroupedMM:
    float8: Float8GroupedMM = section(Float8GroupedMM, "Float8 grouped matrix multiplication")
    mx: MXGroupedMM = section(MXGroupedMM, "MX grouped matrix multiplication")


@dataclass
class Quantize:
    linear: QuantizedLinear = section(QuantizedLinear, "Quantized linears")
    grouped_mm: QuantizedGroupedMM = section(
        QuantizedGroupedMM, "Quantized grouped matrix multiplication, for mixtures of experts"
    )


@dataclass
class Comm:
    init_timeout_seconds: int = 300  # How long a collective may take up to and including step 1
    train_timeout_seconds: int = 100  # How long a collective may take after step 1
    # Events that NCCL's flight recorder remembers; 0 turns it off. Gloo never writes them: 100 at most
    trace_buf_size: int = 20000
    # Folder for flight recorder dumps, under the dump folder
    save_traces_folder: str = "comm_traces"
    save_traces_file_prefix: str = "rank_"  # How the names of those dumps begin
    # Real communication, none at all (for dry runs on one process), or all ranks simulated in one
    # process
    mode: Literal["default", "fake_backend", "local_tensor"] = "default"


@dataclass
class MemoryEstimation:
    enable: bool = False  # Estimate the memory a job needs, without allocating it
    disable_fake_mode: bool = False  # Estimate with real tensors


@dataclass
class FaultTolerance:
    enable: bool = False  # Train with torchft replicas
    process_group: str = "gloo"  # Process group between replicas: gloo or nccl
    process_group_timeout_ms: int = 10000  # How long that group waits, in milliseconds
    replica_id: int = 0  # Number of this replica
    group_size: int = 0  # Number of replicas
    min_replica_size: int = 1  # Replicas that have to take part in a step
    # How replicas that synchronise only now and then do it: local_sgd or diloco
    semi_sync_method: str | None = None


@dataclass
class Experimental:
    custom_import: str = ""  # Dotted name of a module to import when the trainer starts
    custom_args_module: str = ""  # Old name of job.custom_config_module


@dataclass
class Validation:
    enable: bool = False  # Measure the loss on held-out data
    # Dataset, by its registered name; None takes the part that is held out of training.dataset, or
    # training.dataset itself where it has none
    dataset: str | None = None
    # Where the dataset lies; None takes training.dataset_path if dataset is None, too
    dataset_path: str | None = None
    local_batch_size: int = 8  # Sequences per data-parallel rank in one forward pass
    seq_len: int | None = None  # Tokens per sequence; None takes training.seq_len
    freq: int = 10  # Validate every this many steps
    steps: int = -1  # Batches per validation on each rank; -1 takes all the data there is
    dataloader: DataLoader = section(DataLoader, "How validation data is loaded")

    def __post_init__(self) -> None:
        assert self.steps > 0 or self.steps == -1, (
            f"validation.steps must be positive, or -1 for the whole dataset, got {self.steps}"
        )


@dataclass
class Debug:
    seed: int | None = None  # Seed of all random numbers; None lets rank 0 draw one
    deterministic: bool = False  # Use deterministic algorithms only; slower
    # Warn, instead of failing, where no deterministic algorithm exists
    deterministic_warn_only: bool = False
    # Send the same number of tokens to every expert, whatever the router says
    moe_force_load_balance: bool = False
    # At the first step, and again after this many steps, exchange one token of the batch, and stop
    # the run if the logits of another document move, or of an earlier token; the error names the
    # layer. Costs two forward passes of a microbatch; 0 turns it off
    check_document_isolation_freq: int = 0


@dataclass
class JobConfig:
    """What one job should do; built once, checked once, then only read."""

    job: Job = section(Job)
    profiling: Profiling = section(Profiling)
    metrics: Metrics = section(Metrics)
    model: Model = section(Model)
    optimizer: Optimizer = section(Optimizer)
    lr_scheduler: LRScheduler = section(LRScheduler)
    training: Training = section(Training)
    parallelism: Parallelism = section(Parallelism)
    checkpoint: Checkpoint = section(Checkpoint)
    activation_checkpoint: ActivationCheckpoint = section(ActivationCheckpoint)
    compile: Compile = section(Compile)
    quantize: Quantize = section(Quantize)
    comm: Comm = section(Comm)
    memory_estimation: MemoryEstimation = section(MemoryEstimation)
    fault_tolerance: FaultTolerance = section(FaultTolerance)
    experimental: Experimental = section(Experimental)
    validation: Validation = section(Validation)
    debug: Debug = section(Debug)

    @property
    def validation_data(self) -> Validation:
        """`[validation]` with dataset, dataset_path and seq_len of `[training]` where it has none."""
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
        """How many of a job's ranks, the last ones, do not train."""
        return 0

    def trainer_ranks(self, world_size: int) -> int:
        """How many of a job's ranks train: the first ones. The layout is theirs."""
        return world_size

    def to_dict(self) -> dict[str, Any]:
        """The whole config as nested dicts, which share nothing with it."""
        return asdict(self)

    def maybe_log(self) -> None:
        """Log the config and write it to a file, each if `job` asks for it.

        Rank 0 writes the file. Without a process group, which tells the rank, there is a warning
        and no file.
        """
        if self.job.print_config:
            described = json.dumps(self.to_dict(), indent=2, ensure_ascii=False)
            logger.info(f"Running with configs: {described}")
        if self.job.save_config_file is None:
            return
        if not torch.distributed.is_initialized():
            logger.warning(
                "job.save_config_file is set, but torch.distributed is not initialised: "
                "the config is not written"
            )
            return
        path = os.path.join(self.job.dump_folder, self.job.save_config_file)
        if torch.distributed.get_rank() == 0:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            with open_file(path, "w") as config_file:
                json.dump(self.to_dict(), config_file, indent=2)
        logger.info(f"Config is saved to {path}")
