"""Chat messages, rendered as text by the model's Jinja template.

Templates come from downloaded files, so `rendering` runs them in another process.
"""

import json
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan.data.tokenizer import SPECIAL_TOKEN_KEYS, HuggingFaceTokenizer
from torchtitan.tools import bounded
from torchtitan.tools.errors import RunError
from torchtitan.tools.files import read_text

Message = Mapping[str, Any]
"""`role`, `content` and any other field that a template reads."""
Tools = Sequence[Mapping[str, Any]] | None
"""JSON schemas of functions."""
Variables = Mapping[str, Any] | None

SEAM = "\ufdd0"
"""A mark that splits a text for the tokenizer: the parts on both sides are tokenized separately. This
character is a Unicode noncharacter, so no ordinary text contains it."""

# Control tokens that end a part of a reply, not the whole reply.
_WITHIN_TURNS = ("</think>", "</tool_call>", "</seed:think>", "<channel|>", "<tool_call|>")
# Placeholders for a model's reply; no template changes their text.
_WRITTEN = "what the model wrote"
_THOUGHT = "<think>\nwhat it thought\n</think>\n\n" + _WRITTEN


class CannotRenderError(ValueError):
    """A template cannot render messages. reason: the error, without template name and messages."""

    def __init__(self, name: str, messages: Sequence[Message], reason: str) -> None:
        super().__init__(name, messages, reason)  # unpickling passes these arguments
        self.reason = " ".join(reason.split())

    def __str__(self) -> str:
        name, messages, reason = self.args
        return f"{name} cannot render {reprlib.repr(messages)}: {reason}"


