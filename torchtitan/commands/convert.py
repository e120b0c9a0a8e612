"""Convert checkpoints to Hugging Face or PEFT folders, and Hugging Face folders to checkpoints."""

import argparse
import contextlib

from torchtitan.checkpoint.conversion import convert_from_hf, replacing
from torchtitan.checkpoint.folder import Contents, contents_of
from torchtitan.commands import SourceParser, errors_as_sentences
from torchtitan.commands.source import job_of, open_engine, weights_in
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.job import find_train_spec
from torchtitan.tools.logging import init_logger, logger

OVERWRITE = "replace the weights in OUT; its other files are kept"


def export() -> None:
    """Write a checkpoint as a folder for transformers, or its adapters as a folder for peft."""
    parser = SourceParser("torchtitan export", export.__doc__, "OUT")
    add = parser.add_argument
    add("out", metavar="OUT", help="folder or address to write")
    add("--peft", action="store_true", help="write only the adapters; by default they are merged")
    add("--base_model", help="name of the base model for adapter_config.json")
    add(
        "--dtype",
        choices=list(TORCH_DTYPE_MAP),
        help="dtype of the weights (default: as in the checkpoint)",
    )
    add("--overwrite", action="store_true", help=OVERWRITE)
    options, overrides = parser.options_and_overrides()
    init_logger()
    with errors_as_sentences():
        if options.peft and options.dtype:
            raise ValueError(
                f"--dtype {options.dtype} is for merged weights, and --peft writes the adapters in their own "
                "dtype; leave out one of them"
            )
        if options.base_model and not options.peft:
            raise ValueError(
                "--base_model is written to adapter_config.json, and merged weights have none; add --peft or "
                "leave out --base_model"
            )
        config = job_of(options.source, options.config, overrides)
        weights = weights_in(options.source, config)
        if options.peft and contents_of(weights) == Contents.HF:
            raise ValueError(
                f"--peft writes adapters, and the model in {weights} has none; give a step folder of a LoRA run"
            )
        with (
            replacing(options.out, options.overwrite, [weights]) as folder,
            open_engine(config, weights) as engine,
        ):
            if (build := engine.train_spec.build_tokenizer_fn) is not None:
                # The export warns of a missing tokenizer.
                with contextlib.suppress(OSError, ValueError):
                    engine.checkpointer.tokenizer = build(config)
            if options.peft:
                engine.save_peft(folder, base_model=options.base_model)
            else:
                engine.save_hf(folder, dtype=TORCH_DTYPE_MAP.get(options.dtype))
        logger.info(f"Wrote {options.out}")


def import_() -> None:
    """Write the safetensors files of a Hugging Face folder as a checkpoint to start from."""
    parser = argparse.ArgumentParser(prog="torchtitan import", description=import_.__doc__)
    parser.add_argument(
        "folder", metavar="FOLDER", help="a folder with *.safetensors, or its address"
    )
    parser.add_argument("out", metavar="OUT", help="folder or address to write the checkpoint to")
    parser.add_argument("--config", help="the job's TOML file (default: FOLDER's config.json)")
    parser.add_argument("--overwrite", action="store_true", help=OVERWRITE)
    options = parser.parse_args()
    init_logger()
    with errors_as_sentences():
        config = job_of(options.folder, options.config, [])
        model = config.model.name, config.model.flavor
        spec = find_train_spec(config)
        convert_from_hf(options.folder, options.out, *model, None, options.overwrite, spec)
