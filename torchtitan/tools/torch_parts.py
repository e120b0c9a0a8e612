"""The private parts of torch that this package uses: each is reached through this module only.

An attribute of this module imports and returns a part of the table below. A method or a field of a torch
object is a function of the object, as in `torch_parts.version_of(x)`. If the installed torch has no such part,
a RunError names the feature, the part, this torch and a remedy; `check` raises it at start-up, for the
features that a job uses. `python -m torchtitan.tools.torch_parts` prints the table.
"""

import contextlib
import functools
import importlib
import inspect
import operator
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchtitan.tools.errors import RunError

VERSIONS = ("2.11", "2.12", "2.13", "2.14", "2.15")  # the versions of torch whose source was read


class Feature(NamedTuple):
    """What a user knows; what to do without it; whether a job (config, number of ranks) uses it.

    is_used: None if no setting tells; a missing part then raises at its first use.
    """

    title: str
    otherwise: str = ""
    is_used: Callable[[Any, int], bool] | None = None


_FEATURES = {
    "job": Feature("every job", is_used=lambda c, n: True),
    "ranks": Feature("a job of several ranks", "train on one rank", lambda c, n: n > 1),
    "fsdp": Feature(
        "FSDP (parallelism.data_parallel_shard_degree)",
        "replicate the model with data_parallel_shard_degree = 1",
        lambda c, n: n > 1 and c.parallelism.data_parallel_shard_degree != 1,
    ),
    "fsdp within": Feature(
        "parallelism.fsdp_reshard_after_forward = a number of ranks",
        "set it to 'always' or 'never'",
        lambda c, n: n > 1 and str(c.parallelism.fsdp_reshard_after_forward).isdecimal(),
    ),
    "ddp": Feature(
        "DDP (parallelism.data_parallel_replicate_degree)",
        "shard the model with data_parallel_shard_degree",
        lambda c, n: n > 1 and c.parallelism.data_parallel_replicate_degree > 1,
    ),
    "async tp": Feature(
        "parallelism.enable_async_tensor_parallel",
        "set it to false",
        lambda c, n: c.parallelism.enable_async_tensor_parallel,
    ),
    "ac": Feature(
        "activation_checkpoint.mode",
        "set it to 'none'",
        lambda c, n: c.activation_checkpoint.mode != "none",
    ),
    "selective ac": Feature(
        "activation_checkpoint.mode = 'selective' with selective_ac_option = 'op'",
        "set mode = 'full'",
        lambda c, n: (
            c.activation_checkpoint.mode == "selective"
            and c.activation_checkpoint.selective_ac_option == "op"
        ),
    ),
    "memory budget": Feature(
        "activation_checkpoint.mode = 'memory_budget'",
        "set it to 'full'",
        lambda c, n: c.activation_checkpoint.mode == "memory_budget",
    ),
    "compile": Feature("compile.enable", "set it to false", lambda c, n: c.compile.enable),
    "checkpoint": Feature("checkpoint.enable", "set it to false", lambda c, n: c.checkpoint.enable),
    "async save": Feature(
        "checkpoint.async_mode = 'async'",
        "set it to 'disabled'",
        lambda c, n: c.checkpoint.enable and c.checkpoint.async_mode == "async",
    ),
    "pinned save": Feature(
        "checkpoint.async_mode = 'async_with_pinned_mem'",
        "set it to 'async'",
        lambda c, n: c.checkpoint.enable and c.checkpoint.async_mode == "async_with_pinned_mem",
    ),
    "hf": Feature(
        "saving Hugging Face files on several ranks",
        "set checkpoint.last_save_in_hf = false",
        lambda c, n: n > 1 and c.checkpoint.enable and c.checkpoint.last_save_in_hf,
    ),
    "memory snapshot": Feature("profiling.enable_memory_snapshot", "set it to false"),
    "gc debug": Feature("training.gc_debug", "set it to false", lambda c, n: c.training.gc_debug),
    "fake ranks": Feature(
        "comm.mode = 'local_tensor'",
        "set it to 'fake_backend'",
        lambda c, n: c.comm.mode == "local_tensor",
    ),
    "seed": Feature("the seed of random numbers in DTensors on an accelerator"),
    "guest": Feature(
        "an engine in a program with its own process group", "let torchtitan make the group"
    ),
    "roles": Feature("RL on ranks with several roles", "train and generate on the same ranks"),
    "plain files": Feature("reading a pickled dataloader state"),
    "data workers": Feature(
        "a data worker that reads a stream of `datasets`",
        "set training.dataloader.num_workers = 0",
    ),
    "cp context": Feature(
        "torch's own context_parallel", "set parallelism.context_parallel_degree instead"
    ),
    "documents on cpu": Feature("attention to packed documents on a CPU", "train on a GPU"),
    "optimizer offload": Feature("optimizer states in host memory"),
    "weights": Feature("copies of a model's weights"),
    "generation": Feature("generation on a CPU"),
    "tinker": Feature("the Tinker client"),
}


