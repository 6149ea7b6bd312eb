"""Chat templates that do what some families' do, for the tokenizer of `tests.support.chat_policy`."""

from __future__ import annotations

CLOSES_IN_TEXT = """\
{%- for message in messages %}
    {%- if (message.role == "user") != (loop.index0 % 2 == 0) %}{{ raise_exception("roles must alternate") }}{% endif %}
    {{- "[" + message.content + "] " if message.role == "user" else message.content + " <|endoftext|>" }}
{%- endfor %}"""
CLOSES_BY_THE_NEXT = """\
{%- for message in messages %}{{ "<|im_start|>" + message.role + "\n" + message.content }}{% endfor %}
{{- "<|im_start|>assistant\n" if add_generation_prompt else "" }}"""
ASKS_FOR_CALLS = """\
{%- for message in messages %}
    {%- if message.role == "tool" and not messages[loop.index0 - 1].tool_calls and loop.previtem.role != "tool" %}
        {{- raise_exception("nobody called") }}
    {%- endif %}
    {{- "<|im_start|>" + message.role + ":" }}
    {%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% else %}{{ message.content }}{% endfor %}
    {{- "<|im_end|>" }}
{%- endfor %}"""
CHANGES_WHAT_IS_BEFORE = """\
{{- messages | length }}
{%- for message in messages %}{{ message.role + message.content + "<|im_end|>" }}{% endfor %}"""
DROPS_REASONING = """\
{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "\n" }}
    {{- "<think>\n\n</think>\n\n" if message.role == "assistant" and loop.last else "" }}
    {{- message.content + "<|im_end|>\n" }}
{%- endfor %}
{{- "<|im_start|>assistant\n<think>\n" if add_generation_prompt else "" }}"""
CLOSES_THE_LAST_OTHERWISE = """\
{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "\n" + message.content }}
    {{- "<|endoftext|>" if loop.last and message.role == "assistant" else "<|im_end|>" }}
{%- endfor %}
{{- "<|im_start|>assistant\n" if add_generation_prompt else "" }}"""
ENDS_IN_TEXT = """\
{%- for message in messages %}{{ "### " + message.role + ": " + message.content + "\n" }}{% endfor %}
{{- "### assistant: " if add_generation_prompt else "" }}"""
