"""`verifier = "math"`: the last value of an answer equals the solution's, by the library math-verify.

Numbers, fractions, percentages, LaTeX (also in `\\boxed{…}`), sets, intervals, equations, and GSM8K's `#### 18`.
"""

from __future__ import annotations

import logging

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from services.rewards.verifiers.text import without_thoughts

_MARK = "####"
_LAST_CHARACTERS = 4000
"""Of an answer, which are read: what counts stands at its end, and the library's patterns take long on long texts."""


def judge(answer: str, solution: str | float, precision: int = 6) -> float:
    """`precision`: digits behind the point in which numbers must agree. Raises ValueError for another solution."""
    # It logs each text that it cannot read, with a traceback.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    gold = _values(str(solution).rpartition(_MARK)[2].strip(), alone=True)
    if not gold:
        raise ValueError(f"the solution {str(solution)[:200]!r} is no value that can be compared")
    said = without_thoughts(answer)[-_LAST_CHARACTERS:]
    _, marked, behind = said.rpartition(_MARK)
    found = _values(_last_boxed(behind if marked else said))
    # The sandbox bounds the time: the library's own alarms are left out.
    return float(bool(found) and verify(gold, found, float_rounding=precision, timeout_seconds=None))


def _values(text: str, *, alone: bool = False) -> list[object]:
    """What the library reads in `text`. `alone`: it is a value and nothing else, so LaTeX needs no dollars."""
    if alone and "\\" in text and not any(sign in text for sign in ("$", "\\boxed", "\\(", "\\[")):
        text = f"${text}$"
    kinds = (LatexExtractionConfig(), ExprExtractionConfig())
    return list(parse(text, kinds, fallback_mode="no_fallback", parsing_timeout=None))


def _last_boxed(text: str) -> str:
    """The last `\\boxed{…}` of `text`, where there is one with an end: the library would take all of them for a set."""
    begins = text.rfind("\\boxed{")
    depth = 0
    for place in range(begins, len(text)) if begins >= 0 else ():
        depth += (text[place] == "{") - (text[place] == "}")
        if text[place] == "}" and not depth:
            return f"${text[begins : place + 1]}$"
    return text
