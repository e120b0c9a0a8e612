"""Text to token ids and back, from the files of Hugging Face models that `tokenizer_files` reads."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.config import JobConfig
from torchtitan.tools.files import find_shipped
from torchtitan.tools.logging import logger

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Keys of tokenizer_config.json that name a special token. Tokens without an id get new ids in this order.
SPECIAL_TOKEN_KEYS = tuple(f"{name}_token" for name in "bos eos unk sep pad cls mask".split())


class BaseTokenizer(ABC):
    """The tokenizer interface that data and models need. eos_id: the end-of-text id; None: no such token."""

    def __init__(self) -> None:
        self.eos_id: int | None = None

    @abstractmethod
    def encode(self, *args, **kwargs) -> list[int]: ...

    @abstractmethod
    def decode(self, *args, **kwargs) -> str: ...

    @abstractmethod
    def get_vocab_size(self) -> int: ...


class HuggingFaceTokenizer(BaseTokenizer):
    """A tokenizer read from a folder of Hugging Face files; `tokenizer` is the `tokenizers.Tokenizer`.

    `encode` adds a begin- or end-of-text id if called with `add_bos` or `add_eos` (their defaults come
    from tokenizer_config.json, else are False), unless the post-processor already adds this id.

    bos_token, eos_token: replace the tokens that the files name.
    begins_documents: whether documents begin with the begin-of-text token. False if there is no such token,
        if it is the same as the end-of-text token, or if the files have `add_bos_token = false` and the
        caller does not set bos_token.
    Raises FileNotFoundError or ValueError for missing or bad files, and for tokens not in the vocabulary.
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
            raise FileNotFoundError(
                f"tokenizer folder {tokenizer_path!r} does not exist: set model.hf_assets_path to a folder "
                "that holds tokenizer.json; `hf download OWNER/NAME --local-dir FOLDER` fetches one"
            )
        try:
            self._read(folder)
        except Exception as error:  # `tokenizers` raises errors of several types
            if isinstance(error, OSError | ValueError) and str(folder) in str(error):
                raise
            raise ValueError(
                f"cannot read the tokenizer in {str(folder)!r}: {error}; fetch its files again"
            ) from error

    def _read(self, folder: Path) -> None:
        # Imported here, because `tokenizers` is slow to load, and not every program needs it.
        from torchtitan.data import tokenizer_files as files

        self.tokenizer: Tokenizer
        self.config: dict | None
        self.tokenizer, self.config = files.load(folder)
        config, config_path = self.config or {}, folder / "tokenizer_config.json"
        is_bos_chosen = self.bos_token is not None
        # Separate lookups, because both settings may name the same token.
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
        added_ids = self.tokenizer.encode("").ids
        self.hf_adds_bos = self.bos_id is not None and self.bos_id in added_ids
        self.hf_adds_eos = self.eos_id is not None and self.eos_id in added_ids
        self.default_add_bos = bool(config.get("add_bos_token", False))
        self.default_add_eos = bool(config.get("add_eos_token", False))
        declines = config.get("add_bos_token") is False and not is_bos_chosen
        # If both tokens are the same, the end-of-text token alone separates documents.
        self.begins_documents = not declines and self.bos_id not in (None, self.eos_id)

    def encode(
        self,
        text: str = "",
        *,
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Return the token ids of `text`; without any added ids if add_special_tokens is False."""
        # Only this method of `tokenizers` skips offsets, which would take a fifth of the time.
        (encoding,) = self.tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        token_ids = encoding.ids
        if not add_special_tokens:
            return token_ids
        add_bos = self.default_add_bos if add_bos is None else add_bos
        add_eos = self.default_add_eos if add_eos is None else add_eos
        if add_bos and not self.hf_adds_bos and self.bos_id is not None:
            token_ids.insert(0, self.bos_id)
        if add_eos and not self.hf_adds_eos and self.eos_id is not None:
            token_ids.append(self.eos_id)
        return token_ids

    def decode(self, token_ids: list[int], **options) -> str:
        return self.tokenizer.decode(token_ids, **options)

    def id_to_token(self, token_id: int) -> str | None:
        return self.tokenizer.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self.tokenizer.token_to_id(token)

    @property
    def special_tokens(self) -> list[str]:
        added = self.tokenizer.get_added_tokens_decoder()
        return [added[i].content for i in sorted(added) if added[i].special]

    def get_vocab(self) -> dict[str, int]:
        return self.tokenizer.get_vocab()

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.get_vocab_size()

    def get_vocab_size(self) -> int:
        return self.vocab_size


def build_hf_tokenizer(job_config: JobConfig) -> HuggingFaceTokenizer | BaseTokenizer:
    """Return the tokenizer in `model.hf_assets_path`; logs which tokens begin and end documents."""
    training = job_config.training
    tokenizer = HuggingFaceTokenizer(
        job_config.model.hf_assets_path, bos_token=training.bos_token, eos_token=training.eos_token
    )
    if tokenizer.eos_id is None:
        logger.warning(
            f"the tokenizer in {job_config.model.hf_assets_path} names no end-of-text token, so packed "
            "documents run together; set training.eos_token to one of its tokens (special tokens: "
            f"{', '.join(map(repr, tokenizer.special_tokens)) or 'none'})"
        )
    elif tokenizer.bos_id is not None and not tokenizer.hf_adds_bos:
        begin = f"begin with bos_token {tokenizer.bos_token!r}, which transformers does not add"
        if not tokenizer.begins_documents:
            begin = f"do not begin with bos_token {tokenizer.bos_token!r}"
        logger.info(f"documents of text {begin}, and end with {tokenizer.eos_token!r}")
    return tokenizer
