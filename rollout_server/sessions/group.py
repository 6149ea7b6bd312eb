"""Groups of sessions and the registry of them: which are open, which have ended and how.

    (admitted) ──► open ──every sibling finished───────────────────────► finished   stream ids kept for repeated calls
                     └──a sibling aborted, expired or never opened ...──► dropped    once all siblings have ended

Of a group that has ended only how it ended is kept, for a bounded time and number, to answer late calls.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from rollout_server.sessions.session import DropCause, Session, SessionEnd, Terms
from services.run_store.session_groups import sibling_id
from services.wire.errors import (
    ConcludedError,
    ConflictError,
    NotFoundError,
    NotReadyError,
    RollmeshError,
    UsageError,
)
from services.wire.rollout_api import Purpose, SamplingBody
from services.wire.sampling import SamplingParams
from services.wire.session_api import SessionState


def sampling_of(body: SamplingBody) -> SamplingParams:
    """The wire struct of a request body."""
    return msgspec.convert(body, SamplingParams, from_attributes=True)


def new_group_id() -> str:
    """Not to be guessed (128 random bits): knowing a group's id is enough to generate in it."""
    return f"g-{secrets.token_hex(16)}"


@dataclass(slots=True, eq=False)
class Group:
    """Sessions that share a prompt. `opened_at` is in Unix seconds, `last_used` on the monotonic clock.

    `sampling`: of turns that name none; None in a group whose sessions were opened one by one.
    """

    group_id: str
    ordinal: int
    size: int
    task: str
    purpose: Purpose
    idle_timeout_s: float
    sampling: SamplingParams | None = None
    sessions: dict[str, Session] = field(default_factory=dict)
    opened_at: float = field(default_factory=time.time)
    last_used: float = field(default_factory=time.monotonic)
    taken_over: bool = False
    """It was another server's, or an earlier life's."""
    closing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the group is being ended."""
    client_gone: bool = False
    """Its client disconnected while it waited for a turn, and has not come back."""
    turns_answered: OrderedDict[str, bytes] = field(default_factory=OrderedDict)
    """The last answers to calls for turns, by the calls' names."""
    runner: str | None = None
    """Who plays it (`services.wire.rollout_api`): it is given up when that runner is gone."""

    @property
    def opened_whole(self) -> bool:
        """Whether all siblings were opened in one call, to be finished in one."""
        return self.sampling is not None

    @property
    def taking_turns(self) -> bool:
        return any(session.busy for session in self.sessions.values())

    @property
    def live(self) -> list[Session]:
        """Siblings that have not ended."""
        return [session for session in self.sessions.values() if session.end is None]

    @property
    def complete(self) -> bool:
        """Whether every sibling was opened and has ended."""
        return len(self.sessions) == self.size and not self.live

    def fill(self, terms: Terms, first: Terms | None = None) -> None:
        """Open all siblings at once; `first`: what the first one is opened on, where it is not that of the others."""
        for member in range(self.size):
            own = first if first is not None and member == 0 else terms.of_sibling(member)
            self.add(self.next_session(sibling_id(self.group_id, member), own, b""))

    def next_session(self, name: str, terms: Terms, fingerprint: bytes) -> Session:
        """The next sibling, yet to be added. Raises ConflictError when all are open already, or have been."""
        if len(self.sessions) >= self.size:
            raise ConflictError(f"group {self.group_id} has all its {self.size} sessions", "open another group")
        return Session(name, self.group_id, self.ordinal, len(self.sessions), terms, fingerprint)

    def add(self, session: Session) -> None:
        """`session` is open."""
        self.sessions[session.session_id] = session
        self.last_used = time.monotonic()

    @contextmanager
    def reserved(self, session_ids: Sequence[str]) -> Iterator[list[Session]]:
        """The named sessions, each taking a turn for the time of the block.

        Raises NotFoundError for a session of another group, UsageError for one named twice, ConflictError for one that is
        taking a turn already, SessionConcludedError or SessionExpiredError for one that has ended.
        """
        if self.closing.locked():
            raise ConflictError(f"group {self.group_id} is being ended", "open another one")
        if len(set(session_ids)) != len(session_ids):
            raise UsageError("a session is named twice", "one turn a session in a call")
        sessions = [self._session(name) for name in session_ids]
        for session in sessions:
            session.check_open()
            if session.busy:
                raise ConflictError(f"session {session.session_id} is taking a turn", "wait for its answer")
        self.client_gone = False
        for session in sessions:
            session.taking_turn = True
        try:
            yield sessions
        finally:
            for session in sessions:
                session.taking_turn = False
                session.touch()

    def _session(self, name: str) -> Session:
        try:
            return self.sessions[name]
        except KeyError:
            raise NotFoundError(f"group {self.group_id} has no session {name!r}") from None


