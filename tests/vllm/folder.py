"""The toy policy of RL as a folder that vLLM reads: `python -m tests.vllm.folder FOLDER`."""

import json
import shutil
import sys
from pathlib import Path

from tests.unit.rl.toy import toy_config
from torchtitan.engine import TrainingEngine


def make_folder(folder: Path) -> Path:
    """Write random weights, config.json and a tokenizer, which vLLM needs; return the folder."""
    config = toy_config(folder / "dump")
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


if __name__ == "__main__":
    make_folder(Path(sys.argv[1]))
