"""Opening groups and sessions, idempotently: the first sibling opens the group, the others join it.

POST /sessions ──► known id? ──same body──► the same session
                       │ no                └─another body──► 409
                       ▼
                 group open here? ──no──► admission (ledger) ──► group, journal
                       └──yes──► join, journal

A call with a gateway's call id derives its ids from that, so that a retry finds what the first try opened.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable
from dataclasses import replace
from hashlib import blake2b
from typing import TypeVar

import structlog
from redis.exceptions import RedisError

from rollout_server.journal.journal import Journal
from rollout_server.journal.replay import Now, began, group_began
from rollout_server.lifecycle.admission import AdmissionGate
from rollout_server.lifecycle.takeover import Takeover
from rollout_server.sessions.group import Group, GroupRegistry, new_group_id, sampling_of
from rollout_server.sessions.session import Session, Terms
from services.host.aio import NamedLocks
from services.observability.tracing import NO_TRACING, Tracing
from services.policies.training.mixture import draw
from services.run_store.ledger import Ledger
from services.wire.errors import ConflictError, NotReadyError, RollmeshError, SessionConcludedError
from services.wire.rollout_api import OpenGroup, SamplingBody, SamplingLimits
from services.wire.session_api import OpenSession

_log = structlog.get_logger()
_FOUND_WITHIN_S = 2.0
_POLL_S = 0.05
T = TypeVar("T")


class SessionOpener:
    """Opens groups and sessions of one server. `idle_timeout_s`: of those that name none."""

    def __init__(
        self,
        registry: GroupRegistry,
        gate: AdmissionGate,
        ledger: Ledger,
        journal: Journal,
        takeover: Takeover,
        idle_timeout_s: float,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self._registry = registry
        self._gate = gate
        self._ledger = ledger
        self._journal = journal
        self._takeover = takeover
        self._idle_timeout_s = idle_timeout_s
        self._tracing = tracing
        self._locks = NamedLocks()

    async def open_group(self, call: OpenGroup, name: str | None) -> Group:
        """A group with all its sessions. `name`: the call's, where it has one.

        Raises as `AdmissionGate.open` and `Journal.open` do.
        """
        group_id = new_group_id() if name is None else f"g-{name}"
        async with self._locks.hold(group_id):
            if name is not None:
                # Nearly every call is the first of its name: of such a group there is no journal, and no more to be asked.
                # Of one that is trained, admission asks that.
                unknown = call.purpose != "train" and not self._registry.knows(group_id)
                if unknown and await self._journal.exists(group_id):
                    await self._takeover.hold_group(group_id)
                if self._registry.knows(group_id):
                    return self._found(group_id)
            ordinal = await self._admit(group_id, call.purpose == "train", call.wait_s)
            if ordinal is None:
                return self._found(group_id)
            task, sampling = _task_of(call, ordinal)
            group = Group(
                group_id,
                ordinal,
                call.group_size,
                task,
                call.purpose,
                self._idle_timeout_s,
                sampling_of(sampling),
                runner=call.runner,
            )
            limits = SamplingLimits.model_validate(sampling.model_dump(exclude_unset=True))
            terms = Terms(
                task=task,
                purpose=call.purpose,
                sampling=limits,
                idle_timeout_s=self._idle_timeout_s,
                trace=self._tracing.current(),
            )
            first = terms
            if call.greedy_baseline:
                first = replace(terms, sampling=limits.model_copy(update={"temperature": 0.0}))
            group.fill(terms, first)
            try:
                await self._begin(group)
            except asyncio.CancelledError:
                # The client does not know of it; a retry of the call finds it.
                group.client_gone = True
                raise
            return group

    def _found(self, group_id: str) -> Group:
        """An open group, whose client is there again."""
        found = self._registry.find_open(group_id)
        found.client_gone = False
        return found

    async def open(self, call: OpenSession, name: str | None = None) -> tuple[Session, bool]:
        """The session, and whether it is a new one. `name`: the call's, where it has one.

        Raises ConflictError for an id that was opened with another body or a group that does not take it,
        SessionConcludedError for an id that has ended, HeldElsewhereError for what another server holds, and as
        `AdmissionGate.open` and `Journal.append` do.
        """
        fingerprint = blake2b(call.model_dump_json(exclude={"wait_s"}).encode(), digest_size=16).digest()
        session_id = call.session_id or (None if name is None else f"s-{name}")
        group_id = call.group_id or (new_group_id() if session_id is None else f"g.{session_id}")
        async with self._locks.hold(group_id):
            while True:
                if session_id is not None:
                    known = await self._known(session_id, fingerprint)
                    if known is not None:
                        return known, False
                if call.group_id is not None or call.session_id is not None:
                    await self._takeover.hold_group(group_id)
                session_id = session_id or f"s-{secrets.token_hex(16)}"
                group = self._registry.get_open(group_id)
                if group is not None:
                    return await self._join(group, session_id, call, fingerprint), True
                opened = await self._open_with(group_id, session_id, call, fingerprint)
                if opened is not None:
                    return opened, True
                # It was taken over while it waited for admission, perhaps with this very session: look again.

    async def _known(self, session_id: str, fingerprint: bytes) -> Session | None:
        await self._takeover.hold_session(session_id)
        known = self._registry.get_session(session_id)
        if isinstance(known, Session):
            if known.fingerprint != fingerprint:
                raise ConflictError(f"session {session_id} was opened with another body", "choose another session_id")
            return known
        if known is not None or await self._ledger.stream_id_of(session_id) is not None:
            raise SessionConcludedError(f"session {session_id} has ended", "choose another session_id")
        return None

    async def _open_with(self, group_id: str, session_id: str, call: OpenSession, fingerprint: bytes) -> Session | None:
        """Open a group with its first session; None where `_admit` found the group."""
        if self._registry.find_ended(group_id) is not None:
            raise ConflictError(f"group {group_id} has ended", "choose another group_id")
        ordinal = await self._admit(group_id, call.purpose == "train", call.wait_s)
        if ordinal is None:
            return None
        idle_timeout_s = call.idle_timeout_s or self._idle_timeout_s
        group = Group(group_id, ordinal, call.group_size, call.env, call.purpose, idle_timeout_s)
        session = group.next_session(session_id, self._terms(call), fingerprint)
        group.add(session)
        await self._begin(group)
        return session

    async def _admit(self, group_id: str, train: bool, wait_s: float) -> int | None:
        """The group's ordinal; None where the group is known here now: it was opened before, and its server is gone.

        Raises HeldElsewhereError where that server is alive, NotReadyError where it neither writes the group down nor gives
        its place back for a while: it may yet do so, so that the call must come again.
        """
        if not train:
            return -1
        ends: float | None = None
        while True:
            try:
                return await self._gate.open(group_id, wait_s)
            except ConflictError as held:
                # Its owner is about to write the first line of the journal or to give the place back, or died before that.
                await self._takeover.hold_group(group_id)
                if self._registry.knows(group_id):
                    return None
                ends = time.monotonic() + _FOUND_WITHIN_S if ends is None else ends
                if time.monotonic() >= ends:
                    what = f"another server opened group {group_id} and has not written it down yet"
                    raise NotReadyError(what, "send the call again") from held
                await asyncio.sleep(_POLL_S)

    async def _begin(self, group: Group) -> None:
        """Write the group down, with the sessions that it has, and take it up; or give its place in the ledger back.

        To the end even when cancelled: a group that is half written would have no owner.
        """
        now = Now(time.time(), time.monotonic())
        sessions = [began(session, now) for session in group.sessions.values()]
        written = self._journal.open(group_began(group), sessions, lambda: self._registry.add(group))
        try:
            await asyncio.shield(written)
        except BaseException:
            await _shielded(self._give_back_unless_written(written, group))
            raise

    async def _give_back_unless_written(self, written: asyncio.Future[None], group: Group) -> None:
        """Once that is known."""
        try:
            await written
        except RollmeshError:
            if group.purpose == "train":
                try:
                    await self._ledger.close_group(group.group_id, dropped=True)
                except RedisError as error:
                    _log.warning("a group without a journal stays open", group=group.group_id, error=str(error))

    async def _join(self, group: Group, session_id: str, call: OpenSession, fingerprint: bytes) -> Session:
        wanted = (call.group_size, call.env, call.purpose)
        if wanted != (group.size, group.task, group.purpose):
            raise ConflictError(
                f"group {group.group_id} has size {group.size}, env {group.task!r} and purpose {group.purpose}",
                "siblings must say the same",
            )
        session = group.next_session(session_id, self._terms(call), fingerprint)

        def add() -> None:
            group.add(session)
            self._registry.add_session(session)

        record = began(session, Now(time.time(), time.monotonic()))
        await _shielded(self._journal.join(group.group_id, record, add))
        return session

    def _terms(self, call: OpenSession) -> Terms:
        return Terms(
            task=call.env,
            task_id=call.task_id,
            purpose=call.purpose,
            sampling=call.sampling_params,
            idle_timeout_s=call.idle_timeout_s or self._idle_timeout_s,
            deadline_s=call.deadline_s,
            max_tokens=call.max_tokens,
            metadata=call.metadata,
            trace=self._tracing.current(),
        )


def _task_of(call: OpenGroup, ordinal: int) -> tuple[str, SamplingBody]:
    if call.mixture is not None:
        chosen = call.mixture.tasks[draw(call.mixture.parts, call.mixture.seed, ordinal).task]
        return chosen.task, chosen.sampling
    assert call.task is not None and call.sampling is not None, "the body was checked"
    return call.task, call.sampling


async def _shielded(work: Awaitable[T]) -> T:
    """Await to the end even when cancelled: a group that is half written would have no owner."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
