"""Which services began again: one that is back before the next look was never seen away, yet is another process. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

TOLD_FOR_S = 60.0


class Restart(msgspec.Struct, frozen=True):
    """`at`: Unix seconds, of the look that found it."""

    service: str
    at: float


class Restarts:
    """Compares each look with the one before."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._found: dict[str, Restart] = {}

    def look(self, incarnations: Mapping[str, str], at: float) -> list[Restart]:
        """Those of the last minute. `incarnations`: of the services that are there now, by name."""
        for service, incarnation in incarnations.items():
            if self._known.get(service, incarnation) != incarnation:
                self._found[service] = Restart(service, at)
            self._known[service] = incarnation
        self._found = {name: each for name, each in self._found.items() if at - each.at < TOLD_FOR_S}
        return list(self._found.values())
