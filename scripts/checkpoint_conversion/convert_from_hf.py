"""Turn Hugging Face safetensors files into a checkpoint that training can start from.

Set checkpoint.initial_load_path to the folder it writes. Training can also read the files
directly (checkpoint.initial_load_in_hf); converting pays off when they are read often.
"""

import argparse

import torch

from torchtitan.checkpoint import dcp
from torchtitan.checkpoint.conversion import prepare_conversion, replacing
from torchtitan.checkpoint.folder import HashingWriter
from torchtitan.checkpoint.hf import load_from_hf
from torchtitan.job import model_of_file
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.tools.errors import RunError
from torchtitan.tools.logging import init_logger, logger


@torch.no_grad()
def convert_from_hf(
    input_dir: str,
    output_dir: str,
    model_name: str,
    model_flavor: str,
    hf_config: str | None = None,
    overwrite: bool = False,
    spec: TrainSpec | None = None,
) -> None:
    """Read the safetensors files in `input_dir`, write a checkpoint to `output_dir`. On the CPU.

    hf_config: a config.json that says which model it is, in place of name and flavor.
    spec: in place of the registered train spec of `model_name`.
    overwrite: `output_dir` may hold weights, which are replaced.
    Raises ValueError if the files are not those of this model and flavor.
    """
    with replacing(output_dir, overwrite, [input_dir]) as folder:
        weights, adapter, description = prepare_conversion(
            model_name, model_flavor, hf_config=hf_config, spec=spec
        )
        chosen = None if hf_config or spec else ()
        load_from_hf(weights, adapter, input_dir, False, description, chosen)
        with dcp.one_error(f"The checkpoint {output_dir} could not be written"):
            dcp.save(weights, storage_writer=HashingWriter(folder), checkpoint_id=folder)
    logger.info(f"Wrote {output_dir}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("input_dir", help="folder with *.safetensors")
    parser.add_argument("output_dir", help="folder to write the checkpoint to")
    parser.add_argument("--config", help="the job's TOML file: takes the place of name and flavor")
    parser.add_argument("--model_name", default="llama3")
    parser.add_argument("--model_flavor", default="8B")
    parser.add_argument(
        "--hf_config",
        help="the model's config.json, or its folder: takes the place of name and flavor",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the weights in output_dir; its other files are kept",
    )
    options = vars(parser.parse_args())
    init_logger()
    try:
        if (config := options.pop("config")) is not None:
            options |= model_of_file(config)
            del options["hf_assets_path"]
        convert_from_hf(**options)
    except (ValueError, OSError, RunError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
