"""Access to the private parts of torch that this package uses; other modules use no private names.

A part is a function, class, method, field or module of torch. Each row of the table below names a part; this
module's attribute of that name imports and returns it. A method or field becomes a function of its object:
`torch_parts.version_of(x)`. If the installed torch lacks a part, a RunError names the feature, the part, the
torch version and a remedy. `check` raises this error at start-up for the features that a job uses.
"""

import contextlib
import functools
import importlib
import inspect
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from torchtitan.tools.errors import RunError
from torchtitan.tools.torch_versions import TESTED, minor_version

_FIRST, *_, _LAST = map(minor_version, TESTED)


class Feature(NamedTuple):
    """title: the feature's name in error messages. otherwise: remedy if torch lacks a part for it."""

    title: str
    otherwise: str


class Part(NamedTuple):
    """A private part of torch.

    feature: key in `_FEATURES` of the feature that needs the part.
    spellings: the part's names in torch's versions, newest version first, as "module:attribute.attribute" or
        "module". The first name that exists is used.
    members: names of the attributes of the part that this package uses.
    instead: what this package does if the part is missing; "": it raises RunError.
    """

    feature: str
    spellings: list[str]
    members: list[str]
    instead: str


# A line "feature: title; otherwise" begins a feature. The indented rows below it are the feature's parts:
# "part spelling members | instead". A part with several rows has other names in older versions of torch.
_TABLE = """
job: every job
    world torch.distributed.distributed_c10d:_world pg_map
    default_store torch.distributed.distributed_c10d:_get_default_store
    group_of_name torch.distributed.distributed_c10d:_resolve_process_group
    backend_of torch.distributed:ProcessGroup.get_backend
    backend_of torch.distributed:ProcessGroup._get_backend
    start_abort torch.distributed:ProcessGroupNCCL._group_start | groups are aborted one by one
    end_abort torch.distributed:ProcessGroupNCCL._group_end | groups are aborted one by one
    collectives_so_far torch.distributed:ProcessGroup._get_sequence_number_for_group
    collective_operators torch.distributed._functional_collectives:torch.ops._c10d_functional all_gather_into_tensor all_reduce all_to_all_single reduce_scatter_tensor wait_tensor
    split_mesh torch.distributed.device_mesh:DeviceMesh._unflatten
    join_mesh torch.distributed.device_mesh:DeviceMesh._flatten
    fake_backend torch.testing._internal.distributed.fake_pg
    pytree torch.utils._pytree tree_flatten tree_leaves tree_map_only
    DispatchMode torch.utils._python_dispatch:TorchDispatchMode
    assert_on_device torch:_assert_async
    foreach_div torch:_foreach_div_
    version_of torch:Tensor._version
    below_autograd torch._C:_AutoDispatchBelowAutograd
    onednn_linear torch:ops.mkldnn._linear_pointwise | MKL computes
    onednn_has_bf16 torch:ops.mkldnn._is_mkldnn_bf16_supported | bf16 is taken to be slow
    skips_on_device torch.optim:Adam._step_supports_amp_scaling | the host skips bad steps
    last_lr torch.optim.lr_scheduler:LRScheduler._last_lr
guest: an engine in a program with its own process group; let torchtitan make the group
    mesh_default_group torch.distributed.device_mesh:_get_default_group
fake ranks: comm.mode = 'local_tensor'; set it to 'fake_backend'
    LocalTensorMode torch.distributed._local_tensor:LocalTensorMode
weights: copies of a model's weights
    foreach_copy torch:_foreach_copy_
    unsaved_buffers torch.nn:Module._non_persistent_buffers_set
documents on cpu: attention to packed documents on a CPU; train on a GPU
    flash_on_cpu torch:ops.aten._scaled_dot_product_flash_attention_for_cpu
    flash_on_cpu_backward torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
optimizer offload: optimizer states in host memory
    empty_host_cache torch.accelerator:empty_host_cache
    empty_host_cache torch._C:_host_emptyCache
data workers: a data worker that reads a stream of `datasets`; set training.dataloader.num_workers = 0
    worker_info torch.utils.data._utils.worker:_worker_info
plain files: reading a pickled dataloader state
    rebuild_tensor torch._utils:_rebuild_tensor_v2
tinker: the Tinker client
    plain_results torch._C:_disabled_torch_function_impl
memory snapshot: profiling.enable_memory_snapshot; set it to false
    record_memory torch.cuda.memory:_record_memory_history
    memory_history torch.cuda.memory:_snapshot
gc debug: training.gc_debug; set it to false
    warn_tensor_cycles torch.utils.viz._cycles:warn_tensor_cycles
ranks: a job of several ranks; train on one rank
    local_shape_and_offset torch.distributed.tensor._utils:compute_local_shape_and_global_offset
    held_tensor torch.distributed.tensor:DTensor._local_tensor
    dispatcher torch.distributed.tensor:DTensor._op_dispatcher | torch's cache is not cleared
    clear_sharding_cache torch._C:_clear_DTensor_sharding_propagator_cache | torch's cache is not cleared
    transforms torch.distributed.tensor._redistribute:_gen_transform_infos | torch's cache is not cleared
seed: the seed of random numbers in DTensors on an accelerator
    seed_dtensors torch.distributed.tensor._random:manual_seed
    rng_tracker torch.distributed.tensor._random:_rng_tracker
cp context: torch's own context_parallel; set parallelism.context_parallel_degree instead
    set_rotate_method torch.distributed.tensor.experimental._attention:set_rotate_method
ddp: DDP (parallelism.data_parallel_replicate_degree); shard the model with data_parallel_shard_degree
    replicate torch.distributed._composable.replicate:replicate
fsdp: FSDP (parallelism.data_parallel_shard_degree); replicate the model with data_parallel_shard_degree = 1
    fsdp_state torch.distributed.fsdp:FSDPModule._get_fsdp_state
    fsdp_is_root torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._is_root
    fsdp_groups torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._fsdp_param_groups
    fsdp_groups torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._fsdp_param_group
    fsdp_forward_mesh torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.post_forward_mesh_info
    fsdp_mesh torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.mesh_info
    fsdp_communication torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.comm_ctx
    fsdp_reset torch.distributed.fsdp:FSDPModule.reset_iter_state
    fsdp_reset torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._state_ctx
    fsdp_training_state torch.distributed.fsdp._fully_shard._fsdp_common:TrainingState
    fsdp_post_backward torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.post_backward
    fsdp_end_backward torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._root_post_backward_final_callback
    fsdp_forwards torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPCommContext.post_forward_order
    fsdp_order torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._post_forward_indices
    fsdp_params torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.fsdp_params
    fsdp_size torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._orig_size
    fsdp_dtypes torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.mp_policy
    fsdp_shard torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.sharded_param
    fsdp_gathered torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._unsharded_param
    fsdp_gradient torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.unsharded_accumulated_grad
async tp: parallelism.enable_async_tensor_parallel; set it to false
    enable_symmetric_memory torch.distributed._symmetric_memory:enable_symm_mem_for_group
    pipelined_products torch._inductor.config:_micro_pipeline_tp
ac: activation_checkpoint.mode; set it to 'none'
    checkpoint_wrapper torch.distributed.algorithms._checkpoint.checkpoint_wrapper:checkpoint_wrapper
    reorder_compiled torch._C._dynamo.eval_frame:_set_lru_cache
selective ac: activation_checkpoint.mode = 'selective' with selective_ac_option = 'op'; set mode = 'full'
    RecomputeMode torch.utils.checkpoint:_CachedTorchDispatchMode
    copy_operator torch:ops.aten._to_copy
    low_precision_products torch:ops.aten _scaled_mm _scaled_mm_v2 | recomputed
    costly_operators torch:ops.aten _grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2 _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention _scaled_dot_product_cudnn_attention _scaled_dot_product_attention_math _scaled_dot_product_fused_attention_overrideable _scaled_dot_product_flash_attention_for_cpu | recomputed
    varlen torch.nn.attention.varlen:torch.ops.torch_attn._varlen_attn
memory budget: activation_checkpoint.mode = 'memory_budget'; set it to 'full'
    memory_budget torch._functorch.config activation_memory_budget memory_budget_pareto_dir visualize_memory_budget_pareto
compile: compile.enable; set it to false
    dynamo_config torch._dynamo.config optimize_ddp recompile_limit
    compiled_function torch._dynamo.eval_frame:_TorchDynamoContext._torchdynamo_orig_callable
    OptimizedModule torch._dynamo:OptimizedModule._orig_mod
    compiled_call torch.nn:Module._compiled_call_impl
    inductor_config torch._inductor.config emulate_precision_casts
    inductor_options torch._inductor:list_options
    GraphPass torch._inductor.custom_graph_pass:CustomGraphPass
async save: checkpoint.async_mode = 'async'; set it to 'disabled'
    copy_states torch.distributed._state_dict_utils:_copy_state_dict
    allocate_states torch.distributed._state_dict_utils:_create_cpu_state_dict
pinned save: checkpoint.async_mode = 'async_with_pinned_mem'; set it to 'async'
    staging_stream torch.distributed.checkpoint.staging:DefaultStager._staging_stream | each save waits for the device
checkpoint: checkpoint.enable; set it to false
    StorageInfo torch.distributed.checkpoint.filesystem:_StorageInfo
    MemoryFormats torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING
    FileView torch.distributed.checkpoint.utils:_ReaderView
    flatten_states torch.distributed.checkpoint._nested_dict:flatten_state_dict
quantized: quantized Hugging Face weights; convert them first
    map_scales torch.distributed.checkpoint.quantized_hf_storage:QuantizedHuggingFaceStorageReader._build_weight_scale_mapping
hf: loading Hugging Face files; set checkpoint.initial_load_in_hf = false
    SHARDED_FILE_KEY torch.distributed.checkpoint._hf_utils:CUSTOM_METADATA_KEY
"""


