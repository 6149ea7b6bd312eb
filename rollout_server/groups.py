"""Groups and their registry: who is open, who has ended and with which answer.

    (admitted) ──► open ──finish──────────────────────────► finished   stream ids kept, a repeated finish answers them
                     └──idle | run concluded | shutdown──► dropped    tokens forgotten

Only the fact of the end is kept, for a bounded time and number, so that late calls get a true answer.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from rollout_server.sessions import Session
from services.wire.errors import ConcludedError, ConflictError, NotFoundError, UsageError
from services.wire.sampling import SamplingParams

Purpose = Literal["train", "evaluate"]
DropCause = Literal["idle", "run_concluded", "client_gone", "shutdown"]


def new_group_id() -> str:
    """Whoever knows a group's id may speak in it, so it cannot be guessed (128 random bits)."""
    return f"g-{secrets.token_hex(16)}"


def session_id(group_id: str, member: int) -> str:
    """The id of sibling `member`, and of its trajectory."""
    return f"{group_id}.{member}"


@dataclass(slots=True, eq=False)
class Group:
    """Sessions that share a prompt. `opened_at` is in Unix seconds, `last_used` on the monotonic clock."""

    group_id: str
    ordinal: int
    task: str
    purpose: Purpose
    sampling: SamplingParams
    sessions: dict[str, Session]
    opened_at: float
    last_used: float
    closing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by whoever ends the group."""

    @classmethod
    def open(
        cls, group_id: str, ordinal: int, task: str, purpose: Purpose, sampling: SamplingParams, group_size: int
    ) -> Group:
        siblings = [Session(session_id(group_id, member), member) for member in range(group_size)]
        sessions = {session.session_id: session for session in siblings}
        return cls(group_id, ordinal, task, purpose, sampling, sessions, time.time(), time.monotonic())

    @property
    def busy(self) -> bool:
        """Whether a turn is being taken, or the group is being ended."""
        return self.closing.locked() or self.taking_turns

    @property
    def taking_turns(self) -> bool:
        return any(session.busy for session in self.sessions.values())

    @contextmanager
    def reserved(self, session_ids: Sequence[str]) -> Iterator[list[Session]]:
        """The named sessions, busy for the time of the block.

        Raises NotFoundError for a session of another group, UsageError for one named twice, ConflictError for one that is
        taking a turn already.
        """
        if self.closing.locked():
            raise ConflictError(f"group {self.group_id} is being ended", "open another one")
        if len(set(session_ids)) != len(session_ids):
            raise UsageError("a session is named twice", "one turn a session in a call")
        sessions = [self._session(name) for name in session_ids]
        for session in sessions:
            if session.busy:
                raise ConflictError(f"session {session.session_id} is taking a turn", "wait for its answer")
        for session in sessions:
            session.busy = True
        try:
            yield sessions
        finally:
            for session in sessions:
                session.busy = False
            self.last_used = time.monotonic()

    def _session(self, name: str) -> Session:
        try:
            return self.sessions[name]
        except KeyError:
            raise NotFoundError(f"group {self.group_id} has no session {name!r}") from None


@dataclass(frozen=True, slots=True)
class Ended:
    """How a group ended. `stream_ids`: session id → stream id, when it was finished."""

    ended_at: float
    stream_ids: Mapping[str, str] | None = None
    cause: DropCause | None = None

    def answer(self, group_id: str) -> dict[str, str]:
        """The stream ids. Raises what a call on a group that was dropped deserves."""
        if self.stream_ids is not None:
            return dict(self.stream_ids)
        if self.cause == "run_concluded":
            raise ConcludedError(
                f"group {group_id} was dropped, the run has concluded", "no more trajectories are taken"
            )
        raise ConflictError(f"group {group_id} was dropped ({self.cause})", "open another one")


class GroupRegistry:
    """All groups of one server. Pure bookkeeping: the ledger and the stream are its callers' business."""

    def __init__(self, *, keep_ended: int = 4096, keep_ended_s: float = 600.0) -> None:
        self._open: dict[str, Group] = {}
        self._ended: OrderedDict[str, Ended] = OrderedDict()
        self._keep_ended = keep_ended
        self._keep_ended_s = keep_ended_s

    def __len__(self) -> int:
        return len(self._open)

    def add(self, group: Group) -> None:
        self._open[group.group_id] = group

    def find_open(self, group_id: str) -> Group:
        """The open group. Raises NotFoundError, or ConflictError when it has ended."""
        group = self._open.get(group_id)
        if group is not None:
            return group
        ended = self.find_ended(group_id)
        if ended is None:
            raise NotFoundError(f"no group {group_id!r} on this server", "it never was here, or ended long ago")
        ended.answer(group_id)
        raise ConflictError(f"group {group_id} is finished", "open another one")

    def find_ended(self, group_id: str) -> Ended | None:
        return self._ended.get(group_id)

    def finish(self, group: Group, stream_ids: Mapping[str, str]) -> None:
        self._end(group, Ended(time.monotonic(), stream_ids=stream_ids))

    def drop(self, group: Group, cause: DropCause) -> None:
        self._end(group, Ended(time.monotonic(), cause=cause))

    def _end(self, group: Group, ended: Ended) -> None:
        del self._open[group.group_id]
        self._ended[group.group_id] = ended
        if len(self._ended) > self._keep_ended:
            self._ended.popitem(last=False)

    def all_open(self) -> list[Group]:
        return list(self._open.values())

    def idle_since(self, moment: float) -> list[Group]:
        """Open groups last used before `moment` (monotonic) in which nothing is going on."""
        return [group for group in self._open.values() if group.last_used < moment and not group.busy]

    def forget_ended(self, now: float) -> None:
        """Forget the ends that are older than is promised."""
        while self._ended:
            group_id, ended = next(iter(self._ended.items()))
            if ended.ended_at > now - self._keep_ended_s:
                return
            del self._ended[group_id]
