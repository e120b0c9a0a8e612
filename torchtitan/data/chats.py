"""Converts chats, and prompt-completion pairs, to token ids and a mask of the tokens to train on.

The tokenizer's chat template renders the text; the ids [n] equal those of `apply_chat_template` of
`transformers`. The assistant's turns are trained. They are found by the template's {% generation %}
marks or, without marks, by rendering the chat up to the start and the end of each turn. A chat is
refused if its turns cannot be found in either way.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from torchtitan.config.checks.common import guess
from torchtitan.data.chat_template import CannotRenderError, ChatTemplate, Message, text_of
from torchtitan.data.local_files import SampleRule, load_local_documents
from torchtitan.data.open_document import Tokens
from torchtitan.data.tokenizer import HuggingFaceTokenizer
from torchtitan.tools.logging import logger, warn_once

_RESULT_ROLES = ("tool", "function", "ipython")
ROLES = ("system", "developer", "user", "assistant", *_RESULT_ROLES)
# Keys of a message that hold the model's reasoning; most templates read the first key.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_IN_PLACE_OF_CONTENT = {"tool_calls", *_REASONING_KEYS}
# Keys by which other programs leave a message out of the loss (value 0 or false).
_TRAINING_KEYS = ("weight", "train", "training", "loss", "loss_mask")

Span = tuple[int, int]  # the characters [begin, end) of a text


class ChatEncoder:
    """Converts a sample to (ids [n] int32, trained [n] bool); trained tokens are labels of the loss.

    A sample has `messages`, a list of {role, content, ...}, and optionally `tools` (JSON schemas) and
    `chat_template_kwargs` (variables of the template); or it has `prompt` and `completion`, both lists
    of messages or both texts. Other keys, and keys whose value is None, are ignored. Trained tokens:

    - with `messages`: the text between {% generation %} marks. Without marks: each assistant turn, from
      behind its header through the control token that ends the turn, or that begins the next turn.
    - with `prompt` and `completion` as messages: the completion, through its final control token.
    - with `prompt` and `completion` as texts: the completion and an end-of-text id, without a template.

    A token that straddles the boundary of a turn is trained, as in `transformers`.
    template: None if the folder has none; then chats are refused. tool_template: for samples with tools.
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
        """Raises ValueError for a bad sample or template, and if the trained tokens are unknown or none."""
        return self.encode(renamed(sample, self.keys))

    def encode(self, sample: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Encode a sample whose keys are renamed already."""
        if problem := _problem_of(sample):
            raise ValueError(problem)
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
        chat = _Chat(template, sample)
        text, spans = chat.text_and_spans()
        ids, trained = self._encode(text, spans)
        if not trained.any():
            raise ValueError(
                f"no token of the chat is trained: {template.name} writes nothing in the assistant's "
                f"turns, or has its marks elsewhere; leave out the chat, or {_MARK_IT}"
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
        offsets = chain.from_iterable(encoding.offsets)  # numpy reads pairs four times slower
        begins, ends = np.fromiter(offsets, np.int64, 2 * len(ids)).reshape(-1, 2).T
        # Sorted offsets for searchsorted: tokens may share a character or have an empty span.
        begins, ends = np.maximum.accumulate(begins), np.maximum.accumulate(ends)
        for begin, end in spans:
            if begin < end:
                first = np.searchsorted(ends, begin, side="right")
                trained[first : np.searchsorted(begins, end, side="left")] = True
        return ids, trained


def _warn_of_texts(chat: "_Chat", text: str) -> None:
    for arguments in chat.arguments():
        is_text = isinstance(arguments, str) and '"' in arguments
        if is_text and json.dumps(arguments) in text:
            warn_once(
                logger,
                f"{chat.template.name} writes a tool call's 'arguments', which is a text, as a quoted "
                "JSON string; if the model should write an object, give 'arguments' as an object",
            )
    for role, text in chat.texts_of_others():
        if token := chat.template.control_token_in(text):
            warn_once(
                logger,
                f"a message of the role {role!r} has {token!r} in its text, which is encoded as that "
                "control token, as transformers does; change texts of people who must not end a turn",
            )
            break


class ChatTokens:
    """Converts a sample to a document of at most `seq_len` tokens.

    too_long: "error" raises ValueError for a longer chat, "cut" truncates it, "skip" returns no tokens. A
        chat with no trained token before the truncation is skipped as well.
    key: identifies all settings but the tokenizer that the tokens depend on. template: the encoder's key.
    """

    unit, what, limit = "chat", "the chat", "training.seq_len"  # for messages

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
                f"{self.what} has {len(ids)} tokens, and {self.limit} is {self.seq_len}; raise it, or "
                "set training.too_long to 'cut' or 'skip'"
            )
        is_skipped = len(ids) > self.seq_len and self._too_long == "skip"
        n = 0 if is_skipped or not trained[: self.seq_len].any() else self.seq_len
        return Tokens(ids[:n], trained[:n])


class _Chat:
    """The messages of a sample, with the template that renders them."""

    def __init__(self, template: ChatTemplate, sample: Mapping[str, Any]) -> None:
        self.template = template
        tools = sample.get("tools")
        if isinstance(tools, str):  # some file formats can only hold JSON as a string
            with contextlib.suppress(ValueError, RecursionError):
                tools = json.loads(tools)
        if tools is not None and not _is_list_of(dict, tools):
            raise ValueError(
                f"'tools' must be a list of JSON schemas, got {tools!r:.80}; correct it"
            )
        variables = sample.get("chat_template_kwargs", {})
        if not isinstance(variables, dict):
            raise ValueError(
                f"'chat_template_kwargs' must be an object, got {variables!r:.80}; correct it"
            )
        self._options: Any = {"tools": tools, "variables": variables}
        # (n, whether the assistant's header follows) -> the text of the first n messages
        self._beginnings: dict[tuple[int, bool], str | CannotRenderError] = {}
        self._num_prompt = 0  # number of messages in the prompt; 0 for a sample with `messages`
        if "messages" not in sample:
            self.messages = _checked_messages(sample["prompt"], "prompt")
            self._num_prompt = len(self.messages)
            self.messages += _checked_messages(sample["completion"], "completion")
        else:
            self.messages = _checked_messages(sample["messages"], "messages")
            if not any(message["role"] == "assistant" for message in self.messages):
                raise ValueError("the chat has no turn of the role 'assistant'; leave it out")
        self._join_parts()

    def arguments(self) -> Iterator[Any]:
        for message in self.messages:
            for call in message.get("tool_calls") or []:
                if isinstance(call, dict):
                    yield (call.get("function") or call).get("arguments")

    def texts_of_others(self) -> Iterator[tuple[str, str]]:
        for message in self.messages:
            content = message.get("content")
            for part in content if isinstance(content, list) else [{"text": content}]:
                if message["role"] != "assistant" and isinstance(part, dict):
                    if isinstance(text := part.get("text"), str):
                        yield message["role"], text

    def text_and_spans(self) -> tuple[str, list[Span]]:
        """Return the text of the chat, and the character spans to train on."""
        n, n_prompt = len(self.messages), self._num_prompt
        turns = [i for i in range(n_prompt, n) if self.messages[i]["role"] == "assistant"]
        try:
            if self.template.marks_generation:
                text, spans = self.template.render_with_spans(self.messages, **self._options)
            else:
                self._render_beginnings(turns)
                text = text_of(self._beginnings[n, False])
        except CannotRenderError as error:
            reason = error.reason
            remedy = "correct the chat, or set training.chat_template to a file"
            if "dict" in reason and any(isinstance(x, dict) for x in self.arguments()):
                remedy = "the template joins a tool call's 'arguments' to a text: give them as a text of JSON"
            if "strftime_now" in reason:
                remedy = "set training.chat_template to a copy of the template with a fixed date"
            raise ValueError(
                f"{self.template.name} cannot render the chat: {reason}; {remedy}"
            ) from None
        if n_prompt:
            if not all(map(self._is_trained, range(n_prompt, n))):
                raise ValueError(
                    "a message of the completion is left out of the loss; write the sample with 'messages'"
                )
            return text, [self._span_of_completion(text)]
        is_trained = [self._is_trained(turn) for turn in turns]
        if not self.template.marks_generation:
            spans = [self._span_of_turn(text, turn) for turn in turns]
            text, spans = self._with_stop_tokens(text, spans, turns)
        elif not all(is_trained) and len(spans) != len(turns):
            raise ValueError(
                f"{self.template.name} has {len(spans)} marked parts for {len(turns)} turns of the "
                "assistant, so it is unknown which of them is left out of the loss; leave out the chat"
            )
        if len(spans) == len(turns):
            spans = [span for span, trained in zip(spans, is_trained, strict=True) if trained]
        return text, spans

    def _is_trained(self, turn: int) -> bool:
        message = self.messages[turn]
        keys = [key for key in _TRAINING_KEYS if key in message]
        for key in keys:
            if message[key] not in (0, 1):
                raise ValueError(
                    f"message {turn + 1} has {key!r} = {message[key]!r}, and only 0 and 1 (false and true) "
                    "are known; correct it"
                )
        return all(message[key] for key in keys)

    def _with_stop_tokens(
        self, text: str, spans: list[Span], turns: list[int]
    ) -> tuple[str, list[Span]]:
        """Extend each turn without a closing token by the next turn's first token, as its stop token."""
        for i, ((begin, end), turn) in enumerate(zip(spans, turns, strict=True)):
            rest = text[end:]
            if self.template.token_at_end(text[begin:end]):
                continue
            if turn + 1 == len(self.messages):  # the user's next turn
                rest = ""
                with contextlib.suppress(ValueError):  # a template may refuse the turn
                    rest = self._rest_before_question(text, turn)
            elif self.messages[turn + 1]["role"] == "assistant":
                continue
            stop = self.template.leading_token(rest)
            spans[i] = begin, end + len(stop)
            text = text[:end] + stop if turn + 1 == len(self.messages) and stop else text
        return text, spans

    def _span_of_completion(self, text: str) -> Span:
        is_reply = self.messages[self._num_prompt]["role"] == "assistant"
        before = _header_in(text, self._beginning(self._num_prompt, header=is_reply))
        if difference := _difference(text, before):
            raise ValueError(
                f"{self.template.name} renders the prompt differently when the completion follows "
                f"({difference}); write the sample as 'messages', and {_MARK_IT}"
            )
        return len(before), self.template.end_of_turn(text)

    def _join_parts(self) -> None:
        """Replace a content [{"text": x}] by x if the template cannot render lists."""
        lists = [m["content"] for m in self.messages if _is_list_of(dict, m.get("content"))]
        lists = [parts for parts in lists if parts and all("text" in part for part in parts)]
        if not lists:
            return
        try:
            text = self.template.render(self.messages, add_generation_prompt=False, **self._options)
        except ValueError:
            text = "".join(map(str, lists))
        if not any(str(parts) in text for parts in lists):
            return
        if any(len(parts) > 1 for parts in lists):
            raise ValueError(
                f"{self.template.name} writes texts, and a 'content' is a list of several parts; join them"
            )
        self.messages = [
            {**m, "content": m["content"][0]["text"]} if m.get("content") in lists else m
            for m in self.messages
        ]

    def _render_beginnings(self, turns: list[int]) -> None:
        """Render the chat, its parts before and through each of these turns, and one more user turn."""
        n = len(self.messages)
        of_turns = [key for i in turns for key in ((i, True), (i + 1, False))]
        keys = [(n, False), *of_turns, (n + 1, False)]
        messages = [*self.messages, _QUESTION]
        variables = self._options["variables"]
        calls = [(messages[:i], variables | {"add_generation_prompt": x}) for i, x in keys]
        results = self.template.render_each(calls, tools=self._options["tools"])
        self._beginnings = dict(zip(keys, results, strict=True))

    def _beginning(self, number: int, *, header: bool = False, of: Any = None) -> str:
        """Return the text of the first `number` messages, or of those in `of`. header: add the next turn's."""
        try:
            if of is None and (number, header) in self._beginnings:
                return text_of(self._beginnings[number, header])
            messages = (of or self.messages)[:number]
            return self.template.render(messages, add_generation_prompt=header, **self._options)
        except CannotRenderError as error:
            raise ValueError(
                f"{self.template.name} has no {{% generation %}} marks, and cannot render the chat through "
                f"message {number} ({error.reason}), so the assistant's tokens are unknown; {_MARK_IT}"
            ) from None

    def _span_of_turn(self, text: str, turn: int) -> Span:
        """Return the span of an assistant's turn, from behind its header to its closing token.

        Two renderings should be prefixes of the chat's text: the messages before the turn with the turn's
        header, and the messages through the turn. The second is no prefix if the template drops reasoning
        from earlier turns. Then the turn is rendered with another content to find the text after its content,
        in the chat and as the last turn; both must begin with the same closing tokens. Raises ValueError if
        the span cannot be found.
        """
        before = _header_in(text, self._beginning(turn, header=True))
        through = self._beginning(turn + 1)
        name = f"the assistant's turn in message {turn + 1}"
        if difference := _difference(text, before):
            name = f"the header of {name}"
        elif text.startswith(through) and len(before) <= len(through):
            return len(before), self.template.end_of_turn(through)
        else:
            difference = _difference(text, through) or "it is shorter than its header"
            closing = self._behind(turn, through, self.messages[: turn + 1])
            rest = self._behind(turn, text, self.messages)
            length = self._common_closing(closing, rest)
            if length is not None and len(before) <= (end := len(text) - len(rest) + length):
                return len(before), end
        raise ValueError(
            f"{self.template.name} has no {{% generation %}} marks, and renders {name} differently when "
            f"the chat goes on ({difference}), so the assistant's tokens are unknown; {_MARK_IT}"
        )

    def _behind(self, turn: int, text: str, messages: list[dict[str, Any]]) -> str:
        """Return what is behind a turn's content in the messages' text: the same with another content."""
        message = messages[turn]  # its replacement must differ, also in the last character
        ending = "." if str(message.get("content")).rstrip().endswith("!") else "!"
        changed = {**message, "content": f"what the model wrote{ending}"}
        changed = [*messages[:turn], changed, *messages[turn + 1 :]]
        return _common_end(text, self._beginning(len(changed), of=changed))

    def _rest_before_question(self, text: str, turn: int) -> str:
        """Return what follows the chat's text, whose last turn this is, if the user asks something next."""
        longer = self._beginning(len(self.messages) + 1)
        if longer.startswith(text):
            return longer[len(text) :]
        # The template drops reasoning, or what ends a chat.
        behind = self._behind(turn, text, self.messages)
        rest = self._behind(turn, longer, [*self.messages, _QUESTION])
        return rest.removeprefix(behind) if rest.startswith(behind) else ""

    def _common_closing(self, closing: str, rest: str) -> int | None:
        """Return the length of what ends a turn in both texts; None if they end it in different ways.

        closing: the text behind the turn's content if the chat ends there. rest: if the chat goes on.
        """
        if closing and rest.startswith(closing):
            return self.template.end_of_turn(closing)
        if not closing:  # only the next turn's header ends a turn
            return 0 if self.template.leading_token(rest) else None
        # A token that ends the chat may stand between the turn's closing token and the end.
        common = os.path.commonprefix([closing, rest])
        cut = self.template.end_of_last_token(common)
        leftovers = [text[cut:].lstrip() for text in (closing, rest)]
        is_next_token = all(self.template.leading_token(text) for text in leftovers)
        return cut if cut and is_next_token else None


_QUESTION = {"role": "user", "content": "what the user asks next"}
_MARK_IT = (
    "set training.chat_template to a copy of the template that has the assistant's text between "
    "{% generation %} and {% endgeneration %}"
)


# What a header may end with in a prompt, if thinking is on or off, and lack in a chat.
_OPENED_THOUGHT = re.compile(
    r"(<think>\s*(</think>\s*)?|</think>|<\|channel>thought\n<channel\|>)$"
)


def _header_in(text: str, before: str) -> str:
    """Return `before`, without the beginning of a thought at its end if only then `text` begins with it."""
    return before if text.startswith(before) else _OPENED_THOUGHT.sub("", before)


def _difference(text: str, prefix: str) -> str:
    """Describe, for messages, where `text` differs from `prefix`; "" if `text` begins with `prefix`."""
    if text.startswith(prefix):
        return ""
    same = len(os.path.commonprefix([text, prefix]))
    here = slice(max(0, same - 20), same + 40)
    return f"{text[here]!r} in place of {prefix[here]!r}"


def _common_end(text: str, other: str) -> str:
    length = len(os.path.commonprefix([text[::-1], other[::-1]]))
    return text[len(text) - length :]


def _check_template(template: ChatTemplate) -> None:
    """Raise ValueError for marks around another role's text; log which token ends a trained turn."""
    question, answer = "what the user asked", "what the model wrote"
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    try:
        text, spans = _Chat(template, {"messages": turns * 2}).text_and_spans()
    except ValueError:  # the template is made for other chats
        return
    marked = "".join(text[begin:end] for begin, end in spans)
    if template.marks_generation and (question in marked or answer not in marked):
        raise ValueError(
            f"{template.name} has its {{% generation %}} marks around the wrong text ({marked!r:.80}); "
            "have them enclose the assistant's text, and no other role's"
        )
    tokens = {template.token_at_end(text[begin:end]) for begin, end in spans}
    if None in tokens:
        warn_once(
            logger,
            f"{template.name}: no token that ends the assistant's turn is trained, so the model does not "
            "learn to stop; set training.chat_template to a copy with {{ eos_token }} behind its text",
        )
    else:
        ends = " or ".join(sorted(repr(token) for token in tokens))
        logger.info(f"{template.name}: a trained turn of the assistant ends with {ends}")


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, kind) for entry in value)


