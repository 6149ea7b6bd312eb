"""A trial of a weight transport on this host: another process offers memory, this one reads it, and times that.

trial ──starts──► `rollmesh transports --offer`: allocate, fill, export ──source, a line──► read, compare
"""

from __future__ import annotations

import base64
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import msgspec

from services.policies.diagnosis.machine import Transport
from services.wire.errors import RollmeshError
from weight_bus.errors import TransportError
from weight_bus.manifest.manifest import Source
from weight_bus.transports.select import make_exporter, make_readers, resolve

NBYTES = 64 << 20
_PIECE = 16 << 20
"""As a bucket of weights."""
_PATTERN = bytes(range(251)) * 4
_WITHIN_S = 8.0
_MARK = "source "
"""Before the line that is meant: UCX writes to standard output too."""
_ROUNDS = 2
"""The first read connects and registers memory."""


def offer(name: str, nbytes: int = NBYTES) -> None:
    """Offer an arena until standard input ends. What fails is the last line on standard error."""
    exporter = make_exporter(name, f"trial-{time.monotonic_ns():x}")
    try:
        arena = exporter.allocate(nbytes)
        arena.view[: len(_PATTERN)] = _PATTERN
        arena.view[-len(_PATTERN) :] = _PATTERN
        packed = base64.b64encode(msgspec.msgpack.encode(exporter.export(arena)))
        sys.stdout.write(f"\n{_MARK}{packed.decode()}\n")
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        exporter.close()


def try_transport(name: str, command: Sequence[str], nbytes: int = NBYTES) -> Transport:
    """`command`: what runs `offer`, in another process. What fails is in `why`; nothing is raised."""
    name = resolve(name)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    # A library that hangs must not hang this process.
    ending = threading.Timer(2 * _WITHIN_S, process.kill)
    ending.start()
    try:
        mark = _MARK.encode()
        line = next((line for line in process.stdout if line.startswith(mark)), None)
        if line is None:
            return Transport(name, why=_last_words(process))
        source = msgspec.msgpack.decode(base64.b64decode(line.removeprefix(mark)), type=Source)
        return Transport(name, _read(name, source, nbytes), nbytes)
    except (RollmeshError, OSError) as error:
        return Transport(name, why=str(error))
    finally:
        ending.cancel()
        try:
            process.communicate(timeout=_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _read(name: str, source: Source, nbytes: int) -> float:
    """Bytes a second of the fastest round. Raises TransportError."""
    reader = make_readers(name, _WITHIN_S)[0]
    if not reader.can_read(source):
        raise TransportError(f"{name} cannot read what another process of this host offers")
    out = memoryview(bytearray(nbytes))
    try:
        best = 0.0
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            pieces = [(at, out[at : at + _PIECE]) for at in range(0, nbytes, _PIECE)]
            for _ in reader.read_many(source, pieces):
                pass
            best = max(best, nbytes / (time.perf_counter() - began))
        if out[: len(_PATTERN)] != _PATTERN or out[-len(_PATTERN) :] != _PATTERN:
            raise TransportError(f"{name} read other bytes than were offered")
        return best
    finally:
        reader.close()


def _last_words(process: subprocess.Popen[bytes]) -> str:
    _, said = process.communicate(timeout=_WITHIN_S)
    lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("rollmesh: ") if lines else f"exit code {process.returncode}"
