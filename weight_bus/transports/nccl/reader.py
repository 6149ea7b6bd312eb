"""The receiver's side of the collective transport: join an epoch, take its chunks in order, leave.

    read ─► member? ──no──► join: ticket, wait for the plan, make the group ─┐
              └──yes── next chunk of the broadcast ─► out ◄──────────────────┘
                            └── the epoch broke ─► leave, join the next one at the byte that is missing

Ranges are read in rising order; one that lies behind what was broadcast leaves the epoch and joins the next.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import torch

from services.policies.training.deadlines import within
from services.wire.errors import UNDECODABLE
from weight_bus.errors import TransportError
from weight_bus.manifest.manifest import CollectiveSource, Source
from weight_bus.transports.base import check_range, read_in_order
from weight_bus.transports.nccl import group

_POLL_S = 0.003
_MAX_CHUNK = 1 << 30


class CollectiveReader:
    """`deadline_s` bounds each read, broken epochs and the wait for the next one included, at the least: an epoch under way
    may have all bytes to send first (`services.policies.training.deadlines`)."""

    name = "collective"

    def __init__(self, deadline_s: float = 30.0) -> None:
        group.quiet_torch()
        self._deadline_s = deadline_s
        self._source: CollectiveSource | None = None
        self._store: group.Store | None = None
        self._epoch: _Epoch | None = None

    def can_read(self, source: Source) -> bool:
        return isinstance(source, CollectiveSource) and source.backend in (group.GLOO, group.default_backend())

    def read(self, source: Source, offset: int, out: memoryview) -> None:
        if not isinstance(source, CollectiveSource):
            raise TransportError(f"the collective reader cannot read a {type(source).__name__}")
        check_range(source.length, offset, len(out))
        within_s = within(self._deadline_s, source.length)
        deadline = time.monotonic() + within_s
        done = 0
        while done < len(out):
            try:
                epoch = self._member_at(source, offset + done, deadline)
                done += epoch.take(offset + done, out[done:], deadline)
            except RuntimeError as error:
                # Another member died or stalled, or the publisher went: joining the next epoch tells which.
                self._leave()
                if time.monotonic() >= deadline:
                    raise TransportError(
                        f"a broadcast from {source.host}:{source.port} gave {done} of {len(out)} bytes within "
                        f"{within_s:g} s ({error})",
                        "is another engine stalled, or the publisher gone?",
                    ) from error

    def read_many(self, source: Source, pieces: Iterable[tuple[int, memoryview]]) -> Iterator[int]:
        # The next chunk is under way while the caller works on the last one, whatever the pieces are.
        return read_in_order(self, source, pieces)

    def close(self) -> None:
        self._leave()
        self._store = self._source = None

    def _member_at(self, source: CollectiveSource, offset: int, deadline: float) -> _Epoch:
        if source != self._source:
            self._leave()
            self._source, self._store = None, None
            left = max(0.05, min(deadline - time.monotonic(), self._deadline_s))
            self._store = group.reach_store(source.host, source.port, left)
            self._source = source
        if self._epoch is not None and self._epoch.position > offset:
            self._leave()
        if self._epoch is None:
            self._epoch = self._join(source, offset, deadline)
        return self._epoch

    def _join(self, source: CollectiveSource, offset: int, deadline: float) -> _Epoch:
        assert self._store is not None
        try:
            while True:
                epoch = int(self._store.get("epoch"))
                ticket = self._store.add(f"{epoch}/joined", 1)
                self._store.set(f"{epoch}/from/{ticket}", str(offset))
                plan = _await_plan(self._store, epoch, ticket, deadline)
                if ticket in plan.members:
                    break
        except RuntimeError as error:
            self._source = self._store = None
            raise TransportError(
                f"the broadcast at {source.host}:{source.port} is over ({error})", "is the publisher gone?"
            ) from error
        return _Epoch(self._store, source, epoch, plan, plan.members.index(ticket) + 1)

    def _leave(self) -> None:
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            epoch.leave()


class _Epoch:
    """Membership in one broadcast. RuntimeError from any method: the epoch is broken.

    `position`: the first byte that can still be taken.
    """

    def __init__(self, store: group.Store, source: CollectiveSource, number: int, plan: group.Plan, rank: int) -> None:
        self._store, self._length, self._number, self._plan = store, source.length, number, plan
        self._backend = source.backend
        size = len(plan.members) + 1
        self._group: Any = group.make_group(source.backend, store, number, rank, size, source.host, plan.stall_s)
        self._spare = [group.chunk_buffer(source.backend, plan.chunk_bytes) for _ in range(group.IN_FLIGHT + 1)]
        self._coming: deque[tuple[int, torch.Tensor, torch.Tensor, Any]] = deque()
        self._posted = plan.start
        self._here: torch.Tensor | None = None
        self._buffer: torch.Tensor | None = None
        self.position = plan.start
        self._post()

    def take(self, offset: int, out: memoryview, deadline: float) -> int:
        """Copy what of `out` lies in one chunk; gives how many bytes. `offset` is not before `position`."""
        while self._here is None or offset >= self.position + len(self._here):
            self._next(deadline)
        within = offset - self.position
        count = min(len(out), len(self._here) - within)
        torch.frombuffer(out, dtype=torch.uint8, count=count).copy_(self._here[within : within + count])
        return count

    def leave(self) -> None:
        group.end_group(self._group)
        self._coming.clear()
        self._group = None

    def _next(self, deadline: float) -> None:
        if self._buffer is not None:
            self._spare.append(self._buffer)
            self._here = self._buffer = None
        self._post()
        offset, buffer, chunk, work = self._coming[0]
        work.wait(group.seconds(max(0.001, min(self._plan.stall_s, deadline - time.monotonic()))))
        self._coming.popleft()
        self.position, self._here, self._buffer = offset, chunk.cpu(), buffer
        if offset + len(chunk) == self._length:
            self._store.add(f"{self._number}/done", 1)

    def _post(self) -> None:
        while self._spare and self._posted < self._length:
            buffer = self._spare.pop()
            chunk = buffer[: min(self._plan.chunk_bytes, self._length - self._posted)]
            self._coming.append((self._posted, buffer, chunk, self._group.broadcast(chunk, 0)))
            self._posted += len(chunk)


def _await_plan(store: group.Store, epoch: int, ticket: int, deadline: float) -> group.Plan:
    while not store.check([f"{epoch}/plan"]):
        if time.monotonic() >= deadline:
            store.set(f"{epoch}/gone/{ticket}", "1")
            raise RuntimeError("it did not begin in time: another one is still under way")
        time.sleep(_POLL_S)
    try:
        plan = msgspec.json.decode(store.get(f"{epoch}/plan"), type=group.Plan)
    except UNDECODABLE as error:
        raise RuntimeError(f"its plan cannot be read: {error}") from error
    if not (0 < plan.chunk_bytes <= _MAX_CHUNK and plan.start >= 0 and 0 < plan.stall_s <= 3600):
        raise RuntimeError(f"its plan is impossible: {plan}")
    return plan
