"""Leases of environment runners: whose groups are given up. Pure.

    a runner joins, and is heard of several times a lease ──► held
        ├── it leaves, or another process joins under its name ──► gone, at once
        └── it is silent for `lease_s` seconds in which it could have been heard ──► gone

A rollout server looks a few times a second. It counts the time between two looks as silence only where both could be made
and heartbeats had a way to the run's servers: not while Redis or all gateways were away, nor while the server itself stood
still. So an outage of anything but the runner costs no group, and a server that starts gives every runner a whole lease.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Gone(StrEnum):
    """Why a runner plays its groups no more."""

    LEFT = "left"
    REPLACED = "replaced"
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class Heard:
    """Of one name: the incarnation that has it, and a mark that changes whenever it is heard of."""

    incarnation: str
    mark: int
    left: bool = False


class RunnerLeases:
    """One server's view. `longest_s`: the longest time between two looks that counts as watched throughout."""

    def __init__(self, lease_s: float, longest_s: float) -> None:
        if lease_s <= 0.0 or longest_s <= 0.0:
            raise ValueError(f"a lease and a look take time, got {lease_s} and {longest_s} seconds")
        self._lease_s = lease_s
        self._longest_s = longest_s
        # Mark and seconds of silence; None: nobody has this name.
        self._silences: dict[str, tuple[int | None, float]] = {}
        self._looked_at: float | None = None

    def look(
        self, now: float, runners: Iterable[str], heard: Mapping[str, Heard], *, reachable: bool = True
    ) -> dict[str, Gone]:
        """Those of `runners` (`name/incarnation`) that are gone. `heard`: by name, as of `now`, in seconds of any clock.

        `reachable`: whether heartbeats had a way here since the last look.
        """
        since, self._looked_at = self._looked_at, now
        watched = 0.0 if since is None or not reachable else min(max(0.0, now - since), self._longest_s)
        gone: dict[str, Gone] = {}
        silences: dict[str, tuple[int | None, float]] = {}
        for runner in set(runners):
            name, _, incarnation = runner.rpartition("/")
            found = heard.get(name)
            if found is not None and found.incarnation != incarnation:
                gone[runner] = Gone.REPLACED
            elif found is not None and found.left:
                gone[runner] = Gone.LEFT
            else:
                mark = None if found is None else found.mark
                before = self._silences.get(runner)
                silent_s = 0.0 if before is None or before[0] != mark else before[1] + watched
                silences[runner] = mark, silent_s
                if silent_s >= self._lease_s:
                    gone[runner] = Gone.SILENT
        self._silences = silences
        return gone
