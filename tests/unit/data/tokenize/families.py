"""Chat templates in the manner of published families, with tokenizers that know their special tokens.

They are short, and keep the traits that matter: how strings are trimmed, cut, compared, joined and escaped, and how
turns end.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tests.unit.data.tokenize.test_tokenizers import fast_tokenizer


@dataclass(frozen=True, kw_only=True)
class Family:
    template: str
    tokens: str
    """The special tokens, the end token first, with spaces between."""

    @property
    def special(self) -> list[str]:
        return self.tokens.split()

    @property
    def writes_tools(self) -> bool:
        return "tool_calls" in self.template

    @property
    def writes_reasoning(self) -> bool:
        return "reasoning_content" in self.template


_ASKS = "{% if add_generation_prompt %}"
# Calls as Hermes and Qwen write them.
_HERMES = (
    "{% for c in m.tool_calls or [] %}{% set f = c.function if c.function else c %}\n<tool_call>\n"
    '{"name": "{{ f.name }}", "arguments": '
    "{% if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}{% endif %}}\n</tool_call>"
    "{% endfor %}"
)
_THINKS = (
    "{% set content = m.content or '' %}{% set thought = '' %}{% if m.reasoning_content is string %}"
    "{% set thought = m.reasoning_content %}{% elif '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
)
_CHATML = "<|im_end|> <|im_start|> <|endoftext|>"
_PHI = "<|endoftext|> <|end|> <|user|> <|assistant|> <|system|> <|tool|> <|tool_response|> <|sep|>"
_GLM = "<|endoftext|> <|user|> <|assistant|> <|system|> <|observation|> [gMASK] <sop>"
_COHERE = (
    "<|END_OF_TURN_TOKEN|> <|START_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|> "
    "<|START_THINKING|> <|END_THINKING|> <|START_ACTION|> <|END_ACTION|>"
)
_LLAMA_3 = "<|eot_id|> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eom_id|> <|python_tag|>"
_BEGINS = ("<s>", "<bos>", "<|begin_of_text|>")
_LOOP = "{% for m in messages %}"

FAMILIES: dict[str, Family] = {
    "hermes": Family(
        template="{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n"
        "{% endfor %}<|im_end|>\n{% endif %}"
        + _LOOP
        + "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        + _HERMES
        + "<|im_end|>\n{% endif %}{% endfor %}"
        + _ASKS
        + "<|im_start|>assistant\n{% endif %}",
        tokens=f"{_CHATML} <tool_call> </tool_call>",
    ),
    "qwq": Family(
        template=_LOOP + "{% if m.role == 'assistant' %}<|im_start|>assistant\n{% if m.reasoning_content %}"
        "{{ m.reasoning_content }}{% endif %}{{ (m.content or '').replace('<think>', '').replace('</think>', '') }}"
        + _HERMES
        + "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        + _ASKS
        + "<|im_start|>assistant\n{% endif %}",
        tokens=_CHATML,
    ),
    "llama3.1": Family(
        template="{{ bos_token }}" + _LOOP + "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('only one call') }}{% endif %}{% set f = m.tool_calls[0].function %}"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}<|eot_id|>'
        "{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
        "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endif %}"
        "{% endfor %}" + _ASKS + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        tokens=_LLAMA_3,
    ),
    "gemma4": Family(
        template="{{ bos_token }}{% for t in tools or [] %}<|tool>{{ t.function.name }}:("
        '{% for key, value in t.function.parameters.properties | dictsort %}{{ key }}:{type:<|"|>'
        '{{ value.type | upper }}<|"|>'
        "{% if value.type | upper == 'STRING' and value.enum %},enum:[{% for one in value.enum %}<|\"|>{{ one }}<|\"|>"
        "{% endfor %}]{% endif %}},{% endfor %}}<tool|>"
        "{% endfor %}" + _LOOP + "<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name + '{' }}"
        "{% for key, value in c.function.arguments | dictsort %}{{ key }}:"
        "{% if value is string %}{{ '<|\"|>' + value + '<|\"|>' }}"
        "{% else %}{{ value }}{% endif %},{% endfor %}}<tool_call|>{% endfor %}"
        "{% for part in (m.content or '').split('</think>') %}"
        "{{ part.split('<think>')[0] }}{% endfor %}<turn|>\n"
        "{% endfor %}" + _ASKS + "<|turn>model\n{% endif %}",
        tokens='<turn|> <|turn> <bos> <eos> <|tool> <tool|> <|tool_call> <tool_call|> <|"|>',
    ),
    "glm4.5": Family(
        template="[gMASK]<sop>{% set ns = namespace(last=-1) %}" + _LOOP + "{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        + _LOOP
        + "{% if m.role == 'assistant' %}<|assistant|>"
        + _THINKS
        + "{% if loop.index0 > ns.last and thought %}\n<think>{{ thought.strip() }}</think>{% else %}\n<think></think>"
        "{% endif %}{% if content.strip() %}\n{{ content.strip() }}{% endif %}{% for c in m.tool_calls or [] %}"
        "\n<tool_call>{{ c.function.name }}"
        "{% for key, value in c.function.arguments.items() %}\n<arg_key>{{ key }}</arg_key>"
        "\n<arg_value>{{ value | tojson if value is not string else value }}</arg_value>"
        "{% endfor %}\n</tool_call>{% endfor %}"
        "{% elif m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>"
        "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}" + _ASKS + "<|assistant|>{% endif %}",
        tokens=_GLM,
    ),
    "phi3": Family(
        template=_LOOP
        + "{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
        + _ASKS
        + "<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
        tokens=_PHI,
    ),
    "cohere": Family(
        template="{{ bos_token }}" + _LOOP + "<|START_OF_TURN_TOKEN|>{% if m.role == 'user' %}<|USER_TOKEN|>"
        "{% elif m.role == 'assistant' %}<|CHATBOT_TOKEN|>{% else %}<|SYSTEM_TOKEN|>{% endif %}"
        "{% if m.reasoning_content %}"
        "<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|>{% endif %}{{ (m.content or '').strip() }}"
        "{% if m.tool_calls %}<|START_ACTION|>["
        '{% for c in m.tool_calls %}{"tool_name": {{ c.function.name | tojson }}, '
        '"parameters": {{ c.function.arguments | tojson }}}{% endfor %}]<|END_ACTION|>{% endif %}<|END_OF_TURN_TOKEN|>'
        "{% endfor %}" + _ASKS + "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}",
        tokens=_COHERE,
    ),
    "granite": Family(
        template=_LOOP
        + "<|start_of_role|>{{ m.role }}<|end_of_role|>{% if m.tool_calls %}{{ m.content or '' }}<|tool_call|>"
        "{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}<|end_of_text|>\n{% endfor %}"
        + _ASKS
        + "<|start_of_role|>assistant<|end_of_role|>{% endif %}",
        tokens="<|end_of_text|> <|start_of_role|> <|end_of_role|> <|tool_call|>",
    ),
    "alpaca": Family(
        template=_LOOP + "{% if m.role == 'system' %}{{ m.content }}\n\n{% elif m.role == 'user' %}### Instruction:\n"
        "{{ m.content | trim }}\n\n{% else %}### Response:\n{{ m.content }}{{ eos_token }}\n\n{% endif %}{% endfor %}"
        + _ASKS
        + "### Response:\n{% endif %}",
        tokens="</s> <s>",
    ),
    "falcon": Family(
        template=_LOOP
        + "{% if not loop.first %}\n{% endif %}{{ m.role | capitalize }}: {{ m.content.strip() }}{% endfor %}"
        + _ASKS
        + "\nAssistant:{% endif %}",
        tokens="<|endoftext|> >>TITLE<< >>INTRODUCTION<<",
    ),
    "xml": Family(
        # Calls as Qwen3-Coder, MiniMax and Seed-OSS write them, with keys as tags, and names as attributes.
        template=_LOOP + "]~b]{{ m.role }}{% if m.name %} name={{ m.name }}{% endif %}\n{% if m.reasoning_content %}"
        "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "<function={{ c.function.name }}>"
        "{% for key, value in c.function.arguments.items() %}<{{ key }}>{{ value }}</{{ key }}>"
        "{% endfor %}</function>{% endfor %}</s>\n{% endfor %}" + _ASKS + "]~b]assistant\n{% endif %}",
        tokens="</s> ]~b] <s>",
    ),
    "keyed": Family(
        # Keys, names and words that the template itself uses, between brackets.
        template=_LOOP + "<|im_start|>{{ m.role }}{% if m.name %}<|{{ m.name }}|>{% endif %}\n"
        "{% for key in m if key not in ('role', 'content', 'name', 'tool_calls') %}<{{ key }}>{% endfor %}"
        "{% if m.role == 'assistant' %}{{ (m.content or '').split('</think>')[-1] }}"
        "{% for tool_call in m.tool_calls or [] %}<function={{ tool_call.function.name }}>"
        "{% for key, value in tool_call.function.arguments.items() %}<{{ key }}>{{ value }}</{{ key }}>"
        "{% endfor %}</function>{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        + _ASKS
        + "<|im_start|>assistant\n{% endif %}",
        tokens=f"{_CHATML} <tool_call> </tool_call> <|assistant|>",
    ),
    "conditions": Family(
        # Special tokens depend on contents, also on characters that special tokens have.
        template=_LOOP + "<|im_start|>{{ m.role }}\n{% if m.content.startswith('/') %}<|command|>"
        "{% elif m.content[0:1] == '[' %}<|list|>"
        "{% elif 'http' in m.content | lower %}<|link|>{% elif m.content.endswith('?') %}<|question|>{% endif %}"
        "{% if m.content | length > 20 %}<|long|>{% endif %}{{ m.content | e }}<|im_end|>\n{% endfor %}"
        + _ASKS
        + "<|im_start|>assistant\n{% endif %}",
        tokens=f"{_CHATML} <|command|> <|list|> <|link|> <|question|> <|long|> [INST] </s>",
    ),
    "harmony": Family(
        template=_LOOP
        + "{% if m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>"
        "{{ m.content | tojson }}<|end|>{% elif m.role == 'assistant' %}{% if m.reasoning_content %}<|start|>assistant"
        "<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>{% endif %}"
        "{% if m.tool_calls %}<|start|>assistant"
        "<|channel|>commentary to=functions.{{ m.tool_calls[0].function.name }} <|constrain|>json<|message|>"
        "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
        "{% else %}<|start|>assistant<|channel|>final<|message|>"
        "{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}"
        "{% else %}<|start|>{{ m.role }}<|message|>"
        "{{ m.content }}<|end|>{% endif %}{% endfor %}" + _ASKS + "<|start|>assistant{% endif %}",
        tokens="<|return|> <|start|> <|end|> <|channel|> <|message|> <|constrain|> <|call|>",
    ),
    "joined": Family(
        # Consecutive answers are one turn, as in Kimi's and Llama 2's descendants; arguments as Python writes them.
        template=_LOOP + "{% set before = messages[loop.index0 - 1].role if loop.index0 else '' %}"
        "{% if m.role != before %}{% if before == 'assistant' %}<|im_end|>\n"
        "{% endif %}<|im_start|>{{ m.role }}\n{% endif %}"
        "{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments }}){% endfor %}"
        "{% if m.role != 'assistant' %}<|im_end|>\n{% elif loop.last %}<|im_end|>\n{% endif %}{% endfor %}"
        + _ASKS
        + "<|im_start|>assistant\n{% endif %}",
        tokens=_CHATML,
    ),
}


def family_directory(directory: Path, family: Family) -> Path:
    """Write the family's tokenizer and template."""
    from tokenizers import Tokenizer

    path = fast_tokenizer(directory) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.add_special_tokens(family.special)
    tokenizer.save(str(path))
    bos = next((one for one in family.special if one in _BEGINS), "<s>")
    named = {"eos_token": family.special[0], "bos_token": bos, "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    (directory / "chat_template.jinja").write_text(family.template, encoding="utf-8")
    return directory