class Part(NamedTuple):
    """One private part.

    name: "module:attribute.attribute", or a module; found in all of `VERSIONS`. If versions differ:
        each name, with the first and the last version in which it was found; the first is preferred.
    members: names in it, separated by spaces, that are used too.
    instead: what happens without it, if that is no error.
    """

    feature: str
    name: str | dict[str, tuple[str, str]]
    members: str = ""
    instead: str = ""

    @property
    def spellings(self) -> dict[str, tuple[str, str]]:
        every = VERSIONS[0], VERSIONS[-1]
        return {self.name: every} if isinstance(self.name, str) else self.name

    def spelling_in(self, version: str) -> str | None:
        """Return the name that the part has in one of `VERSIONS`."""
        position = VERSIONS.index
        for name, (first, last) in self.spellings.items():
            if position(first) <= position(version) <= position(last):
                return name
        return None


_C10D, _FSDP = "torch.distributed.distributed_c10d", "torch.distributed.fsdp._fully_shard"
_DCP, _DTENSOR = "torch.distributed.checkpoint", "torch.distributed.tensor"
_MESH, _GROUP = "torch.distributed.device_mesh", "torch.distributed:ProcessGroup."
_NCCL = "torch.distributed:ProcessGroupNCCL."
_FSDP_GROUP = f"{_FSDP}._fsdp_param_group:FSDPParamGroup."
_FSDP_STATE, _FSDP_PARAM = f"{_FSDP}._fsdp_state:FSDPState.", f"{_FSDP}._fsdp_param:FSDPParam."
_HF = f"{_DCP}._consolidate_hf_safetensors"
_DYNAMO, _INDUCTOR = "torch._dynamo", "torch._inductor"
_STATES, _NOT_CLEARED = "torch.distributed._state_dict_utils", "torch's cache is not cleared"

