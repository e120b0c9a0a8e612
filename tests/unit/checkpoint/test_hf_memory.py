"""Host memory of reading, converting and writing Hugging Face files, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.tiny_hf import tiny_hf_config

pytestmark = pytest.mark.long

MIB = 2**20
# Large beside the rest of the process, small enough for a quick test.
DIM, FFN, LAYERS, EXPERTS = 512, 2048, 5, 8

SIZES = dict(hidden_size=DIM, intermediate_size=2 * FFN, num_hidden_layers=LAYERS, vocab_size=256)
STACKED_EXPERTS = SIZES | dict(num_experts=EXPERTS, moe_intermediate_size=FFN // 4)

PROBE = """
import sys, torch
import torch.distributed.checkpoint as dcp
from scripts.checkpoint_conversion.convert_from_hf import convert_from_hf
from scripts.checkpoint_conversion.convert_to_hf import convert_to_hf
from torchtitan.checkpoint import hf
from torchtitan.checkpoint.conversion import prepare_conversion

hf._BYTES_PER_PART = 8 * 2**20  # in proportion to the model
hf._BYTES_PER_FILE = int(sys.argv[2])

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))

def growth(call):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts again from here
    before = status("VmRSS")
    call()
    return status("VmHWM") - before

def load():
    weights, adapter, _ = prepare_conversion("", "", hf_config=folder + "/hf")
    hf.load_from_hf(weights, adapter, folder + "/hf")

def read():
    convert_from_hf(folder + "/hf", folder + "/dcp", "", "", folder + "/hf", overwrite=True)

def write(dtype):
    convert_to_hf(
        folder + "/dcp", folder + "/back", "", "", None, dtype, folder + "/hf", overwrite=True
    )

folder = sys.argv[1]
read()  # once before measuring, because the first call imports and allocates
print(growth(load), growth(read), growth(lambda: write("float32")),
      growth(lambda: write("bfloat16")))
"""


def random_files(folder, config, n_files):
    """Write files of that model; return the bytes of all files and of the largest."""
    from torchtitan.checkpoint.conversion import prepare_conversion

    config.save_pretrained(folder)
    weights, adapter, _ = prepare_conversion("", "", hf_config=str(folder))
    names = adapter.to_hf(weights)
    per_file = -(-len(names) // n_files)
    for number in range(n_files):
        part = list(names)[number * per_file : (number + 1) * per_file]
        tensors = {name: torch.randn(names[name].shape) for name in part}
        save_file(tensors, folder / f"model-{number + 1:05d}-of-{n_files:05d}.safetensors")
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    return sum(sizes), max(sizes)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("family, sizes", [("llama3", SIZES), ("qwen3_moe", STACKED_EXPERTS)])
def test_conversions_need_the_model_and_one_file(tmp_path, family, sizes):
    config = tiny_hf_config(family, **sizes)
    model_bytes, file_bytes = random_files(tmp_path / "hf", config, 6)
    result = subprocess.run(
        [sys.executable, "-c", PROBE, str(tmp_path), str(file_bytes)],
        capture_output=True,
        text=True,
        # Freed memory goes back to the system at once, or using it again would not show as growth.
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
    )
    assert result.returncode == 0, result.stderr
    peaks = [int(n) for n in result.stdout.split()[-4:]]
    # The memory of the allocator and of Python's objects differs between machines.
    allowed = model_bytes + file_bytes + 16 * MIB
    assert model_bytes > 100 * MIB
    assert max(peaks) < allowed, f"{[p // MIB for p in peaks]} MiB of {allowed // MIB}"
    print(f"model {model_bytes // MIB}, file {file_bytes // MIB}, {[p // MIB for p in peaks]} MiB")
