"""Chat templates like those of known models, and a byte tokenizer with a template."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

# Tools are listed in the system's turn, results of one turn share a user's turn, and the thinking of
# turns before the user's last question is left out.
QWEN_LIKE = r"""
{%- macro turn(role, text) %}{{ '<|im_start|>' + role + '\n' + text + '<|im_end|>\n' }}{% endmacro %}
{%- set first = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}
    {%- set listed = namespace(text=first ~ '\nTools:') %}
    {%- for tool in tools %}
        {%- set listed.text = listed.text ~ '\n' ~ (tool | tojson) %}
    {%- endfor %}
    {{- turn('system', listed.text) }}
{%- elif first %}
    {{- turn('system', first) }}
{%- endif %}
{%- set at = namespace(question=0) %}
{%- for message in messages if message.role == 'user' %}
    {%- set at.question = messages.index(message) %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- turn('user', message.content) }}
    {%- elif message.role == 'assistant' %}
        {%- generation %}
        {%- set text = message.content %}
        {%- if loop.index0 < at.question and '</think>' in text %}
            {%- set text = text.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- turn('assistant', text) }}
        {%- endgeneration %}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem is undefined or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- elif message.role != 'system' %}
        {{- raise_exception('no such role: ' ~ message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""

# Texts are trimmed, a date has a default, and a function's results are of the role ipython.
LLAMA_LIKE = r"""
{{- bos_token }}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|im_start|>' ~ role ~ '\n\n' }}
    {%- if loop.first %}
        {{- 'Today: ' ~ (date_string or '1 May 2024') ~ '\n' }}
        {%- for tool in tools or [] %}
            {{- tool | tojson(indent=2) ~ '\n' }}
        {%- endfor %}
    {%- endif %}
    {{- (message.content if message.content is string else message.content | tojson) | trim }}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n\n' }}
{%- endif %}
"""

# Leaves the thinking out of every earlier turn, as some models' templates do.
FORGETFUL = QWEN_LIKE.replace("loop.index0 < at.question and ", "not loop.last and ")


def write_tokenizer(folder: Path, template: str | list | None = None, **entries) -> Path:
    """Return a folder with a tokenizer whose ids are bytes and three special tokens.

    Encoding adds a begin-of-text token, as Llama's tokenizer does.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<|begin|>"]
    backend.add_special_tokens([AddedToken(text, special=True) for text in special])
    begin = backend.token_to_id("<|begin|>")
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|im_end|>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | entries))
    return folder
