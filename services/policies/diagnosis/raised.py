"""What user code raised, and in which line of it. Pure.

agent.py:41 ──► openai/_client.py:1248 raises      told as (agent.py:41): the innermost line that is no library's
"""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_ROOT = Path(__file__).parents[3]
_OURS = tuple(_ROOT / each for each in ("clients", "rollout_server", "services", "trainer", "weight_bus"))
_OUR_TASKS = _ROOT / "clients" / "environments" / "tasks"
_INSTALLED = {"site-packages", "dist-packages"}
_STANDARD = tuple(Path(sysconfig.get_path(each)) for each in ("stdlib", "platstdlib"))


def authors_line(error: BaseException) -> str:
    """` (agent.py:41)`: the innermost line of the traceback that is of no installed library, of Python's own or of this
    project; where all are, the innermost one. Empty for an error that was never raised."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    found = next((frame for frame in reversed(frames) if not _of_a_library(frame.filename)), frames[-1])
    return f" ({Path(found.filename).name}:{found.lineno})"


def _of_a_library(filename: str) -> bool:
    path = Path(filename)
    if path.is_relative_to(_OUR_TASKS):
        return False
    if filename.startswith("<frozen ") or not _INSTALLED.isdisjoint(path.parts):
        return True
    return any(path.is_relative_to(folder) for folder in (*_STANDARD, *_OURS))
