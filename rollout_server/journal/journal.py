"""Write-ahead journal of groups in Redis: only the owner writes, and nothing is told to an agent before it is written.

    append ──► queue ──► everything queued: one script ──► applied here, in the journal's order ──► told to the agent
                              │ not the owner any more, or Redis failed: nothing is applied, the group is released,
                              └── and the next call reads it again from the journal, here or at another server

    owners:  group ─► me        held            ─► ""   released (draining)       (no entry) ended, or never was

The end of a group that is finished whole is written with its trajectories (`services.run_store.publishing`).

An element is appended at the position that the owner knows to be next, so a script that the client library repeats after a
lost connection appends nothing twice, and a server that has lost the group appends nothing at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from rollout_server.journal import records, scripts
from services.run_store.client import as_text
from services.run_store.keys import RunKeys
from services.run_store.publishing import KEEP_ENDED_S
from services.run_store.session_groups import SessionGroups, keys_of_sessions
from services.run_store.undelivered import UndeliveredCalls
from services.wire.errors import DrainingError, NotReadyError, RollmeshError

KEEP_ANSWER_S = 60
KEEP_PARTIAL_S = 3600
RELEASED = ""
_AT_ONCE = 256

_log = structlog.get_logger()
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Item:
    """A record of a group."""

    group_id: str
    payload: bytes
    partial: str
    """The key of a partial answer that it replaces; `kept_key` where there is none."""
    kept_key: str
    kept: bytes
    """What is kept under a key of its own beside the record, for `kept_s` seconds, or until the group's end."""
    kept_s: int | None
    then: Callable[[], Any]
    done: asyncio.Future[Any]
    call: str = ""
    position: int = 0


@dataclass(slots=True, eq=False)
class _Opening:
    """A new group. `names`: keys of its sessions, where there are any."""

    group_id: str
    payloads: list[bytes]
    names: list[str]
    then: Callable[[], Any]
    done: asyncio.Future[Any]


