"""What a server spends on telemetry itself, seen where nothing else happens: its CPU time over calls that draw no token.

A call that draws tokens costs a hundred times what telemetry adds to it, and differs from run to run by more than that.
Beside calls that only open and abort a session the same work stands out; its share is then reckoned.
"""

from __future__ import annotations

import asyncio
import random
from typing import Literal

from rollout_server.bench.http_arm import HttpArm
from rollout_server.bench.rate import in_parallel
from rollout_server.bench.telemetry_report import AloneFigures
from services.bench.processes import Child

# Of a session that is opened and aborted.
_SPANS_A_PAIR = 2
_AT_ONCE = 8
_ROUNDS = 6
# Spans are handed in a second after they were made, in batches: whatever is left of them belongs to their own round.
_HANDED_IN_S = 1.5
_Kind = Literal["plain", "recorded"]


async def measure_alone(
    plain: HttpArm, recorded: HttpArm, child: Child, count: int, rng: random.Random
) -> AloneFigures:
    """`count`: sessions, and scrapes, a round. `recorded`: the server by a client whose calls are of a recorded trace."""
    found = AloneFigures()
    arms: dict[_Kind, HttpArm] = {"plain": plain, "recorded": recorded}
    await _pairs(recorded, child, count)
    for _ in range(_ROUNDS):
        order = list(arms)
        rng.shuffle(order)
        spent = {kind: await _pairs(arms[kind], child, count) for kind in order}
        # What a server does by itself in that time is in both.
        found.span_us.append(1e6 * (spent["recorded"] - spent["plain"]) / (_SPANS_A_PAIR * count))
        found.scrape_ms.append(1e3 * await _scrapes(plain, child, count) / count)
    return found


async def _pairs(arm: HttpArm, child: Child, count: int) -> float:
    """CPU seconds of so many sessions that are opened and aborted."""

    async def play(_: int) -> int:
        await arm.give_up([await arm.open_one()])
        return 0

    before = child.cpu_s()
    await in_parallel(range(count), _AT_ONCE, play)
    await asyncio.sleep(_HANDED_IN_S)
    return child.cpu_s() - before


async def _scrapes(arm: HttpArm, child: Child, count: int) -> float:
    """CPU seconds of so many calls of `/metrics`, one after the other."""
    before = child.cpu_s()
    for _ in range(count):
        await arm.scrape()
    return child.cpu_s() - before
