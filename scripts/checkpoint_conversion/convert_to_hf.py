"""Turn a training checkpoint into Hugging Face safetensors files.

The folder it writes opens with transformers: config.json is made from the flavor, and the tokenizer
comes from --hf_assets_path or the folder of --hf_config.
"""

import argparse

import torch

from torchtitan.checkpoint.conversion import load_weights, prepare_conversion, replacing
from torchtitan.checkpoint.dcp import one_error
from torchtitan.checkpoint.hf import save_to_hf
from torchtitan.checkpoint.hf_assets import untrained_parts
from torchtitan.commands.source import with_model
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.tools.errors import RunError
from torchtitan.tools.logging import init_logger, logger


@torch.no_grad()
def convert_to_hf(
    input_dir: str,
    output_dir: str,
    model_name: str,
    model_flavor: str,
    hf_assets_path: str | None,
    export_dtype: str,
    hf_config: str | None = None,
    overwrite: bool = False,
    spec: TrainSpec | None = None,
    untrained_weights: str = "drop",
) -> None:
    """Read the checkpoint `input_dir` (a step folder), write safetensors to `output_dir`.

    hf_assets_path: folder of the tokenizer, and of the config.json if the model came from there.
        Its model.safetensors.index.json says which tensor goes into which file; without it files
        hold 5 GB each.
    hf_config: a config.json that says which model it is, in place of name and flavor.
    spec: in place of the registered train spec of `model_name`.
    untrained_weights: "copy" copies parts of the model in `hf_assets_path` that are not trained.
    overwrite: `output_dir` may hold weights, which are replaced.
    Raises ValueError if the checkpoint is not one of this model and flavor.
    """
    with replacing(output_dir, overwrite, [input_dir]) as folder:
        weights, adapter, description = prepare_conversion(
            model_name, model_flavor, hf_assets_path, hf_config, spec
        )
        load_weights(weights, input_dir, description)
        assets, untrained = adapter.hf_assets_path or "", None
        if untrained_weights == "copy":
            untrained = untrained_parts(assets, adapter)
        with one_error(f"The files in {output_dir} could not be written"):
            dtype = TORCH_DTYPE_MAP[export_dtype]
            save_to_hf(weights, adapter, folder, dtype, untrained=untrained)
    logger.info(f"Wrote {output_dir}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("input_dir", help="step folder of a training run")
    parser.add_argument("output_dir", help="folder to write *.safetensors to")
    parser.add_argument(
        "--hf_assets_path",
        help="default: the job's, or ./assets/hf/Llama-3.1-8B for --model_name llama3",
    )
    parser.add_argument("--config", help="the job's TOML file: takes the place of name and flavor")
    parser.add_argument("--model_name", help="default: as the input's config.json or run says")
    parser.add_argument("--model_flavor", help="of --model_name")
    parser.add_argument(
        "--hf_config",
        help="the model's config.json, or its folder: takes the place of name and flavor",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the weights in output_dir; its other files are kept",
    )
    parser.add_argument("--export_dtype", default="float32", choices=list(TORCH_DTYPE_MAP))
    parser.add_argument(
        "--untrained_weights",
        default="drop",
        choices=("copy", "drop"),
        help="what to do with parts of the Hugging Face model that are not trained",
    )
    options = parser.parse_args()
    init_logger()
    try:
        convert_to_hf(**with_model(vars(options)))
    except (ValueError, OSError, RunError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
