"""Continue a prompt with a trained model.

    python -m scripts.generate.test_generate --config X.toml --checkpoint FOLDER --prompt "Once"

What it does not know as an option is taken as config override, like --training.seq_len 1024.
Text goes to stdout, everything else to stderr. See docs/generate.md.
"""

import argparse
import json
import logging
import os
import sys
import time
import warnings
from typing import Any

import torch
from torch import Tensor

from scripts.generate._loading import load_model
from torchtitan.callbacks.metrics import build_device_memory_monitor, memory_metrics
from torchtitan.config import ConfigManager
from torchtitan.config.job_config import Debug
from torchtitan.data.tokenizer import BaseTokenizer
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_determinism
from torchtitan.generation.sampling import end_ids, generate
from torchtitan.job import find_train_spec
from torchtitan.tools.errors import RunError
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import get_device_type


def test_generate(options: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """Load, generate, and return the report, {"metadata": {...}, "responses": [...]}.

    Raises ValueError or OSError for options and files that cannot work.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        raise ValueError(
            f"generation runs on one process, got {world_size}: tensor parallelism is not "
            "available yet; set NGPU=1"
        )
    if options.batch_size < 1:
        raise ValueError(f"--batch_size must be at least 1, got {options.batch_size}")
    job_config = ConfigManager().parse_args([f"--job.config_file={options.config}", *overrides])
    train_spec = find_train_spec(job_config)
    if train_spec.build_tokenizer_fn is None:
        raise ValueError(f"model {job_config.model.name} comes without a tokenizer")
    tokenizer = train_spec.build_tokenizer_fn(job_config)

    device = torch.device(get_device_type())
    set_determinism(
        ParallelDims(1, 1, 1, 1, 1, 1, 1, world_size=1),
        device,
        Debug(seed=options.seed, deterministic=options.deterministic),
        distinct_seed_mesh_dims=[],
    )
    monitor = build_device_memory_monitor()
    model = load_model(job_config, train_spec, options.checkpoint, device)
    prompt = encode_prompt(tokenizer, options.prompt, model.vocab_size)

    ends = end_ids(job_config.model.hf_assets_path)
    ends += [tokenizer.eos_id] if tokenizer.eos_id not in (None, *ends) else []
    started = time.monotonic()
    tokens = generate(
        model,
        torch.tensor(prompt, device=device).repeat(options.batch_size, 1),
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
        eos_id=None if options.ignore_eos else ends or None,
    ).cpu()  # which waits for the device
    seconds = time.monotonic() - started

    memory = monitor.get_peak_stats()
    metadata = {
        "generated_n_tokens": tokens.shape[1] - len(prompt),
        "input_n_tokens": len(prompt),
        "generation_time_sec": seconds,
        "tokens_per_sec": tokens.numel() / seconds,
        "batch_size": options.batch_size,
        "seed": options.seed,
        "timestamp": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **memory_metrics(memory),
        "memory/num_alloc_retries": memory.num_alloc_retries,
        "memory/num_ooms": memory.num_ooms,
        "world_size": world_size,
        "torch_version": torch.__version__,
    }
    return {"metadata": metadata, "responses": decode(tokenizer, tokens, len(prompt))}


# Called like the program; for pytest it is no test.
test_generate.__test__ = False


def encode_prompt(tokenizer: BaseTokenizer, text: str, vocab_size: int) -> list[int]:
    """Token ids of `text`, begun as a document; ValueError if the model cannot read them."""
    ids = tokenizer.encode(text, add_bos=True, add_eos=False)
    if not ids:
        raise ValueError(
            "an empty --prompt needs a tokenizer with a begin-of-text token, and this one has "
            "none; give --prompt a text"
        )
    if max(ids) >= vocab_size:
        raise ValueError(
            f"the tokenizer in model.hf_assets_path gives token {max(ids)}, and the model has "
            f"{vocab_size} tokens only; set model.hf_assets_path to the model's own tokenizer"
        )
    return ids


def decode(tokenizer: BaseTokenizer, tokens: Tensor, n_prompt: int) -> list[dict[str, Any]]:
    """The report's entry for each row of tokens [B, T], whose first `n_prompt` were given."""
    return [
        {
            "response_idx": index,
            "input_text": tokenizer.decode(row[:n_prompt]),
            "output_text": tokenizer.decode(row[n_prompt:]),
        }
        for index, row in enumerate(tokens.tolist())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="All other options are config overrides, like --training.seq_len 1024.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="TOML file that the model trained with")
    parser.add_argument(
        "--checkpoint", required=True, help="step folder, folder of these, or of safetensors"
    )
    parser.add_argument("--prompt", default="", help="text to continue")
    parser.add_argument("--max_new_tokens", type=int, default=32)
    parser.add_argument("--batch_size", type=int, default=1, help="continuations of the prompt")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: the likeliest token")
    parser.add_argument("--top_k", type=int, help="draw from this many of the likeliest tokens")
    parser.add_argument("--seed", type=int, help="the same seed gives the same text")
    parser.add_argument("--deterministic", action="store_true", help="deterministic kernels only")
    parser.add_argument("--ignore_eos", action="store_true", help="go on past an end of text")
    parser.add_argument("--out", action="store_true", help="print a JSON report, not the text")
    options, overrides = parser.parse_known_args()

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process, as it should
    try:
        report = test_generate(options, overrides)
    except (ValueError, OSError, RunError) as error:
        is_first = os.environ.get("RANK", "0") == "0"
        raise SystemExit(f"error: {error}" if is_first else 1) from error
    if options.out:
        print(json.dumps(report, indent=2))
        return
    for response in report["responses"]:
        print(f"{response['input_text']}{response['output_text']}\n")
    metadata = report["metadata"]
    logger.info(
        f"{metadata['generated_n_tokens']} tokens after {metadata['input_n_tokens']} in "
        f"{metadata['generation_time_sec']:.2f} s"
    )


if __name__ == "__main__":
    main()