PARTS = {
    # ---- process groups and meshes ----
    "world": Part("job", f"{_C10D}:_world", "pg_map"),
    "default_store": Part("job", f"{_C10D}:_get_default_store"),
    "group_of_name": Part("job", f"{_C10D}:_resolve_process_group"),
    "backend_of": Part(
        "job",
        {f"{_GROUP}get_backend": ("2.14", "2.15"), f"{_GROUP}_get_backend": ("2.11", "2.13")},
    ),
    "start_abort": Part("job", f"{_NCCL}_group_start", instead="groups are aborted one by one"),
    "end_abort": Part("job", f"{_NCCL}_group_end", instead="groups are aborted one by one"),
    "collectives_so_far": Part("job", f"{_GROUP}_get_sequence_number_for_group"),
    "collective_operators": Part(
        "job",
        "torch.distributed._functional_collectives:torch.ops._c10d_functional",
        "all_gather_into_tensor all_reduce all_to_all_single reduce_scatter_tensor wait_tensor",
    ),
    "split_mesh": Part("job", f"{_MESH}:DeviceMesh._unflatten"),
    "join_mesh": Part("job", f"{_MESH}:DeviceMesh._flatten"),
    "fake_backend": Part("job", "torch.testing._internal.distributed.fake_pg"),
    "mesh_default_group": Part("guest", f"{_MESH}:_get_default_group"),
    "register_backend": Part("roles", f"{_GROUP}_register_backend"),
    "set_default_backend": Part("roles", f"{_GROUP}_set_default_backend"),
    "LocalTensorMode": Part("fake ranks", "torch.distributed._local_tensor:LocalTensorMode"),
    # ---- tensors and modules ----
    "pytree": Part("job", "torch.utils._pytree", "tree_flatten tree_leaves tree_map_only"),
    "DispatchMode": Part("job", "torch.utils._python_dispatch:TorchDispatchMode"),
    "assert_on_device": Part("job", "torch:_assert_async"),
    "foreach_copy": Part("weights", "torch:_foreach_copy_"),
    "foreach_div": Part("job", "torch:_foreach_div_"),
    "version_of": Part("job", "torch:Tensor._version"),
    "below_autograd": Part("job", "torch._C:_AutoDispatchBelowAutograd"),
    "flash_on_cpu": Part(
        "documents on cpu", "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu"
    ),
    "flash_on_cpu_backward": Part(
        "documents on cpu", "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward"
    ),
    "onednn_linear": Part("job", "torch:ops.mkldnn._linear_pointwise", instead="MKL computes"),
    "onednn_pack": Part("job", "torch:ops.mkldnn._reorder_linear_weight", instead="MKL computes"),
    "onednn_has_bf16": Part(
        "job", "torch:ops.mkldnn._is_mkldnn_bf16_supported", instead="bf16 is taken to be slow"
    ),
    "remove_library": Part("job", "torch.library:Library._destroy"),
    "empty_host_cache": Part(
        "optimizer offload",
        {
            "torch.accelerator:empty_host_cache": ("2.12", "2.15"),
            "torch._C:_host_emptyCache": ("2.11", "2.11"),
        },
    ),
    "unsaved_buffers": Part("weights", "torch.nn:Module._non_persistent_buffers_set"),
    "forward_hooks": Part("generation", "torch.nn:Module._forward_hooks"),
    "forward_pre_hooks": Part("generation", "torch.nn:Module._forward_pre_hooks"),
    "skips_on_device": Part(
        "job", "torch.optim:Adam._step_supports_amp_scaling", instead="the host skips bad steps"
    ),
    "last_lr": Part("job", "torch.optim.lr_scheduler:LRScheduler._last_lr"),
    "worker_info": Part("data workers", "torch.utils.data._utils.worker:_worker_info"),
    "rebuild_tensor": Part("plain files", "torch._utils:_rebuild_tensor_v2"),
    "plain_results": Part("tinker", "torch._C:_disabled_torch_function_impl"),
    "record_memory": Part("memory snapshot", "torch.cuda.memory:_record_memory_history"),
    "memory_history": Part("memory snapshot", "torch.cuda.memory:_snapshot"),
    "warn_tensor_cycles": Part("gc debug", "torch.utils.viz._cycles:warn_tensor_cycles"),
    # ---- DTensor ----
    "local_shape_and_offset": Part(
        "ranks", f"{_DTENSOR}._utils:compute_local_shape_and_global_offset"
    ),
    "dispatcher": Part("ranks", f"{_DTENSOR}:DTensor._op_dispatcher", instead=_NOT_CLEARED),
    "clear_sharding_cache": Part(
        "ranks", "torch._C:_clear_DTensor_sharding_propagator_cache", instead=_NOT_CLEARED
    ),
    "transforms": Part(
        "ranks", f"{_DTENSOR}._redistribute:_gen_transform_infos", instead=_NOT_CLEARED
    ),
    "seed_dtensors": Part("seed", f"{_DTENSOR}._random:manual_seed"),
    "rng_tracker": Part("seed", f"{_DTENSOR}._random:_rng_tracker"),
    "set_rotate_method": Part(
        "cp context", f"{_DTENSOR}.experimental._attention:set_rotate_method"
    ),
    # ---- data and tensor parallelism ----
    "replicate": Part("ddp", "torch.distributed._composable.replicate:replicate"),
    "fsdp_state": Part("fsdp", "torch.distributed.fsdp:FSDPModule._get_fsdp_state"),
    "fsdp_is_root": Part("fsdp", f"{_FSDP_STATE}_is_root"),
    "fsdp_groups": Part(
        "fsdp",
        {
            f"{_FSDP_STATE}_fsdp_param_groups": ("2.12", "2.15"),
            f"{_FSDP_STATE}_fsdp_param_group": ("2.11", "2.11"),
        },
    ),
    "fsdp_forward_mesh": Part("fsdp", f"{_FSDP_GROUP}post_forward_mesh_info"),
    "fsdp_mesh": Part("fsdp", f"{_FSDP_GROUP}mesh_info"),
    "fsdp_communication": Part("fsdp", f"{_FSDP_GROUP}comm_ctx"),
    "fsdp_state_context": Part(
        "fsdp",
        {
            "torch.distributed.fsdp:FSDPModule.reset_iter_state": ("2.13", "2.15"),
            f"{_FSDP_STATE}_state_ctx": ("2.11", "2.12"),
        },
    ),
    "fsdp_training_state": Part("fsdp", f"{_FSDP}._fsdp_common:TrainingState"),
    "fsdp_order": Part("fsdp", f"{_FSDP_GROUP}_post_forward_indices"),
    "fsdp_params": Part("fsdp", f"{_FSDP_GROUP}fsdp_params"),
    "fsdp_size": Part("fsdp", f"{_FSDP_PARAM}_orig_size"),
    "fsdp_dtypes": Part("fsdp", f"{_FSDP_PARAM}mp_policy"),
    "fsdp_shard": Part("fsdp", f"{_FSDP_PARAM}sharded_param"),
    "fsdp_gathered": Part("fsdp", f"{_FSDP_PARAM}_unsharded_param"),
    "fsdp_gradient": Part("fsdp", f"{_FSDP_PARAM}unsharded_accumulated_grad"),
    "make_forward_mesh": Part("fsdp within", f"{_FSDP}._fully_shard:_get_post_forward_mesh_info"),
    "HsdpMesh": Part("fsdp within", f"{_FSDP}._fsdp_common:HSDPMeshInfo"),
    "enable_symmetric_memory": Part(
        "async tp", "torch.distributed._symmetric_memory:enable_symm_mem_for_group"
    ),
    "pipelined_products": Part("async tp", f"{_INDUCTOR}.config:_micro_pipeline_tp"),
    # ---- activation checkpointing, compiler ----
    "checkpoint_wrapper": Part(
        "ac", "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:checkpoint_wrapper"
    ),
    "reorder_compiled": Part("ac", "torch._C._dynamo.eval_frame:_set_lru_cache"),
    "RecomputeMode": Part("selective ac", "torch.utils.checkpoint:_CachedTorchDispatchMode"),
    "copy_operator": Part("selective ac", "torch:ops.aten._to_copy"),
    "low_precision_products": Part(
        "selective ac", "torch:ops.aten", "_scaled_mm _scaled_mm_v2", instead="recomputed"
    ),
    "costly_operators": Part(
        "selective ac",
        "torch:ops.aten",
        "_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2"
        " _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention"
        " _scaled_dot_product_cudnn_attention _scaled_dot_product_attention_math"
        " _scaled_dot_product_fused_attention_overrideable"
        " _scaled_dot_product_flash_attention_for_cpu",
        instead="recomputed",
    ),
    "varlen": Part("selective ac", "torch.nn.attention.varlen:torch.ops.torch_attn._varlen_attn"),
    "memory_budget": Part(
        "memory budget",
        "torch._functorch.config",
        "activation_memory_budget memory_budget_pareto_dir visualize_memory_budget_pareto",
    ),
    "dynamo_config": Part("compile", f"{_DYNAMO}.config", "optimize_ddp recompile_limit"),
    "compiled_function": Part(
        "compile", f"{_DYNAMO}.eval_frame:_TorchDynamoContext._torchdynamo_orig_callable"
    ),
    "OptimizedModule": Part("compile", f"{_DYNAMO}:OptimizedModule._orig_mod"),
    "compiled_call": Part("compile", "torch.nn:Module._compiled_call_impl"),
    "inductor_config": Part(
        "compile", f"{_INDUCTOR}.config", "emulate_precision_casts post_grad_custom_post_pass"
    ),
    "inductor_options": Part("compile", f"{_INDUCTOR}:list_options"),
    "GraphPass": Part("compile", f"{_INDUCTOR}.custom_graph_pass:CustomGraphPass"),
    # ---- checkpoints ----
    "copy_states": Part("async save", f"{_STATES}:_copy_state_dict"),
    "allocate_states": Part("async save", f"{_STATES}:_create_cpu_state_dict"),
    "staging_stream": Part(
        "pinned save",
        f"{_DCP}.staging:DefaultStager._staging_stream",
        instead="each save waits for the device",
    ),
    "StorageInfo": Part("checkpoint", f"{_DCP}.filesystem:_StorageInfo"),
    "MemoryFormats": Part("checkpoint", f"{_DCP}.metadata:_MEM_FORMAT_ENCODING"),
    "FileView": Part("checkpoint", f"{_DCP}.utils:_ReaderView"),
    "read_entry": Part("checkpoint", f"{_DCP}:FileSystemReader._slice_file"),
    "flatten_states": Part("checkpoint", f"{_DCP}._nested_dict:flatten_state_dict"),
    "save_plan": Part("checkpoint", f"{_DCP}:SavePlanner._cached_save_plan"),
    "plan_caches": Part(
        "checkpoint",
        f"{_DCP}:SavePlanner",
        "_cached_save_plan _cached_final_save_plan _cached_all_plans _cached_global_plan"
        " _cached_metadata",
    ),
    "pending_plan": Part(
        "checkpoint",
        {f"{_DCP}:DefaultSavePlanner._pending_local_plan": ("2.12", "2.15")},
        instead="not needed",
    ),
    "plan_key": Part("checkpoint", f"{_DCP}:DefaultSavePlanner._cached_plans_key"),
    "join_files": Part("hf", f"{_HF}:_consolidate_safetensors_files"),
    "write_index": Part("hf", f"{_HF}:_write_overall_metadata_file"),
    "SHARDED_FILE_KEY": Part("hf", f"{_DCP}._hf_utils:CUSTOM_METADATA_KEY"),
}