class ChatTemplate:
    """Renders messages, as `apply_chat_template` of Hugging Face's tokenizers does.

    source: the template text; ValueError if it is not valid Jinja. name: the template's name in errors.
    variables: template variables such as bos_token, besides those that `render` sets.
    control_tokens: texts of tokens that the template may produce, but a reply must not.
    """

    def __init__(
        self,
        source: str,
        name: str,
        variables: Variables = None,
        control_tokens: Iterable[str] = (),
    ):
        self.source, self.name, self._variables = source, name, dict(variables or {})
        self._control_tokens = tuple(control_tokens)
        self._ends = tuple(t for t in self._control_tokens if t not in _WITHIN_TURNS)
        self._token = re.compile("|".join(map(re.escape, self._control_tokens)) or "(?!)")
        try:
            self.marks_generation = bounded.call(
                "torchtitan.data.rendering:marks_generation", source
            )
        except (ValueError, bounded.OutOfBoundsError) as error:
            raise ValueError(f"{name} is not a Jinja template: {error}; correct it") from error

    @classmethod
    def of_tokenizer(
        cls,
        tokenizer: HuggingFaceTokenizer,
        variables: Variables = None,
        *,
        path: str = "",
        tools: bool = False,
    ) -> "ChatTemplate | None":
        """Return the template of a model's folder; None if it has no template.

        path: a file that replaces the folder's template. tools: take the folder's separate template for
            chats with tools, if there is one. Raises ValueError for a template that cannot be read.
        """
        config, folder = tokenizer.config or {}, Path(tokenizer.tokenizer_path)
        named = {key: config[key] for key in SPECIAL_TOKEN_KEYS if config.get(key) is not None}
        known = {k: t.get("content") if isinstance(t, dict) else t for k, t in named.items()}
        files = [folder / "additional_chat_templates" / "tool_use.jinja"] * tools
        files = [Path(path)] if path else [*files, folder / "chat_template.jinja"]
        if file := next((file for file in files if path or file.exists()), None):
            try:
                source, name = read_text(file), str(file)
            except (OSError, ValueError) as error:
                raise ValueError(f"cannot read the chat template {str(file)!r}: {error}") from error
        else:
            source, name = config.get("chat_template"), f"chat_template of {folder}"
            if isinstance(source, list):  # a list of templates with names
                by_name = {entry.get("name"): entry.get("template") for entry in source}
                source = tools and by_name.get("tool_use") or by_name.get("default")
        if source is None:
            return None
        if not isinstance(source, str):
            raise ValueError(f"{name} must be a string, got a {type(source).__name__}; correct it")
        added = tokenizer.tokenizer.get_added_tokens_decoder().values()
        # A token that is not special, such as <tool_call>, is a control token only if the template has it.
        control_tokens = [
            token.content
            for token in added
            if token.special or (token.content in source and not token.content.isspace())
        ]
        return cls(source, name, known | dict(variables or {}), control_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools = None,
        add_generation_prompt: bool = True,
        variables: Variables = None,
    ) -> str:
        """Return the messages as text, by default with the header of the model's next message.

        Raises ValueError if the template cannot render them, RunError if time or memory run out.
        """
        values = self._values(messages, tools, variables)
        values["add_generation_prompt"] = add_generation_prompt
        try:
            return bounded.call("torchtitan.data.rendering:render", self.source, values)
        except bounded.OutOfBoundsError as error:
            raise RunError(
                f"{self.name} cannot render {reprlib.repr(messages)}: {error}; correct the template, or "
                "name another file"
            ) from error
        except OSError:  # no process could be started
            raise
        except Exception as error:  # pickle raises errors of several types
            raise CannotRenderError(self.name, messages, str(error)) from None

    def _values(
        self, messages: Sequence[Message], tools: Tools, variables: Variables
    ) -> dict[str, Any]:
        chat = {"messages": messages, "tools": tools, "documents": None}
        return {**self._variables, **(variables or {}), **chat}

    def render_beginnings(
        self,
        messages: Sequence[Message],
        beginnings: Sequence[tuple[int, bool]],
        *,
        tools: Tools = None,
        variables: Variables = None,
    ) -> dict[tuple[int, bool], str]:
        """Return {(n, add_generation_prompt): text of the first n messages}, rendered in one call.

        The messages are sent to the rendering process only once. Beginnings that cannot be rendered are
        left out; `render` raises their error.
        """
        values = self._values(messages, tools, variables)
        try:
            texts = bounded.call(
                "torchtitan.data.rendering:render_beginnings", self.source, values, beginnings
            )
        except Exception:  # pickle raises errors of several types
            return {}
        return {key: text for key, text in zip(beginnings, texts, strict=True) if text is not None}

    def render_with_spans(
        self, messages: Sequence[Message], *, tools: Tools = None, variables: Variables = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return (text, spans): the character span [begin, end) of each {% generation %} block.

        Raises ValueError as `render` does, and if the template changes the text of a block after writing it.
        """
        options: Any = {"tools": tools, "add_generation_prompt": False}
        text = self.render(messages, variables=variables, **options)
        unused = (mark for mark in map(chr, range(ord(SEAM) + 1, 2**20)) if mark not in text)
        begin, end = next(unused), next(unused)
        marks = {"_begin_generation": begin, "_end_generation": end}
        marked = self.render(messages, variables={**(variables or {}), **marks}, **options)
        spans, begins, plain = [], [], ""
        for part in re.split(f"([{begin}{end}])", marked):
            if part == begin:
                begins.append(len(plain))
            elif part == end and begins:
                spans.append((begins.pop(), len(plain)))
            else:
                plain += part
        if plain != text:
            raise ValueError(
                f"{self.name} changes the text of a {{% generation %}} block after writing the block; "
                "change the text first, and write the changed text in the block"
            )
        return text, spans

    def control_token_in(self, text: str) -> str | None:
        found = self._token.search(text)
        return found and found[0]

    def end_of_turn(self, text: str) -> int:
        """Return the length of a text, not counting blanks after a final turn-ending token."""
        end = text.rstrip()
        return len(end if end.endswith(self._ends) else text)

    def end_of_last_token(self, text: str) -> int:
        """Return the index after the last control token of a text; 0 if it has none."""
        return max((found.end() for found in self._token.finditer(text)), default=0)

    def token_at_end(self, text: str) -> str | None:
        """Return the turn-ending token at the end of a text, ignoring trailing blanks, or None."""
        ends = (token for token in self._ends if text.rstrip().endswith(token))
        return max(ends, key=len, default=None)

    def leading_token(self, rest: str) -> str:
        """Return `rest` through its first control token; "" if text other than blanks precedes the token."""
        found = self._token.match(rest, len(rest) - len(rest.lstrip()))
        return rest[: found.end()] if found else ""

    def continuation(
        self,
        messages: Sequence[Message],
        replies: Sequence[Message],
        *,
        stop: str = "",
        tools: Tools = None,
    ) -> str:
        """Return the text between the model's answer to `messages` and its next answer.

        replies: untrusted messages after the answer; a `SEAM` splits each control token in them.
        stop: text at the end of the model's answer that the template would repeat.
        """
        written = _WRITTEN
        while written in json.dumps(replies, default=str):  # the placeholder must be unique
            written += "!"
        answer = {"role": "assistant", "content": written}
        text = self.render([*messages, answer, *self._cut_tokens(list(replies))], tools=tools)
        return text.rpartition(written)[2].removeprefix(stop)

    def _cut_tokens(self, value: Any) -> Any:
        if isinstance(value, str):
            token_begins = f"(?={self._token.pattern})(.)"  # lookahead: tokens may overlap
            return re.sub(token_begins, rf"\1{SEAM}", value.replace(SEAM, ""), flags=re.DOTALL)
        if isinstance(value, Mapping):
            return {self._cut_tokens(key): self._cut_tokens(v) for key, v in value.items()}
        return list(map(self._cut_tokens, value)) if isinstance(value, list | tuple) else value

    def check_turns(
        self, messages: Sequence[Message], reply: Message, *, tools: Tools = None
    ) -> None:
        """Raise ValueError if the template renders earlier turns differently once a reply follows."""
        for written in (_WRITTEN, _THOUGHT):
            answer = {"role": "assistant", "content": written}
            start = self.render(messages, tools=tools)
            once = self.render([*messages, answer, reply], tools=tools)
            twice = self.render([*messages, answer, reply, answer, reply], tools=tools)
            after = once.removeprefix(start + written)
            if once == after or twice != start + (written + after) * 2:
                got = once[max(0, len(start) - 80) : len(start) + len(written)]
                raise ValueError(
                    f"{self.name} writes the turn {written!r} differently once a message of the role "
                    f"{reply['role']!r} follows ({got!r} in place of {start[-80:] + written!r}); set "
                    "rl.task.chat_template to a file with a template that leaves earlier turns unchanged"
                )
