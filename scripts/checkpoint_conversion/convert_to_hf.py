"""Turn a training checkpoint into Hugging Face safetensors files.

Only the weights are converted. A tokenizer and config.json come from the original model.
"""

import argparse

import torch

from torchtitan.components.checkpoint_contents import (
    load_weights,
    prepare_conversion,
    save_to_hf,
)
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools.logging import init_logger


@torch.no_grad()
def convert_to_hf(
    input_dir: str,
    output_dir: str,
    model_name: str,
    model_flavor: str,
    hf_assets_path: str | None,
    export_dtype: str,
) -> None:
    """Read the checkpoint `input_dir` (a step folder), write safetensors to `output_dir`.

    hf_assets_path: folder whose model.safetensors.index.json says which tensor goes into which
        file; without it everything goes into one file.
    Raises ValueError if the checkpoint is not one of this model and flavor.
    """
    weights, adapter = prepare_conversion(model_name, model_flavor, hf_assets_path)
    load_weights(weights, input_dir, f"{model_name} {model_flavor}")
    dtype = TORCH_DTYPE_MAP[export_dtype]
    weights = {k: t.to(dtype) if t.is_floating_point() else t for k, t in weights.items()}
    save_to_hf(weights, adapter, output_dir)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("input_dir", help="step folder of a training run")
    parser.add_argument("output_dir", help="folder to write *.safetensors to")
    parser.add_argument("--hf_assets_path", default="./assets/hf/Llama-3.1-8B")
    parser.add_argument("--model_name", default="llama3")
    parser.add_argument("--model_flavor", default="8B")
    parser.add_argument("--export_dtype", default="float32", choices=list(TORCH_DTYPE_MAP))
    options = parser.parse_args()
    init_logger()
    try:
        convert_to_hf(**vars(options))
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
