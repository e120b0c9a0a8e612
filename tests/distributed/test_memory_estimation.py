"""Estimates of a step against formulas; `scripts/estimate/check.py` compares them with real runs."""

import pickle
import subprocess
import sys

import pytest
import torch

from tests.reliability.jobs import flags_in
from torchtitan.config import ConfigManager
from torchtitan.estimate.device import why_not
from torchtitan.estimate.memory_tracker import OTHER, PARAMETERS, MemoryTracker
from torchtitan.estimate.step import bytes_of_states

CONFIG = "torchtitan/models/llama3/train_configs/debug_model.toml"
# A process of its own: the stand-in for a device has to be there before torch.
ESTIMATE = """
import os, pickle, sys
from torchtitan.estimate.device import prepare_device
prepare_device()
from torchtitan.estimate.step import estimate_step
from torchtitan.config import ConfigManager
jobs, estimates = pickle.load(sys.stdin.buffer), {}
os.environ["LOCAL_RANK"] = "0"
for name, (world_size, overrides, *others) in jobs.items():
    os.environ["NGPU"] = str(world_size)
    estimates[name] = estimate_step(ConfigManager().parse_args(overrides), *others)
pickle.dump(estimates, open(sys.argv[1], "wb"))
"""
PLAIN = ["--activation_checkpoint.mode=none"]
LAYERS = 2
# name -> (ranks, overrides)
FORMULAS = {
    "fsdp": (8, PLAIN),
    "value head": (8, [*PLAIN, "--model.value_head"]),
    # What needs neither its files nor its accelerators to be here.
    "256 ranks": (
        256,
        "--model.hf_assets_path=nowhere --training.dataset_path=/nowhere --compile.enable "
        "--checkpoint.enable --model.flavor=debugmodel_varlen_attn".split(),
    ),
}
BATCH, SEQ_LEN = 2, 128


@pytest.fixture(scope="module")
def estimates(tmp_path_factory):
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("estimates")
    settings = [f"--job.config_file={CONFIG}", f"--job.dump_folder={folder / 'dump'}"]
    settings += [f"--training.local_batch_size={BATCH}", f"--training.seq_len={SEQ_LEN}"]
    # Of rank 0, with 8 GPUs in each node.
    jobs = {name: (n, [*settings, *flags], 0, 8, LAYERS) for name, (n, flags) in FORMULAS.items()}
    command = [sys.executable, "-c", ESTIMATE, str(folder / "estimates")]
    done = subprocess.run(command, input=pickle.dumps(jobs), capture_output=True, timeout=900)
    assert done.returncode == 0, done.stderr.decode()
    assert not (folder / "dump").exists()  # no files are written either
    return pickle.loads((folder / "estimates").read_bytes())


DIM, VOCABULARY = 256, 2048  # of the debug model


def sent(estimate, axis, kind):
    return estimate.counts.traffic[axis, kind].sent


@pytest.mark.slow
def test_fsdp_gathers_twice_in_bf16_and_reduces_once_in_fp32(estimates):
    estimate = estimates["fsdp"]
    assert estimate.parameters >= 4 * estimate.num_params / 8
    # Backward begins with norm and output, which are still there.
    gathered = 2 * estimate.num_params - DIM - VOCABULARY * DIM
    assert sent(estimate, "fsdp", "all-gather") == 2 * gathered * 7 / 8
    assert sent(estimate, "fsdp", "reduce-scatter") == 4 * estimate.num_params * 7 / 8
    # Embeddings, blocks, and norm with output; the norm of the gradients.
    calls = {key: traffic.calls for key, traffic in estimate.counts.traffic.items()}
    units = LAYERS + 2
    assert calls == {
        ("fsdp", "all-gather"): 2 * units - 1,
        ("fsdp", "reduce-scatter"): units,
        ("fsdp", "all-reduce"): 1,
    }
    assert all(traffic.network == 0 for traffic in estimate.counts.traffic.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp", "value head"])
def test_matrix_products_are_six_flops_per_weight_and_token(estimates, name):
    estimate = estimates[name]
    tokens = BATCH * SEQ_LEN
    norms = (2 * LAYERS + 1) * DIM + (name == "value head")  # and its bias
    weights = estimate.num_params - norms - VOCABULARY * DIM  # embeddings are looked up
    assert estimate.counts.flops["matrix products"] == 6 * weights * tokens
    # Two products forward, five backward, of half of the scores: causal.
    assert estimate.counts.flops["attention"] == 7 * tokens * SEQ_LEN * DIM * LAYERS
    assert estimate.tokens == 8 * tokens


@pytest.mark.slow
def test_ranks_files_and_accelerators_need_not_exist(estimates):
    table = estimates["256 ranks"].as_table()
    assert table.startswith("rank 0 of 256:\nparameters and buffers ")
    assert "peak (forward and backward) " in table
    assert "all-gather on fsdp, 7 calls, sends" in table


@pytest.mark.parametrize("loss", ["dpo", "distillation"])
def test_job_with_a_second_model_is_estimated_without_it(loss, monkeypatch, caplog):
    monkeypatch.setenv("NGPU", "1")
    caplog.set_level("INFO")
    flags = flags_in(f"""
        job.config_file={CONFIG} loss.name={loss} training.dataset=preference training.packing=fit
        model.converters=lora checkpoint.enable checkpoint.last_save_peft
        checkpoint.save_peft_interval=2
    """)
    config = ConfigManager().parse_args(flags)
    assert bytes_of_states(config) > 0
    assert f"loss.name = '{loss}' is ignored" in caplog.text


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


@pytest.mark.parametrize("base", ["full training", "adapters", "adapters, 4 bits"])
def test_states_of_a_model_are_its_parameters_and_three_times_what_trains(base, monkeypatch):
    monkeypatch.setenv("NGPU", "1")
    flags = [f"--job.config_file={CONFIG}"]
    flags += ["--model.converters=lora"] if "adapters" in base else []
    flags += ["--lora.base_format=nf4"] if "4 bits" in base else []
    # Of the debug model: 6 layers, 16 heads of 16, feed-forwards of 768.
    matrices, norms = 6 * (4 * DIM * DIM + 3 * DIM * 768), (2 * 6 + 1) * DIM
    tables, rank = 2 * VOCABULARY * DIM, 8
    adapters = 6 * rank * (4 * 2 * DIM + 3 * (DIM + 768))
    expected = {
        "full training": 16 * (matrices + norms + tables),
        "adapters": 2 * (matrices + norms + tables) + 16 * adapters,
        "adapters, 4 bits": matrices * 36 // 64 + 2 * (norms + tables) + 16 * adapters,
    }
    assert bytes_of_states(ConfigManager().parse_args(flags)) == expected[base]
