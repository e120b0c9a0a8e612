"""Faults of chats and of their templates; messages name the chat's line or the template's file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.reliability.faults import Fault

TEMPLATE = """\
{%- for message in messages %}
    {{- '<|begin_of_text|>' + message.role + ':' + message.content + '<|end_of_text|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|begin_of_text|>assistant:' }}{% endif %}"""
QUESTION = {"role": "user", "content": "two and two?"}
ANSWER = {"role": "assistant", "content": "four"}
CHAT = {"messages": [QUESTION, ANSWER]}


def chats(*samples: Any, template: str | None = TEMPLATE, arguments: Sequence[str] = ()):
    """Arranges a job that reads these samples from chats.jsonl.

    template: of the file chat.jinja, which training.chat_template names; None names no file.
    """

    def arrange(folder: Path) -> list[str]:
        lines = "".join(json.dumps(sample) + "\n" for sample in samples)
        (folder / "chats.jsonl").write_text(lines)
        flags = ["--training.dataset=chat", f"--training.dataset_path={folder}/chats.jsonl"]
        if template is not None:
            (folder / "chat.jinja").write_text(template)
            flags.append(f"--training.chat_template={folder}/chat.jinja")
        return [*flags, *arguments]

    return arrange


FAULTS = {
    "chat without an assistant's turn": chats(CHAT, {"messages": [QUESTION]}),
    "chat without an assistant's turn, read by one of two ranks": Fault(
        chats(CHAT, {"messages": [QUESTION]}), ranks=2
    ),
    "unknown role": chats(CHAT, {"messages": [QUESTION, ANSWER | {"role": "assistent"}]}),
    "chat under other keys": chats(CHAT, {"conversations": [QUESTION, ANSWER]}),
    "chat that is longer than a row": chats(
        CHAT, {"messages": [QUESTION, ANSWER | {"content": "four " * 40}]}
    ),
    "chats that are all left out": chats(
        CHAT, arguments=["--training.seq_len=4", "--training.too_long=skip"]
    ),
    "chat template that is not there": chats(
        CHAT, template=None, arguments=["--training.chat_template=/nowhere/chat.jinja"]
    ),
    "chat template that is not Jinja": chats(CHAT, template="{% for message in messages %}"),
    "template that takes all memory": Fault(
        chats(CHAT, template=TEMPLATE + "{{ 'a' * 10**10 }}"), ranks=2
    ),
    "template that fails": chats(
        CHAT, template=TEMPLATE.replace("message.content", "message.content.upper(1)")
    ),
}
