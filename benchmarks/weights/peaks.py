"""`shadow_peak`: memory of a vLLM engine with the weight bus above that of vLLM alone, by where versions are staged.

    alone     start ─ streams decode                        peak of each of the two times, of all its processes
    others    start ─ streams decode, updates meanwhile     less that of `alone` and the host's share ÷ bytes of the weights

Peaks are the kernel's high-water marks of resident memory. On a CPU there is no memory of a device: what would lie in the
host's memory beside one (pinned) is counted apart, as the engine's own sets say. `device` is with all defaults: matrices
packed alone. `plain` packs none, as on a GPU, and neither do the other places; `beside` has packed copies beside the
matrices (`weights.packed`). Over nixl: pages of a publisher that shm maps would count as the engine's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.harness.processes import peaks_bytes
from benchmarks.weights.arms import Arrivals, AskHeld, Begin, Done, End, HeldBytes, Ways
from benchmarks.weights.engine import ALONE
from benchmarks.weights.processes import prompts, running_engine, running_publisher

_PLACES: Mapping[str, tuple[str, str]] = {
    ALONE: (ALONE, "off"),
    "device": ("device", "auto"),
    "pinned": ("pinned", "off"),
    "sparse": ("sparse", "off"),
    "device, plain": ("device", "off"),
    "device, beside": ("device", "beside"),
}
"""Arm → `weights.shadow` and `weights.packed`."""
ARMS = tuple(arm for arm in _PLACES if arm != ALONE)
_TRANSPORT = "nixl"
_UPDATES = 6
_STREAMS = 2
_MAX_TOKENS = 1900
_SEED = 1
_ALONE_S = 3.0


class _Peak(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of an arm: the most while it started and while it was updated; `host`: counted apart in them."""

    starting: int
    updating: int
    host: int = 0

    def above(self, alone: _Peak, weight_bytes: int) -> float:
        """Of the two times the larger share of the weights."""
        more = max(self.starting - alone.starting, self.updating - alone.updating)
        return round((more - self.host) / weight_bytes, 3)


async def measure_peaks(
    model: Path,
    weight_bytes: int,
    folder: Path,
    say: Callable[[str], None],
    arms: Sequence[str] = ARMS,
) -> dict[str, float]:
    """Arm → what it takes above vLLM alone, as a share of the weights."""
    peaks = {}
    for arm in (ALONE, *arms):
        peaks[arm] = await _peak(arm, model, folder)
        starting, updating, host = (size / 1e6 for size in msgspec.structs.astuple(peaks[arm]))
        say(f"memory, {arm}: {starting:.0f} MB starting, {updating:.0f} updating, {host:.0f} of them the host's")
    return {arm: peak.above(peaks[ALONE], weight_bytes) for arm, peak in peaks.items() if arm != ALONE}


async def _peak(arm: str, model: Path, folder: Path) -> _Peak:
    begin = Begin(prompts(_STREAMS, _SEED), _MAX_TOKENS, again=True)
    async with (
        running_publisher(model, folder) as publisher,
        running_engine("vllm", model, folder, _STREAMS, f"{arm} memory", _PLACES[arm]) as engine,
    ):
        host = 0
        starting = peaks_bytes(engine.child)
        await engine.ask(begin, Done)
        if arm == ALONE:
            await asyncio.sleep(_ALONE_S)
        else:
            ways = Ways(engine, publisher, folder, [_TRANSPORT])
            for _ in range(_UPDATES):
                await ways.update(_TRANSPORT)
            host = (await engine.ask(AskHeld(), HeldBytes)).host
        await engine.ask(End(), Arrivals)
        return _Peak(starting=starting, updating=peaks_bytes(engine.child), host=host)