def _is_ddp(config: Any) -> bool:
    p = config.parallelism
    others = {p.data_parallel_shard_degree, p.context_parallel_degree, p.expert_parallel_degree}
    return p.data_parallel_replicate_degree > 1 and others == {1}


# Feature -> function of (config, number of ranks) that returns whether a job uses the feature. For
# features that are not listed here, a missing part raises at its first use.
_IS_USED: dict[str, Callable[[Any, int], bool]] = {
    "job": lambda c, n: True,
    "ranks": lambda c, n: n > 1,
    "fsdp": lambda c, n: n > 1 and not _is_ddp(c),
    "ddp": lambda c, n: _is_ddp(c),
    "async tp": lambda c, n: c.parallelism.enable_async_tensor_parallel,
    "ac": lambda c, n: c.activation_checkpoint.mode != "none",
    "selective ac": lambda c, n: (
        c.activation_checkpoint.mode == "selective"
        and c.activation_checkpoint.selective_ac_option == "op"
    ),
    "memory budget": lambda c, n: c.activation_checkpoint.mode == "memory_budget",
    "compile": lambda c, n: c.compile.enable,
    "checkpoint": lambda c, n: c.checkpoint.enable,
    "async save": lambda c, n: c.checkpoint.enable and c.checkpoint.async_mode == "async",
    "pinned save": lambda c, n: (
        c.checkpoint.enable and c.checkpoint.async_mode == "async_with_pinned_mem"
    ),
    "hf": lambda c, n: c.checkpoint.initial_load_in_hf,
    "gc debug": lambda c, n: c.training.gc_debug,
    "fake ranks": lambda c, n: c.comm.mode == "local_tensor",
}