def __getattr__(name: str) -> Any:
    if name not in PARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return get(name)


def get(name: str) -> Any:
    """Return the part, or None if it is missing and `instead` says what happens then."""
    owner, attribute = _find(name)
    if owner is None:
        return None
    value = getattr(owner, attribute, None) if attribute else owner
    if not isinstance(owner, type):
        return value
    if not callable(value):
        return operator.attrgetter(attribute)
    return lambda x, *args, **options: getattr(x, attribute)(*args, **options)


def place(name: str) -> tuple[Any, str]:
    """Return the module or class that holds a part, and the attribute, to replace the part there."""
    return _find(name)


def attribute(name: str) -> str:
    """Return the last component of a part's name, to read or set that field of an object."""
    return re.split("[.:]", next(iter(PARTS[name].spellings)))[-1]


def field_of(owner: Any, name: str) -> Any:
    """Return the field of an object, or None if it has no such field. Imports nothing."""
    return getattr(owner, attribute(name), None)


def is_compiled(module: Any) -> bool:
    """Return True if the module is the result of `torch.compile`. Does not load the compiler."""
    return hasattr(module, attribute("OptimizedModule"))


def reset_fsdp(model: Any) -> None:
    """Do what `FSDPModule.reset_iter_state` does, on torch 2.11 and 2.12, which lack that method."""
    root, idle = model._get_fsdp_state(), get("fsdp_training_state").IDLE
    context = get("fsdp_state_context")(root)
    if root._device.type != "cpu":
        root._device_handle.synchronize()  # collectives run on streams of their own
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
    """Return the parameter groups of an FSDP state; in torch 2.11 it has one group or None."""
    groups = get("fsdp_groups")(state)
    return groups if isinstance(groups, list) else [groups] if groups is not None else []


