"""`verifier = "code"`: the Python of an answer passes tests, each in a process of its own.

    cases    [{"input": "3 4", "output": "7"}, …]     what the program writes for what it reads, line by line
    tests    "assert add(3, 4) == 7"                  Python that is run behind the answer's code

The program is the last fenced block of Python, else of no language, else the whole answer. `cases` are compared here, out
of its reach. `tests` run in one process with the code that they test: code that wants to can cheat them.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from services.rewards.verifiers.text import fenced, without_thoughts

_PYTHON = ("python", "py", "python3")
_MOST_OUTPUT = 1 << 20


def judge(
    answer: str,
    cases: list[dict[str, Any]] | None = None,
    tests: str | None = None,
    case_limit_s: float = 2.0,
    partial: bool = False,
) -> float:
    """1 where all cases and tests pass. `partial`: the share that does, where `tests` count as one.

    Raises ValueError for a sample with neither, or whose cases lack an output.
    """
    if not cases and not tests:
        raise ValueError("the sample has neither cases nor tests")
    for case in cases or ():
        if "output" not in case:
            raise ValueError(f"the case {case!r} has no output")
    program = program_of(without_thoughts(answer))
    if not program.strip():
        return 0.0
    passed = [_writes(program, str(case.get("input", "")), str(case["output"]), case_limit_s) for case in cases or ()]
    if tests:
        passed.append(_passes(program, tests, case_limit_s))
    return sum(passed) / len(passed) if partial else float(all(passed))


def program_of(said: str) -> str:
    """The code of an answer."""
    blocks = fenced(said)
    for wanted in (_PYTHON, ("",)):
        found = [text for language, text in blocks if language in wanted]
        if found:
            return found[-1]
    return "" if blocks else said


def _writes(program: str, given: str, wanted: str, limit_s: float) -> bool:
    done = _run(program, given, limit_s)
    return done is not None and done[0] == 0 and _lines(done[1]) == _lines(wanted)


def _lines(text: str) -> list[str]:
    """Without white space at ends, where judges of programs do not look."""
    return [line.rstrip() for line in text.strip().splitlines()]


def _passes(program: str, tests: str, limit_s: float) -> bool:
    # A program that ends by itself, with 0, has not come to the tests' end.
    word = secrets.token_hex(16)
    done = _run(f"{program}\n\n{tests}\n\nprint(open(0).read())\n", word, limit_s)
    return done is not None and done[0] == 0 and done[1].rstrip().endswith(word)


def _run(program: str, given: str, limit_s: float) -> tuple[int, str] | None:
    """Exit code and output; None where it ran too long or wrote too much."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        file.write_text(program, encoding="utf-8", errors="replace")
        with (Path(folder) / "out").open("w+b") as out:
            try:
                done = subprocess.run(
                    [sys.executable, "-I", str(file)],
                    input=given.encode(errors="replace"),
                    stdout=out,
                    stderr=subprocess.DEVNULL,
                    timeout=limit_s,
                    cwd=folder,
                    env={"PATH": os.environ.get("PATH", ""), "TMPDIR": folder},
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return None
            out.seek(0)
            written = out.read(_MOST_OUTPUT + 1)
    return None if len(written) > _MOST_OUTPUT else (done.returncode, written.decode(errors="replace"))