_FEATURES: dict[str, Feature] = {}
PARTS: dict[str, Part] = {}


def _read_table() -> None:
    feature = ""
    for line in _TABLE.strip().splitlines():
        if not line.startswith(" "):
            feature, _, rest = line.partition(": ")
            title, _, otherwise = rest.partition("; ")
            _FEATURES[feature] = Feature(title, otherwise)
            continue
        row, _, instead = line.partition(" | ")
        name, spelling, *members = row.split()
        PARTS.setdefault(name, Part(feature, [], members, instead)).spellings.append(spelling)


_read_table()


def __getattr__(name: str) -> Any:
    if name not in PARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return get(name)


def get(name: str) -> Any:
    """Return the part of torch called `name`; None if it is missing and has an `instead`."""
    owner, attribute = place(name)
    if owner is None:
        return None
    value = getattr(owner, attribute, None) if attribute else owner
    if not isinstance(owner, type):
        return value
    if not callable(value):
        return operator.attrgetter(attribute)
    return lambda x, *args, **options: getattr(x, attribute)(*args, **options)


def attribute(name: str) -> str:
    """Return the attribute name of a method or field in torch, for getattr and setattr on an object."""
    return re.split("[.:]", PARTS[name].spellings[0])[-1]


def field_of(owner: Any, name: str) -> Any:
    """Return the value of the field called `name` on `owner`, or None. Imports nothing."""
    return getattr(owner, attribute(name), None)


