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
LEAVE_OUT = "Correct the chat, or leave it out."
CORRECT_TEMPLATE = "Correct the template, or set training.chat_template to another file."


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


def chat_fault(name: str, sample: Any, says: str, cause: str, remedy: str = LEAVE_OUT):
    """The second chat is wrong."""
    message = f"error: …chats.jsonl, line 2: {says}"
    return Fault(name, message, cause, remedy, chats(CHAT, sample), exit_code=1)


def template_fault(
    name: str,
    template: str | None,
    message: str,
    cause: str,
    remedy: str = CORRECT_TEMPLATE,
    sample: Any = CHAT,
):
    arrange = chats(sample, template=template)
    return Fault(name, f"error: {message}", cause, remedy, arrange, exit_code=1)


FAULTS = [
    chat_fault(
        "chat without an assistant's turn",
        {"messages": [QUESTION]},
        "the chat has no turn of the role 'assistant', so nothing is to be learned; leave it out",
        "The chat was cut off before the answer.",
    ),
    Fault(
        name="chat without an assistant's turn, read by one of two ranks",
        message="error: …chats.jsonl, line 2: the chat has no turn of the role 'assistant', …",
        cause="As above; the other rank points to this message.",
        remedy=LEAVE_OUT,
        arrange=chats(CHAT, {"messages": [QUESTION]}),
        exit_code=1,
        ranks=2,
    ),
    chat_fault(
        "messages that are not a list",
        {"messages": "two and two? four"},
        "'messages' must be a list of objects with 'role' and 'content', got 'two and two? four'; "
        "correct it",
        "The data are texts, or the list is a string of JSON.",
    ),
    chat_fault(
        "chat without a message",
        {"messages": []},
        "'messages' holds no message; leave out the chat",
        "An export wrote a chat that nobody has begun.",
    ),
    chat_fault(
        "unknown role",
        {"messages": [QUESTION, {"role": "assistent", "content": "four"}]},
        "message 2 of 'messages' has the unknown role 'assistent', did you mean 'assistant'?; it must be "
        "one of system, developer, user, assistant, …",
        "A typing error, or the data have names of their own for roles.",
        "Rename the role.",
    ),
    chat_fault(
        "message without a role",
        {"messages": [{"from": "human", "value": "two and two?"}]},
        "message 1 of 'messages' has no 'role', got the keys ['from', 'value']; convert the chat to "
        "messages with 'role' and 'content'",
        "The data are in ShareGPT's format.",
        "Convert them.",
    ),
    chat_fault(
        "message with an image",
        {"messages": [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}, ANSWER]},
        "message 1 of 'messages' has a part of the type 'image'; only text can be trained: leave out the "
        "chat",
        "The data are for a model that sees images.",
        "Leave out the chat.",
    ),
    chat_fault(
        "prompt without a completion",
        {"prompt": "two and two?"},
        "need 'completion' beside 'prompt', got the keys ['prompt']; add it, or leave out the sample",
        "The column has another name, or the sample has no answer.",
    ),
    chat_fault(
        "prompt that is a text and completion that is a list",
        {"prompt": "two and two?", "completion": [ANSWER]},
        "'prompt' and 'completion' must both be texts or both be lists of messages; convert one",
        "The columns come from different tools.",
        "Convert one of the columns.",
    ),
    chat_fault(
        "chat under other keys",
        {"conversations": [QUESTION, ANSWER]},
        "need an object with 'messages', or with 'prompt' and 'completion', got the keys "
        "['conversations']; convert the data, or name yours in training.chat_keys",
        "The data are in another tool's format.",
        "Set training.chat_keys, or rename the column.",
    ),
    Fault(
        name="chat that is longer than a row",
        message="error: …chats.jsonl, line 2: the chat has … tokens, and training.seq_len is 32; raise "
        "it, or set training.too_long to 'cut' or 'skip'",
        cause="Rows are shorter than the data need.",
        remedy="Raise training.seq_len, or set training.too_long.",
        arrange=chats(CHAT, {"messages": [QUESTION, ANSWER | {"content": "four " * 40}]}),
        exit_code=1,
    ),
    Fault(
        name="chats that are all left out",
        message="error: dataset chat: every chat is left out, because it is longer than training.seq_len "
        "= 4 (or trains nothing before that token); raise training.seq_len",
        cause="With training.too_long = 'skip', rows are shorter than every chat.",
        remedy="Raise training.seq_len.",
        arrange=chats(CHAT, arguments=["--training.seq_len=4", "--training.too_long=skip"]),
        exit_code=1,
    ),
    template_fault(
        "chats for a tokenizer without a template",
        None,
        "…chats.jsonl, line 1: the tokenizer in '…' has no chat template; set training.chat_template to "
        "a file with a Jinja template, or put a chat_template.jinja into the folder "
        "model.hf_assets_path",
        "The tokenizer is of a base model.",
        "Set training.chat_template to a file.",
    ),
    Fault(
        name="chat template that is not there",
        message="config error: training.chat_template must be a file with a Jinja template, got "
        "'/nowhere/chat.jinja' …; correct the path, or leave it out for the template in "
        "model.hf_assets_path",
        cause="The path is wrong, or relative to another folder.",
        remedy="Correct training.chat_template.",
        arrange=chats(
            CHAT, template=None, arguments=["--training.chat_template=/nowhere/chat.jinja"]
        ),
    ),
    template_fault(
        "chat template that is not Jinja",
        "{% for message in messages %}",
        "…chat.jinja is not a Jinja template: …; correct it",
        "The file was cut off.",
    ),
    template_fault(
        "template that refuses a chat",
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
        + TEMPLATE,
        "…chats.jsonl, line 1: …chat.jinja cannot render the chat: no system turn; correct the chat, or "
        "set training.chat_template to a template file that fits it",
        "The model was trained without such a turn.",
        "Leave the turn out, or take another template.",
        sample={"messages": [{"role": "system", "content": "Be brief."}, QUESTION, ANSWER]},
    ),
    Fault(
        name="template that takes all memory",
        message="error: …chat.jinja cannot render …: it takes more than 1 GiB of memory; correct the "
        "template, or name another file",
        cause="The template repeats a text without end, or was made to do harm. The same is said of one "
        "that takes more than 10 seconds.",
        remedy=CORRECT_TEMPLATE,
        arrange=chats(CHAT, template=TEMPLATE + "{{ 'a' * 10**10 }}"),
        exit_code=1,
        ranks=2,
    ),
    template_fault(
        "template that fails",
        TEMPLATE.replace("message.content", "message.content.upper(1)"),
        "…chats.jsonl, line 1: …chat.jinja cannot render the chat: …",
        "The template is for messages of another shape, or has a mistake.",
    ),
    template_fault(
        "template that changes earlier turns and has no marks",
        TEMPLATE.replace("messages %}", "messages[-2:] %}"),
        "…chats.jsonl, line 1: …chat.jinja has no {% generation %} marks, and renders … differently when "
        "the chat goes on (…), so it is unknown which tokens are the assistant's; set "
        "training.chat_template to a copy of the template that has the assistant's text between {% "
        "generation %} and {% endgeneration %}",
        "The template leaves out or rewrites what came before.",
        "Mark the assistant's text in a copy of the template.",
        sample={"messages": [QUESTION, ANSWER] * 2},
    ),
    template_fault(
        "template with marks around another role's text",
        "{% generation %}" + TEMPLATE + "{% endgeneration %}",
        "…chat.jinja has its {% generation %} marks around the wrong text (…); have them enclose the "
        "assistant's text, and no other role's",
        "Training would teach the model to write the user's part.",
        "Move the marks.",
    ),
]
