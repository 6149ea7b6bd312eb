"""The reaper: a tiny process that outlives the supervisor's kill -9 and cleans up after it. Standard library only.

    supervisor ──pipe──► reaper        "group 123"   a child's process group was started
                                       "gone 123"    … and has ended
                                       "shm PREFIX"  shared-memory files whose path starts so belong to the run
                                       "bye"         all is in order: end without doing anything
    the pipe closes without a "bye" ──► SIGTERM to all groups, SIGKILL to what is left after GRACE_S, files unlinked

It runs in a session of its own (Ctrl-C in the terminal does not reach it) and works wherever there are process groups.
"""

from __future__ import annotations

import glob
import os
import signal
import sys
import time

GRACE_S = 5.0


def listen() -> tuple[set[int], str | None] | None:
    """Follow the pipe; returns what is left to clean up, or None after a "bye"."""
    groups: set[int] = set()
    prefix: str | None = None
    for line in sys.stdin:
        word, _, argument = line.strip().partition(" ")
        if word == "group":
            groups.add(int(argument))
        elif word == "gone":
            groups.discard(int(argument))
        elif word == "shm":
            prefix = argument
        elif word == "bye":
            return None
    return groups, prefix


def clean_up(groups: set[int], prefix: str | None) -> None:
    """End every group, first by request, then by force; then unlink the shared memory."""
    deadline = time.monotonic() + GRACE_S
    left = {group for group in groups if tell(group, signal.SIGTERM)}
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = {group for group in left if tell(group, 0)}
    for group in left:
        tell(group, signal.SIGKILL)
    if prefix is not None:
        for path in glob.glob(f"{glob.escape(prefix)}*"):  # noqa: PTH207 - pathlib would cost half the start
            os.unlink(path)  # noqa: PTH108


def tell(group: int, what: int) -> bool:
    """Send a signal to a process group; False when there is none any more."""
    try:
        os.killpg(group, what)
    except ProcessLookupError:
        return False
    except PermissionError:
        # macOS says so of a group of which only zombies are left.
        return False
    return True


def main() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    left = listen()
    if left is not None:
        clean_up(*left)


if __name__ == "__main__":
    main()
