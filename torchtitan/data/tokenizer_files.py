"""Reads a tokenizer from a folder of Hugging Face files, as `transformers` 5 does.

The tokenizer is tokenizer.json or, for the classes in `_OWN_RULES`, vocab.json and merges.txt.
tokenizer_config.json (with special_tokens_map.json and added_tokens.json in older folders) adds special
tokens. For some classes `transformers` uses rules of the class in place of parts of tokenizer.json; a
folder is refused if its tokenizer.json differs from these rules, or if its class is unknown here.
"""

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from torchtitan.data.tokenizer import SPECIAL_TOKEN_KEYS
from torchtitan.tools.files import read_json_object, read_text, regular_file
from torchtitan.tools.logging import logger

# Classes (without the suffix "Fast") for which tokenizer.json is used as it is.
_GENERIC = ("PreTrainedTokenizer", "TokenizersBackend", "LlamaTokenizer")
_END = "<|endoftext|>"
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Class -> (normalizer, regex that splits words, special tokens that default to `_END`).
_OWN_RULES = {
    "GPT2Tokenizer": (None, None, ("bos_token", "eos_token", "unk_token")),
    "Qwen2Tokenizer": (normalizers.NFC(), _QWEN_WORDS, ("eos_token", "unk_token", "pad_token")),
}


def load(folder: Path, name: str | None = None) -> tuple[Tokenizer, dict | None]:
    """Return (tokenizer of a folder, its config merged with special_tokens_map.json of older folders).

    name: the tokenizer's class without "Fast"; None: the class that transformers would choose.
    """
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path)
    has_decoder = "added_tokens_decoder" in (config or {})
    older = None if has_decoder else read_json(folder / "special_tokens_map.json")
    if older is not None:
        config = (config or {}) | older
    stated = str((config or {}).get("tokenizer_class") or "").removesuffix("Fast")
    if name is None:
        # transformers reads every qwen2 model as Qwen2Tokenizer, even if the config states another class. For
        # qwen3 the model type decides only if no class is stated.
        model = (read_json(folder / "config.json") or {}).get("model_type")
        is_qwen = model == "qwen2" or (not stated and model in ("qwen3", "qwen3_moe"))
        name = "Qwen2Tokenizer" if is_qwen else stated
    if name in _OWN_RULES:
        config = dict.fromkeys(_OWN_RULES[name][2], _END) | (config or {})
    backend = _backend(folder, name, config or {})
    in_file = backend.get_added_tokens_decoder()
    by_id = {} if has_decoder else read_json(folder / "added_tokens.json") or {}
    known = {token.content for token in in_file.values()}
    tokens = sorted(by_id.keys() - known, key=by_id.__getitem__)
    # Add special tokens apart from the rest, because `add_special_tokens` marks every token as special.
    declared = [*map(AddedToken, tokens), *_declared_tokens(config or {}, config_path, backend)]
    for is_special, run in groupby(declared, lambda token: token.special):
        (backend.add_special_tokens if is_special else backend.add_tokens)(list(run))
    if name in _OWN_RULES and (difference := _difference(backend, name, config or {}, in_file)):
        if stated in _GENERIC:
            logger.warning(
                f"transformers 5 reads the tokenizer in {folder} as a {name}, because of its model_type "
                f"'qwen2'; the ids here are those of tokenizer.json, which has {difference}"
            )
            return load(folder, stated)
        raise ValueError(
            f"the tokenizer in {folder} has {difference} than the {name} that transformers builds; to train "
            f"with the ids of transformers, {_convert(folder)}; to train with the ids of tokenizer.json, use a "
            "folder with tokenizer_class = 'PreTrainedTokenizerFast' and without config.json"
        )
    return backend, config


def _convert(folder: Path) -> str:
    return (
        f'write tokenizer.json with: python -c "from transformers import AutoTokenizer as A; '
        f"t = A.from_pretrained('{folder}'); type(t).__name__ = 'PreTrainedTokenizerFast'; "
        "t.save_pretrained('NEW_FOLDER')\" and set model.hf_assets_path to the new folder"
    )


def _backend(folder: Path, name: str, config: dict) -> Tokenizer:
    """Return the tokenizer without the tokens that tokenizer_config.json adds."""
    whole = folder / "tokenizer.json"
    if name not in ("", *_GENERIC, *_OWN_RULES):
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: tokenizer_class {name!r} is not supported; "
            f"{_convert(folder)}"
        )
    rules = _OWN_RULES.get(name)
    if not whole.exists():
        if name in _GENERIC or not (folder / "merges.txt").exists():
            found = sorted(entry.name for entry in folder.iterdir())
            raise FileNotFoundError(
                f"no tokenizer in {str(folder)!r}: it needs tokenizer.json, or vocab.json and "
                f"merges.txt of {' or '.join(_OWN_RULES)}; files there: {', '.join(found) or 'none'}; "
                f"if these are files of a tokenizer, {_convert(folder)}"
            )
        return _byte_level(folder, *(rules or _OWN_RULES["GPT2Tokenizer"])[:2], config)
    try:
        backend = Tokenizer.from_file(regular_file(whole))
    except Exception as error:  # `tokenizers` raises bare Exception for any bad content
        raise ValueError(
            f"cannot read the tokenizer in {whole}: {error}; fetch the file again"
        ) from error
    # Drop the file's truncation and padding, which are meant for another program's batches.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _words(pattern: str | None, config: dict) -> pre_tokenizers.PreTokenizer:
    has_prefix = bool(config.get("add_prefix_space", False))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=has_prefix, use_regex=pattern is None)
    if pattern is None:
        return byte_level
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