@contextlib.contextmanager
def replaced(name: str, value: Any) -> Iterator[None]:
    """In the block, torch uses `value` in place of the part."""
    owner, attribute = place(name)
    before = getattr(owner, attribute)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        setattr(owner, attribute, before)


def members(name: str) -> list[Any]:
    """Return the members of a part that this torch has."""
    owner = get(name)
    return [getattr(owner, x) for x in PARTS[name].members.split() if hasattr(owner, x)]


def check(job_config: Any, world_size: int = 1) -> None:
    """Raise RunError if a part is missing that this job needs."""
    used = {key for key, x in _FEATURES.items() if x.is_used and x.is_used(job_config, world_size)}
    for name, part in PARTS.items():
        if part.feature in used:
            _find.__wrapped__(name)  # finds what is there now


@functools.cache
def _find(name: str) -> tuple[Any, str]:
    """Return the module or class that holds a part, and the attribute, "" for a whole module.

    Raises RunError if this torch lacks the part; if it has a replacement, returns (None, "").
    """
    part, first_missing = PARTS[name], ""
    for spelling in part.spellings:
        owner, attribute, missing = _resolve(spelling, "" if part.instead else part.members)
        if not missing:
            return owner, attribute
        first_missing = first_missing or missing
    if part.instead:
        return None, ""
    feature = _FEATURES[part.feature]
    remedy = f"install torch {VERSIONS[0]} to {VERSIONS[-1]}"
    remedy += f", or {feature.otherwise}" if feature.otherwise else ""
    raise RunError(
        f"{feature.title} needs {first_missing}, which torch {torch.__version__} does not have; {remedy}"
    )


