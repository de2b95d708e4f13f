"""Chat templates with one quirk each, and a tokenizer of single characters for them."""

import re
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gruppo.turns.chat import ChatCodec

CHARS = "\n" + "".join(map(chr, range(32, 127)))
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
        },
    }
]

# A separator after the end token, one block around the answers of all tools; calls as Hermes writes them.
BLOCK = """{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}
{{- '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}{{ c.function.arguments | tojson }}
{{- '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Thoughts of turns before the last user's message are dropped.
FORGETS = """{% set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{% set said = m.content %}
{%- if m.role == 'assistant' %}
{%- if m.reasoning_content %}{% set thought = m.reasoning_content %}
{%- elif '</think>' in said %}
{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip() %}
{%- set said = said.split('</think>')[-1].strip() %}{% endif %}
{%- if thought is defined and loop.index0 > ns.last %}{% set said = '<think>\n' + thought + '\n</think>\n\n' + said %}
{%- endif %}{% endif %}
{{- '<|im_start|>' + m.role + '\n' + said }}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>{"name": "' + c.function.name + '", "arguments": ' }}{{ c.function.arguments | tojson }}
{{- '}</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Roles alternate, and nobody but user and assistant speaks.
ALTERNATES = """{% for m in messages %}
{%- if m.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}{{ raise_exception('roles must alternate') }}
{%- endif %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\n' }}
{{- (m.content | trim) + '<end_of_turn>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

# The end of the last turn is another token than that of earlier ones; an answer bears the name of its tool.
RETURNS = """{% set ns = namespace(name='') %}{% for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}{% set call = m.tool_calls[0].function %}{% set ns.name = call.name %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary<|message|>' }}
{{- call.arguments | tojson + '<|call|>' }}
{%- elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- elif m.role == 'tool' %}{{ '<|start|>functions.' + ns.name + ' to=assistant<|message|>' + m.content + '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

# No end of a turn.
ENDLESS = """{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""

# The end of the last turn alone.
OMITS = """{% for m in messages %}{{ '<|start|>' + m.role + '<|message|>' + m.content }}{% endfor %}
{{- '<|start|>assistant<|message|>' if add_generation_prompt else '<|endoftext|>' }}"""

# Nobody's calls are shown, and something stands before the last message of a user alone.
MOVES = """{% set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + ('!' if loop.index0 == ns.last else '') + '\n' + m.content }}
{{- '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Content is a list of parts.
PARTS = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# A system message of its own comes first, and the end token swallows the line's end after it.
SYSTEM_FIRST = """{% if messages[0].role != 'system' %}{{ '<|system|>\nHelp.<|end|>\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role in ('system', 'user', 'assistant') %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"""

# The tool's name stands in its answer, and must.
NAMED = """{% for m in messages %}{% if m.role == 'tool' %}
{%- if not m.name %}{{ raise_exception('an answer needs the name of its tool') }}{% endif %}
{{- '<|im_start|>tool ' + m.name + '\n' + m.content }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>' + ({'name': c.function.name, 'arguments': c.function.arguments} | tojson) + '</tool_call>' }}
{%- endfor %}{{ '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Ids of calls have nine characters; nothing begins the assistant's turn.
NINE = """{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}
{%- if (m.tool_call_id or '') | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- '[TOOL_RESULTS]' + ({'content': m.content, 'call_id': m.tool_call_id} | tojson) + '[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS][' }}{% for c in m.tool_calls %}
{%- if (c.id or '') | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- {'name': c.function.name, 'arguments': c.function.arguments, 'id': c.id} | tojson }}
{{- ', ' if not loop.last else '' }}{% endfor %}{{ ']</s>' }}
{%- else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"""

# One call in a turn, as bare JSON, in place of what is said.
SINGLE = """{{ '<|begin_of_text|>' }}{% for m in messages %}
{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson + '}' }}
{%- else %}{{ m.content | trim }}{% endif %}{{ '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# Arguments of calls must be JSON text.
TEXT_ARGUMENTS = """{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>' + m.content }}
{%- elif m.role == 'tool' %}{{ '<|output|>' + m.content + '<|output_end|>' }}
{%- else %}{{ '<|assistant|>' + m.content }}{% for c in m.tool_calls or [] %}
{{- '<tool_call>{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments + '}</tool_call>' }}
{%- endfor %}{{ '<|endoftext|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

# A turn ends where the next message begins.
OPENS = """{% for m in messages %}{% if m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}{{ '\n' + m.content }}
{%- else %}{{ '<|' + m.role + '|>\n' + m.content }}{% for c in m.tool_calls or [] %}
{{- '<tool_call>' + ({'name': c.function.name, 'arguments': c.function.arguments} | tojson) + '</tool_call>' }}
{%- endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""

# What is said beside a call stands after the tool's answer.
LATE = """{% for m in messages %}{% if m.role == 'tool' %}
{%- set called = messages[loop.index0 - 1] %}
{{- '<|output|>' + m.content + '<|output_end|>' }}{% if called.content %}{{ called.content + '<|end|>' }}{% endif %}
{%- else %}{{ '<|' + m.role + '|>' }}{% for c in m.tool_calls or [] %}
{{- '<tool_call>' + ({'name': c.function.name, 'arguments': c.function.arguments} | tojson) + '</tool_call><|call|>' }}
{%- else %}{{ m.content + '<|end|>' }}{% endfor %}{% endif %}{% endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|assistant|>' }}{% endif %}"""

# The first answer of a tool is written otherwise than later ones.
CHANGES = """{% set ns = namespace(first=true) %}{% for m in messages %}
{{- '<|' + m.role + '|>' + m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}
{%- if m.role == 'tool' and ns.first %}{{ '!' }}{% set ns.first = false %}{% endif %}{{ '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

# Template, and what the model stops at.
TEMPLATES: dict[str, tuple[str, tuple[str, ...]]] = {
    "block": (BLOCK, ("<|im_end|>", "<|endoftext|>")),
    "forgets": (FORGETS, ("<|im_end|>",)),
    "alternates": (ALTERNATES, ("<end_of_turn>",)),
    "returns": (RETURNS, ("<|return|>", "<|call|>")),
    "system_first": (SYSTEM_FIRST, ("<|end|>", "<|endoftext|>")),
    "named": (NAMED, ("<|im_end|>",)),
    "nine": (NINE, ("</s>",)),
    "single": (SINGLE, ("<|eot_id|>",)),
    "text_arguments": (TEXT_ARGUMENTS, ("<|endoftext|>",)),
    "opens": (OPENS, ("<|user|>", "<|observation|>", "<|endoftext|>")),
    "late": (LATE, ("<|end|>", "<|call|>")),
    "moves": (MOVES, ("<|im_end|>",)),
    "omits": (OMITS, ("<|endoftext|>",)),
    "endless": (ENDLESS, ("<|endoftext|>",)),
    "parts": (PARTS, ("<|im_end|>",)),
    "changes": (CHANGES, ("<|end|>",)),
}
SWALLOWS = ("<|end|>",)
"""Tokens that take the space after them."""
WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens that are not special."""


def tokenizer_of(name: str) -> Any:
    """A tokenizer of one token for each character, and for each marker of the template."""
    template, ends = TEMPLATES[name]
    found = re.findall(r"<\|\w+\|>|</?(?:s|start_of_turn|end_of_turn)>|\[/?[A-Z_]+\]", template)
    marks = sorted({*found, *ends, "<|python_tag|>", "<|endoftext|>", "<|end|>"})
    if "tool |" in template or "'<|' + m.role" in template:
        marks = sorted({*marks, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"})
    ids = {token: i for i, token in enumerate(["<pad>", *marks, *WORDS, *CHARS])}
    made = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken(mark, rstrip=name == "system_first" and mark in SWALLOWS) for mark in marks])
    made.add_tokens([AddedToken(word, special=False) for word in WORDS])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token=ends[0],
        clean_up_tokenization_spaces=False,
        chat_template=template,
    )


def codec_of(name: str, tools: Any = ()) -> ChatCodec:
    tokenizer = tokenizer_of(name)
    return ChatCodec(tokenizer, tokenizer.convert_tokens_to_ids(list(TEMPLATES[name][1])), tools)


def ids_of(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