def _checked_messages(messages: Any, key: str) -> list[Message]:
    """Return messages without None values; reasoning gets the keys `thinking` and `reasoning_content`."""
    if not _is_list_of(dict, messages) or not messages:
        raise ValueError(
            f"{key!r} must be a list of objects with 'role' and 'content', got {messages!r:.80}; "
            "correct it, or leave out the chat"
        )
    checked: list[Message] = []
    for number, message in enumerate(messages, 1):
        message = {name: value for name, value in message.items() if value is not None}
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            got = f"'role' {role!r}{guess(role, ROLES)}" if role else f"the keys {sorted(message)}"
            raise ValueError(
                f"message {number} of {key!r} must have a 'role' of {', '.join(ROLES)}, got {got}; convert "
                "the chat, or name your keys and roles in training.chat_keys"
            )
        parts = content if _is_list_of(dict, content) else [{"text": content}]
        is_good = all(isinstance(part.get("text"), str) for part in parts)
        is_good |= role in _RESULT_ROLES and isinstance(content, dict | list)  # written as JSON
        is_good |= (
            role == "assistant" and content is None and bool(_IN_PLACE_OF_CONTENT & {*message})
        )
        if not is_good:
            raise ValueError(
                f"message {number} of {key!r} must have a text as its 'content' (role {role!r}), got "
                f"{content!r:.80}; give it a text, or leave out the chat"
            )
        thoughts = [message[name] for name in _REASONING_KEYS if name in message]
        if thoughts:
            message = {"thinking": thoughts[0], **message, "reasoning_content": thoughts[0]}
        checked.append(message)
    return checked


