"""Stop strings over text that comes in pieces: what may be shown, and where to stop. Pure.

    stop "END"    fed "the E"  ──► show "the ", hold back "E"
                  fed "N"      ──► hold back "EN"
                  fed "D, so"  ──► stopped by "END"; "EN" never shows

Of several the one that is complete first counts, and of those complete at the same character the longest, so that it does
not matter how the text was cut into pieces. The stop string itself does not show.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped: str | None = None
        """The stop string that was met."""

    def __bool__(self) -> bool:
        """Whether there is anything to watch for."""
        return bool(self._stops)

    def feed(self, text: str) -> str:
        """What may be shown now. Nothing after a stop string. Costs O(len(text)) for usual stop strings."""
        if not self._stops:
            return text
        if self.stopped is not None:
            return ""
        text = self._held + text
        met = self._first(text)
        if met is not None:
            start, self.stopped = met
            self._held = ""
            return text[:start]
        keep = self._beginning(text)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """What was held back, where the text ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        found = [(text.find(stop), stop) for stop in self._stops]
        met = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if not met:
            return None
        _, start, stop = min(met)
        return start, stop

    def _beginning(self, text: str) -> int:
        """Where the earliest unfinished stop string begins; the text's length where none does."""
        keep = len(text)
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= at < keep:
                if stop.startswith(text[at:]):
                    keep = at
                    break
                at = text.find(stop[0], at + 1)
        return keep
