"""Text to token ids and back, from the files that Hugging Face models ship.

`tokenizer_files` says which files these are.
"""

from abc import ABC, abstractmethod
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.config import JobConfig
from torchtitan.tools.logging import logger
from torchtitan.tools.shipped import find_shipped

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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

    bos_token, eos_token: take the place of the file's.

    Raises FileNotFoundError if the folder or every tokenizer file is missing, ValueError if a
    file cannot be read, or if the vocabulary lacks bos_token or eos_token.
    """

    def __init__(
        self, tokenizer_path: str, *, bos_token: str | None = None, eos_token: str | None = None
    ) -> None:
        super().__init__()
        self.tokenizer_path = tokenizer_path = find_shipped(tokenizer_path)
        self.bos_token, self.eos_token = bos_token, eos_token
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
        # Loads `tokenizers`: slow, and other programs bring their own.
        from torchtitan.data import tokenizer_files as files

        self.tokenizer: Tokenizer = files.load_backend(folder)
        config_path = folder / "tokenizer_config.json"
        self.config: dict | None = files.read_json(config_path)
        config = self.config or {}
        # In runs, since the order decides new ids, and `add_special_tokens` would mark as special
        # even a token that the file says is not.
        for is_special, run in groupby(
            files.declared_tokens(config, config_path), lambda t: t.special
        ):
            add = self.tokenizer.add_special_tokens if is_special else self.tokenizer.add_tokens
            add(list(run))
        # One string may serve as both, so each is looked up by itself.
        for kind in ("bos", "eos"):
            token = getattr(self, f"{kind}_token")
            if token is not None and self.token_to_id(token) is None:
                raise ValueError(
                    f"training.{kind}_token must be a token of the tokenizer in {str(folder)!r}, "
                    f"got {token!r}; special tokens there: {', '.join(self.special_tokens) or 'none'}"
                )
            if token is None:
                token = files.token_text(config.get(f"{kind}_token"), f"{kind}_token", config_path)
            setattr(self, f"{kind}_token", token)
            setattr(self, f"{kind}_id", None if token is None else self.token_to_id(token))
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

    @property
    def special_tokens(self) -> list[str]:
        """Tokens that are no text, such as an end-of-text token, in the order of their ids."""
        added = self.tokenizer.get_added_tokens_decoder()
        return [added[i].content for i in sorted(added) if added[i].special]

    def get_vocab(self) -> dict[str, int]:
        return self.tokenizer.get_vocab()

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self.tokenizer.get_vocab_size()

    def get_vocab_size(self) -> int:
        return self.vocab_size


def build_hf_tokenizer(job_config: JobConfig) -> HuggingFaceTokenizer | BaseTokenizer:
    """Return the tokenizer in `model.hf_assets_path`.

    Warns if it has no end-of-text token, because documents then follow each other without a mark.
    """
    training = job_config.training
    tokenizer = HuggingFaceTokenizer(
        job_config.model.hf_assets_path,
        bos_token=training.bos_token,
        eos_token=training.eos_token,
    )
    if tokenizer.eos_id is None:
        special = ", ".join(map(repr, tokenizer.special_tokens)) or "none"
        logger.warning(
            "the tokenizer in %s names no end-of-text token, so packed documents run together; set "
            "training.eos_token to a token of its vocabulary (special tokens: %s)",
            job_config.model.hf_assets_path,
            special,
        )
    return tokenizer