@dataclass(frozen=True, slots=True)
class Ended:
    """How a group ended. `stream_ids`: session id → stream id, when it was finished."""

    ended_at: float
    ordinal: int = -1
    size: int = 0
    purpose: Purpose = "train"
    siblings: tuple[SessionEnd, ...] = ()
    stream_ids: Mapping[str, str] | None = None
    cause: DropCause | None = None

    def answer(self, group_id: str) -> dict[str, str]:
        """The stream ids. Raises ConcludedError or ConflictError for a group that was dropped."""
        if self.stream_ids is not None:
            return dict(self.stream_ids)
        if self.cause == "run_concluded":
            raise ConcludedError(
                f"group {group_id} was dropped, the run has concluded", "no more trajectories are taken"
            )
        raise ConflictError(f"group {group_id} was dropped ({self.cause})", "open another one")


class GroupRegistry:
    """All groups and sessions of one server. Pure bookkeeping: its callers write to the ledger and the stream."""

    def __init__(self, *, keep_ended: int = 4096, keep_ended_s: float = 600.0) -> None:
        self._open: dict[str, Group] = {}
        self._sessions: dict[str, Session | SessionEnd] = {}
        self._ended: OrderedDict[str, Ended] = OrderedDict()
        self._keep_ended = keep_ended
        self._keep_ended_s = keep_ended_s

    def __len__(self) -> int:
        return len(self._open)

    @property
    def live_sessions(self) -> int:
        return sum(len(group.live) for group in self._open.values())

    def add(self, group: Group) -> None:
        self._open[group.group_id] = group
        for session in group.sessions.values():
            self._sessions[session.session_id] = session

    def add_session(self, session: Session) -> None:
        """A session that joined a group that is open."""
        self._sessions[session.session_id] = session

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

    def get_open(self, group_id: str) -> Group | None:
        return self._open.get(group_id)

    def knows(self, group_id: str) -> bool:
        """Whether the group is open here, or its end is remembered here."""
        return group_id in self._open or group_id in self._ended

    def remember_ended(self, group: Group, stream_ids: Mapping[str, str] | None, cause: DropCause | None) -> None:
        """A group that ended at another server, with all its sessions."""
        self.add(group)
        self._end(group, stream_ids, cause)

    def forget_open(self, group_id: str, why: RollmeshError) -> None:
        """Forget an open group without an end: another server has it, or the journal must be read again."""
        group = self._open.pop(group_id, None)
        if group is None:
            return
        for session in group.sessions.values():
            session.memory.cancel_answers(why)
            self._sessions.pop(session.session_id, None)

    def find_ended(self, group_id: str) -> Ended | None:
        return self._ended.get(group_id)

    def get_session(self, name: str) -> Session | SessionEnd | None:
        """The session, or what stays of it; None for one that is not known here."""
        found = self._sessions.get(name)
        return found.end if isinstance(found, Session) and found.end is not None else found

    def find_session(self, name: str) -> Session:
        """The open session. Raises NotFoundError, or as `SessionEnd.refuse` says for one that has ended."""
        found = self.get_session(name)
        if isinstance(found, Session):
            return found
        if found is None:
            raise NotFoundError(f"no session {name!r} on this server", "it never was here, or ended long ago")
        raise found.refuse()

    def group_of(self, session: Session) -> Group:
        """The open group of a session. Raises NotReadyError where it was let go of while a call was on its way to it."""
        group = self._open.get(session.group_id)
        if group is None or group.sessions.get(session.session_id) is not session:
            raise NotReadyError(f"group {session.group_id} is not held here any more", "send the call again")
        return group

    def holds(self, group: Group) -> bool:
        """Whether this very group is open here: it may have been lost, and read again from the journal, meanwhile."""
        return self._open.get(group.group_id) is group

    def finish(self, group: Group, stream_ids: Mapping[str, str]) -> None:
        """Every sibling was finished."""
        for session in group.live:
            session.conclude("finished", stream_ids.get(session.session_id))
        self._end(group, stream_ids, None)

    def drop(self, group: Group, cause: DropCause) -> None:
        state: SessionState = "expired" if cause == "idle" else "dropped"
        for session in group.live:
            session.conclude(state)
        self._end(group, None, cause)

    def _end(self, group: Group, stream_ids: Mapping[str, str] | None, cause: DropCause | None) -> None:
        # It may be gone already: lost to another server while its end was written.
        self._open.pop(group.group_id, None)
        ends = tuple(session.end for session in group.sessions.values() if session.end is not None)
        for end in ends:
            self._sessions[end.session_id] = end
        self._ended[group.group_id] = Ended(
            time.monotonic(), group.ordinal, group.size, group.purpose, ends, stream_ids, cause
        )
        if len(self._ended) > self._keep_ended:
            self._forget_oldest()

    def forget_session(self, name: str) -> None:
        """Forget a session that has ended."""
        self._sessions.pop(name, None)

    def _forget_oldest(self) -> None:
        _, ended = self._ended.popitem(last=False)
        for end in ended.siblings:
            if self._sessions.get(end.session_id) is end:
                del self._sessions[end.session_id]

    def all_open(self) -> list[Group]:
        return list(self._open.values())

    def forget_ended(self, now: float) -> None:
        """Forget the ends that are older than is promised."""
        while self._ended:
            ended = next(iter(self._ended.values()))
            if ended.ended_at > now - self._keep_ended_s:
                return
            self._forget_oldest()