def _resolve(spelling: str, members: str) -> tuple[Any, str, str]:
    """Return the module or class with the part, the attribute, and the name of what is missing."""
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
    missing = [f"{_shown(spelling)}.{name}" for name in members.split() if not _has(value, name)]
    return owner, attribute, missing[0] if missing else ""


def _has(owner: Any, attribute: str) -> bool:
    """Return True if there is such an attribute; of a class, also a field that its methods use."""
    if hasattr(owner, attribute) or not isinstance(owner, type):
        return hasattr(owner, attribute)
    return any(
        attribute in vars(cls).get("__annotations__", ())
        or any(
            attribute in x.__code__.co_names for x in vars(cls).values() if inspect.isfunction(x)
        )
        for cls in owner.__mro__
    )


def _shown(spelling: str, members: str = "") -> str:
    module, _, path = spelling.partition(":")
    name = path if path.startswith("torch.") else ".".join(filter(None, (module, path)))
    return f"{name} ({members})" if members else name


_USE = re.compile(
    r"(?:torch_parts\.)?\b(?:get|place|replaced|members|field_of|attribute)\(\s*(?:[^()\"]*, )?\"(\w+)\""
    r"|torch_parts\.([A-Za-z]\w*)"
    r"|torch_parts import (\w+)"
)


def uses() -> dict[str, list[str]]:
    """Return part -> the package's files that use it."""
    found: dict[str, list[str]] = {name: [] for name in PARTS}
    package = Path(__file__).resolve().parents[1]
    for path in sorted(package.rglob("*.py")):
        names = {name for groups in _USE.findall(path.read_text()) for name in groups}
        for name in names & PARTS.keys():
            found[name].append(path.relative_to(package).as_posix())
    return found


def main() -> None:
    """Print the table of parts."""
    users = uses()
    print(f"torch {torch.__version__}; read: {', '.join(VERSIONS)}\n")
    for name, part in PARTS.items():
        feature = _FEATURES[part.feature]
        try:
            is_there = _find(name)[0] is not None
        except RunError:
            is_there = False
        for spelling in part.spellings:
            read = [x if part.spelling_in(x) == spelling else " -  " for x in VERSIONS]
            print(f"{name:25} {' '.join(read)}  {_shown(spelling, part.members)}")
        print(
            f"    here: {'yes' if is_there else 'no'}; for {feature.title}; "
            f"without it: {part.instead or 'an error'}; used by {', '.join(users[name])}"
        )


if __name__ == "__main__":
    main()
