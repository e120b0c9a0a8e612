"""Chat templates: short re-creations of published formats, with {% generation %} marks.

The marks are around the text that the model writes, through the token that ends its turn.
"""

import re
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers


class Format(NamedTuple):
    template: str
    eos: str
    control: str = ""  # further special tokens, with blanks between them
    bos: str | None = None
    marks_header: bool = False  # published with marks, which enclose the headers of turns, too

    @property
    def special(self) -> dict[str, str]:
        named = {"bos_token": self.bos, "eos_token": self.eos}
        return {name: token for name, token in named.items() if token is not None}


def replaced(template: str, changes: dict[str, str]) -> str:
    """Return a template with other text in places that it has once."""
    for old, new in changes.items():
        assert template.count(old) == 1
        template = template.replace(old, new)
    return template


def turns(
    header: str,
    end: str,
    gap: str = "",
    begin: str = "",
    last: str = "",
    thought: tuple[str, str] = ("", ""),
    prompt: str = "",
    **roles: str,
) -> str:
    """Return the template of a format whose turns are a header, the content, `end` and `gap`.

    header: with {} for the role. last: ends the last turn of a chat that is no prompt, behind `end`.
    thought: is around the thinking, which only replies after the last question have. prompt: is behind the
        header of a turn that the model will write, and may begin its thinking. roles: names of roles that
        differ from those of the messages.
    """
    close = thought[1].strip()
    begins = f"{thought[0]!r} if kept else ''" if prompt == thought[0] else "''"
    return rf"""
{{{{- {begin!r} }}}}
{{%- set ns = namespace(question=-1) %}}
{{%- for message in messages %}}
    {{%- if message.role == 'user' %}}{{%- set ns.question = loop.index0 %}}{{%- endif %}}
{{%- endfor %}}
{{%- for message in messages %}}
    {{%- set content, kept = message.content, message.reasoning_content %}}
    {{%- if {bool(close)} and message.role == 'assistant' and {close!r} in content %}}
        {{%- set kept = content.split({close!r})[0].split({thought[0].strip()!r})[-1].strip() %}}
        {{%- set content = content.split({close!r})[-1].lstrip() %}}
    {{%- endif %}}
    {{%- set kept = kept if {bool(close)} and loop.index0 > ns.question else '' %}}
    {{%- set role = {roles!r}.get(message.role, message.role) %}}
    {{{{- {header!r}.replace('{{}}', role) }}}}
    {{%- set last = {last!r} if loop.last and not add_generation_prompt else '' %}}
    {{%- if message.role == 'assistant' %}}
        {{%- set begins = {begins} %}}
        {{{{- begins }}}}
        {{%- generation %}}
        {{%- if kept %}}{{{{- ('' if begins else {thought[0]!r}) + kept + {thought[1]!r} }}}}{{%- endif %}}
        {{{{- content + {end!r} + last }}}}
        {{%- endgeneration %}}
    {{%- else %}}
        {{{{- content + {end!r} + last }}}}
    {{%- endif %}}
    {{{{- {gap!r} }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- {header!r}.replace('{{}}', {roles.get("assistant", "assistant")!r}) + {prompt!r} }}}}{{%- endif %}}
"""


