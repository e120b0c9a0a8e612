"""Text to token ids and back, from the files that Hugging Face models ship.

A model folder can hold a tokenizer in three ways; the first that is found is used:

1. `tokenizer.json`: everything in one file.
2. `vocab.json` or `vocab.txt`, with `merges.txt`: byte-level BPE.
3. `vocab.json` or `vocab.txt` without it: one id per whitespace-separated word.

Special tokens come from `tokenizer_config.json`, if it exists.
"""

from abc import ABC, abstractmethod
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.config import JobConfig
from torchtitan.tools.json_files import read_json_object

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

# Keys of tokenizer_config.json that name one special token each.
SPECIAL_TOKEN_KEYS = tuple(f"{name}_token" for name in "bos eos pad unk sep cls mask".split())


class BaseTokenizer(ABC):
    """What data and models ask of a tokenizer. `eos_id` ends a document; None if there is none."""

    def __init__(self) -> None:
        self.eos_id: int | None = None

    @abstractmethod
    def encode(self, *args, **kwargs) -> list[int]: ...

    @abstractmethod
    def decode(self, *args, **kwargs) -> str: ...

    @abstractmethod
    def get_vocab_size(self) -> int: ...


class HuggingFaceTokenizer(BaseTokenizer):
    """A tokenizer read from a folder of Hugging Face files.

    `tokenizer` is the `tokenizers.Tokenizer` underneath. `encode` adds a begin- or end-of-text id
    on request, unless the files' own post-processor already does (`hf_adds_bos`, `hf_adds_eos`).
    Its default (`default_add_bos`, `default_add_eos`) is `add_bos_token` and `add_eos_token` of
    tokenizer_config.json, else False.

    Raises FileNotFoundError if the folder or every tokenizer file is missing, ValueError if a
    file cannot be read.
    """

    def __init__(self, tokenizer_path: str) -> None:
        super().__init__()
        self.tokenizer_path = tokenizer_path
        self.bos_token: str | None = None
        self.eos_token: str | None = None
        self.bos_id: int | None = None
        folder = Path(tokenizer_path)
        if not folder.is_dir():
            hint = "set model.hf_assets_path to a folder that holds tokenizer.json"
            if "assets/tokenizer" in tokenizer_path:
                hint += (
                    "; this path is from before a model's files moved to assets/hf/<model name>, "
                    "where scripts/download_hf_assets.py puts them"
                )
            raise FileNotFoundError(f"tokenizer folder {tokenizer_path!r} does not exist: {hint}")
        try:
            self._read(folder)
        except Exception as error:  # of whatever type the library raises for bad content
            if isinstance(error, OSError | ValueError) and str(folder) in str(error):
                raise
            raise ValueError(
                f"cannot read the tokenizer in {str(folder)!r}: {error}; fetch its files again"
            ) from error

    def _read(self, folder: Path) -> None:
        self.tokenizer: Tokenizer = _load_backend(folder)
        config_path = folder / "tokenizer_config.json"
        self.config: dict | None = _read_json(config_path)
        config = self.config or {}
        # In runs, since the order decides new ids, and `add_special_tokens` would mark as special
        # even a token that the file says is not.
        for is_special, run in groupby(_declared_tokens(config, config_path), lambda t: t.special):
            add = self.tokenizer.add_special_tokens if is_special else self.tokenizer.add_tokens
            add(list(run))
        # One string may serve as both, so each is looked up by itself.
        self.bos_token = _token_text(config.get("bos_token"), "bos_token", config_path)
        self.eos_token = _token_text(config.get("eos_token"), "eos_token", config_path)
        id_of = self.tokenizer.token_to_id
        self.bos_id = None if self.bos_token is None else id_of(self.bos_token)
        self.eos_id = None if self.eos_token is None else id_of(self.eos_token)
        ids_of_nothing = self.tokenizer.encode("").ids
        self.hf_adds_bos = self.bos_id is not None and self.bos_id in ids_of_nothing
        self.hf_adds_eos = self.eos_id is not None and self.eos_id in ids_of_nothing
        self.default_add_bos = bool(config.get("add_bos_token", False))
        self.default_add_eos = bool(config.get("add_eos_token", False))

    def encode(
        self,
        text: str = "",
        *,
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Token ids of `text`; None for `add_bos` or `add_eos` means this tokenizer's default.

        add_special_tokens: False gives the ids of the text and nothing before or after it, for text
            that goes on from other text.
        """
        if not add_special_tokens:
            return self.tokenizer.encode(text, add_special_tokens=False).ids
        add_bos = self.default_add_bos if add_bos is None else add_bos
        add_eos = self.default_add_eos if add_eos is None else add_eos

        token_ids = self.tokenizer.encode(text).ids
        if add_bos and not self.hf_adds_bos and self.bos_id is not None:
            token_ids.insert(0, self.bos_id)
        if add_eos and not self.hf_adds_eos and self.eos_id is not None:
            token_ids.append(self.eos_id)
        return token_ids

    def decode(self, token_ids: list[int], **options) -> str:
        """Text of `token_ids`; the options are those of `tokenizers.Tokenizer.decode`."""
        return self.tokenizer.decode(token_ids, **options)

    def id_to_token(self, token_id: int) -> str | None:
        return self.tokenizer.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self.tokenizer.token_to_id(token)

    def get_vocab(self) -> dict[str, int]:
        return self.tokenizer.get_vocab()

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self.tokenizer.get_vocab_size()

    def get_vocab_size(self) -> int:
        return self.vocab_size


def build_hf_tokenizer(job_config: JobConfig) -> HuggingFaceTokenizer | BaseTokenizer:
    """The tokenizer in `model.hf_assets_path`."""
    return HuggingFaceTokenizer(job_config.model.hf_assets_path)


def _load_backend(folder: Path) -> "Tokenizer":
    """The tokenizer in `folder`, before the config's special tokens are added."""
    # Slow to import, and other programs bring their own tokenizers.
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    whole = folder / "tokenizer.json"
    if whole.is_file():
        try:
            backend = Tokenizer.from_file(str(whole))
        except Exception as error:  # the library raises bare Exception for any bad content
            raise ValueError(
                f"cannot read the tokenizer in {whole}: {error}; fetch the file again"
            ) from error
        # They are settings for another program's batches; here each text is wanted as it is.
        backend.no_truncation()
        backend.no_padding()
        return backend

    listing, merges_path = folder / "vocab.txt", folder / "merges.txt"
    vocab = _read_json(folder / "vocab.json")
    if vocab is not None:
        if wrong := [entry for entry in vocab.items() if type(entry[1]) is not int]:
            raise ValueError(
                f"{folder / 'vocab.json'} must give each token a number, got {wrong[0]}"
            )
    elif listing.is_file():
        # A blank line keeps its number: ids after it must not move.
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
    except Exception as error:  # a bare Exception again, for a merge of unknown tokens
        raise ValueError(f"{merges_path} does not fit the vocabulary beside it: {error}") from error
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    return backend


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error}; fetch the file again") from error


