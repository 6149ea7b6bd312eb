"""Takeover (failover of sessions): a group whose server died or released it moves to whichever server is asked for it.

    call for a session ──here?──► yes
                          └ no: its group's owner ──alive──► HeldElsewhereError: there
                                                  ├─dead, or released──► claimed, journal replayed ──► here
                                                  └─none──► it has ended: its journal says how, for a while

Groups that no agent asks for are taken over too, every few seconds, so that they expire and free their place in the ledger:
a rendezvous hash says by whom. A server that is wrongly believed to be dead does no harm: its writes are refused, because
it is not the owner any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b

import httpx
import structlog
from redis.exceptions import RedisError

from rollout_server.journal.journal import RELEASED, Journal
from rollout_server.journal.records import GroupEnded, Record
from rollout_server.journal.replay import AnswerName, Now, Replayed, replay
from rollout_server.sessions.group import GroupRegistry
from rollout_server.sessions.session import Session, SessionEnd
from services.host.aio import NamedLocks
from services.run_store.discovery import ServerRecord, ServiceRegistry
from services.run_store.ledger import Ledger
from services.security.tls import PUBLIC, Trust
from services.wire.errors import DrainingError, HeldElsewhereError, NotReadyError, RollmeshError

TAKE_ORPHANS_EVERY_S = 2.0
PROBE_WITHIN_S = 0.5
UNWRITTEN_AFTER_S = 10.0
"""A group in the ledger without a journal for so long was opened by a server that died in that moment."""
_BELIEVED_S = 0.25
_KEPT_ANSWERS = 16
_TRIES = 3

_log = structlog.get_logger()


def incarnation_of(record: ServerRecord) -> str:
    """How a server is named as an owner."""
    return f"{record.name}/{record.incarnation}"


def falls_to(group_id: str, server_ids: Sequence[str]) -> str:
    """The server that takes an orphan, by rendezvous hashing: every server computes the same. Pure."""
    return max(server_ids, key=lambda name: blake2b(f"{group_id}\0{name}".encode(), digest_size=8).digest())


async def restore_answers(journal: Journal, replayed: Replayed) -> None:
    """Give the sessions of a group back those of their answers that may be asked for again."""
    by_session: dict[str, list[AnswerName]] = {}
    for name in replayed.answers:
        by_session.setdefault(name.session.session_id, []).append(name)
    wanted = [name for names in by_session.values() for name in names[-_KEPT_ANSWERS:]]
    kept = await journal.kept_answers(replayed.group.group_id, [name.call_id for name in wanted])
    for name, whole in zip(wanted, kept, strict=True):
        if whole is not None and name.session.end is None:
            name.session.memory.answers.restore(name.request_key, whole)


class Takeover:
    """Takes groups over for one server. `run` is a task owned by the server."""

    def __init__(
        self,
        groups: GroupRegistry,
        journal: Journal,
        ledger: Ledger,
        servers: ServiceRegistry,
        server_id: str,
        trust: Trust = PUBLIC,
    ) -> None:
        self._groups = groups
        self._journal = journal
        self._ledger = ledger
        self._servers = servers
        self._server_id = server_id
        self._http: httpx.AsyncClient | None = None
        """Made for the first probe: it reads all authorities of the system."""
        self._trust = trust
        self.taking = True
        """Whether it takes groups over. Not while the server is on its way out, or its engine serves nothing."""
        self._locks = NamedLocks()
        self._probes: dict[str, tuple[float, asyncio.Task[str | None]]] = {}
        self._missed: set[str] = set()
        self._stale: set[str] = set()
        self._unreadable: set[str] = set()

    async def aclose(self) -> None:
        for _, probe in self._probes.values():
            probe.cancel()
        await asyncio.gather(*(probe for _, probe in self._probes.values()), return_exceptions=True)
        if self._http is not None:
            await self._http.aclose()

    async def session(self, session_id: str) -> Session | SessionEnd | None:
        """The session, or what is left of it, now held here; None for one unknown. Raises as `hold_group` does."""
        await self.hold_session(session_id)
        return self._groups.get_session(session_id)

    async def open_session(self, session_id: str) -> Session:
        """The open session, now held here. Raises as `hold_group` and `GroupRegistry.find_session` do."""
        await self.hold_session(session_id)
        return self._groups.find_session(session_id)

    async def hold_session(self, session_id: str) -> None:
        """If any server knows this session, this one does now. Raises as `hold_group` does."""
        if self._groups.get_session(session_id) is not None:
            return
        try:
            group_id = await self._journal.group_of(session_id)
        except RedisError as error:
            raise _no_redis(error) from error
        if group_id is not None:
            await self.hold_group(group_id)

    async def hold_group(self, group_id: str) -> None:
        """If any server knows this group, this one does now.

        Raises HeldElsewhereError when a server that is alive holds it, DrainingError when this one is on its way out,
        NotReadyError when Redis fails.
        """
        if self._groups.knows(group_id):
            return
        async with self._locks.hold(group_id):
            if self._groups.knows(group_id):
                return
            try:
                await self._take(group_id)
            except RedisError as error:
                raise _no_redis(error) from error

    async def _take(self, group_id: str) -> None:
        for _ in range(_TRIES):
            owner = await self._journal.look(group_id)
            if not isinstance(owner, str):
                self._remember_end(owner)
                return
            if owner not in (RELEASED, self._journal.owner):
                url = await self._alive(owner)
                if url is not None:
                    raise HeldElsewhereError(f"another rollout server holds group {group_id}", url)
            if not self.taking:
                raise DrainingError(f"rollout server {self._server_id} takes nothing over now", "use another server")
            started = time.monotonic()
            records = await self._journal.claim(group_id, owner)
            if records is None:
                continue  # another server was faster
            replayed = replay(records, Now(time.time(), time.monotonic()))
            if replayed.ended is not None:  # its owner died before it could take its entry away
                await self._journal.conclude(group_id, replayed.ended, list(replayed.group.sessions))
                self._end(replayed)
                return
            await restore_answers(self._journal, replayed)
            self._groups.add(replayed.group)
            _log.info(
                "group taken over",
                group=group_id,
                of=owner,
                sessions=len(replayed.group.sessions),
                records=len(records),
                ms=round((time.monotonic() - started) * 1e3, 1),
            )
            return
        raise NotReadyError(f"group {group_id} is being taken over", "send the call again")

    def _remember_end(self, records: Sequence[Record]) -> None:
        if records:
            replayed = replay(records, Now(time.time(), time.monotonic()))
            if replayed.ended is not None:
                self._end(replayed)

    def _end(self, replayed: Replayed) -> None:
        ended, group = replayed.ended, replayed.group
        assert ended is not None
        if ended.stream_ids is not None:
            for session in group.live:
                session.conclude("finished", ended.stream_ids.get(session.session_id))
        else:
            for session in group.live:
                session.conclude("expired" if ended.cause == "idle" else "dropped")
        self._groups.remember_ended(group, ended.stream_ids, ended.cause)

    async def _alive(self, owner: str) -> str | None:
        """The address of a server, if it is that incarnation and answers. Asked once for many calls at a time."""
        asked, probe = self._probes.get(owner, (0.0, None))
        if probe is None or (probe.done() and time.monotonic() - asked > _BELIEVED_S):
            probe = asyncio.create_task(self._probe(owner))
            self._probes[owner] = time.monotonic(), probe
        return await asyncio.shield(probe)

    async def _probe(self, owner: str) -> str | None:
        found = {incarnation_of(record): record.url for record in await self._servers.servers()}
        url = found.get(owner)
        if url is None:
            return None
        if self._http is None:
            self._http = httpx.AsyncClient(timeout=PROBE_WITHIN_S, verify=self._trust.verify)
        try:
            answer = await self._http.get(f"{url}/livez")
        except httpx.HTTPError as error:
            why = self._trust.refusal(url, error) or repr(error)
            _log.warning("a server does not answer", server=owner, url=url, why=str(why))
            return None
        return url if answer.status_code == 200 else None

    async def run(self) -> None:
        """Take orphans over until cancelled."""
        failing = False
        while True:
            await asyncio.sleep(TAKE_ORPHANS_EVERY_S)
            if not self.taking:
                continue
            try:
                await self._take_orphans()
                failing = False
            except (RedisError, RollmeshError) as error:
                if not failing:
                    _log.warning("cannot look for orphans", why=str(error))
                failing = True

    async def _take_orphans(self) -> None:
        servers = await self._servers.servers()
        serving = [record.name for record in servers if record.state == "serving"]
        if self._server_id not in serving:
            return
        owners = await self._journal.owners()
        alive = {incarnation_of(record) for record in servers}
        missed = {
            group_id
            for group_id, owner in owners.items()
            if (owner not in alive and falls_to(group_id, serving) == self._server_id)
            # Its own that it does not know: Redis failed while something was written.
            or (owner == self._journal.owner and not self._groups.knows(group_id))
        }
        # Missed twice: no server is just opening it, or late with its heartbeat because Redis stood still.
        for group_id in missed & self._missed:
            await self._try_to_take(group_id)
        self._missed = missed
        await self._close_unwritten(owners)
        await self._agree_with(owners)

    async def _agree_with(self, owners: Mapping[str, str]) -> None:
        """Reconcile what this server remembers with a Redis that came back as it was before: seen twice, as orphans are.

        A group that ended here and is open there is ended there again. One that is open here, and there neither open nor
        anybody's, is given up: its next record could not be written.
        """
        mine = {group_id for group_id, owner in owners.items() if owner == self._journal.owner}
        ended = {group_id for group_id in mine if self._groups.find_ended(group_id) is not None}
        unknown = {
            group.group_id
            for group in self._groups.all_open()
            if group.group_id not in owners and not group.complete and not group.closing.locked()
        }
        for group_id in ended & self._stale:
            await self._end_again(group_id)
        for group_id in unknown & self._stale:
            why = DrainingError(f"Redis came back without group {group_id}", "open another one")
            self._groups.forget_open(group_id, why)
            _log.warning("a group that Redis does not know any more is given up", group=group_id)
        self._stale = ended | unknown

    async def _end_again(self, group_id: str) -> None:
        ended = self._groups.find_ended(group_id)
        if ended is None:
            return
        ids = None if ended.stream_ids is None else dict(ended.stream_ids)
        sessions = [each.session_id for each in ended.siblings]
        await self._journal.conclude(group_id, GroupEnded(stream_ids=ids, cause=ended.cause), sessions)
        if ended.purpose == "train":
            # Whether its trajectories are there too is for the trainer to find (`services.policies.balance`).
            await self._ledger.close_group(group_id, dropped=ids is None)
        _log.warning("a group that had ended was open in Redis", group=group_id, finished=ids is not None)

    async def _try_to_take(self, group_id: str) -> None:
        """Take an orphan, unless another was asked for it in the meantime. One that cannot be read hinders no other."""
        try:
            await self.hold_group(group_id)
            self._unreadable.discard(group_id)
        except HeldElsewhereError:
            return
        except NotReadyError:
            raise  # nor could any other be taken now
        except Exception:  # noqa: BLE001 - a bug, or another version's journal: said once, with its traceback
            if group_id not in self._unreadable:
                _log.exception("a group cannot be taken over", group=group_id)
            self._unreadable.add(group_id)

    async def _close_unwritten(self, owners: Mapping[str, str]) -> None:
        for group_id, record in (await self._ledger.open_groups()).items():
            if group_id not in owners and time.time() - record.opened_at > UNWRITTEN_AFTER_S:
                await self._ledger.close_group(group_id, dropped=True)
                _log.warning("a group that was never written down is closed", group=group_id, ordinal=record.ordinal)


def _no_redis(error: RedisError) -> NotReadyError:
    return NotReadyError(f"the journal cannot be read: Redis failed ({error})", "send the call again")
