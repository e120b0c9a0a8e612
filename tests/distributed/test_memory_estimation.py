"""The memory estimate against a run that torch's profiler watches, and what it refuses."""

import os

import pytest
import torch
from torch.distributed.tensor import DTensor

from scripts.estimate._memory_tracker import OTHER, PARAMETERS, MemoryTracker
from scripts.estimate.estimation import estimate_memory
from torchtitan.config import ConfigManager
from torchtitan.engine import TrainingEngine
from torchtitan.testing.gloo import run_ranks

CONFIG = "torchtitan/models/llama3/train_configs/debug_model.toml"
JOBS = {
    "one rank, every second block recomputed": (1, []),
    "two ranks, recomputed by operator, two microbatches": (
        2,
        ["--activation_checkpoint.selective_ac_option=op", "--training.global_batch_size=8"],
    ),
}


def parse(overrides):
    return ConfigManager().parse_args([f"--job.config_file={CONFIG}", *overrides])


def job(overrides, folder):
    # fp32: a CPU without bf16 instructions takes a minute over bf16.
    settings = ["--training.local_batch_size=2", "--training.seq_len=128"]
    settings.append("--training.mixed_precision_param=float32")
    return parse([*settings, f"--job.dump_folder={folder}", *overrides])


def local_bytes(tensors):
    return sum(t.to_local().nbytes if isinstance(t, DTensor) else t.nbytes for t in tensors)


def real_bytes(overrides, folder):
    """(parameters and buffers, optimizer state, peak) of this rank in its second step."""
    engine = TrainingEngine(job(overrides, folder))
    tokens = torch.zeros(2, 128, dtype=torch.int64)

    def step():
        for _ in range(engine.gradient_accumulation_steps):
            engine.forward_backward_step(
                input_dict={"input": tokens}, labels=tokens, global_valid_tokens=1.0
            )
        engine.optim_step()

    step()
    (model,) = engine.model_parts
    parameters = local_bytes([*model.parameters(), *model.buffers()])
    optimizer_state = local_bytes(
        value for state in engine.optimizers.state.values() for value in state.values()
    )
    with torch.profiler.profile(profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        highest = max(highest, live)
    return parameters, optimizer_state, parameters + optimizer_state + highest


def estimated(world_size, overrides, folder):
    os.environ["NGPU"] = str(world_size)
    return estimate_memory(job(overrides, folder))


@pytest.mark.parametrize("name", JOBS)
def test_estimate_agrees_with_a_real_run(name, tmp_path):
    world_size, overrides = JOBS[name]
    real = run_ranks(real_bytes, world_size, overrides, str(tmp_path))
    (estimate,) = run_ranks(
        estimated, 1, world_size, overrides, str(tmp_path), init_process_group=False
    )
    parameters, optimizer_state, peak = real[0]
    assert estimate.parameters == parameters
    assert estimate.optimizer_state == optimizer_state
    assert estimate.peak_phase == "forward and backward"
    # Gradients are as large as parameters, but for the RoPE table and padding of shards.
    assert estimate.gradients == pytest.approx(parameters, rel=0.02)
    # The profiler sees the kernels' scratch memory, too, and the buffers of collectives until
    # gloo's threads let them go: its ranks differ by 6 %.
    assert estimate.peak == pytest.approx(peak, rel=0.02 if world_size == 1 else 0.15)


def many_ranks_estimated(folder):
    os.environ["NGPU"] = "256"
    overrides = ["--training.local_batch_size=1", f"--job.dump_folder={folder}"]
    # A small model, but with what needs neither its files nor its accelerators to be here.
    overrides += ["--model.hf_assets_path=nowhere", "--training.dataset_path=/nowhere"]
    overrides += ["--compile.enable", "--checkpoint.enable", "--training.seq_len=128"]
    return estimate_memory(parse([*overrides, "--model.flavor=debugmodel_varlen_attn"]))


def test_ranks_files_and_accelerators_need_not_exist(tmp_path):
    (estimate,) = run_ranks(many_ranks_estimated, 1, str(tmp_path), init_process_group=False)
    assert estimate.world_size == 256
    table = estimate.as_table()
    assert table.startswith("each of 256 rank(s):\nparameters and buffers ")
    assert table.splitlines()[-1].startswith("peak (forward and backward) ")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--training.enable_cpu_offload", "training.enable_cpu_offload = true cannot be"),
        ("--activation_checkpoint.mode=memory_budget", "estimate 'none' and 'full', which it lies"),
        ("--parallelism.pipeline_parallel_degree=2", "pipeline_parallel_degree above 1 cannot be"),
        ("--parallelism.context_parallel_degree=2", "context_parallel_degree above 1 cannot be"),
        ("--parallelism.expert_parallel_degree=2", "expert_parallel_degree above 1 cannot be"),
    ],
)
def test_jobs_that_cannot_be_estimated_are_named(override, message):
    with pytest.raises(ValueError, match=message):
        estimate_memory(parse([override]))


def test_number_of_ranks_has_to_be_given(monkeypatch):
    monkeypatch.delenv("NGPU", raising=False)
    with pytest.raises(ValueError, match="the environment variable NGPU is the number of ranks"):
        estimate_memory(parse([]))


def test_tracker_counts_storages_once_until_they_are_freed():
    tracker = MemoryTracker()
    weight = torch.zeros(100)
    tracker.mark([weight, weight.view(10, 10), 3], PARAMETERS)
    with tracker:
        copy = weight * 2
        _view = copy[:50]
        del copy  # the view keeps all of it
        assert tracker.live == {PARAMETERS: 400, OTHER: 400}
        del _view
        assert tracker.live == {PARAMETERS: 400, OTHER: 0}
        weight.untyped_storage().resize_(0)
        assert tracker.live.total() == 0
    assert tracker.peak == {PARAMETERS: 400, OTHER: 400}
