"""How long an agent hears nothing once the server that spoke to it is dead. Pure.

    chunks     │││││││ ││                 │││││││││
                     ▲   ◄── silence ──►
                     kill ─── figure ──►

What was on its way at the kill still arrives: it is no sign that another server has taken over. The silence is therefore
the longest gap between chunks among those that begin within a moment of the kill.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

ON_ITS_WAY_S = 0.1


def until_heard(killed_at: float, began: float, arrivals: Sequence[float]) -> float | None:
    """Seconds from the kill to the chunk that ended the silence. All times on one clock.

    `began`: when the call was sent, before the kill. `arrivals`: of its chunks so far, in order. None as long as only what
    was on its way has come; for ever, if that was the whole rest of the answer.
    """
    known_after = killed_at + ON_ITS_WAY_S
    if not arrivals or arrivals[-1] <= known_after:
        return None
    last_before = max([began, *(time for time in arrivals if time <= killed_at)])
    gaps = pairwise([last_before, *(time for time in arrivals if time > killed_at)])
    silences = [(end - max(start, killed_at), end) for start, end in gaps if start <= known_after]
    return max(silences)[1] - killed_at
