"""Reads and checks samples with chats; `training.chat_keys` may rename their keys and roles."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan.config.checks.common import guess
from torchtitan.data.chat_template import Message
from torchtitan.data.local_files import JoinedDocuments, load_local_documents

RESULT_ROLES = ("tool", "function", "ipython")
ROLES = ("system", "developer", "user", "assistant", *RESULT_ROLES)
# Keys of a message that hold the model's reasoning; most templates read the first key.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_IN_PLACE_OF_CONTENT = {"tool_calls", *_REASONING_KEYS}
_COLUMNS = ("messages", "prompt", "completion", "tools", "chat_template_kwargs")
REFERENCE_KEYS = ("ref_chosen_logps", "ref_rejected_logps")  # TRL uses the same names
_PAIR_COLUMNS = ("prompt", "chosen", "rejected", *_COLUMNS[3:], *REFERENCE_KEYS)
_MESSAGE_KEYS = ("role", "content", "tool_calls", *_REASONING_KEYS)


def load_chats(path: str, keys: Mapping[str, str] | None = None) -> JoinedDocuments:
    """Return the chats in local files, unchanged. keys: more Parquet columns to read; see `renamed`."""
    return load_local_documents(path, (*_COLUMNS, *(keys or ())))


def load_pairs(path: str, keys: Mapping[str, str] | None = None) -> JoinedDocuments:
    """Return the preference pairs in local files, unchanged. keys: as in `load_chats`."""
    return load_local_documents(path, (*_PAIR_COLUMNS, *(keys or ())))


def parse_keys(entries: Sequence[str]) -> dict[str, str]:
    """Return `training.chat_keys` as {name in the files: torchtitan's name}; ValueError if unknown."""
    known = (*dict.fromkeys(_COLUMNS + _PAIR_COLUMNS), *_MESSAGE_KEYS, *ROLES)
    keys = dict(entry.partition("=")[::2] for entry in entries)
    for theirs, ours in keys.items():
        if not theirs or ours not in known:
            raise ValueError(
                f"training.chat_keys must be a list of 'key in the files=known key', got "
                f"{theirs + '=' + ours!r}{guess(ours, known)}; known are {', '.join(known)}"
            )
    return keys


def renamed(sample: Any, keys: Mapping[str, str] | None) -> Any:
    """Return a sample with its keys, its messages' keys and its roles renamed to torchtitan's names.

    keys: name in the files -> torchtitan's name. If that name is a role, the sample's value becomes a message
        of this role before `messages`, or before `prompt` in a preference pair; several values for one role
        are joined by blank lines. Raises ValueError if `messages` or `prompt` is then not a list.
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
        for i, message in enumerate(result[name] if is_list_of(dict, result.get(name)) else ()):
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
                f"training.chat_keys puts the turns of {', '.join(turns)} before {name!r}, so {name!r} must "
                f"be a list of messages, got {rest!r:.80}; remove these keys or {name!r}, or give "
                f'{name!r} a role too, as in "{name}=user"'
            )
        result[name] = first + rest
    return result


def check_chat(sample: Any) -> None:
    """Raise ValueError unless the sample has `messages`, or `prompt` and `completion`."""
    if not isinstance(sample, Mapping):
        raise ValueError(f"need an object with 'messages', got {type(sample).__name__}; correct it")
    if sample.get("messages") is not None:
        return
    prompt, completion = sample.get("prompt"), sample.get("completion")
    if prompt is None or completion is None:
        raise ValueError(
            "need an object with 'messages', or with 'prompt' and 'completion', got the keys "
            f"{sorted(sample)}; convert the data, or name yours in training.chat_keys"
        )
    if isinstance(prompt, str) != isinstance(completion, str):
        raise ValueError(
            "'prompt' and 'completion' must both be strings or both be lists of messages; convert one"
        )


def checked_messages(messages: Any, key: str) -> list[Message]:
    """Return valid messages without None values; `thinking` and `reasoning_content` both hold reasoning."""
    if not is_list_of(dict, messages) or not messages:
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
        parts = content if is_list_of(dict, content) else [{"text": content}]
        is_good = all(isinstance(part.get("text"), str) for part in parts)
        # Templates write a tool's result as JSON if it is not a string.
        is_good |= role in RESULT_ROLES and isinstance(content, dict | list)
        is_good |= (
            role == "assistant" and content is None and bool(_IN_PLACE_OF_CONTENT & {*message})
        )
        if not is_good:
            raise ValueError(
                f"message {number} of {key!r} must have a string as its 'content' (role {role!r}), got "
                f"{content!r:.80}; set 'content' to a string, or leave out the chat"
            )
        thoughts = [message[name] for name in _REASONING_KEYS if name in message]
        if thoughts:
            message = {"thinking": thoughts[0], **message, "reasoning_content": thoughts[0]}
        checked.append(message)
    return checked


def is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, kind) for entry in value)
