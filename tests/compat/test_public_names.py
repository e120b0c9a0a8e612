"""What other programs need of the package: names to import, and versions beside which it installs.

Names of the reference are there, and say so if they cannot work.
"""

import importlib
import pkgutil
import sys
from pathlib import Path
from types import FunctionType

import pytest
import tomli
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import torchtitan.rl
from tests.torch_alone import run_with_torch_alone
from torchtitan.tools.torch_versions import TESTED

ROOT = Path(__file__).resolve().parents[2]

# Module, and names that clients import from it.
NAMES = """
components.checkpoint AsyncCheckpointerType AsyncMode AsyncSaveResponse CheckpointManager DATALOADER
components.checkpoint DefaultStager HuggingFaceStorageWriter LR_SCHEDULER MODEL ModelWrapper OPTIMIZER
components.checkpoint SaveDone StagingOptions TRAIN_STATE Terminate dcp dist purge_thread
components.weight_stream WeightStream digest_of
config.job_config Checkpoint Compile JobConfig LRScheduler Model Optimizer Parallelism Training
distributed.activation_checkpoint apply_ac
distributed.context_parallel apply_cp_to_attention_module cp_shard prepare_context_parallel_input
distributed.deepep DispatchState combine_tokens dispatch_tokens sync_combine
distributed.dual_pipe_v DualPipeExpertParallel HookCoordinator SyncHook get_dual_pipe_v_flag
distributed.dual_pipe_v overlap_callback _count_moe_modules
distributed.expert_parallel BaseExpertParallel DeepEPExpertParallel ExpertParallel TensorParallel
distributed.expert_parallel ExpertTensorParallel ReordererSequenceParallel
distributed.parallel_dims ParallelDims
distributed.utils clip_grad_norm_ get_train_context maybe_enable_amp
models.attention VarlenMetadata create_attention_mask get_causal_mask_mod
models.deepseek_v3.infra.parallelize apply_non_moe_tp parallelize_deepseekv3
models.deepseek_v3.model.model Attention DeepSeekV3Model precompute_freqs_cis
models.gpt_oss.infra.expert_parallel GptossExpertTensorParallel GptossTensorParallel
models.gpt_oss.model.model Attention GptOssModel precompute_rope_cache
models.gpt_oss.model.moe GptOssGroupedExperts GptOssMoE swiglu
models.llama3.infra.parallelize apply_compile apply_ddp apply_fsdp apply_tp parallelize_llama
models.llama3.infra.parallelize disable_fsdp_gradient_division
models.llama3.model.args RoPEScalingArgs TransformerModelArgs
models.llama3.model.model Attention FeedForward Transformer TransformerBlock apply_rotary_emb
models.llama3.model.model precompute_freqs_cis reshape_for_broadcast
models.llama4.infra.parallelize apply_compile apply_fsdp apply_moe_ep_tp
models.llama4.model.args RoPEScalingArgs TransformerModelArgs
models.qwen3.model.args Qwen3ModelArgs
models.qwen3.model.state_dict_adapter Qwen3StateDictAdapter
models.moe.moe_deepep DeepEPMoE
protocols.model AttentionMasksType BaseModelArgs ModelProtocol
protocols.train_spec TrainSpec get_train_spec register_train_spec
rl.client AdamParams CustomLoss Datum ForwardBackwardOutput LocalSamplingClient LocalTrainingClient
rl.client ModelInput SamplingParams
rl.serve Server
train Trainer
"""


def test_names_are_importable():
    for line in NAMES.strip().splitlines():
        module, *names = line.split()
        loaded = importlib.import_module(f"torchtitan.{module}")
        assert [name for name in names if not hasattr(loaded, name)] == [], module


def test_star_imports_do_not_depend_on_what_is_loaded():
    """In a new process, before and after submodules and lazy names are loaded."""
    code = """if True:
        import importlib
        packages = ("config", "components.quantization", "hf_datasets")
        found = []
        for _ in range(2):
            found.append({})
            for package in packages:
                exec(f"from torchtitan.{package} import *", found[-1])
            for module in ("config.manager", "quantization.float8", "data.text_datasets"):
                importlib.import_module(f"torchtitan.{module}")
        names = [set(namespace) - {"__builtins__"} for namespace in found]
        assert names[0] == names[1], names[0] ^ names[1]
        wanted = {"ConfigManager", "JobConfig", "TORCH_DTYPE_MAP", "DatasetConfig"}
        wanted |= {"QuantizationConverter", "MXFP8_GROUP_ALIGNMENT_SIZE"}
        assert wanted <= names[0], wanted - names[0]
    """
    run_with_torch_alone(code)


# The reference's paths of modules that live elsewhere here.
REFERENCE_PATHS = [
    ("components.dataloader", "data.dataloader"),
    ("components.loss", "loss.cross_entropy"),
    ("components.lr_scheduler", "optim.lr_scheduler"),
    ("components.metrics", "callbacks.metrics"),
    ("components.optimizer", "optim.optimizer"),
    ("components.quantization", "quantization"),
    ("components.quantization.float8", "quantization.float8"),
    ("components.quantization.mx", "quantization.mx"),
    ("components.quantization.utils", "quantization"),
    ("components.tokenizer", "data.tokenizer"),
    ("components.validate", "callbacks.validate"),
    ("hf_datasets", "data"),
    ("hf_datasets.text_datasets", "data.text_datasets"),
    ("tools.profiling", "callbacks.profiling"),
]


