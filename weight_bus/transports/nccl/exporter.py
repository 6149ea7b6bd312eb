"""The publisher's side of the collective transport: one thread an export broadcasts the arena, epoch by epoch.

    open ──first member joins──► window ──member list fixed──► broadcast ──all have it──► open (next epoch)
                                                                  └──one died or stalled: the epoch ends──┘

The trainer's thread takes no part. A receiver that dies or stalls ends its epoch for all, after `stall_s` at the latest;
the others join the next one, which starts at the first byte that one of them still lacks.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import structlog
import torch

from weight_bus.errors import TransportError
from weight_bus.manifest.manifest import CollectiveSource, Manifest, Source
from weight_bus.memory.arena import Arena, private_arena
from weight_bus.transports.nccl import group

_POLL_S = 0.01
_TICKET_S = 1.0
"""How long a member that has a ticket may take to say from which byte on it reads."""

log = structlog.get_logger(__name__)


class CollectiveExporter:
    """`host`: the address that receivers reach this process at, the only one that is listened on.

    `window_s`: how long an epoch waits for further members once one has joined. `stall_s`: how long a chunk may take.
    """

    name = "collective"

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        window_s: float = 0.25,
        stall_s: float = 10.0,
        chunk_bytes: int = 16 << 20,
        backend: str | None = None,
    ) -> None:
        group.quiet_torch()
        self._host = host
        self._window_s, self._stall_s, self._chunk_bytes = window_s, stall_s, chunk_bytes
        self._backend = backend or group.default_backend()
        self._arenas: list[Arena] = []
        self._exports: dict[int, _Export] = {}
        self._exported = 0

    def allocate(self, nbytes: int) -> Arena:
        arena = private_arena(nbytes)
        self._arenas.append(arena)
        return arena

    def export(self, arena: Arena, draft: Manifest | None = None) -> Source:  # noqa: ARG002
        """Opens the arena's bytes for joining; what it was exported as before is withdrawn."""
        former = self._exports.pop(arena.address, None)
        if former is not None:
            former.withdraw()
        self._exported += 1
        export = _Export(self._host, arena, self._backend, self._window_s, self._stall_s, self._chunk_bytes)
        self._exports[arena.address] = export
        return CollectiveSource(
            host=self._host, port=export.port, epoch=self._exported, backend=self._backend, length=arena.nbytes
        )

    def close(self) -> None:
        """Raises TransportError when a broadcast does not end within its stall time."""
        exports = list(self._exports.values())
        self._exports.clear()
        for export in exports:
            export.withdraw()
        for export in exports:
            export.join(3 * self._stall_s + _TICKET_S)
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()


class _Export:
    """One version's bytes, its store and the thread that broadcasts them."""

    def __init__(
        self, host: str, arena: Arena, backend: str, window_s: float, stall_s: float, chunk_bytes: int
    ) -> None:
        self._store, self.port = group.open_store(host, stall_s)
        self._host, self._backend = host, backend
        self._bytes: torch.Tensor | None = torch.frombuffer(arena.view, dtype=torch.uint8)
        self._window_s, self._stall_s, self._chunk_bytes = window_s, stall_s, chunk_bytes
        self._epoch = 1
        self._withdrawn = threading.Event()
        self._store.set("epoch", "1")
        self._thread = threading.Thread(target=self._run, name=f"collective-export-{self.port}", daemon=True)
        self._thread.start()

    def withdraw(self) -> None:
        """No further epoch; one under way ends with its next chunk."""
        self._withdrawn.set()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TransportError(f"a broadcast on port {self.port} did not end within {timeout_s:.0f} s")

    def _run(self) -> None:
        try:
            while not self._withdrawn.wait(_POLL_S):
                if self._store.add(f"{self._epoch}/joined", 0):
                    self._run_epoch()
        except RuntimeError as error:
            # The store is in this process: only torch itself can fail here. Receivers find nobody and say so.
            log.error("weight broadcast ended", port=self.port, why=str(error))
        finally:
            self._bytes = None
            del self._store

    def _run_epoch(self) -> None:
        self._withdrawn.wait(self._window_s)
        plan, epoch = self._fix_members(), self._epoch
        self._store.set(f"{epoch}/plan", msgspec.json.encode(plan).decode())
        self._epoch += 1
        self._store.set("epoch", str(self._epoch))
        if not plan.members:
            return
        collective = None
        try:
            size = len(plan.members) + 1
            collective = group.make_group(self._backend, self._store, epoch, 0, size, self._host, self._stall_s)
            self._broadcast(collective, plan)
            self._await_done(epoch, len(plan.members))
        except RuntimeError as error:
            log.warning("weight broadcast broke off", epoch=epoch, members=len(plan.members), why=str(error))
        finally:
            if collective is not None:
                group.end_group(collective)

    def _fix_members(self) -> group.Plan:
        joined = self._store.add(f"{self._epoch}/joined", 0)
        deadline = time.monotonic() + _TICKET_S
        starts: dict[int, int] = {}
        for ticket in range(1, joined + 1):
            wish = f"{self._epoch}/from/{ticket}"
            while not self._store.check([wish]) and time.monotonic() < deadline:
                self._withdrawn.wait(_POLL_S)
            # Who died before it said what it wants, or has given up since, is not waited for.
            if self._store.check([wish]) and not self._store.check([f"{self._epoch}/gone/{ticket}"]):
                starts[ticket] = int(self._store.get(wish))
        return group.Plan(sorted(starts), min(starts.values(), default=0), self._chunk_bytes, self._stall_s)

    def _broadcast(self, collective: Any, plan: group.Plan) -> None:
        assert self._bytes is not None
        stall = group.seconds(plan.stall_s)
        works: list[Any] = []
        buffers = group.IN_FLIGHT if self._on_gpu else 0
        spare = [group.chunk_buffer(self._backend, plan.chunk_bytes) for _ in range(buffers)]
        for number, offset in enumerate(range(plan.start, len(self._bytes), plan.chunk_bytes)):
            if self._withdrawn.is_set():
                raise RuntimeError("withdrawn: the arena holds another version now")
            if len(works) == group.IN_FLIGHT:
                works.pop(0).wait(stall)
            chunk = self._bytes[offset : offset + plan.chunk_bytes]
            if spare:
                chunk = spare[number % group.IN_FLIGHT][: len(chunk)].copy_(chunk)
            works.append(collective.broadcast(chunk, 0))
        for work in works:
            work.wait(stall)

    def _await_done(self, epoch: int, members: int) -> None:
        # A socket that is closed too early could take its last bytes with it.
        deadline = time.monotonic() + self._stall_s
        while self._store.add(f"{epoch}/done", 0) < members:
            if time.monotonic() > deadline:
                raise RuntimeError(f"not all members had the bytes within {self._stall_s} s")
            if self._withdrawn.wait(_POLL_S):
                return

    @property
    def _on_gpu(self) -> bool:
        return self._backend != "gloo"