class _Addition:
    """Parts of a partial answer. A stream writes some for every chunk, so it says no more than it has to."""

    __slots__ = ("done", "group_id", "partial", "payloads")

    def __init__(self, group_id: str, partial: str, payloads: list[bytes]) -> None:
        self.group_id, self.partial, self.payloads = group_id, partial, payloads
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Journal:
    """Writes as `owner`, the incarnation of server `server_id`. `on_lost` is told of each group that is no longer sure."""

    def __init__(
        self, redis: Redis, run_id: str, owner: str, server_id: str, on_lost: Callable[[str, RollmeshError], None]
    ) -> None:
        self.owner = owner
        self._redis = redis
        self._keys = RunKeys(run_id)
        self._server_id = server_id
        self._on_lost = on_lost
        self._undelivered = UndeliveredCalls(redis, run_id)
        self._sessions = SessionGroups(redis, run_id)
        self._write = redis.register_script(scripts.WRITE)
        self._open = redis.register_script(scripts.OPEN)
        self._look = redis.register_script(scripts.LOOK)
        self._claim = redis.register_script(scripts.CLAIM)
        self._conclude = redis.register_script(scripts.END)
        self._release = redis.register_script(scripts.RELEASE)
        self._lengths: dict[str, int] = {}
        """Elements in the journal of each group that is held."""
        self._queue: list[_Opening | _Item | _Addition] = []
        self._wake = asyncio.Event()

    def open(
        self, began: records.GroupBegan, sessions: Sequence[records.SessionBegan], then: Callable[[], Any]
    ) -> asyncio.Future[Any]:
        """Begin the journal of a new group and take hold of it, then run `then`: what it returns is done after that.

        It raises DrainingError when another server has the group, NotReadyError when Redis fails.
        """
        opening = _Opening(
            began.group_id,
            [records.encode_record(began), *map(records.encode_record, sessions)],
            list(keys_of_sessions(self._keys, began.group_id, (each.session_id for each in sessions))),
            then,
            asyncio.get_running_loop().create_future(),
        )
        self._queue.append(opening)
        self._wake.set()
        return opening.done

    async def join(self, group_id: str, session: records.SessionBegan, then: Callable[[], T]) -> T:
        """A further sibling. Raises as `append` does."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        name = next(iter(keys_of_sessions(self._keys, group_id, [session.session_id])), None)
        key, group = (self._keys.answer(group_id, ""), b"") if name is None else (name, group_id.encode())
        item = _Item(group_id, records.encode_record(session), key, key, group, None, then, done)
        return await self._enqueue(item)  # type: ignore[no-any-return]

    async def append(
        self,
        group_id: str,
        record: records.Record,
        then: Callable[[], T],
        *,
        partial: str | None = None,
        answer: tuple[str, bytes] | None = None,
        call: str | None = None,
    ) -> T:
        """Write `record`, then run `then` and return its result: in the journal's order, also if the caller was cancelled.

        `partial`: key of one that the record replaces. `answer`: its name, and bytes to keep for those who ask again.
        `call`: the one that is answered, by a gateway's name; what was noted of an earlier try of it counts no more.
        Raises DrainingError when the group is another's, NotReadyError when Redis fails; then nothing was applied.
        """
        name, kept = answer or ("", b"")
        key, kept_s = self._keys.answer(group_id, name), None if answer is None else KEEP_ANSWER_S
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        payload = records.encode_record(record)
        item = _Item(group_id, payload, partial or key, key, kept, kept_s, then, done, call or "")
        return await self._enqueue(item)  # type: ignore[no-any-return]

    def add_partial(
        self, group_id: str, partial: str, *parts: records.PartialHead | records.PartialPart
    ) -> asyncio.Future[None]:
        """Append to a partial answer; what it returns is done once that is written, and raises as `append` does.

        Who waits for it hears of it before who waits for an `append` that came later.
        """
        item = _Addition(group_id, partial, [records.encode_record(part) for part in parts])
        self._queue.append(item)
        self._wake.set()
        return item.done

    async def _enqueue(self, item: _Item) -> Any:
        self._queue.append(item)
        self._wake.set()
        return await item.done

    async def run(self) -> None:
        """Serve the queue until cancelled."""
        while True:
            await self._wake.wait()
            batch, self._queue = self._queue[:_AT_ONCE], self._queue[_AT_ONCE:]
            if not self._queue:
                self._wake.clear()
            await self._write_all(batch)

    async def _open_all(self, openings: list[_Opening]) -> None:
        keys: list[str] = [self._keys.owners]
        args: list[str | bytes | int] = [self.owner]
        for opening in openings:
            keys += [self._keys.journal(opening.group_id), *opening.names]
            args += [opening.group_id, len(opening.names), len(opening.payloads), *opening.payloads]
        try:
            answers = await self._open(keys=keys, args=args)
        except RedisError as error:
            for opening in openings:
                _fail(opening, _failed(error))
            return
        for opening, held in zip(openings, answers, strict=True):
            if held:
                self._lengths[opening.group_id] = len(opening.payloads)
                _settle(opening)
            else:
                _fail(opening, _lost(opening.group_id))

    async def _write_all(self, batch: list[_Opening | _Item | _Addition]) -> None:
        if openings := [item for item in batch if isinstance(item, _Opening)]:
            await self._open_all(openings)
        items: list[_Item] = []
        additions: list[_Addition] = []
        for item in batch:
            if isinstance(item, _Opening):
                continue
            if item.group_id not in self._lengths:
                _fail(item, _lost(item.group_id))
            elif isinstance(item, _Addition):
                additions.append(item)
            else:
                items.append(item)
        held: list[_Item | _Addition] = [*additions, *items]
        if not held:
            return
        keys: list[str] = [self._keys.owners]
        args: list[str | bytes | int] = [self.owner, KEEP_PARTIAL_S, len(items)]
        ahead: dict[str, int] = {}
        for item in items:
            item.position = self._lengths[item.group_id] + ahead.get(item.group_id, 0)
            ahead[item.group_id] = ahead.get(item.group_id, 0) + 1
            keys += [self._keys.journal(item.group_id), item.partial, item.kept_key]
            # Only an answer to a named call has one.
            keys.append(self._keys.undelivered(item.group_id) if item.call else item.kept_key)
            args += [item.group_id, item.position, item.payload, item.kept]
            args += ["" if item.kept_s is None else item.kept_s, item.call]
        for addition in additions:
            keys.append(addition.partial)
            args += (addition.group_id, len(addition.payloads), *addition.payloads)
        try:
            answers = await self._write(keys=keys, args=args)
        except RedisError as error:
            # Nobody knows what of it was written.
            _log.warning("the journal cannot be written", items=len(held), error=str(error))
            failure = _failed(error)
            for group_id in {item.group_id for item in held}:
                self._lose(group_id, failure)
            for item in held:
                _fail(item, failure)
            return
        for item, written in zip(held, [*answers[len(items) :], *answers[: len(items)]], strict=True):
            if written and item.group_id in self._lengths:
                if isinstance(item, _Addition):
                    if not item.done.done():
                        item.done.set_result(None)
                    continue
                self._lengths[item.group_id] = item.position + 1
                _settle(item)
            else:
                lost = _lost(item.group_id)
                self._lose(item.group_id, lost)
                _fail(item, lost)

    async def conclude(self, group_id: str, ended: records.GroupEnded, session_ids: Sequence[str]) -> None:
        """Write the end of the group and remove its owner. Raises as `append` does, and RedisError."""
        keys = [self._keys.owners, self._keys.journal(group_id), self._keys.undelivered(group_id)]
        keys += keys_of_sessions(self._keys, group_id, session_ids)
        if not await self._conclude(keys=keys, args=[self.owner, group_id, records.encode_record(ended), KEEP_ENDED_S]):
            lost = _lost(group_id)
            self._lose(group_id, lost)
            raise lost
        self.ended(group_id)

    def ended(self, group_id: str) -> None:
        """The end of the group is in its journal, or another server has the group: nothing more is written of it here."""
        self._lengths.pop(group_id, None)

    async def release(self, group_ids: Sequence[str]) -> None:
        """Any server may take over these groups now. Raises RedisError."""
        if group_ids:
            await self._release(keys=[self._keys.owners], args=[self.owner, *group_ids])
        for group_id in group_ids:
            self._lengths.pop(group_id, None)

    async def group_of(self, session_id: str) -> str | None:
        """The group of a session; None where no server has opened such a one. Raises RedisError."""
        return await self._sessions.group_of(session_id)

    async def exists(self, group_id: str) -> bool:
        """Whether the group was ever written down: it is held, or has ended not long ago. Raises NotReadyError."""
        try:
            return bool(await self._redis.exists(self._keys.journal(group_id)))
        except RedisError as error:
            raise _failed(error) from error

    async def look(self, group_id: str) -> str | list[records.Record]:
        """Who holds the group: an incarnation or RELEASED. Of one that has ended, the journal; empty if it never was."""
        found = await self._look(keys=[self._keys.owners, self._keys.journal(group_id)], args=[group_id])
        return _decoded(found) if isinstance(found, list) else as_text(found)

    async def owner_of(self, group_id: str) -> str | None:
        """Who holds the group: an incarnation, RELEASED, or None for one that has ended or never was."""
        found = await self._redis.hget(self._keys.owners, group_id)
        return None if found is None else as_text(found)

    async def owners(self) -> dict[str, str]:
        """Open group → its owner."""
        found = await self._redis.hgetall(self._keys.owners)
        return {as_text(group): as_text(owner) for group, owner in found.items()}

    async def read(self, group_id: str) -> list[records.Record]:
        """The journal of a group; empty where there is none."""
        return _decoded(await self._redis.lrange(self._keys.journal(group_id), 0, -1))

    async def claim(self, group_id: str, expected: str) -> list[records.Record] | None:
        """Take hold of a group that `expected` holds, and read it; None when another server was faster."""
        keys = [self._keys.owners, self._keys.journal(group_id), self._keys.open_groups]
        found = await self._claim(keys=keys, args=[group_id, expected, self.owner, self._server_id])
        if found is None:
            return None
        journal = _decoded(found)
        self._lengths[group_id] = len(journal)
        return journal

    def partial_key(self, session_id: str, call: str) -> str:
        return self._keys.partial(session_id, call)

    async def read_partial(self, partial: str) -> list[records.PartialHead | records.PartialPart]:
        """What there is of a partial answer, in order, nothing twice."""
        parts: list[records.PartialHead | records.PartialPart] = []
        numbers: set[int] = set()
        for packed in _bytes(await self._redis.lrange(partial, 0, -1)):
            part = records.decode_partial(packed)
            number = part.number if isinstance(part, records.PartialPart) else 0
            if number not in numbers:
                numbers.add(number)
                parts.append(part)
        return parts

    async def kept_answers(self, group_id: str, names: Sequence[str]) -> list[bytes | None]:
        """The bytes of answers, where they are still kept."""
        if not names:
            return []
        found = await self._redis.mget([self._keys.answer(group_id, name) for name in names])
        return cast("list[bytes | None]", found)

    async def give_again(self, group_id: str, call: str) -> None:
        """The answer to `call`, which is in the journal, is given once more. Raises NotReadyError when Redis fails."""
        try:
            await self._undelivered.withdraw(group_id, call)
        except RedisError as error:
            raise _failed(error) from error

    def _lose(self, group_id: str, why: RollmeshError) -> None:
        self._lengths.pop(group_id, None)
        self._on_lost(group_id, why)


def _settle(item: _Opening | _Item) -> None:
    try:
        result = item.then()
    except Exception as error:  # noqa: BLE001 - raised again in the waiting callers
        if not item.done.done():
            item.done.set_exception(error)
        return
    if not item.done.done():
        item.done.set_result(result)


def _fail(item: _Opening | _Item | _Addition, error: RollmeshError) -> None:
    if not item.done.done():
        item.done.set_exception(error)


def _decoded(reply: object) -> list[records.Record]:
    return [records.decode_record(packed) for packed in _bytes(reply)]


def _bytes(reply: object) -> list[bytes]:
    return cast("list[bytes]", reply)


def _lost(group_id: str) -> DrainingError:
    return DrainingError(f"group {group_id} was taken over by another server", "send the call again")


def _failed(error: RedisError) -> NotReadyError:
    return NotReadyError(f"the journal needs Redis, which failed ({error})", "send the call again")