@pytest.mark.parametrize("path, own", REFERENCE_PATHS)
def test_a_path_of_the_reference_has_the_names_of_the_module_it_stands_for(path, own):
    module, old = (importlib.import_module(f"torchtitan.{name}") for name in (own, path))
    public = {
        name: value
        for name, value in vars(module).items()
        if name[0] != "_"
        and isinstance(value, type | FunctionType)
        and value.__module__ == module.__name__
    }
    assert public, "nothing to offer"
    assert {name for name in public if getattr(old, name, None) is not public[name]} == set()


def test_old_paths_of_rl_lead_to_the_same_modules():
    import torchtitan.experiments.rl.actors.trainer as trainer
    import torchtitan.experiments.rl.losses as losses
    import torchtitan.experiments.rl.unified.actors.generator as generator
    from torchtitan.experiments.rl.unified.actors.trainer import PolicyTrainer

    from torchtitan.experiments.rl import types

    assert generator is torchtitan.rl.generator and trainer.PolicyTrainer is PolicyTrainer
    names = [m.name for m in pkgutil.walk_packages(torchtitan.rl.__path__, "torchtitan.rl.")]
    assert {module.__name__ for module in (losses, trainer, types)} <= set(names)
    for name in names:
        old = importlib.import_module(name.replace("torchtitan.rl", "torchtitan.experiments.rl"))
        assert old is sys.modules[name]


# Uses of what is not available, with what each says to use.
NOT_AVAILABLE = {
    "expert_parallel.DeepEPExpertParallel()": "use ExpertParallel",
    "deepep.dispatch_tokens(1)": "'standard'",
    "deepep.combine_tokens(1)": "'standard'",
    "deepep.sync_combine()": "'standard'",
    "deepep.DispatchState()": "'standard'",
    "moe_deepep.DeepEPMoE(moe.MoEArgs(), 8, 8)": r"build MoE\(",
    "dual_pipe_v.DualPipeExpertParallel(expert_parallel.ExpertParallel())": "use ExpertParallel",
    "dual_pipe_v.HookCoordinator()": "'DualPipeV'",
    "dual_pipe_v.SyncHook.apply(1)": "'DualPipeV'",
    "dual_pipe_v.overlap_callback()": "'DualPipeV'",
    "context_parallel.apply_cp_to_attention_module([], None, 'flex')": "prepare_context_parallel_input",
}


def test_what_is_not_available_says_what_to_use_when_it_is_used():
    from torchtitan.distributed import context_parallel, deepep, dual_pipe_v, expert_parallel
    from torchtitan.models import moe
    from torchtitan.models.moe import moe_deepep

    modules = (context_parallel, deepep, dual_pipe_v, expert_parallel, moe, moe_deepep)
    names = {module.__name__.rpartition(".")[2]: module for module in modules}
    for use, remedy in NOT_AVAILABLE.items():
        with pytest.raises(NotImplementedError, match=remedy):
            eval(use, names)
            pytest.fail(f"{use} was silent")


def test_list_of_saved_ops_is_there_and_cannot_be_changed():
    for family in ("deepseek_v3", "gpt_oss", "llama3", "llama4", "qwen3"):
        module = importlib.import_module(f"torchtitan.models.{family}.infra.parallelize")
        assert torch.ops.aten.mm.default in module._op_sac_save_list
        assert not hasattr(module._op_sac_save_list, "add")
        with pytest.raises(AttributeError, match="no attribute 'other'"):
            module.other  # noqa: B018


def test_no_job_overlaps_experts_with_another_microbatch():
    from torchtitan.config import JobConfig
    from torchtitan.distributed.dual_pipe_v import _count_moe_modules, get_dual_pipe_v_flag
    from torchtitan.models.qwen3 import get_train_spec

    config = JobConfig()
    config.parallelism.pipeline_parallel_schedule = "DualPipeV"
    assert get_dual_pipe_v_flag(config, None) is False
    spec = get_train_spec()
    with torch.device("meta"):
        model = spec.model_cls(spec.model_args["debugmodel_moe_small"])
    assert _count_moe_modules(model) == 4


def versions_of_constraints() -> list[tuple[str, str]]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [tuple(line.split("==")) for line in lines if line and not line.startswith("#")]


CLIENT = dict(python="3.11.0", transformers="4.57.0", datasets="4.0.0", tokenizers="0.22.0")
CLIENT["huggingface_hub"] = "0.36.0"


@pytest.mark.parametrize(
    "package, version",
    [
        *versions_of_constraints(),
        *(("torch", version) for version in TESTED),
        *(("triton", version) for version in TESTED.values()),
        # Those of an embedding client whose other packages admit no later ones.
        *CLIENT.items(),
        ("datasets", "4.8.4"),
    ],
)
def test_dependency_ranges_admit_tested_versions_and_those_of_a_client(package, version):
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    lists.append([f"python{project['requires-python']}"])
    for requirement in (Requirement(line) for lines in lists for line in lines):
        if canonicalize_name(requirement.name) == canonicalize_name(package):
            assert requirement.specifier.contains(version), requirement
