"""Converts chats, and prompt-completion pairs, to token ids and a mask of the tokens to train on.

The tokenizer's chat template renders the text; the ids [n] equal those of `apply_chat_template` of
`transformers`. The assistant's turns are trained; `chat_spans` finds them.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from torchtitan.data.chat_samples import check_chat, renamed
from torchtitan.data.chat_samples import load_chats as load_chats  # clients import it from here
from torchtitan.data.chat_spans import MARK_IT, Chat, Span
from torchtitan.data.chat_template import ChatTemplate
from torchtitan.data.open_document import Tokens
from torchtitan.data.tokenizer import HuggingFaceTokenizer
from torchtitan.tools.logging import logger, warn_once


class ChatEncoder:
    """Converts a sample to (ids [n] int32, trained [n] bool); trained tokens are labels of the loss.

    A sample has `messages`, a list of {role, content, ...}, and optionally `tools` (JSON schemas) and
    `chat_template_kwargs` (variables of the template); or it has `prompt` and `completion`, both lists
    of messages or both strings. Other keys, and keys whose value is None, are ignored. Trained tokens:

    - with `messages`: the text between {% generation %} marks. Without marks: each assistant turn after its
      header, including the control token that ends the turn or, if there is none, begins the next turn.
    - with `prompt` and `completion` as messages: the completion, including its final control token.
    - with `prompt` and `completion` as strings: the completion and an end-of-text id; no template is used.

    A token that straddles the boundary of a turn is trained, as in `transformers`.
    template: None refuses samples with messages. tool_template: for samples with tools.
    keys: see `renamed`.
    """

    def __init__(
        self,
        tokenizer: HuggingFaceTokenizer,
        template: ChatTemplate | None,
        tool_template: ChatTemplate | None = None,
        keys: Mapping[str, str] | None = None,
    ) -> None:
        self.keys = dict(keys or {})
        self._tokenizer, self._template = tokenizer, template
        self._tool_template = tool_template or template
        templates = [t for t in (template, self._tool_template) if t is not None]
        for each in {t.source: t for t in templates}.values():
            _check_template(each)
        self.key = " ".join(t.source for t in templates) + (f" {self.keys}" if keys else "")
        backend = tokenizer.tokenizer
        processor = backend.post_processor
        if processor and b'"trim_offsets":true' in processor.__getstate__():
            # This post-processor trims blanks from token offsets. Dropping it changes no ids.
            backend = type(backend).from_str(backend.to_str())
            backend.post_processor = None
        self._backend = backend

    @classmethod
    def of_tokenizer(
        cls, tokenizer: HuggingFaceTokenizer, path: str = "", keys: Mapping[str, str] | None = None
    ) -> "ChatEncoder":
        """Return an encoder with the template in the file `path`, or else in the tokenizer's folder."""
        plain, with_tools = (
            ChatTemplate.of_tokenizer(tokenizer, path=path, tools=x) for x in (False, True)
        )
        return cls(tokenizer, plain, with_tools, keys)

    def __call__(self, sample: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Encode a sample. Raises ValueError for a bad sample or template, and if no token is trained."""
        return self.encode(renamed(sample, self.keys))

    def encode(self, sample: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, trained) of a sample whose keys are already renamed; see `renamed`."""
        check_chat(sample)
        sample = {key: value for key, value in sample.items() if value is not None}
        if "messages" not in sample and isinstance(sample["prompt"], str):
            return self._encode_texts(sample["prompt"], sample["completion"])
        template = self._template if sample.get("tools") is None else self._tool_template
        if template is None:
            raise ValueError(
                f"the tokenizer in {self._tokenizer.tokenizer_path!r} has no chat template; set "
                "training.chat_template to a file with a Jinja template, or put a "
                "chat_template.jinja into the folder model.hf_assets_path"
            )
        chat = Chat(template, sample)
        text, spans = chat.text_and_spans()
        ids, trained = self._encode(text, spans)
        if not trained.any():
            raise ValueError(
                f"no token of the chat is trained: {template.name} writes nothing in the assistant's "
                f"turns, or its marks enclose other text; leave out the chat, or {MARK_IT}"
            )
        if trained.all():
            raise ValueError(
                f"every token of the chat would be trained, because {template.name} writes nothing outside "
                "of the assistant's turns; set training.chat_template to a file that writes a header"
            )
        _warn_of_texts(chat, text)
        return ids, trained

    def _encode_texts(self, prompt: str, completion: str) -> tuple[np.ndarray, np.ndarray]:
        text = prompt + completion
        ids, trained = self._encode(text, [(len(prompt), len(text))])
        tokenizer = self._tokenizer
        if tokenizer.bos_id is not None and (tokenizer.hf_adds_bos or tokenizer.default_add_bos):
            ids, trained = np.insert(ids, 0, tokenizer.bos_id), np.insert(trained, 0, False)
        is_ended = bool(completion) and ids[-1:].tolist() == [tokenizer.eos_id]
        if tokenizer.eos_id is not None and not is_ended:
            ids, trained = np.append(ids, tokenizer.eos_id), np.append(trained, True)
        if not trained.any():
            raise ValueError(
                "'completion' is empty and there is no end-of-text token; set training.eos_token"
            )
        return ids.astype(np.int32), trained

    def _encode(self, text: str, spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids [n], trained [n]) of a text; tokens with a character in a span are trained."""
        text.encode()  # raises UnicodeEncodeError for half of a surrogate pair
        encoding = self._backend.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.int32)
        trained = np.zeros(len(ids), dtype=bool)
        # Flattened first, because numpy reads a list of pairs four times as slowly.
        offsets = chain.from_iterable(encoding.offsets)
        begins, ends = np.fromiter(offsets, np.int64, 2 * len(ids)).reshape(-1, 2).T
        # searchsorted needs sorted offsets, but they decrease where tokens share a character or are empty.
        begins, ends = np.maximum.accumulate(begins), np.maximum.accumulate(ends)
        for begin, end in spans:
            if begin < end:
                first = np.searchsorted(ends, begin, side="right")
                trained[first : np.searchsorted(begins, end, side="left")] = True
        return ids, trained


def _warn_of_texts(chat: Chat, text: str) -> None:
    for arguments in chat.arguments():
        is_text = isinstance(arguments, str) and '"' in arguments
        if is_text and json.dumps(arguments) in text:
            warn_once(
                logger,
                f"{chat.template.name} writes a tool call's 'arguments', which is a string, as a quoted "
                "JSON string; if the model should write an object, give 'arguments' as an object",
            )
    for role, text in chat.texts_of_others():
        if token := chat.template.control_token_in(text):
            warn_once(
                logger,
                f"a message of the role {role!r} has {token!r} in its text, which is encoded as that "
                "control token, as transformers does; remove it if this role must not write control tokens",
            )
            break


class ChatTokens:
    """Converts a sample to a document of at most `seq_len` tokens.

    too_long: "error" raises ValueError for a longer chat, "cut" truncates it, "skip" returns no tokens. A
        chat whose trained tokens would all be cut off is skipped too.
    key: identifies the settings that change the tokens, except the tokenizer. template: the encoder's `key`.
    """

    unit, what, limit = "chat", "the chat", "training.seq_len"  # words for error messages

    def __init__(self, encoder: ChatEncoder, seq_len: int, too_long: str) -> None:
        self.encoder, self.seq_len, self._too_long = encoder, seq_len, too_long
        self.key = f"{seq_len} {too_long} {encoder.key}"
        self.template = encoder.key

    def __call__(self, sample: Mapping[str, Any]) -> Tokens:
        return self._read(sample)[0]

    def count(self, sample: Mapping[str, Any]) -> tuple[int, int, int]:
        """Return (tokens, trained tokens, tokens before truncation)."""
        fitted, num_tokens = self._read(sample)
        return len(fitted.ids), int(fitted.trained.sum()), num_tokens

    def _read(self, sample: Mapping[str, Any]) -> tuple[Tokens, int]:
        ids, trained = self.encoder(sample)
        return self._fitted(ids, trained), len(ids)

    def _fitted(self, ids: np.ndarray, trained: np.ndarray) -> Tokens:
        if len(ids) > self.seq_len and self._too_long == "error":
            raise ValueError(
                f"{self.what} has {len(ids)} tokens, and {self.limit} is {self.seq_len}; raise seq_len, "
                "or set training.too_long to 'cut' or 'skip'"
            )
        is_skipped = len(ids) > self.seq_len and self._too_long == "skip"
        n = 0 if is_skipped or not trained[: self.seq_len].any() else self.seq_len
        return Tokens(ids[:n], trained[:n])


def _check_template(template: ChatTemplate) -> None:
    """Raise ValueError for marks around another role's text; log which token ends a trained turn."""
    question, answer = "what the user asked", "what the model wrote"
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    try:
        text, spans = Chat(template, {"messages": turns * 2}).text_and_spans()
    except ValueError:  # the template cannot render this chat
        return
    marked = "".join(text[begin:end] for begin, end in spans)
    if template.marks_generation and (question in marked or answer not in marked):
        raise ValueError(
            f"{template.name} has its {{% generation %}} marks around the wrong text ({marked!r:.80}); "
            "put them around the assistant's text only"
        )
    tokens = {template.token_at_end(text[begin:end]) for begin, end in spans}
    if None in tokens:
        warn_once(
            logger,
            f"{template.name}: no token that ends the assistant's turn is trained, so the model does not "
            "learn to stop; set training.chat_template to a copy with {{ eos_token }} after that turn",
        )
    else:
        ends = " or ".join(sorted(repr(token) for token in tokens))
        logger.info(f"{template.name}: a trained turn of the assistant ends with {ends}")