def _difference(backend: Tokenizer, name: str, config: dict, in_file: dict[int, AddedToken]) -> str:
    """Describe how a tokenizer differs from the tokenizer that the class `name` builds; "" if it does not."""
    normalizer, pattern, _ = _OWN_RULES[name]
    rules = Tokenizer(models.BPE())
    rules.pre_tokenizer = _words(pattern, config)
    if normalizer is not None:
        rules.normalizer = normalizer
    ours, theirs = (
        json.loads(each.to_str().replace('"trim_offsets":true', '"trim_offsets":false'))
        for each in (backend, rules)
    )
    options = {key: value for key, value in ours["model"].items() if key not in ("vocab", "merges")}
    if any({**options, "type": options["type"] != "BPE"}.values()):
        return f"another model ({options})"
    keys = [key for key in ("normalizer", "pre_tokenizer") if ours[key] != theirs[key]]
    declared = {int(number) for number in config.get("added_tokens_decoder") or {}}
    if declared and not in_file.keys() <= declared:  # the class ignores tokenizer.json's tokens
        keys.append("set of added tokens")
    named = {config.get(key) for key in SPECIAL_TOKEN_KEYS if isinstance(config.get(key), str)}
    added = backend.get_added_tokens_decoder().values()
    if any(t.lstrip or t.rstrip or t.single_word for t in added if t.content in named):
        keys.append("way of stripping blanks around special tokens")
    return " and ".join(f"another {key}" for key in keys)


def _byte_level(folder: Path, normalizer: Any, pattern: str | None, config: dict) -> Tokenizer:
    vocab, path = read_json(folder / "vocab.json") or {}, folder / "merges.txt"
    try:
        # Not splitlines, which also splits at Unicode's other line separators inside tokens.
        lines = read_text(path).split("\n")
        pairs = [line.split() for line in lines if not line.startswith("#version")]
        merges = [(pair[0], pair[1]) for pair in pairs if len(pair) >= 2]
        backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    except Exception as error:  # the library raises bare Exception for any bad content
        raise ValueError(f"{path} does not fit the vocabulary beside it: {error}") from error
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = _words(pattern, config)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    return backend


def read_json(path: Path) -> dict | None:
    """Return the JSON object in `path`; None if there is no such file."""
    return read_json_object(path) if path.exists() else None


def _declared_tokens(config: dict, config_path: Path, backend: Tokenizer) -> Iterator[AddedToken]:
    """Yield the tokens that a config declares, in the order in which new tokens get their ids."""
    by_id = config.get("added_tokens_decoder") or {}
    if not isinstance(by_id, dict):
        raise ValueError(
            f"{config_path}: added_tokens_decoder must be an object, got {by_id!r:.80}"
        )
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for number in sorted(by_id, key=int):
        entry = by_id[number]
        token = _token(entry, f"added_tokens_decoder[{number}]", config_path, special=False)
        known.add(token.content)
        yield token
    named = {key: config.get(key) for key in SPECIAL_TOKEN_KEYS}
    named |= {key: text for key, text in config.items() if key.endswith("_token")}
    extra = config.get("extra_special_tokens") or config.get("model_specific_special_tokens") or []
    lists = (extra, config.get("additional_special_tokens") or [])
    if isinstance(extra, dict):
        named |= extra
    listed = next((entries for entries in lists if isinstance(entries, list) and entries), [])
    for key, entry in [*named.items(), *(("additional_special_tokens", e) for e in listed)]:
        if isinstance(entry, bool):  # the entry is a flag, such as add_bos_token
            continue
        if entry is not None and token_text(entry, key, config_path) not in known:
            token = _token(entry, key, config_path, special=True)
            known.add(token.content)
            yield token


def _token(entry: Any, key: str, config_path: Path, special: bool) -> AddedToken:
    text = token_text(entry, key, config_path)
    flags = {"special": special, "normalized": not special}
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    if isinstance(entry, dict):
        flags |= {name: entry[name] for name in names if name in entry}
    try:
        return AddedToken(text, **flags)
    except TypeError as error:  # the text is None, or a flag is not a bool
        raise ValueError(f"{config_path}: {key} cannot be used: {error}") from error


def token_text(entry: Any, key: str, config_path: Path) -> str | None:
    """Return the text of a token that the config holds as a string or as a dict; None if unset."""
    if isinstance(entry, dict):
        entry = entry.get("content", entry)
    if entry is None or isinstance(entry, str):
        return entry
    raise ValueError(
        f"{config_path}: {key} must be a string or an object with a string 'content', got {entry!r}"
    )
