"""The reaper: a tiny process that outlives the supervisor's kill -9 and cleans up after it. Standard library only.

    supervisor ──pipe──► reaper        "group 123"   a child's process group was started
                                       "gone 123"    … and has ended
                                       "mark NAME=…" is in the environment variables of every child
                                       "shm PREFIX"  shared-memory files whose path starts so belong to the run
                                       "bye"         all is in order: end without doing anything
    the pipe closes without a "bye" ──► SIGTERM to all groups, SIGKILL to what is left after GRACE_S, files unlinked

It runs in a session of its own (Ctrl-C in the terminal does not reach it) and works wherever there are process groups.
A supervisor may be killed when it has started a child and not yet said so. Such a child is found by the mark, on Linux.
"""

from __future__ import annotations

import glob
import os
import signal
import sys
import time

GRACE_S = 5.0


class Left:
    """What is to be cleaned up. No dataclass: it would cost half the start."""

    def __init__(self) -> None:
        self.groups: set[int] = set()
        self.mark: str | None = None
        self.prefix: str | None = None


def listen() -> Left | None:
    """Follow the pipe; returns what is left to clean up, or None after a "bye"."""
    left = Left()
    for line in sys.stdin:
        word, _, argument = line.strip().partition(" ")
        if word == "group":
            left.groups.add(int(argument))
        elif word == "gone":
            left.groups.discard(int(argument))
        elif word == "mark":
            left.mark = argument
        elif word == "shm":
            left.prefix = argument
        elif word == "bye":
            return None
    return left


def clean_up(left: Left) -> None:
    """End every group, first by request, then by force; then unlink the shared memory."""
    deadline = time.monotonic() + GRACE_S
    groups = {group for group in left.groups | marked(left.mark) if tell(group, signal.SIGTERM)}
    while groups and time.monotonic() < deadline:
        time.sleep(0.02)
        groups = {group for group in groups if tell(group, 0)}
    # One that had not become its own program yet, as the supervisor died, shows its mark by now.
    for group in groups | marked(left.mark):
        tell(group, signal.SIGKILL)
    if left.prefix is not None:
        for path in glob.glob(f"{glob.escape(left.prefix)}*"):  # noqa: PTH207 - pathlib would cost half the start
            os.unlink(path)  # noqa: PTH108


def marked(mark: str | None) -> set[int]:
    """Groups of processes whose environment variables have the mark; none where there is no /proc."""
    found: set[int] = set()
    if mark is None or not os.path.isdir("/proc"):  # noqa: PTH112
        return found
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            try:
                with open(f"/proc/{name}/environ", "rb") as variables:  # noqa: PTH123
                    if mark.encode() in variables.read().split(b"\0"):
                        found.add(os.getpgid(int(name)))
            except OSError:
                # It has ended, or is another user's.
                continue
    return found


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
        clean_up(left)


if __name__ == "__main__":
    main()
