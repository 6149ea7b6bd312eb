"""The part of an answer that counts, as models write: what they think is left out, code and data stand in fences."""

from __future__ import annotations

import re

_THOUGHT = re.compile(r"<(think|thinking|reasoning)>.*?(</\1>|\Z)", re.DOTALL)
_FENCE = re.compile(
    r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*\1[ \t]*$|\Z)", re.DOTALL | re.MULTILINE
)


def without_thoughts(answer: str) -> str:
    """`answer` without `<think>…</think>` and the like; a thought that never ends takes all behind it.

    Templates may open the thought for the model: then the answer begins within it.
    """
    for tag in ("think", "thinking", "reasoning"):
        head, closed, tail = answer.partition(f"</{tag}>")
        if closed and f"<{tag}>" not in head:
            answer = tail
    return _THOUGHT.sub("", answer)


def fenced(answer: str) -> list[tuple[str, str]]:
    """Fenced blocks in order: their language in lower case, empty where none is named, and their text."""
    return [(match[2].lower(), match[3]) for match in _FENCE.finditer(answer)]
