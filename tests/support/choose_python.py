"""Which of the Pythons on the PATH an environment is made of: the first one, unless another is clearly faster.

    python tests/support/choose_python.py FIRST        `./dev` does this, with the first one's path

A Python that was compiled without profile-guided optimisation (pyenv's, unless told otherwise) takes a sixth more CPU for
all that a mesh does outside of torch; what a build was made with is not always written down in it, so they are timed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

NAMES = ("python3.11", "python3.12", "python3.13", "python3")
FASTER = 0.9
"""Of the first one's time: what another must do with, to be taken in its place."""
_ROUNDS = 3
_WITHIN_S = 20.0
# Its header files, for what torch compiles, and ensurepip, without which pip could not make an environment of it.
_PROBE = """
import ensurepip, pathlib, sys, sysconfig, time
if not (3, 11) <= sys.version_info[:2] <= (3, 13) or not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists():
    sys.exit(1)
class Item:
    __slots__ = ("name", "value")
    def __init__(self, name, value):
        self.name, self.value = name, value
def work():
    items = {}
    for number in range(20000):
        item = Item(str(number), number)
        items[item.name] = item
    return sum(item.value for item in items.values())
def timed():
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
print(min(timed() for _ in range(9)))
"""


def pythons(path: str) -> Iterator[str]:
    """Those in the folders of `path`, each once, in the order in which a shell would find them."""
    seen: set[Path] = set()
    for name in NAMES:
        for folder in path.split(os.pathsep):
            found = Path(folder, name)
            if not os.access(found, os.X_OK) or found.resolve() in seen:
                continue
            seen.add(found.resolve())
            yield str(found)


def seconds_of(python: str) -> float | None:
    """For a piece of work; None for a Python that cannot be used."""
    try:
        ended = subprocess.run(
            [python, "-I", "-c", _PROBE], capture_output=True, text=True, timeout=_WITHIN_S, check=False
        )
        return float(ended.stdout) if ended.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None


def choose(first: str, seconds: Mapping[str, float]) -> str:
    """`seconds`: of each that can be used."""
    if not seconds:
        return first
    fastest = min(seconds, key=lambda python: seconds[python])
    return fastest if first not in seconds or seconds[fastest] < FASTER * seconds[first] else first


def main() -> None:
    """Print the Python to take. The one that runs this is the first."""
    first, seconds = sys.argv[1], dict[str, float]()
    others = list(pythons(os.environ.get("PATH", "")))
    for _ in range(_ROUNDS):  # in turns: a busy moment of the machine is nobody's fault
        for python in dict.fromkeys([first, *others]):
            took = seconds_of(python)
            if took is not None:
                seconds[python] = min(took, seconds.get(python, took))
    chosen = choose(first, seconds)
    if chosen != first and first in seconds:
        less = 1 - seconds[chosen] / seconds[first]
        sys.stderr.write(f"dev: taking {chosen}, which ran a piece of Python in {less:.0%} less time than {first}\n")
    sys.stdout.write(f"{chosen}\n")


if __name__ == "__main__":
    main()
