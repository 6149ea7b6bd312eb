"""Opening sessions one by one: the first sibling opens the group, the others join it; the same call again changes nothing.

POST /sessions ──► known id? ──same body──► the same session
                       │ no                └─another body──► 409
                       ▼
                 group open here? ──no──► admission (ledger) ──► group
                       └──yes──► join
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

from rollout_server.admission_gate import AdmissionGate
from rollout_server.groups import Group, GroupRegistry, new_group_id
from rollout_server.sessions import Session, Terms
from services.ledger import Ledger
from services.wire.errors import ConflictError, SessionConcludedError
from services.wire.session_api import OpenSession


class SessionOpener:
    """Opens sessions of one server. `idle_timeout_s`: of sessions that name none."""

    def __init__(self, registry: GroupRegistry, gate: AdmissionGate, ledger: Ledger, idle_timeout_s: float) -> None:
        self._registry = registry
        self._gate = gate
        self._ledger = ledger
        self._idle_timeout_s = idle_timeout_s
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    async def open(self, call: OpenSession) -> tuple[Session, bool]:
        """The session, and whether it is a new one.

        Raises ConflictError for an id that was opened with another body or a group that does not take it,
        SessionConcludedError for an id that has ended, and as `AdmissionGate.open` does. Cancelling it leaves nothing open.
        """
        fingerprint = blake2b(call.model_dump_json(exclude={"wait_s"}).encode(), digest_size=16).digest()
        group_id = call.group_id or (new_group_id() if call.session_id is None else f"g.{call.session_id}")
        with self._lock_of(group_id) as lock:
            async with lock:
                if call.session_id is not None:
                    known = await self._known(call.session_id, fingerprint)
                    if known is not None:
                        return known, False
                group = self._registry.get_open(group_id) or await self._open_group(group_id, call)
                session = self._join(group, call, fingerprint)
        return session, True

    async def _known(self, name: str, fingerprint: bytes) -> Session | None:
        known = self._registry.get_session(name)
        if isinstance(known, Session):
            if known.fingerprint != fingerprint:
                raise ConflictError(f"session {name} was opened with another body", "choose another session_id")
            return known
        if known is not None or await self._ledger.stream_id_of(name) is not None:
            raise SessionConcludedError(f"session {name} has ended", "choose another session_id")
        return None

    async def _open_group(self, group_id: str, call: OpenSession) -> Group:
        if self._registry.find_ended(group_id) is not None:
            raise ConflictError(f"group {group_id} has ended", "choose another group_id")
        ordinal = -1 if call.purpose == "evaluate" else await self._gate.open(group_id, call.wait_s)
        idle_timeout_s = call.idle_timeout_s or self._idle_timeout_s
        group = Group(group_id, ordinal, call.group_size, call.env, call.purpose, idle_timeout_s)
        self._registry.add(group)
        return group

    def _join(self, group: Group, call: OpenSession, fingerprint: bytes) -> Session:
        wanted = (call.group_size, call.env, call.purpose)
        if wanted != (group.size, group.task, group.purpose):
            raise ConflictError(
                f"group {group.group_id} has size {group.size}, env {group.task!r} and purpose {group.purpose}",
                "siblings must say the same",
            )
        terms = Terms(
            task=call.env,
            task_id=call.task_id,
            purpose=call.purpose,
            sampling=call.sampling_params,
            idle_timeout_s=call.idle_timeout_s or self._idle_timeout_s,
            deadline_s=call.deadline_s,
            max_tokens=call.max_tokens,
            metadata=call.metadata,
        )
        session = group.join(call.session_id or f"s-{secrets.token_hex(16)}", terms, fingerprint)
        self._registry.add_session(session)
        return session

    @contextmanager
    def _lock_of(self, group_id: str) -> Iterator[asyncio.Lock]:
        """One lock a group for as long as somebody uses it: two siblings that come at once open it once."""
        lock, users = self._locks.get(group_id, (asyncio.Lock(), 0))
        self._locks[group_id] = lock, users + 1
        try:
            yield lock
        finally:
            users = self._locks[group_id][1] - 1
            if users:
                self._locks[group_id] = lock, users
            else:
                del self._locks[group_id]
