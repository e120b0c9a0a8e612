"""The files of a Hugging Face folder: weight files, and the other files that `transformers` needs.

`checkpoint.untrained_weights` decides whether an export keeps parts of the loaded model that this
package cannot train, such as a vision tower.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import _TYPES as DTYPES

from torchtitan.checkpoint.folder import (
    HF_INDEX,
    HF_SINGLE_FILE,
    own_share,
    path_inside,
)
from torchtitan.data.tokenizer import HuggingFaceTokenizer
from torchtitan.distributed.processes.ranks import (
    from_rank_zero,
    on_all_ranks,
    ranks_of_first_machine,
)
from torchtitan.models.args import DecoderArgs
from torchtitan.models.hf_config import differing, from_hf_config, to_hf_config
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter, read_weight_map, shorten
from torchtitan.tools import torch_parts
from torchtitan.tools.files import (
    find_shipped,
    hash_file,
    open_file,
    read_json_object,
    regular_file,
    save_tensors,
)
from torchtitan.tools.logging import logger

SCALE = "_scale_inv"  # suffix of the name of an fp8 weight's scales

_TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json "
    "vocab.txt merges.txt tokenizer.model chat_template.jinja chat_template.json"
).split()
NAMED_TEMPLATES = "additional_chat_templates"  # folder of further chat templates
_CLASS = "PreTrainedTokenizerFast"
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
# Fields of a model's config.json that do not apply to an export: exported weights are not
# quantized, and code that stood beside the model's files is not copied.
_NOT_EXPORTED = ("quantization_config", "compression_config", "auto_map")
# Fields with the number of layers for multi-token prediction.
_MTP_FIELDS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")


def check_files(folder: str) -> tuple[list[str], list[str]]:
    """Return the names of the model's safetensors files, and the names of missing files.

    The index lists the model's files. Without an index, the file is model.safetensors if it exists,
    otherwise every safetensors file. Raises ValueError if a file is damaged or leads out of `folder`.
    """
    names = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    if not names:
        raise ValueError(
            f"There are no safetensors files in {folder}, from which Hugging Face weights should be "
            "read; correct the path, or set checkpoint.initial_load_in_hf = false"
        )
    listed = {HF_SINGLE_FILE} if HF_SINGLE_FILE in names else set(names)
    if os.path.lexists(os.path.join(folder, HF_INDEX)):
        listed = set(read_weight_map(path_inside(folder, HF_INDEX)).values())
        if HF_SINGLE_FILE in names and HF_SINGLE_FILE not in listed:
            raise ValueError(
                f"{folder} holds two models, in {HF_SINGLE_FILE} and in the files of {HF_INDEX}; "
                "remove one of them"
            )
    if others := sorted(set(names) - listed):
        logger.info(f"Files in {folder} that the model does not use, not read: {shorten(others)}")
    names = [name for name in names if name in listed]
    file_of: dict[str, str] = {}
    for name in names:
        path = path_inside(folder, name)
        try:
            with safe_open(regular_file(path), framework="pt") as file:
                kinds = {key: file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
                is_sharded = torch_parts.SHARDED_FILE_KEY in (file.metadata() or {})
        except Exception as error:  # safetensors raises many kinds of errors
            raise ValueError(
                f"{path} is not a safetensors file, or it is cut off ({error}); fetch it again"
            ) from error
        if unknown := [f"{kind} of {key}" for key, kind in kinds.items() if kind not in DTYPES]:
            raise ValueError(f"{path} has dtypes that cannot be read: {shorten(unknown)}")
        for key in kinds if not is_sharded else ():
            if file_of.setdefault(key, name) != name:
                raise ValueError(
                    f"{folder} has {key} twice, in {file_of[key]} and in {name}; remove one of the files"
                )
    return names, sorted(listed - set(names))


def are_quantized(names: Iterable[str]) -> bool:
    return any(name.endswith((SCALE, "_scales")) for name in names)


class UntrainedParts(NamedTuple):
    """Parts of the loaded model that an export copies.

    folder: the loaded model's folder. names: file name -> names of the untrained tensors in the file.
    all_names: names of all tensors in the folder.
    """

    folder: str
    names: dict[str, list[str]]
    all_names: list[str]

    def copy_to(self, folder: str) -> dict[str, str]:
        """Copy the tensors to separate files, listed in the index; return name -> hash. Collective.

        Only ranks on rank 0's machine copy, because the folders may be on its local disk.
        """
        n_writers = ranks_of_first_machine()
        copies = {name: f"model-untrained-{n:05}.safetensors" for n, name in enumerate(self.names)}

        def copy_own_share() -> dict[str, tuple[str, int]]:
            """Return file name -> (hash, bytes of its tensors)."""
            written = {}
            for source in own_share(list(self.names), n_writers):
                path = path_inside(self.folder, source)
                with safe_open(regular_file(path), framework="pt") as file:
                    tensors = {name: file.get_tensor(name) for name in self.names[source]}
                path = os.path.join(folder, copies[source])
                save_tensors(tensors, path)
                written[copies[source]] = hash_file(path), sum(t.nbytes for t in tensors.values())
            return written

        written = {name: x for part in on_all_ranks(copy_own_share) for name, x in part.items()}
        index_path = Path(folder, HF_INDEX)

        def write_index() -> dict[str, str]:
            index = read_json_object(index_path)
            for source, names in self.names.items():
                index["weight_map"] |= dict.fromkeys(names, copies[source])
            index["metadata"]["total_size"] += sum(n_bytes for _, n_bytes in written.values())
            return {HF_INDEX: write_json(index_path, index)}

        return {name: digest for name, (digest, _) in written.items()} | from_rank_zero(write_index)


def untrained_parts(folder: str, adapter: BaseStateDictAdapter) -> UntrainedParts | None:
    """Return the parts of the model in `folder` that an export copies; None if there are none.

    If they cannot be copied, warns and returns None, because an export at the end of a run must not fail.
    """
    names = {}
    try:
        for file_name in check_files(folder)[0]:
            with safe_open(regular_file(path_inside(folder, file_name)), framework="pt") as file:
                names[file_name] = list(file.keys())
        all_names = [name for in_file in names.values() for name in in_file]
        adapter = adapter.spelled_like(all_names)
        for file_name, in_file in names.items():
            names[file_name] = [name for name in in_file if adapter.holds_untrained_part(name)]
            if are_quantized(names[file_name]):
                raise ValueError(f"in {folder} these parts are quantized, and the export is not")
    except (OSError, ValueError) as error:
        logger.warning(f"The export lacks the parts that are not trained: {error}")
        return None
    names = {file_name: in_file for file_name, in_file in names.items() if in_file}
    return UntrainedParts(folder, names, all_names) if names else None


def write_model_files(
    folder: str,
    model_args: Any,
    hf_assets_path: str | None,
    dtype: torch.dtype,
    tokenizer: Any = None,
    chat_template: str | None = None,
    untrained_from: str | None = None,
) -> None:
    """Write config.json, generation_config.json, the tokenizer and its chat template to `folder`.

    An existing tokenizer is kept. config.json starts from the first config.json in `folder`,
    `untrained_from` and `hf_assets_path` that describes `model_args`, else from `model_args`. A failure
    only logs a warning, because the weights matter more.
    tokenizer, chat_template: None takes those in `hf_assets_path`. dtype: dtype of the exported weights.
    untrained_from: folder of the model whose untrained parts were copied to `folder`.
    """
    assets = Path(find_shipped(hf_assets_path or os.devnull))
    token_ids: dict[str, int] = {}
    try:
        token_ids = _write_tokenizer(folder, assets, tokenizer, chat_template)
    except (OSError, ValueError) as error:
        logger.warning(f"{folder} gets no tokenizer that transformers can open: {error}")
    try:
        bases = [Path(untrained_from), assets] if untrained_from else [assets]
        for file in (bases[0] / name for name in _PROCESSOR_FILES if untrained_from):
            if file.is_file():
                with open_file(file, "rb") as source:
                    _write(Path(folder, file.name), source.read())
        config = _config(model_args, [Path(folder), *bases], untrained_from is not None)
        for part in (config, config.get("text_config")):
            if part is not None:
                part |= _with_token_ids(part, token_ids)
        # transformers 5 writes the key "dtype", transformers 4 "torch_dtype".
        dtype_key = "dtype" if "dtype" in config else "torch_dtype"
        config[dtype_key] = str(dtype).removeprefix("torch.")
        write_json(Path(folder, "config.json"), config)
        generation = Path(folder, "generation_config.json")
        if not generation.exists():
            content = {key: config[key] for key in _TOKEN_IDS if config.get(key) is not None}
            if (assets / generation.name).exists():
                content = read_json_object(assets / generation.name)
            if content:
                write_json(generation, content | _with_token_ids(content, token_ids))
    except (OSError, ValueError) as error:
        logger.warning(f"{folder} gets no config.json, which transformers needs: {error}")


def differences_from_config(
    adapter: BaseStateDictAdapter, folder: str
) -> dict[str, tuple[Any, Any]] | None:
    """Return field -> (the model's value, config.json's value) for the fields that differ.

    None if the folder has no config.json or the model's args are not `DecoderArgs`.
    """
    path, args = Path(folder, "config.json"), getattr(adapter, "model_args", None)
    if not path.is_file() or not isinstance(args, DecoderArgs):
        return None
    try:
        return differing(args, from_hf_config(path).model_args)
    except ValueError as error:
        raise ValueError(
            f"{error}. To skip this check, remove the config.json beside the weights"
        ) from error


def _config(model_args: Any, folders: list[Path], has_untrained_parts: bool) -> dict[str, Any]:
    """Return config.json for `model_args`, plus other fields of the first matching config.json in `folders`."""
    for path in (folder / "config.json" for folder in folders):
        if not path.is_file():
            continue
        try:
            difference = differing(model_args, from_hf_config(path).model_args)
        except ValueError as error:
            difference = {str(error): ()}
        if difference:
            logger.info(f"{path} is of another model ({', '.join(difference)}), so it is not used")
            continue
        config = read_json_object(path)
        left_out = [key for key in _NOT_EXPORTED if config.pop(key, None)]
        if not has_untrained_parts and "text_config" in config:
            left_out += sorted(config.keys() - {"text_config"})
            config = {k: v for k, v in config["text_config"].items() if k != "architectures"}
        for name in _MTP_FIELDS:
            if not has_untrained_parts and config.get(name):
                config[name] = 0
                left_out.append(name)
        if left_out:
            logger.info(f"Fields of {path} that do not apply to the export, left out: {left_out}")
        # Add fields that only transformers 4 or only 5 writes, so both versions can read the file.
        config = to_hf_config(model_args) | config if "text_config" not in config else config
        if config.get("rope_parameters") and config.get("rope_scaling"):
            # transformers 5 needs rope_theta in rope_scaling too.
            config["rope_scaling"] = config["rope_parameters"]
        return config
    return to_hf_config(model_args)


def _with_token_ids(content: Mapping[str, Any], token_ids: Mapping[str, int]) -> dict[str, Any]:
    """Return `token_ids`, plus the end-of-text ids in `content`, a parsed JSON file."""
    end, ends = token_ids.get("eos_token_id"), content.get("eos_token_id")
    listed = ends if isinstance(ends, list) else [ends]
    if end is None or ends is None:
        return dict(token_ids)
    return token_ids | {"eos_token_id": ends if end in listed else [end, *listed]}


def _write_tokenizer(
    folder: str, assets: Path, tokenizer: Any, chat_template: str | None
) -> dict[str, int]:
    """Write the tokenizer; return its begin- and end-of-text ids under config.json's keys."""
    if any(Path(folder, name).exists() for name in _TOKENIZER_FILES):
        return _token_ids(HuggingFaceTokenizer(folder))
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        if not assets.is_dir():
            raise ValueError("model.hf_assets_path is not a folder with a tokenizer")
        tokenizer = HuggingFaceTokenizer(str(assets))
    source = Path(tokenizer.tokenizer_path)
    templates = [] if chat_template else source.glob(f"{NAMED_TEMPLATES}/*.jinja")
    for file in [*map(source.joinpath, _TOKENIZER_FILES), *templates]:
        if file.exists():
            copy = Path(folder, file.relative_to(source))
            copy.parent.mkdir(exist_ok=True)
            with open_file(file, "rb") as content:
                _write(copy, content.read())
    if not Path(folder, "tokenizer.json").exists():
        _write(Path(folder, "tokenizer.json"), tokenizer.tokenizer.to_str(pretty=True).encode())
    config = dict(tokenizer.config or {"tokenizer_class": _CLASS})
    for key in ("bos_token", "eos_token"):
        token, entry = getattr(tokenizer, key), config.get(key)
        if token != (entry.get("content") if isinstance(entry, dict) else entry):
            config[key] = token
    # transformers 4 knows neither this class nor a list under extra_special_tokens. transformers 5
    # reads the old spellings too.
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = _CLASS
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    if chat_template is not None:
        _write(Path(folder, "chat_template.jinja"), chat_template.encode())
        if "chat_template" in config:
            config["chat_template"] = chat_template
        Path(folder, "chat_template.json").unlink(missing_ok=True)
    if config != tokenizer.config:
        write_json(Path(folder, "tokenizer_config.json"), config)
    return _token_ids(tokenizer)


def _token_ids(tokenizer: HuggingFaceTokenizer) -> dict[str, int]:
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    return {name: token_id for name, token_id in ids.items() if token_id is not None}


def write_json(path: Path, content: dict[str, Any]) -> str:
    """Write a JSON file; return its hash."""
    return _write(path, (json.dumps(content, indent=2) + "\n").encode())


def _write(path: Path, content: bytes) -> str:
    with open_file(path, "wb") as file:
        file.write(content)
    return xxhash.xxh3_128(content).hexdigest()