def is_compiled(module: Any) -> bool:
    """Return True if the module is the result of `torch.compile`. Does not load the compiler."""
    return hasattr(module, attribute("OptimizedModule"))


def name_without_wrappers(name: str) -> str:
    """Return a parameter's or buffer's name without the prefixes of compile and checkpointing."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def reset_fsdp(model: Any) -> None:
    """Call `FSDPModule.reset_iter_state`; do the same work here on torch 2.11 and 2.12, which lack it."""
    if hasattr(model, "reset_iter_state"):
        return model.reset_iter_state()
    root, idle = model._get_fsdp_state(), get("fsdp_training_state").IDLE
    context = get("fsdp_reset")(root)
    if root._device.type != "cpu":
        root._device_handle.synchronize()  # wait for FSDP's streams, too
    root._comm_ctx.all_gather_state = root._comm_ctx.reduce_scatter_state = None
    root._comm_ctx.post_forward_order.clear()
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False
    for state in context.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = idle
        for group in fsdp_groups_of(state):
            group._all_gather_result = group._all_reduce_state = None
            group._post_reduce_event = group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = idle
            group.reshard()


def fsdp_groups_of(state: Any) -> list[Any]:
    """Return the parameter groups of an FSDP state; in torch 2.11 a state has one group or None."""
    groups = get("fsdp_groups")(state)
    return groups if isinstance(groups, list) else [groups] if groups is not None else []


@contextlib.contextmanager
def replaced(name: str, value: Any) -> Iterator[None]:
    """A context in which `value` replaces the part of torch called `name`."""
    owner, attribute = place(name)
    before = getattr(owner, attribute)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        setattr(owner, attribute, before)


def members(name: str) -> list[Any]:
    """Return the `members` of the part called `name`, without those that this torch lacks."""
    owner = get(name)
    return [getattr(owner, x) for x in PARTS[name].members if hasattr(owner, x)]


def check(job_config: Any, world_size: int = 1) -> None:
    """Raise RunError if this torch lacks a part that this job needs."""
    used = {key for key, is_used in _IS_USED.items() if is_used(job_config, world_size)}
    for name, part in PARTS.items():
        if part.feature in used:
            # Bypass the cache of `place`.
            place.__wrapped__(name)


@functools.cache
def place(name: str) -> tuple[Any, str]:
    """Return (owner of the part called `name`, the part's attribute name in it), or (module, "") for a module.

    If this torch lacks the part, returns (None, "") if the part has an `instead`, or raises RunError.
    """
    part, first_missing = PARTS[name], ""
    for spelling in part.spellings:
        owner, attribute, missing = _resolve(spelling, [] if part.instead else part.members)
        if not missing:
            return owner, attribute
        first_missing = first_missing or missing
    if part.instead:
        return None, ""
    feature = _FEATURES[part.feature]
    remedy = f"install torch {_FIRST} to {_LAST}"
    remedy += f", or {feature.otherwise}" if feature.otherwise else ""
    raise RunError(
        f"{feature.title} needs {first_missing}, which torch {torch.__version__} does not have; {remedy}"
    )


def _resolve(spelling: str, members: list[str]) -> tuple[Any, str, str]:
    """Return (owner, attribute, missing) of a spelling; missing: full name of what this torch lacks, or ""."""
    module, _, path = spelling.partition(":")
    *parents, attribute = path.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for parent in parents:
            owner = getattr(owner, parent)
    except (ImportError, AttributeError):
        return None, "", _shown(spelling)
    if attribute and not _has(owner, attribute):
        return None, "", _shown(spelling)
    value = getattr(owner, attribute, None) if attribute else owner
    missing = [f"{_shown(spelling)}.{name}" for name in members if not _has(value, name)]
    return owner, attribute, missing[0] if missing else ""


def _has(owner: Any, attribute: str) -> bool:
    """Return True if `owner` has the attribute or, for a class, an instance field of this name."""
    if hasattr(owner, attribute) or not isinstance(owner, type):
        return hasattr(owner, attribute)
    return any(
        attribute in vars(cls).get("__annotations__", ())
        or any(
            attribute in x.__code__.co_names for x in vars(cls).values() if inspect.isfunction(x)
        )
        for cls in owner.__mro__
    )


def _shown(spelling: str) -> str:
    module, _, path = spelling.partition(":")
    return path if path.startswith("torch.") else ".".join(filter(None, (module, path)))
