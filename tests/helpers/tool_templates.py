"""Chat templates in the forms of widely used ones with tools, and a tokenizer with their tokens."""

from tokenizer_zoo import tokenizer_of
from tokenizers import decoders

TOKENS = (
    *("<|im_start|>", "<|im_end|>", "<|begin|>", "<|head|>", "<|/head|>", "<|eot|>"),
    *("[INST]", "[/INST]", "[TOOL_CALLS]"),
)
# ChatML: the tools as JSON lines in the system's turn, the results of consecutive calls in one
# user's turn, as Qwen2.5 has it. BEGIN and END become {% generation %} blocks, or nothing.
_QWEN = """\
{%- if tools %}
{{- '<|im_start|>system\\nFunctions:' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<result>' + message.content + '</result>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}BEGIN
{%- if message.content %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls %}
{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
{%- if call.function %}{%- set call = call.function %}{%- endif %}
{{- '<call>{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}</call>' }}
{%- endfor %}
{{- '<|im_end|>' }}END{{- '\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
# As Llama 3.1: one call in a message, whose text is not written; the tools are in the first
# question; a result is written as JSON, also if it is text.
LLAMA = """\
{{- '<|begin|>' }}
{%- for message in messages %}
{%- set role = 'ipython' if message.role == 'tool' else message.role %}
{{- '<|head|>' + role + '<|/head|>\\n\\n' }}
{%- if 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('only one call') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}' }}
{%- elif message.role == 'tool' %}
{{- message.content | tojson }}
{%- else %}
{%- if loop.first and tools %}{{- 'Functions: ' }}{{- tools | tojson }}{{- '\\n' }}{%- endif %}
{{- message.content | trim }}
{%- endif %}
{{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\\n\\n' }}{%- endif %}
"""
# As Mistral 7B v0.3: no text may be where a call is, ids have nine characters, no generation prompt.
MISTRAL = """\
{%- set state = namespace(asks=true) %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != state.asks %}{{- raise_exception('roles alternate') }}{%- endif %}
{%- set state.asks = not state.asks %}
{%- endif %}
{%- if message.role == 'user' %}
{%- if tools and loop.first %}{{- tools | tojson }}{%- endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}
{{- 'RESULT ' + message.content + '\\n' }}
{%- elif message.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}{{- raise_exception('id') }}{%- endif %}
{{- call.function | tojson }}
{%- endfor %}
{{- ']' + eos_token }}
{%- else %}
{{- ' ' + message.content + eos_token }}
{%- endif %}
{%- endfor %}
"""
# As DeepSeek V3: the arguments are JSON text, which is joined with other text.
DEEPSEEK = """\
{%- for message in messages %}
{%- if tools and loop.first %}{{- tools | tojson }}{%- endif %}
{{- '<|head|>' + message.role + '<|/head|>' + (message.content or '') }}
{%- for call in message.tool_calls %}
{{- call.function.name + ' ' + call.function.arguments }}
{%- endfor %}
{{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>' }}{%- endif %}
"""


def _qwen(begin: str, end: str) -> str:
    return _QWEN.replace("BEGIN", begin).replace("END", end)


QWEN = _qwen("", "")
QWEN_BLOCKS = _qwen("{%- generation %}", "{%- endgeneration %}")


def with_template(template: str | None):
    """A small tokenizer of GPT-2's kind with the special tokens of these templates."""
    tokenizer = tokenizer_of("gpt2")
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS)})
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.chat_template = template
    return tokenizer
