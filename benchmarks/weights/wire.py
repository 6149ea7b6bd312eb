"""Throughput of the weight transports alone, beside process_vm_readv and memcpy of the same bytes.

    another process   ── process_vm_readv ──►  |       |      nixl_vs_readv = nixl ÷ readv
                      ── NIXL READ ─────────►  | one   |
                      ── shm read ──────────►  | warm  |      shm_vs_memcpy = shm ÷ memcpy
    this process      ── memcpy ────────────►  | arena |

All four copy the same number of bytes in the same pieces to the same place, in a new random order each round, since each
leaves its bytes in the caches. Nothing is hashed. Each arm reads from several arenas in turn, so that their place in
memory matters less.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.harness.processes import PYTHON, answer_lines, replies_only, running_piped
from services.wire.errors import RollmeshError, UsageError
from weight_bus.manifest.layout import hash_bytes
from weight_bus.manifest.manifest import Source
from weight_bus.memory.arena import Arena, private_arena
from weight_bus.transports.base import Reader
from weight_bus.transports.nixl import NixlReader
from weight_bus.transports.select import nixl_installed
from weight_bus.transports.shm import ShmReader

PIECE_BYTES = 16 << 20
"""As the default bucket."""
_ARENAS = 4
_PASSES = 3 * _ARENAS
"""Copies of everything in each round: one alone takes some hundredths of a second."""
_START_S = 60.0


@dataclass(frozen=True)
class Wire:
    """`figures`: one a round of the ratios `nixl_vs_readv`, `shm_vs_memcpy` and each arm's `<arm>_gbps` (10^9 bytes/s).

    `huge`: the kernel gave the shared memory huge pages, as it mostly does a process's own (`private_arena`).
    """

    figures: dict[str, list[float]]
    huge: bool


async def measure_wire(nbytes: int, rounds: int, folder: Path, say: Callable[[str], None]) -> Wire:
    """Takes a thread and, now and then, a second process; both want a core. Raises UsageError where NIXL is not installed
    or the system is not Linux, RollmeshError when bytes arrive that are not those offered.
    """
    if not nixl_installed() or sys.platform != "linux":
        raise UsageError("the wire cannot be measured here", "run on Linux with NIXL installed")
    command = [*PYTHON, "benchmarks.weights.wire"]
    async with running_piped("wire publisher", command, folder, start_within_s=_START_S) as publisher:
        offered = await publisher.ask(Offer(nbytes=nbytes, seed=1, arenas=_ARENAS), Offered)
        figures = await asyncio.to_thread(_measure, offered, nbytes, rounds, say)
        return Wire(figures, huge=all(arena.huge for arena in offered.arenas))


def _measure(offered: Offered, nbytes: int, rounds: int, say: Callable[[str], None]) -> dict[str, list[float]]:
    arena, own = private_arena(nbytes), [private_arena(nbytes) for _ in offered.arenas]
    readers: list[Reader] = [NixlReader(), ShmReader()]
    pieces = [(offset, min(PIECE_BYTES, nbytes - offset)) for offset in range(0, nbytes, PIECE_BYTES)]
    try:
        arms: dict[str, Callable[[int], None]] = {
            "readv": lambda which: _readv(offered.pid, offered.arenas[which], arena, pieces),
            "nixl": lambda which: _read(readers[0], offered.arenas[which].nixl, arena, pieces),
            "memcpy": lambda which: _memcpy(own[which], arena, pieces),
            "shm": lambda which: _read(readers[1], offered.arenas[which].shm, arena, pieces),
        }
        for which, source in enumerate(offered.arenas):
            _read(readers[1], source.shm, own[which], pieces)
            for name, copy in arms.items():
                # The first pass touches every page; it also proves that the arm moves the bytes.
                arena.view[:] = bytes(nbytes)
                copy(which)
                if hash_bytes(arena.view) != offered.digest:
                    raise RollmeshError(f"the bytes that {name} copied are not those offered")
        figures: dict[str, list[float]] = {}
        rng = random.Random(rounds)
        for number in range(rounds):
            speed = _round(arms, nbytes, rng)
            for name, figure in speed.items():
                figures.setdefault(f"{name}_gbps", []).append(figure)
            for key, ours, raw in (("nixl_vs_readv", "nixl", "readv"), ("shm_vs_memcpy", "shm", "memcpy")):
                figures.setdefault(key, []).append(speed[ours] / speed[raw])
            say(
                f"wire, round {number + 1}: " + ", ".join(f"{name} {figure:.1f} GB/s" for name, figure in speed.items())
            )
        return figures
    finally:
        for reader in readers:
            reader.close()
        for made in (arena, *own):
            made.close()


def _round(arms: dict[str, Callable[[int], None]], nbytes: int, rng: random.Random) -> dict[str, float]:
    spent = dict.fromkeys(arms, 0.0)
    for number in range(_PASSES):
        for name in rng.sample(list(arms), len(arms)):
            started = time.perf_counter()
            arms[name](number % _ARENAS)
            spent[name] += time.perf_counter() - started
    return {name: _PASSES * nbytes / seconds / 1e9 for name, seconds in spent.items()}


def _read(reader: Reader, source: Source, arena: Arena, pieces: list[tuple[int, int]]) -> None:
    for _ in reader.read_many(source, ((offset, arena.view[offset : offset + length]) for offset, length in pieces)):
        pass


def _memcpy(source: Arena, arena: Arena, pieces: list[tuple[int, int]]) -> None:
    for offset, length in pieces:
        ctypes.memmove(arena.address + offset, source.address + offset, length)


class _Range(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _readv(pid: int, offered: OfferedArena, arena: Arena, pieces: list[tuple[int, int]]) -> None:
    readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
    readv.restype = ctypes.c_ssize_t
    for offset, length in pieces:
        done = 0
        while done < length:
            here = _Range(arena.address + offset + done, length - done)
            there = _Range(offered.address + offset + done, length - done)
            got = readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
            if got <= 0:
                raise RollmeshError(f"process_vm_readv failed ({os.strerror(ctypes.get_errno())})")
            done += got


# The publisher's process: it offers the same bytes over NIXL and over shared memory.


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """Make `arenas` pairs of arenas, each of the same `nbytes` pseudo-random bytes that follow from `seed`."""

    nbytes: int
    seed: int
    arenas: int


class OfferedArena(msgspec.Struct, frozen=True):
    """Where the bytes lie. `address`: those of `nixl` in the publisher's memory, to be read without a transport.

    `huge`: the kernel gave the shared memory huge pages.
    """

    address: int
    nixl: Source
    shm: Source
    huge: bool


class Offered(msgspec.Struct, frozen=True):
    """`pid`: whose memory it is."""

    pid: int
    arenas: list[OfferedArena]
    digest: str


def main() -> None:
    replies = replies_only()
    import numpy as np

    from weight_bus.manifest.layout import hash_bytes
    from weight_bus.transports.nixl import NixlExporter
    from weight_bus.transports.shm import SealedArena, ShmExporter

    nixl, shm = NixlExporter(), ShmExporter(f"wire-{os.getpid()}")

    async def offer(command: Offer) -> Offered:
        content = np.random.default_rng(command.seed).bytes(command.nbytes)
        # All are there before the first is offered, as a publisher's are: whoever reads meets this process once.
        made = [(nixl.allocate(command.nbytes), shm.allocate(command.nbytes)) for _ in range(command.arenas)]
        arenas = []
        for registered, shared in made:
            registered.view[:] = shared.view[:] = content
            huge = isinstance(shared, SealedArena) and shared.huge
            arenas.append(OfferedArena(registered.address, nixl.export(registered), shm.export(shared), huge))
        return Offered(os.getpid(), arenas, hash_bytes(memoryview(content)))

    try:
        asyncio.run(answer_lines(replies, Offer, offer))
    finally:
        nixl.close()
        shm.close()


if __name__ == "__main__":
    main()
