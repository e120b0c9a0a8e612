"""Turn Hugging Face safetensors files into a checkpoint that training can start from.

Set checkpoint.initial_load_path to the folder it writes. Training can also read the files
directly (checkpoint.initial_load_in_hf); converting pays off when they are read often.
"""

import argparse

from torchtitan.checkpoint.conversion import convert_from_hf
from torchtitan.commands.source import with_model
from torchtitan.tools.errors import RunError
from torchtitan.tools.logging import init_logger


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("input_dir", help="folder with *.safetensors")
    parser.add_argument("output_dir", help="folder to write the checkpoint to")
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
    options = parser.parse_args()
    init_logger()
    try:
        convert_from_hf(**with_model(vars(options)))
    except (ValueError, OSError, RunError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
