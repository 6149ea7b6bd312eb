"""`verifier = "choice"`: the letter of a multiple choice, as models name it.

Looked for in this order, the last one of a kind: `\\boxed{B}`, "the answer is (B)", an answer that is the letter, or
begins with it as in "B) Paris", a last line that is the letter alone.
"""

from __future__ import annotations

import re

from services.rewards.verifiers.text import without_thoughts

_WRAP = r"[\s*_`\"'(\[{$]*"
_END = r"(?=[\s*_`\"'.,:;)\]}$!]*(?:$|\n)|[)\]}:.,;*`\"'](?![A-Za-z])|\s+(?:because|since|as|for|is)\b|\s*[-–—(])"
_BOXED = re.compile(r"\\boxed\s*\{\s*(?:\\(?:text|textbf|mathrm|mathbf)\s*\{)?\s*\(?\s*([A-Za-z])\s*\)?\s*[}.:)]")
_SAID = re.compile(
    rf"(?i:\b(?:answer|choice|option)\b)(?:\s+(?i:is|would be|must be|should be|choice|option))*\s*[:=]?{_WRAP}"
    rf"(?i:option\s+|choice\s+)?{_WRAP}([A-Z]){_END}"
)
_ALONE = re.compile(rf"\A{_WRAP}([A-Za-z])[\s*_`\"'.,:;)\]}}$!]*\Z")
_FIRST = re.compile(r"\A[\s*_`\"'(\[]*([A-Z])[)\].:][*_`\"']*(?:\s|$)")


def judge(answer: str, solution: str, choices: list[str] | int = 26) -> float:
    """`choices`: the texts of the choices, or how many there are. Raises ValueError for another solution."""
    count = choices if isinstance(choices, int) else len(choices)
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[:count]
    wanted = str(solution).strip().strip("().").upper()
    if len(wanted) != 1 or wanted not in letters:
        raise ValueError(f"the solution {solution!r} is no letter of {letters}")
    return float(chosen(without_thoughts(answer).strip()) == wanted)


def chosen(said: str) -> str | None:
    """The letter that is chosen, in upper case; None where none is."""
    for pattern in (_BOXED, _SAID):
        if found := pattern.findall(said):
            return str(found[-1]).upper()
    lines = said.splitlines() or [""]
    for pattern, text in ((_ALONE, said), (_FIRST, said), (_ALONE, lines[-1])):
        if match := pattern.match(text):
            return match[1].upper()
    return None
