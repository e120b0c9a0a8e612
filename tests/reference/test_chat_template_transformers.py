"""Chats are rendered and encoded as transformers does."""

import pytest

from tests.unit.data.chats import FORGETFUL, LLAMA_LIKE, QWEN_LIKE, write_tokenizer
from torchtitan.data.chat_template import ChatTemplate
from torchtitan.data.tokenizer import HuggingFaceTokenizer

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "a < b & 'ü'", "parameters": {"type": "object"}},
}
CHATS = {
    "question": [{"role": "user", "content": "2+2, bitte — ü? <b>'\"&"}],
    "system": [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "Hi\n"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"},
        {"role": "user", "content": "2+2?"},
    ],
    "tools": [
        {"role": "user", "content": "2+2 and 3+3?"},
        {"role": "assistant", "content": "<think>\nx\n</think>\n\n<tool_call>{}</tool_call>"},
        {"role": "tool", "name": "add", "content": "4"},
        {"role": "tool", "name": "add", "content": "6"},
    ],
}


@pytest.mark.parametrize("template", [QWEN_LIKE, LLAMA_LIKE, FORGETFUL], ids="qwen llama f".split())
@pytest.mark.parametrize("place", ["config", "list", "file"])
def test_rendered_chats_are_those_of_transformers(template, place, tmp_path):
    from transformers import AutoTokenizer

    in_config = {"config": template, "list": [{"name": "default", "template": template}]}
    folder = write_tokenizer(tmp_path / "model", in_config.get(place, "not this one"))
    if place == "file":
        (folder / "chat_template.jinja").write_text(template)
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = HuggingFaceTokenizer(str(folder))
    for variables in ({}, {"enable_thinking": False, "date_string": "2 June 2025"}):
        chat = ChatTemplate.of_tokenizer(ours, variables)
        for messages in CHATS.values():
            for tools in (None, [TOOL]):
                for ends_in_prompt in (True, False):
                    options = {"tools": tools, "add_generation_prompt": ends_in_prompt}
                    text = chat.render(messages, **options)
                    options |= variables
                    assert text == theirs.apply_chat_template(messages, tokenize=False, **options)
                    expected = theirs.apply_chat_template(messages, return_dict=False, **options)
                    assert ours.encode(text, add_special_tokens=False) == expected


def test_continuation_is_what_transformers_renders_after_the_answer(tmp_path):
    from transformers import AutoTokenizer

    results = [{"role": "tool", "content": "4"}, {"role": "tool", "content": "6"}]
    for name, template, end in (("q", QWEN_LIKE, "<|im_end|>"), ("l", LLAMA_LIKE, "<|eot_id|>")):
        folder = write_tokenizer(tmp_path / name, template)
        theirs = AutoTokenizer.from_pretrained(folder)
        chat = ChatTemplate.of_tokenizer(HuggingFaceTokenizer(str(folder)))
        question, answer = CHATS["question"], "<tool_call>{}</tool_call>"
        start = theirs.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        messages = [*question, {"role": "assistant", "content": answer}, *results]
        whole = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        sampled = answer + end  # the token that ended the turn is one of the sampled ones
        assert start + sampled + chat.continuation(question, results, stop=end) == whole
        assert start + answer + chat.continuation(question, results) == whole