def _problem_of(sample: Any, keys: Mapping[str, str] | None = None) -> str | None:
    sample = renamed(sample, keys)
    if not isinstance(sample, Mapping):
        return f"need an object with 'messages', got {type(sample).__name__}; correct it"
    if sample.get("messages") is not None:
        return None
    prompt, completion = sample.get("prompt"), sample.get("completion")
    if prompt is None or completion is None:
        return (
            "need an object with 'messages', or with 'prompt' and 'completion', got the keys "
            f"{sorted(sample)}; convert the data, or name yours in training.chat_keys"
        )
    if isinstance(prompt, str) != isinstance(completion, str):
        return (
            "'prompt' and 'completion' must both be texts or both be lists of messages; convert one"
        )
    return None


_COLUMNS = ("messages", "prompt", "completion", "tools", "chat_template_kwargs")
REFERENCE_KEYS = ("ref_chosen_logps", "ref_rejected_logps")  # TRL's names
PAIR_COLUMNS = ("prompt", "chosen", "rejected", *_COLUMNS[3:], *REFERENCE_KEYS)
_MESSAGE_KEYS = ("role", "content", "tool_calls", *_REASONING_KEYS)


def parse_keys(entries: Sequence[str]) -> dict[str, str]:
    """Return `training.chat_keys` as {name in the files: our name}; ValueError for an unknown name."""
    known = (*dict.fromkeys(_COLUMNS + PAIR_COLUMNS), *_MESSAGE_KEYS, *ROLES)
    keys = dict(entry.partition("=")[::2] for entry in entries)
    for theirs, ours in keys.items():
        if not theirs or ours not in known:
            raise ValueError(
                f"training.chat_keys must be a list of 'name in the files=name here', got "
                f"{theirs + '=' + ours!r}{guess(ours, known)}; names here are {', '.join(known)}"
            )
    return keys


