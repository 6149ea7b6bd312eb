"""`verifier = "tags"`: an answer has the form `<think>…</think><answer>…</answer>`, or that of other tags."""

from __future__ import annotations

import re


def judge(answer: str, complete: bool = True, tags: str = "think,answer") -> float:
    """1 where each of `tags` stands once, in this order, each with a text in it, and nothing but white space between them.

    Raises ValueError for `tags` that are no names.
    """
    names = [name.strip() for name in tags.split(",")]
    if not all(re.fullmatch(r"[A-Za-z][\w-]*", name) for name in names):
        raise ValueError(f"tags {tags!r} are no names, written one behind the other with commas")
    if not complete:
        return 0.0
    inside = r"((?:(?!</?(?:{names})>).)*\S(?:(?!</?(?:{names})>).)*)".format(names="|".join(map(re.escape, names)))
    form = r"\s*".join(f"<{re.escape(name)}>{inside}</{re.escape(name)}>" for name in names)
    return float(re.fullmatch(rf"\s*{form}\s*", answer, re.DOTALL) is not None)
