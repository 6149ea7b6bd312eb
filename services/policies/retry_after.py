"""Retry-After for refused groups, estimated from the pace of commits and closings so far. Pure: the caller has a clock.

    refused by    waits for                          judged by
    staleness     as many steps as make room    the intervals between the last commits
    open groups   so many closings                   the intervals between the last closings
    look-ahead    the oldest open group's end        how long the last groups were open

The answer is the `_SURE` quantile of the remaining times that the history allows, not the median: most callers that come
back then are to be admitted. Where the present wait is longer than any before it, only its age is known, and half of that
is answered. The answer reserves no place: where more ask than there are places for, those in the queue come first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection

from services.policies.admission import AdmissionRules, Closed, Places

UNKNOWN_S = 1.0
"""The answer while there is no history."""
LONGEST_S = 600.0
_REMEMBERED = 32
_SURE = 0.85


def remaining_s(lasted: Collection[float], age: float) -> float | None:
    """How much longer something will go on that is `age` seconds old, where others `lasted` so long; None if none did."""
    if not lasted:
        return None
    longer = sorted(each - age for each in lasted if each > age)
    return longer[math.ceil(_SURE * len(longer)) - 1] if longer else age / 2


class ExpectedRate:
    """How often something happens. `now` is in seconds on any clock that only goes forward."""

    def __init__(self, now: float) -> None:
        self._last = now
        self._begun = False
        self._intervals: deque[float] = deque(maxlen=_REMEMBERED)

    def note(self, now: float, times: int = 1) -> None:
        """It happened, so many times since the last note. What went before the first is no interval."""
        if self._begun:
            self._intervals.extend([(now - self._last) / times] * min(times, _REMEMBERED))
        self._begun, self._last = True, now

    def until(self, times: int, now: float) -> float | None:
        """Seconds until it will have happened `times` more times; None while that cannot be told."""
        first = remaining_s(self._intervals, now - self._last)
        if first is None:
            return None
        return first + (times - 1) * sum(self._intervals) / len(self._intervals)


class RetryEstimate:
    """What a server has seen of a run's pace, and what it tells those whom admission refuses."""

    def __init__(self, rules: AdmissionRules, engine_version: int, now: float) -> None:
        self._rules = rules
        self._version = engine_version
        self._commits, self._closings = ExpectedRate(now), ExpectedRate(now)
        self._lasted: deque[float] = deque(maxlen=_REMEMBERED)
        # Those who were told to come back will be there before whoever is refused after them.
        self._promised: deque[float] = deque(maxlen=rules.most_open)

    def serves(self, engine_version: int, now: float) -> None:
        """The engine serves this version."""
        if engine_version > self._version:
            self._commits.note(now, engine_version - self._version)
            self._version = engine_version

    def closed(self, lasted: Collection[float], now: float) -> None:
        """Groups were closed that had been open for so many seconds."""
        if lasted:
            self._closings.note(now, len(lasted))
            self._lasted.extend(lasted)

    def refused(self, left: Places, ahead: int, oldest_age_s: float | None, now: float) -> float:
        """Seconds after which one who is refused now should ask again, at least 0; he is expected then.

        `ahead`: how many waited before him. `oldest_age_s`: for how long the oldest open group has been open.
        """
        self._promised = deque((due for due in self._promised if due > now), maxlen=self._rules.most_open)
        missing = max(1, ahead + len(self._promised) + 1 - left.free)
        match left.closed_by:
            case Closed.STALENESS:
                told = self._commits.until(self._rules.steps_for(missing), now)
            case Closed.OPEN_GROUPS:
                told = self._closings.until(missing, now)
            case Closed.LOOKAHEAD:
                told = remaining_s(self._lasted, oldest_age_s or 0.0)
            case Closed.BYTES:
                told = None
        told = UNKNOWN_S if told is None else min(told, LONGEST_S)
        self._promised.append(now + max(1.0, math.ceil(told)))
        return told
