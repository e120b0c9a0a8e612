"""Reading a tokenizer from the files of a model's folder.

The first of these that exists is used:

1. `tokenizer.json`: the whole tokenizer in one file.
2. `vocab.json` or `vocab.txt`, with `merges.txt`: byte-level BPE.
3. `vocab.json` or `vocab.txt` without `merges.txt`: one id per whitespace-separated word.

Special tokens come from `tokenizer_config.json`, if it exists.
"""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from torchtitan.data.tokenizer import SPECIAL_TOKEN_KEYS
from torchtitan.tools.files import read_json_object


def load_backend(folder: Path) -> Tokenizer:
    """Return the tokenizer in `folder`, without the special tokens of `tokenizer_config.json`."""
    whole = folder / "tokenizer.json"
    if whole.is_file():
        try:
            backend = Tokenizer.from_file(str(whole))
        except Exception as error:  # the library raises bare Exception for any bad content
            raise ValueError(
                f"cannot read the tokenizer in {whole}: {error}; fetch the file again"
            ) from error
        # The file's truncation and padding are for another program's batches.
        backend.no_truncation()
        backend.no_padding()
        return backend

    listing, merges_path = folder / "vocab.txt", folder / "merges.txt"
    vocab = read_json(folder / "vocab.json")
    if vocab is not None:
        if wrong := [entry for entry in vocab.items() if type(entry[1]) is not int]:
            raise ValueError(
                f"{folder / 'vocab.json'} must give each token a number, got {wrong[0]}"
            )
    elif listing.is_file():
        # A token's id is the number of its line, blank lines included.
        lines = enumerate(_read_lines(listing))
        vocab = {line.strip(): number for number, line in lines if line.strip()}
    else:
        found = sorted(entry.name for entry in folder.iterdir())
        raise FileNotFoundError(
            f"no tokenizer in {str(folder)!r}: it needs tokenizer.json, or vocab.json or vocab.txt "
            f"(with merges.txt for BPE); files there: {', '.join(found) or 'none'}"
        )
    if not merges_path.is_file():
        backend = Tokenizer(models.WordLevel(vocab=vocab, unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        return backend

    pairs = [line.split() for line in _read_lines(merges_path) if not line.startswith("#")]
    merges = [(pair[0], pair[1]) for pair in pairs if len(pair) >= 2]
    try:
        backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    except Exception as error:  # also a bare Exception, for a merge of unknown tokens
        raise ValueError(f"{merges_path} does not fit the vocabulary beside it: {error}") from error
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    return backend


def _read_lines(path: Path) -> list[str]:
    try:
        # Not splitlines, because tokens may hold Unicode's other line separators.
        return path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error}; fetch the file again") from error


def read_json(path: Path) -> dict | None:
    """Return the JSON object in `path`; None if there is no such file."""
    if not path.is_file():
        return None
    try:
        return read_json_object(path)
    except ValueError as error:  # bad JSON or bad UTF-8
        raise ValueError(f"{path} is not valid JSON: {error}; fetch the file again") from error


def declared_tokens(config: dict, config_path: Path) -> list[AddedToken]:
    """Return the tokens that tokenizer_config.json declares: first bos_token, eos_token, ..."""
    by_id = config.get("added_tokens_decoder") or {}
    if not isinstance(by_id, dict):
        raise ValueError(
            f"{config_path}: added_tokens_decoder must be an object, got a {type(by_id).__name__}"
        )
    entries = [(key, config.get(key)) for key in SPECIAL_TOKEN_KEYS]
    entries += [
        (f"added_tokens_decoder[{token_id}]", entry)
        for token_id, entry in by_id.items()
        if isinstance(entry, dict) and "content" in entry
    ]
    defaults = dict.fromkeys(["single_word", "lstrip", "rstrip"], False)
    defaults |= {"normalized": True, "special": True}
    tokens = []
    for key, entry in entries:
        text = token_text(entry, key, config_path)
        if entry is None:
            continue
        flags = {"special": True}
        if isinstance(entry, dict):
            flags = {name: entry.get(name, default) for name, default in defaults.items()}
        try:
            tokens.append(AddedToken(text, **flags))
        except TypeError as error:  # a flag that is not a bool
            raise ValueError(f"{config_path}: a token cannot be used: {error}") from error
    return tokens


def token_text(entry: Any, key: str, config_path: Path) -> str | None:
    """Return the text of a token, which the config gives as a string or as a dict."""
    if isinstance(entry, dict):
        entry = entry.get("content", entry)
    if entry is None or isinstance(entry, str):
        return entry
    raise ValueError(
        f"{config_path}: {key} must be a string or an object with a string 'content', got {entry!r}"
    )