MISTRAL_V7 = r"""
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'system' %}
        {{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
    {%- elif message.role == 'assistant' %}
        {%- generation %}{{- message.content + eos_token }}{%- endgeneration %}
    {%- else %}
        {{- raise_exception('Only user, system and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}
"""
# Its marks enclose the headers of turns.
SMOLLM_3 = r"""
{{- '<|im_start|>system\n## Metadata\n\nReasoning Mode: ' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '/no_think' }}{%- else %}{{- '/think' }}{%- endif %}
{{- '\n\n## Custom Instructions\n\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content.rstrip() }}{%- endif %}
{{- '\n\n<|im_end|>\n' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {{- '<|im_start|>assistant\n' + message.content.lstrip('\n') + '<|im_end|>\n' }}
        {%- endgeneration %}
    {%- elif message.role != 'system' %}
        {{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
# Tools are listed in the first user's message, their results have the role ipython.
LLAMA_3 = r"""
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}
{%- set system_message = messages[0]['content'] | trim if messages[0]['role'] == 'system' else '' %}
{%- set messages = messages[1:] if messages[0]['role'] == 'system' else messages %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\n' }}{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\nToday Date: ' + date_string + '\n\n' }}
{{- system_message + '<|eot_id|>' }}
{%- if tools is not none %}
    {%- set first_user_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nRespond with JSON for a function call.\n\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}
    {{- first_user_message + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {%- if message.role == 'assistant' %}
            {%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}
        {%- else %}
            {{- message['content'] | trim + '<|eot_id|>' }}
        {%- endif %}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {%- generation %}
            {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}<|eot_id|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {{- message.content | tojson + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

# The thinking of turns before the user's last question is left out.
QWEN_3 = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '# Tools\n\n<tools>' }}
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\n</tools>\n\nReturn a json object within <tool_call></tool_call> tags.<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last_query_index=messages | length - 1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last_query_index = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- generation %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning) %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\n' }}{%- endif %}
            {{- '<tool_call>\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
            {{- tool_call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or (messages[loop.index0 - 1].role != 'tool') %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != 'tool') %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""

# Calls are written as tags. Every reply after the last question has thinking, which may be empty, and begins
# in the header.
QWEN_3_5 = replaced(
    QWEN_3,
    {
        "and (loop.last or reasoning)": "",
        "{{- '<think>\\n' + reasoning": "{{- reasoning",
        "        {%- generation %}": """{%- if loop.index0 > ns.last_query_index %}{{- '<think>\\n' }}{%- endif %}
        {%- generation %}""",
        "{%- if enable_thinking": "{%- if enable_thinking is not defined %}{{- '<think>\\n' }}{%- endif %}\n    {%- if enable_thinking",
        """{{- '<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
            {{- tool_call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}""": """{{- '<tool_call>\\n<function=' + tool_call.function.name + '>\\n' }}
            {%- for name, value in tool_call.function.arguments.items() %}
                {{- '<parameter=' + name + '>\\n' }}{{- value }}{{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}""",
    },
)

# No token ends a turn: the model writes the first token of the next header.
GLM_4 = r"""
{{- '[gMASK]<sop>' }}
{%- set headers = {'tool': '<|observation|>'} %}
{%- set ns = namespace(question=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.question = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'assistant' %}
        {{- headers.get(message.role, '<|' + message.role + '|>') }}
    {%- endif %}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {%- set content = message.content if message.content is string else '' %}
        {%- set kept = message.reasoning_content if loop.index0 > ns.question else '' %}
        {{- '\n<think>' + (kept or '') + '</think>\n' + content | trim }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>' + call.function.name }}
            {%- for name, value in call.function.arguments.items() %}
                {{- '\n<arg_key>' + name + '</arg_key>\n<arg_value>' }}{{- value }}{{- '</arg_value>' }}
            {%- endfor %}
            {{- '\n</tool_call>' }}
        {%- endfor %}
        {%- if not loop.last %}
            {%- set next = messages[loop.index0 + 1].role %}
            {{- headers.get(next, '<|' + next + '|>') }}
        {%- endif %}
        {%- endgeneration %}
    {%- else %}
        {{- '\n' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and (not messages or messages[-1].role != 'assistant') %}{{- '<|assistant|>' }}{%- endif %}
"""

# No line breaks; the header begins the thinking, and replies without thinking end it.
GLM_4_7 = replaced(
    GLM_4.replace("\\n", ""),
    {
        "        {%- generation %}": """        {%- set kept = message.reasoning_content if loop.index0 > ns.question else '' %}
        {%- if kept %}{{- '<think>' }}{%- endif %}
        {%- generation %}""",
        "{{- '<think>' + (kept": "{{- (kept",
        "{{- '<|assistant|>' }}": "{{- '<|assistant|><think>' }}",
    },
)

# The system's text stands in the first user's turn, and texts are trimmed.
GEMMA_3 = r"""
{%- set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}
{%- set messages = messages[1:] if system else messages %}
{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message.role == 'assistant' %}
        {{- '<start_of_turn>model\n' }}
        {%- generation %}{{- message.content | trim + '<end_of_turn>' }}{%- endgeneration %}
    {%- else %}
        {{- '<start_of_turn>' + message.role + '\n' + (system if loop.first else '') }}
        {{- message.content | trim + '<end_of_turn>' }}
    {%- endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}
"""

# No header before a reply: "[/INST]" ends the user's text.
MISTRAL = r"""
{%- set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}
{%- set messages = messages[1:] if system else messages %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role != ['user', 'assistant'][loop.index0 % 2] %}
        {{- raise_exception('conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- ' [INST] ' + (system if loop.first else '') + message.content + ' [/INST]' }}
    {%- else %}
        {%- generation %}{{- ' ' + message.content + eos_token }}{%- endgeneration %}
    {%- endif %}
{%- endfor %}
"""

# No line breaks; thinking is left out of every turn; a reply behind a tool's result has no header.
DEEPSEEK = r"""
{%- set ns = namespace(is_tool=false) %}
{{- bos_token + (messages[0].content if messages[0].role == 'system' else '') }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set ns.is_tool = false %}
        {{- '<｜User｜>' + message['content'] }}
    {%- elif message['role'] == 'assistant' and message['tool_calls'] is defined %}
        {{- '<｜Assistant｜>' }}
        {%- generation %}
        {{- '<｜tool▁calls▁begin｜>' }}
        {%- for tool in message['tool_calls'] %}
            {{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + tool['function']['name'] }}
            {{- '\n```json\n' + tool['function']['arguments'] | tojson + '\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
        {%- endgeneration %}
    {%- elif message['role'] == 'assistant' %}
        {%- if not ns.is_tool %}{{- '<｜Assistant｜>' }}{%- endif %}
        {%- if ns.is_tool %}{{- '<｜tool▁outputs▁end｜>' }}{%- endif %}
        {%- set ns.is_tool = false %}
        {%- generation %}
        {{- message['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
        {%- endgeneration %}
    {%- elif message['role'] == 'tool' %}
        {%- if not ns.is_tool %}{{- '<｜tool▁outputs▁begin｜>' }}{%- endif %}
        {%- set ns.is_tool = true %}
        {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if ns.is_tool %}{{- '<｜tool▁outputs▁end｜>' }}{%- endif %}
{%- if add_generation_prompt and not ns.is_tool %}{{- '<｜Assistant｜>' }}{%- endif %}
"""

# A reply has channels; its thinking, and the token that ends it, are other ones in earlier turns.
GPT_OSS = r"""
{{- '<|start|>system<|message|>You are ChatGPT.\nCurrent date: 2025-08-05' }}
{{- '\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, final.<|end|>' }}
{%- set begins = messages[0].role in ['developer', 'system'] %}
{%- set developer_message = messages[0].content if begins else '' %}
{%- set loop_messages = messages[1:] if begins else messages %}
{%- if developer_message or tools %}
    {{- '<|start|>developer<|message|># Instructions\n\n' + developer_message }}
    {%- for tool in tools or [] %}{{- '\n// ' + tool.function | tojson }}{%- endfor %}
    {{- '<|end|>' }}
{%- endif %}
{%- set last_tool_call = namespace(name=none) %}
{%- for message in loop_messages %}
    {%- if message.role == 'assistant' %}
        {%- set is_last = loop.last and not add_generation_prompt %}
        {%- set calls = message.tool_calls %}
        {{- '<|start|>assistant' }}
        {%- generation %}
        {%- if message.thinking and (calls or is_last) %}
            {{- '<|channel|>analysis<|message|>' + message.thinking + '<|end|><|start|>assistant' }}
        {%- endif %}
        {%- if calls %}
            {{- ' to=functions.' + calls[0].function.name + '<|channel|>commentary json<|message|>' }}
            {{- calls[0].function.arguments | tojson + '<|call|>' }}
        {%- else %}
            {{- '<|channel|>final<|message|>' + message.content + ('<|return|>' if is_last else '<|end|>') }}
        {%- endif %}
        {%- endgeneration %}
        {%- set last_tool_call.name = calls[0].function.name if calls else none %}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + last_tool_call.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""

# The headers are ordinary text, not tokens.
ZEPHYR = r"""{% for message in messages %}
{% if message['role'] == 'assistant' %}
{{ '<|assistant|>
' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}

{% else %}
{{ '<|' + message['role'] + '|>
' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

# model.name -> formats of its published models
OF_FAMILIES = {
    "llama3": ["llama_3"],
    "llama4": ["llama_4"],
    "qwen3": ["qwen_3", "chatml"],
    "qwen3_5": ["qwen_3_5", "chatml"],
    "qwen2_moe": ["chatml"],
    "deepseek_v3": ["deepseek", "glm_4_7", "kimi_k2"],
    "gpt_oss": ["gpt_oss"],
    "glm4": ["glm_4", "glm_4_7"],
    "gemma3": ["gemma_3"],
    "gemma4": ["gemma_4"],
    "mistral": ["mistral", "mistral_v7"],
    "olmo": ["olmo_2", "chatml"],
    "smollm3": ["smollm_3"],
    "seed_oss": ["seed_oss"],
    "granite": ["granite"],
    "phi3": ["phi_3", "phi_4", "phi_4_mini"],
    "minimax_m2": ["minimax_m2"],
}
_THINK = ("<think>\n", "\n</think>\n\n")
_QWEN_TOKENS = "<|im_start|> <tool_call> </tool_call> <think> </think>"
_GLM_TOKENS = "[gMASK] <sop> <think> </think> <tool_call> </tool_call>"
_GLM_TOKENS += " <|system|> <|user|> <|assistant|> <|observation|>"
_PHI_TOKENS = "<|end|> <|system|> <|user|> <|assistant|>"
_DEEPSEEK_TOKENS = """
    <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜>
    <｜tool▁calls▁end｜> <｜tool▁outputs▁begin｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> <｜tool▁outputs▁end｜>
"""
FORMATS = {
    "chatml": Format(turns("<|im_start|>{}\n", "<|im_end|>", gap="\n"), "<|im_end|>", "<|im_start|>"),
    "llama_4": Format(
        turns("<|header_start|>{}<|header_end|>\n\n", "<|eot|>", begin="<|begin_of_text|>"),
        "<|eot|>", "<|header_start|> <|header_end|>", "<|begin_of_text|>"),
    "llama_3": Format(
        LLAMA_3, "<|eot_id|>", "<|start_header_id|> <|end_header_id|>", "<|begin_of_text|>"),
    "qwen_3": Format(QWEN_3, "<|im_end|>", _QWEN_TOKENS),
    "qwen_3_5": Format(QWEN_3_5, "<|im_end|>", _QWEN_TOKENS),
    "glm_4": Format(GLM_4, "<|endoftext|>", _GLM_TOKENS),
    "glm_4_7": Format(GLM_4_7, "<|endoftext|>", _GLM_TOKENS),
    "gemma_3": Format(GEMMA_3, "<eos>", "<start_of_turn> <end_of_turn>", "<bos>"),
    # Not to think is to begin with an empty thought.
    "gemma_4": Format(
        turns("<|turn>{}\n", "<turn|>", gap="\n", begin="<bos>", assistant="model",
              thought=("<|channel>thought\n", "\n<channel|>"), prompt="<|channel>thought\n<channel|>"),
        "<eos>", "<|turn> <turn|> <|channel> <channel|>", "<bos>"),
    "kimi_k2": Format(
        turns("<|im_{}|>{}<|im_middle|>", "<|im_end|>"), "[EOS]",
        "<|im_end|> <|im_middle|> <|im_system|> <|im_user|> <|im_assistant|>", "[BOS]"),
    "minimax_m2": Format(
        turns("]~b]{}\n", "[e~[", gap="\n", begin="]~!b[", thought=_THINK, prompt="<think>\n", assistant="ai"),
        "[e~[", "]~b] <think> </think>", "]~!b["),
    # The headers are ordinary text, not tokens.
    "olmo_2": Format(
        turns("<|{}|>\n", "<|endoftext|>", gap="\n", begin="<|endoftext|>"), "<|endoftext|>"),
    "granite": Format(
        turns("<|start_of_role|>{}<|end_of_role|>", "<|end_of_text|>", gap="\n"), "<|end_of_text|>",
        "<|start_of_role|> <|end_of_role|>"),
    "phi_4": Format(
        turns("<|im_start|>{}<|im_sep|>", "<|im_end|>"), "<|im_end|>", "<|im_start|> <|im_sep|>"),
    "phi_4_mini": Format(
        turns("<|{}|>", "<|end|>", last="<|endoftext|>"), "<|endoftext|>", _PHI_TOKENS),
    "phi_3": Format(
        turns("<|{}|>\n", "<|end|>", gap="\n", last="\n<|endoftext|>"), "<|endoftext|>", _PHI_TOKENS),
    "seed_oss": Format(
        turns("<seed:bos>{}\n", "<seed:eos>", thought=("<seed:think>", "</seed:think>")), "<seed:eos>",
        "<seed:bos> <seed:think> </seed:think>"),
    "mistral_v7": Format(
        MISTRAL_V7, "</s>", "[INST] [/INST] [SYSTEM_PROMPT] [/SYSTEM_PROMPT]", "<s>"),
    "smollm_3": Format(SMOLLM_3, "<|im_end|>", "<|im_start|>", marks_header=True),
    "mistral": Format(MISTRAL, "</s>", bos="<s>"),
    "deepseek": Format(
        DEEPSEEK, "<｜end▁of▁sentence｜>", _DEEPSEEK_TOKENS, "<｜begin▁of▁sentence｜>"),
    "gpt_oss": Format(
        GPT_OSS, "<|return|>", "<|start|> <|end|> <|message|> <|channel|> <|call|>", "<|startoftext|>"),
    "zephyr": Format(ZEPHYR, "</s>", bos="<s>"),
}  # fmt: skip


def without_marks(template: str) -> str:
    """Return a template in which ordinary blocks take the place of {% generation %}."""
    template = re.sub(r"({%-? *)generation", r"\1if true", template)
    return re.sub(r"({%-? *)endgeneration", r"\1endif", template)


def backend_of(form: Format, trim_offsets: bool = False) -> Tokenizer:
    """Return a byte-level BPE tokenizer with 200 merges of the template's own text, and its tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=456, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([form.template], trainer)
    tokens = [*form.special.values(), *form.control.split()]
    backend.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    steps = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if form.bos:
        ids = [(form.bos, backend.token_to_id(form.bos))]
        steps.append(processors.TemplateProcessing(single=f"{form.bos} $A", special_tokens=ids))
    backend.post_processor = processors.Sequence(steps)
    return backend
