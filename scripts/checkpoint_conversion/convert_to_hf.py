"""Turn a training checkpoint into Hugging Face safetensors files.

Only the weights are converted. A tokenizer and config.json come from the original model.
"""

import argparse

import torch

from torchtitan.components.checkpoint_contents import load_weights, save_to_hf, zero_weights
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.protocols.train_spec import get_train_spec
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
    spec = get_train_spec(model_name)
    if model_flavor not in spec.model_args:
        raise ValueError(
            f"{model_name} has no flavor {model_flavor!r}; it has {', '.join(spec.model_args)}"
        )
    if spec.state_dict_adapter is None:
        raise ValueError(f"{model_name} has no state_dict_adapter, so nothing to convert with")
    model_args = spec.model_args[model_flavor]
    weights = zero_weights(spec.model_cls, model_args)
    load_weights(weights, input_dir, f"{model_name} {model_flavor}")
    dtype = TORCH_DTYPE_MAP[export_dtype]
    weights = {k: t.to(dtype) if t.is_floating_point() else t for k, t in weights.items()}
    save_to_hf(weights, spec.state_dict_adapter(model_args, hf_assets_path), output_dir)


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
