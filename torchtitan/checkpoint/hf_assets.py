"""The config and tokenizer files that `transformers` needs to open a folder of weights."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from torchtitan.data.tokenizer import HuggingFaceTokenizer
from torchtitan.models.hf_config import differing, from_hf_config
from torchtitan.models.hf_config_writer import to_hf_config
from torchtitan.tools.files import find_shipped, open_file, read_json_object
from torchtitan.tools.logging import logger

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)


def write_model_files(
    folder: str,
    model_args: Any,
    hf_assets_path: str | None,
    dtype: torch.dtype,
    tokenizer: Any = None,
) -> None:
    """Write config.json, generation_config.json, the tokenizer and its chat template to `folder`.

    An existing tokenizer is kept, and so is an existing config.json that describes `model_args`.
    hf_assets_path: folder of the tokenizer and, for a model that came from Hugging Face, its
        config.json, which is copied if it describes `model_args`. Otherwise config.json is made
        from `model_args`.
    tokenizer: the run's `HuggingFaceTokenizer`; None reads the tokenizer in hf_assets_path.
    dtype: of the weights; `transformers` loads them in the dtype that config.json names.
    If a file cannot be written, a warning is logged, because the weights matter more.
    """
    assets = Path(find_shipped(hf_assets_path or os.devnull))
    token_ids: dict[str, int] = {}
    try:
        token_ids = _write_tokenizer(folder, assets, tokenizer)
    except (OSError, ValueError) as error:
        logger.warning(f"{folder} gets no tokenizer that transformers can open: {error}")
    try:
        config = _config(model_args, [Path(folder), assets]) or to_hf_config(model_args) | token_ids
        dtype_key = "dtype" if "dtype" in config else "torch_dtype"  # of transformers 5 or 4
        config[dtype_key] = str(dtype).removeprefix("torch.")
        _write_json(Path(folder, "config.json"), config)
        generation = Path(folder, "generation_config.json")
        if not generation.exists() and (assets / generation.name).is_file():
            _write(generation, (assets / generation.name).read_bytes())
        elif not generation.exists() and token_ids:
            _write_json(generation, token_ids)
    except (OSError, ValueError) as error:
        logger.warning(f"{folder} gets no config.json, which transformers needs: {error}")


def _config(model_args: Any, folders: list[Path]) -> dict[str, Any] | None:
    """Return the first config.json that describes these args; None if no folder has one."""
    for path in (folder / "config.json" for folder in folders):
        if not path.is_file():
            continue
        try:
            difference = differing(model_args, from_hf_config(path).model_args)
        except ValueError as error:
            difference = {str(error): ()}
        if not difference:
            return read_json_object(path)
        logger.info(f"{path} describes another model ({', '.join(difference)}), so it is not used")
    return None


def _write_tokenizer(folder: str, assets: Path, tokenizer: Any) -> dict[str, int]:
    """Write the tokenizer; return its begin- and end-of-text ids, by config.json's keys."""
    if any(Path(folder, name).exists() for name in _TOKENIZER_FILES):
        return _token_ids(HuggingFaceTokenizer(folder))
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        if not assets.is_dir():
            raise ValueError("model.hf_assets_path is not a folder with a tokenizer")
        tokenizer = HuggingFaceTokenizer(str(assets))
    for source in (Path(tokenizer.tokenizer_path, name) for name in _TOKENIZER_FILES):
        if source.is_file():
            _write(Path(folder, source.name), source.read_bytes())
    if not Path(folder, "tokenizer.json").exists():
        _write(Path(folder, "tokenizer.json"), tokenizer.tokenizer.to_str(pretty=True).encode())
    config = dict(tokenizer.config or {"tokenizer_class": "PreTrainedTokenizerFast"})
    for key in ("bos_token", "eos_token"):
        token, entry = getattr(tokenizer, key), config.get(key)
        if token != (entry.get("content") if isinstance(entry, dict) else entry):
            config[key] = token
    if config != tokenizer.config:
        _write_json(Path(folder, "tokenizer_config.json"), config)
    return _token_ids(tokenizer)


def _token_ids(tokenizer: HuggingFaceTokenizer) -> dict[str, int]:
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    return {name: token_id for name, token_id in ids.items() if token_id is not None}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    _write(path, (json.dumps(content, indent=2) + "\n").encode())


def _write(path: Path, content: bytes) -> None:
    with open_file(path, "wb") as file:
        file.write(content)