def renamed(sample: Any, keys: Mapping[str, str] | None) -> Any:
    """Return a sample with its keys, its messages' keys and its roles renamed to ours.

    keys: name in the files -> our name. If our name is a role, the value is the text of a turn (texts of
        one role are joined by a blank line) before `messages`, or before the `prompt` of a pair, which
        must be lists of messages then; else ValueError.
    """
    if not keys or not isinstance(sample, Mapping):
        return sample
    result = {key: value for key, value in sample.items() if key not in keys}
    turns: dict[str, list[str]] = {}
    for theirs, ours in keys.items():
        if ours in ROLES and isinstance(sample.get(theirs), str) and sample[theirs]:
            turns.setdefault(ours, []).append(sample[theirs])
        elif ours not in ROLES and sample.get(theirs) is not None:
            result[ours] = sample[theirs]
    for name in ("messages", "prompt", "completion", "chosen", "rejected"):
        for i, message in enumerate(result[name] if _is_list_of(dict, result.get(name)) else ()):
            message = {keys.get(key, key): value for key, value in message.items()}
            if "role" in message:
                message["role"] = keys.get(str(message["role"]), message["role"])
            result[name] = [*result[name][:i], message, *result[name][i + 1 :]]
    if turns:
        first = [{"role": role, "content": "\n\n".join(texts)} for role, texts in turns.items()]
        name = "prompt" if "chosen" in result else "messages"
        rest = result.get(name) or []
        if not isinstance(rest, list):
            raise ValueError(
                f"training.chat_keys puts the turns of {', '.join(turns)} before {name!r}, which must be a list "
                f"of messages then, got {rest!r:.80}; leave out one of the two, or name the role of "
                f'{name!r} too, as in "{name}=user"'
            )
        result[name] = first + rest
    return result


def load_chats(path: str, keys: Mapping[str, str] | None = None) -> Any:
    """Return the samples in local files, checked by the rules of `ChatEncoder`. keys: see `renamed`."""
    example = '{"messages": [{"role": "user", "content": "..."}, ...]}'
    rule = SampleRule(example, (*_COLUMNS, *(keys or ())), partial(_problem_of, keys=keys))
    return load_local_documents(path, rule)
