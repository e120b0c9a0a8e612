"""Finds the assistant's turns in a rendered chat: the character spans to train on.

The template's {% generation %} marks give the spans. Without marks, the chat is rendered up to the start
and up to the end of each turn. A chat whose turns cannot be found is refused.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torchtitan.data.chat_samples import checked_messages, is_list_of
from torchtitan.data.chat_template import CannotRenderError, ChatTemplate

# Keys of a message that other programs set to 0 or false to leave the message out of the loss.
_TRAINING_KEYS = ("weight", "train", "training", "loss", "loss_mask")
_QUESTION = {"role": "user", "content": "what the user asks next"}
MARK_IT = (
    "set training.chat_template to a copy of the template that has the assistant's text between "
    "{% generation %} and {% endgeneration %}"
)

Span = tuple[int, int]  # the characters [begin, end) of a text


class Chat:
    """The messages of a sample, with the template that renders them."""

    def __init__(self, template: ChatTemplate, sample: Mapping[str, Any]) -> None:
        self.template = template
        tools = sample.get("tools")
        if isinstance(tools, str):  # some file formats can only hold JSON as a string
            with contextlib.suppress(ValueError, RecursionError):
                tools = json.loads(tools)
        if tools is not None and not is_list_of(dict, tools):
            raise ValueError(
                f"'tools' must be a list of JSON schemas, got {tools!r:.80}; correct it"
            )
        variables = sample.get("chat_template_kwargs", {})
        if not isinstance(variables, dict):
            raise ValueError(
                f"'chat_template_kwargs' must be an object, got {variables!r:.80}; correct it"
            )
        self._options: Any = {"tools": tools, "variables": variables}
        self._texts: dict[tuple[int, bool], str] = {}  # see `ChatTemplate.render_beginnings`
        self._num_prompt = 0  # number of messages in the prompt; 0 for a sample with `messages`
        if "messages" not in sample:
            self.messages = checked_messages(sample["prompt"], "prompt")
            self._num_prompt = len(self.messages)
            self.messages += checked_messages(sample["completion"], "completion")
        else:
            self.messages = checked_messages(sample["messages"], "messages")
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
                before_and_through = [key for i in turns for key in ((i, True), (i + 1, False))]
                self._texts = self.template.render_beginnings(
                    [*self.messages, _QUESTION],
                    [*before_and_through, (n, False), (n + 1, False)],
                    **self._options,
                )
                text = self._texts.get((n, False)) or self.template.render(
                    self.messages, add_generation_prompt=False, **self._options
                )
        except CannotRenderError as error:
            reason = error.reason
            remedy = "correct the chat, or set training.chat_template to a file"
            if "dict" in reason and any(isinstance(x, dict) for x in self.arguments()):
                remedy = "the template joins a tool call's 'arguments' to a string: give 'arguments' as a JSON string"
            if "strftime_now" in reason:
                remedy = "set training.chat_template to a copy of the template with a fixed date"
            raise ValueError(
                f"{self.template.name} cannot render the chat: {reason}; {remedy}"
            ) from None
        if n_prompt:
            if not all(map(self._is_trained, range(n_prompt, n))):
                raise ValueError(
                    "only samples with 'messages' may leave a message out of the loss; convert the sample"
                )
            return text, [self._span_of_completion(text)]
        is_trained = [self._is_trained(turn) for turn in turns]
        if not self.template.marks_generation:
            spans = [self._span_of_turn(text, turn) for turn in turns]
            text, spans = self._with_stop_tokens(text, spans, turns)
        elif not all(is_trained) and len(spans) != len(turns):
            raise ValueError(
                f"{self.template.name} has {len(spans)} marked parts for {len(turns)} turns of the "
                "assistant, so it is unknown which part to leave out of the loss; leave out the chat"
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
                    f"message {turn + 1} has {key!r} = {message[key]!r}, which must be 0, 1, false "
                    "or true; correct it"
                )
        return all(message[key] for key in keys)

    def _with_stop_tokens(
        self, text: str, spans: list[Span], turns: list[int]
    ) -> tuple[str, list[Span]]:
        """Return (text, spans); spans without a closing token are extended by the next turn's first token."""
        for i, ((begin, end), turn) in enumerate(zip(spans, turns, strict=True)):
            rest = text[end:]
            if self.template.token_at_end(text[begin:end]):
                continue
            if turn + 1 == len(self.messages):  # the chat ends here: append a user's question
                rest = ""
                with contextlib.suppress(ValueError):  # a template may refuse the question
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
                f"({difference}); write the sample as 'messages', and {MARK_IT}"
            )
        return len(before), self.template.end_of_turn(text)

    def _join_parts(self) -> None:
        """If the template cannot render lists, replace each `content` of the form [{"text": x}] by x."""
        lists = [m["content"] for m in self.messages if is_list_of(dict, m.get("content"))]
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
                f"{self.template.name} needs strings, and a 'content' is a list of several parts; join the parts"
            )
        self.messages = [
            {**m, "content": m["content"][0]["text"]} if m.get("content") in lists else m
            for m in self.messages
        ]

    def _beginning(self, number: int, header: bool = False) -> str:
        """Return the first `number` messages as text; a number beyond the last adds a user's question."""
        if (number, header) in self._texts:
            return self._texts[number, header]
        return self._rendered([*self.messages, _QUESTION][:number], header)

    def _rendered(self, messages: list[dict[str, Any]], header: bool = False) -> str:
        """Return messages as text. header: append the header of the assistant's next turn."""
        try:
            return self.template.render(messages, add_generation_prompt=header, **self._options)
        except CannotRenderError as error:
            raise ValueError(
                f"{self.template.name} has no {{% generation %}} marks, and cannot render the chat up to "
                f"message {len(messages)} ({error.reason}), so the assistant's tokens are unknown; {MARK_IT}"
            ) from None

    def _span_of_turn(self, text: str, turn: int) -> Span:
        """Return the span from the end of an assistant turn's header to the end of its closing token.

        Usually `text` begins with the rendering of the earlier messages plus the turn's header, and also with
        the rendering of the messages through this turn. If the template drops reasoning from earlier turns,
        `text` begins only with the first rendering. `_behind` then finds what follows the turn's content, in
        the whole chat and in a chat that ends with the turn; both must begin with the same closing tokens.
        Raises ValueError if the span cannot be found.
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
            f"the chat goes on ({difference}), so the assistant's tokens are unknown; {MARK_IT}"
        )

    def _behind(self, turn: int, text: str, messages: list[dict[str, Any]]) -> str:
        """Return the text after a turn's content, found by rendering the chat with other content."""
        message = messages[turn]
        # Other content with the same last character would make the common suffix too long.
        ending = "." if str(message.get("content")).rstrip().endswith("!") else "!"
        changed = {**message, "content": f"what the model wrote{ending}"}
        changed = [*messages[:turn], changed, *messages[turn + 1 :]]
        other = self._rendered(changed)
        length = len(os.path.commonprefix([text[::-1], other[::-1]]))
        return text[len(text) - length :]

    def _rest_before_question(self, text: str, turn: int) -> str:
        """Return the text that is added if a user's question follows the chat. turn: the chat's last turn."""
        longer = self._beginning(len(self.messages) + 1)
        if longer.startswith(text):
            return longer[len(text) :]
        # Before a question, the template drops earlier reasoning, or the token that ends the chat.
        behind = self._behind(turn, text, self.messages)
        rest = self._behind(turn, longer, [*self.messages, _QUESTION])
        return rest.removeprefix(behind) if rest.startswith(behind) else ""

    def _common_closing(self, closing: str, rest: str) -> int | None:
        """Return the length of the closing tokens that both texts begin with; None if these tokens differ.

        closing: what follows a turn's content if the chat ends with the turn. rest: same in a longer chat.
        """
        if closing and rest.startswith(closing):
            return self.template.end_of_turn(closing)
        if not closing:  # only the next header ends a turn
            return 0 if self.template.leading_token(rest) else None
        # In `closing`, a token that ends the chat may follow the turn's closing token.
        common = os.path.commonprefix([closing, rest])
        cut = self.template.end_of_last_token(common)
        leftovers = [text[cut:].lstrip() for text in (closing, rest)]
        is_next_token = all(self.template.leading_token(text) for text in leftovers)
        return cut if cut and is_next_token else None


# Thinking tags at the end of a generation prompt; the rendered chat may lack these tags.
_OPENED_THOUGHT = re.compile(
    r"(<think>\s*(</think>\s*)?|</think>|<\|channel>thought\n<channel\|>)$"
)


def _header_in(text: str, before: str) -> str:
    """Return `before`, without the thinking tags at its end unless `text` begins with all of `before`."""
    return before if text.startswith(before) else _OPENED_THOUGHT.sub("", before)


def _difference(text: str, prefix: str) -> str:
    """Describe, for error messages, where `text` differs from `prefix`; "" if `text` begins with `prefix`."""
    if text.startswith(prefix):
        return ""
    same = len(os.path.commonprefix([text, prefix]))
    here = slice(max(0, same - 20), same + 40)
    return f"{text[here]!r} in place of {prefix[here]!r}"
