"""Who speaks in a turn, and which tools it calls, as far as its text says so.

A trajectory holds tokens alone. The markers of the templates in use name roles; calls are JSON between tags, or headed by a
name.
"""

from __future__ import annotations

import re

_ROLE = re.compile(
    r"<\|im_start\|>\s*(\w{1,40})|<\|start_header_id\|>\s*(\w{1,40})|<start_of_turn>\s*(\w{1,40})|<\|(system|user|tool|"
    r"observation|assistant)\|>|\[(INST|TOOL_RESULTS)\]"
)
_TOOL_ANSWER = re.compile(r"<tool_response>|\[TOOL_RESULTS\]|<\|observation\|>")
_CALL = re.compile(r'<tool_call>\s*\{[^{}]{0,200}?"name"\s*:\s*"([^"\\]{1,100})"')
_HEADED = re.compile(r"<function=([^>\s]{1,100})>|\[TOOL_CALLS\]\s*([\w.-]{1,100})")
MOST_TOOLS = 50


def role_of(text: str) -> str:
    """Who the first speaker of a context is: `tool` for the answer of one; empty where nobody is named."""
    if _TOOL_ANSWER.search(text):
        return "tool"
    found = _ROLE.search(text)
    if found is None:
        return ""
    role = next(group for group in found.groups() if group is not None).lower()
    return "user" if role == "inst" else role


def called_tools(text: str) -> list[str]:
    """The names of the tools that an answer calls, in their order."""
    found = [(match.start(), match[1]) for match in _CALL.finditer(text)]
    found += [(match.start(), match[1] or match[2]) for match in _HEADED.finditer(text)]
    return [name for _, name in sorted(found)[:MOST_TOOLS]]