def _read_json(path: Path) -> dict | None:
    """The JSON object in `path`; None if there is no such file."""
    if not path.is_file():
        return None
    try:
        return read_json_object(path)
    except ValueError as error:  # bad JSON or bad UTF-8
        raise ValueError(f"{path} is not valid JSON: {error}; fetch the file again") from error


def _declared_tokens(config: dict, config_path: Path) -> "list[AddedToken]":
    """The tokens that tokenizer_config.json declares, named ones first."""
    from tokenizers import AddedToken  # see _load_backend

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
        text = _token_text(entry, key, config_path)
        if entry is None:
            continue
        flags = {"special": True}
        if isinstance(entry, dict):
            flags = {name: entry.get(name, default) for name, default in defaults.items()}
        try:
            tokens.append(AddedToken(text, **flags))
        except TypeError as error:  # a flag that is none
            raise ValueError(f"{config_path}: a token cannot be used: {error}") from error
    return tokens


def _token_text(entry: Any, key: str, config_path: Path) -> str | None:
    """The string of a token that the config gives as a string or as a dict."""
    if isinstance(entry, dict):
        entry = entry.get("content", entry)
    if entry is None or isinstance(entry, str):
        return entry
    raise ValueError(
        f"{config_path}: {key} must be a string or an object with a string 'content', got {entry!r}"
    )
