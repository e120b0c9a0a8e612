"""Chat templates of known models, and a byte tokenizer with a template."""

import json
from pathlib import Path

from tests.reference.chat_formats import LLAMA_3 as LLAMA_LIKE  # noqa: F401
from tests.reference.chat_formats import QWEN_3, Format, backend_of, replaced

TOOL = "{%- elif message.role == 'tool' %}"
REFUSED = "{%- elif message.role not in ('system', 'tool') %}{{- raise_exception('no such role: ' ~ message.role) }}"
QWEN_LIKE = replaced(QWEN_3, {TOOL: REFUSED + TOOL})
# Leaves the thinking out of every earlier turn, as some models' templates do.
FORGETFUL = replaced(
    QWEN_LIKE, {"loop.index0 > ns.last_query_index and (loop.last or reasoning)": "loop.last"}
)

# Writes nothing behind the token that ends a turn.
SHORT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Preference pairs of both kinds.
PAIRS = {
    "texts": {"prompt": "1 + 2 =", "chosen": " 3", "rejected": " 40"},
    "chats": {
        "prompt": [{"role": "user", "content": "1 + 2?"}],
        "chosen": [{"role": "assistant", "content": "It is 3."}],
        "rejected": [{"role": "assistant", "content": "No idea"}],
    },
}


def write_tokenizer(folder: Path, template: str | list | None = None, **entries) -> Path:
    """Return a folder with a tokenizer whose ids are bytes and three special tokens.

    Encoding adds a begin-of-text token, as Llama's tokenizer does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    bytes_only = Format("", "<|im_end|>", "<|im_start|>", bos="<|begin|>")
    backend_of(bytes_only).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|im_end|>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | entries))
    return folder
