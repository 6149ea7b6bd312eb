"""Status collector: a run's services, queue, trainer and waits, read from Redis; which services answer, from probes.

    registry, accounts, open groups, waits, trainer ──at once──► services ──probed──► causes ──► MeshReport

Every part has a deadline and fails alone. Where the trainer waits and no cause is sure, servers are read a second time:
whether they generate shows only over time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import httpx
import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.observability.mesh_status.report import (
    CauseView,
    GroupView,
    MeshReport,
    QueueView,
    ServiceView,
    StoreView,
    WaitView,
)
from services.policies.admission import StoreUse
from services.policies.training.evaluation import point_of
from services.policies.wait_causes import Cause, ProbeOutcome, SeenGroup, SeenService, find_causes
from services.run_store.client import as_text
from services.run_store.discovery import Listed, ServerRecord, ServiceRegistry
from services.run_store.keys import RunKeys
from services.run_store.ledger import Accounts, Ledger
from services.run_store.status import EvaluationStore, TrainerStatus, Wait, read_trainer_status, read_waits
from services.security.tls import PUBLIC, Trust
from services.wire.errors import UNDECODABLE, DeadlineError, UsageError
from services.wire.rollout_api import Evaluation

PART_WITHIN_S = 2.0
COLLECT_AGAIN_S = 2.2
"""Servers announce what they have sampled every second: between two readings so far apart there is at least one."""
TRAINER = "trainer"

_NO_WAITS: dict[str, Wait] = {}

_Part = TypeVar("_Part")


@dataclass
class _Parts:
    """What Redis said. `unread`: what it did not."""

    listed: Sequence[Listed] = ()
    accounts: Accounts | None = None
    groups: Sequence[SeenGroup] = ()
    asking: int = 0
    waits: Mapping[str, Wait] = field(default_factory=dict)
    report: TrainerStatus | None = None
    evaluations: Sequence[Evaluation] = ()
    unread: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Sampled:
    """Tokens that a server's incarnation had sampled when it was read (monotonic clock)."""

    incarnation: str
    tokens: int
    at: float


class StatusCollector:
    """Collects the status of one run. `also`: further services, that are in no registry; `trust`: `http`'s."""

    def __init__(
        self,
        redis: Redis,
        run_id: str,
        http: httpx.AsyncClient,
        also: Sequence[Listed] = (),
        *,
        trust: Trust = PUBLIC,
        part_within_s: float = PART_WITHIN_S,
        collect_again_s: float = COLLECT_AGAIN_S,
    ) -> None:
        self._redis, self._run_id, self._http = redis, run_id, http
        self._also, self._trust = also, trust
        self._part_within_s, self._collect_again_s = part_within_s, collect_again_s
        self._registry = ServiceRegistry(redis, run_id)
        self._ledger = Ledger(redis, run_id)
        self._sampled: dict[str, _Sampled] = {}

    async def collect(self, *, again: bool = True) -> MeshReport:
        """The run as it is. `again`: read servers twice where that says more; no use to repeated calls."""
        parts = await self._read()
        listed = [*parts.listed, *self._also]
        probes = await probe_all(self._http, {each.record.name: each.record.url for each in listed}, self._trust)
        wait = parts.waits.get(TRAINER)
        causes = self._causes(parts, listed, probes, wait)
        if again and wait is not None and not any(cause.sure for cause in causes):
            self._remember(listed)
            await asyncio.sleep(self._collect_again_s)
            # All of it: meanwhile groups may be complete, and the wait over.
            parts = await self._read()
            wait = parts.waits.get(TRAINER)
            now = {each.record.name: each for each in parts.listed}
            listed = [now.get(each.record.name, each) for each in listed]
            causes = self._causes(parts, listed, probes, wait)
        self._remember(listed)
        return _report(self._run_id, parts, listed, probes, causes)

    def _causes(
        self, parts: _Parts, listed: Sequence[Listed], probes: Mapping[str, Probe], wait: Wait | None
    ) -> list[Cause]:
        return find_causes(
            [self._seen(each, probes[each.record.name]) for each in listed],
            parts.groups,
            trainer_waits_since=None if wait is None else wait.since,
            asking_groups=parts.asking,
            now=time.time(),
            store=_store(listed),
            starting=parts.report is None,
        )

    def _seen(self, listed: Listed, probe: Probe) -> SeenService:
        server = _alive_server(listed)
        before = self._sampled.get(listed.record.name)
        known = server is not None and before is not None and before.incarnation == server.incarnation
        apart_s = time.monotonic() - before.at if before is not None else 0.0
        return SeenService(
            name=listed.record.name,
            alive=None if listed.record.told_by is not None else listed.alive,
            last_heard=listed.last_heard,
            probe=probe.outcome,
            reasons=probe.reasons,
            running=0 if server is None else server.running,
            sampled=server.sampled_tokens - before.tokens
            if server and before and known and apart_s >= self._collect_again_s
            else None,
            apart_s=apart_s,
            worked=server is not None and server.sampled_tokens > 0,
        )

    def _remember(self, listed: Sequence[Listed]) -> None:
        """Only what has changed: who generates nothing is compared with when it last generated."""
        now = time.monotonic()
        for server in filter(None, map(_alive_server, listed)):
            before = self._sampled.get(server.name)
            sampled = _Sampled(server.incarnation, server.sampled_tokens, now)
            if before is None or (before.incarnation, before.tokens) != (sampled.incarnation, sampled.tokens):
                self._sampled[server.name] = sampled

    async def _read(self) -> _Parts:
        parts = _Parts()
        async with asyncio.TaskGroup() as tasks:
            listed = tasks.create_task(self._part(parts, "registry", self._registry.services(), list[Listed]()))
            accounts = tasks.create_task(self._part(parts, "accounts", self._ledger.accounts(), None))
            groups = tasks.create_task(self._part(parts, "open groups", self._groups(), list[SeenGroup]()))
            asking = tasks.create_task(self._part(parts, "admission", self._asking(), 0))
            waits = tasks.create_task(self._part(parts, "waits", read_waits(self._redis, self._run_id), _NO_WAITS))
            evaluations = tasks.create_task(
                self._part(parts, "evaluations", EvaluationStore(self._redis, self._run_id).read(), list[Evaluation]())
            )
            report = tasks.create_task(
                self._part(parts, "trainer", read_trainer_status(self._redis, self._run_id), None)
            )
        parts.listed, parts.accounts = listed.result(), accounts.result()
        parts.groups, parts.asking, parts.waits = groups.result(), asking.result(), waits.result()
        parts.report, parts.evaluations = report.result(), evaluations.result()
        return parts

    async def _part(self, parts: _Parts, name: str, reading: Awaitable[_Part], instead: _Part) -> _Part:
        try:
            async with asyncio.timeout(self._part_within_s):
                return await reading
        except TimeoutError:
            parts.unread.append(f"{name}: Redis has not answered within {self._part_within_s:g} s")
        except (RedisError, OSError, *UNDECODABLE) as error:
            parts.unread.append(f"{name}: {error}")
        return instead

    async def _asking(self) -> int:
        return int(await self._redis.zcard(RunKeys(self._run_id).admission_queue))

    async def _groups(self) -> list[SeenGroup]:
        keys = RunKeys(self._run_id)
        opened = await self._ledger.open_groups()
        if not opened:
            return []
        names = list(opened)
        owners = await self._redis.hmget(keys.owners, names)
        finished = await self._redis.hmget(keys.published_groups, names)
        return [
            SeenGroup(
                name,
                opened[name].ordinal,
                # Groups taken over are another server's than the one that opened them.
                as_text(owner).partition("/")[0] if owner else opened[name].server_id,
                opened[name].opened_at,
                int(count or 0),
            )
            for name, owner, count in zip(names, owners, finished, strict=True)
            # Nobody holds what is complete, even while its place is not free yet: nothing of it is waited for.
            if owner is not None or not int(count or 0)
        ]


def _report(
    run_id: str, parts: _Parts, listed: Sequence[Listed], probes: Mapping[str, Probe], causes: Sequence[Cause]
) -> MeshReport:
    waits = [
        WaitView(component=component, waiting_for=wait.waiting_for, since=wait.since)
        for component, wait in sorted(parts.waits.items())
    ]
    held = [group.held_by for group in parts.groups]
    return MeshReport(
        run_id=run_id,
        at=time.time(),
        services=[_service(each, probes[each.record.name], held.count(each.record.name)) for each in listed],
        queue=None if parts.accounts is None else _queue(parts.accounts, len(parts.groups), parts.asking),
        trainer=parts.report,
        trainer_waits=next((wait for wait in waits if wait.component == TRAINER), None),
        waits=waits,
        evaluation=point_of(parts.evaluations[-1]) if parts.evaluations else None,
        causes=[_cause(cause) for cause in causes],
        store=None if (store := _store(listed)) is None else StoreView(used_bytes=store.used, most_bytes=store.most),
        unread=parts.unread,
    )


def _store(listed: Sequence[Listed]) -> StoreUse | None:
    """What Redis holds, as the server said that has the smallest bound; None where no server has one."""
    alive = [server for server in map(_alive_server, listed) if server is not None and server.store_most]
    server = min(alive, key=lambda each: each.store_most, default=None)
    return None if server is None else StoreUse(server.store_used, server.store_most)


def _alive_server(listed: Listed) -> ServerRecord | None:
    """What a rollout server says of itself, as long as its lease lasts."""
    return listed.record if listed.alive and isinstance(listed.record, ServerRecord) else None


def _service(listed: Listed, probe: Probe, groups: int) -> ServiceView:
    record, server = listed.record, _alive_server(listed)
    return ServiceView(
        name=record.name,
        kind=record.kind,
        url=record.url,
        probe=probe.outcome,
        reasons=list(probe.reasons),
        alive=None if record.told_by is not None else listed.alive,
        last_heard=listed.last_heard,
        incarnation=None if record.told_by is not None else record.incarnation,
        policy_version=None if server is None else server.policy_version,
        state=None if server is None else server.state,
        running=None if server is None else server.running,
        most_running=None if server is None else server.max_running,
        kv_use=None if server is None else server.kv_use,
        waiting=None if server is None else server.waiting,
        open_sessions=None if server is None else server.open_sessions,
        open_groups=groups if record.kind == "rollout-server" else None,
    )


def _queue(accounts: Accounts, open_groups: int, asking: int) -> QueueView:
    dropped = accounts.dropped_total()
    return QueueView(
        opened_groups=accounts.opened_groups,
        open_groups=open_groups,
        dropped_groups=accounts.dropped_groups,
        published=accounts.published,
        trained=accounts.trained,
        dropped=dropped,
        in_stream=max(0, accounts.published - accounts.trained - dropped),
        asking_groups=asking,
        concluded=accounts.concluded,
        unaccounted=accounts.unaccounted,
        corrected=accounts.corrected,
    )


def _cause(cause: Cause) -> CauseView:
    groups = [
        GroupView(
            group=each.group_id,
            ordinal=each.ordinal,
            server=each.held_by,
            opened_at=each.opened_at,
            finished=each.finished,
        )
        for each in cause.groups
    ]
    return CauseView(
        kind=cause.kind, service=cause.service, since=cause.since, what=cause.what, sure=cause.sure, groups=groups
    )


# Readiness probes, with a deadline that no stopped process can stretch.

PROBE_WITHIN_S = 1.5


class _Readiness(msgspec.Struct):
    not_ready: list[str] = []


_readiness = msgspec.json.Decoder(_Readiness)


@dataclass(frozen=True)
class Probe:
    """The outcome of one `GET /readyz`. `reasons`: why the service is not ready."""

    outcome: ProbeOutcome
    reasons: tuple[str, ...] = ()


async def probe_all(http: httpx.AsyncClient, urls: Mapping[str, str], trust: Trust = PUBLIC) -> dict[str, Probe]:
    """Name → outcome of `GET /readyz` at its URL; all at once, within PROBE_WITHIN_S. `trust`: `http`'s."""
    probes = await asyncio.gather(*(_probe(http, url, trust) for url in urls.values()))
    return dict(zip(urls, probes, strict=True))


async def _probe(http: httpx.AsyncClient, url: str, trust: Trust) -> Probe:
    try:
        # Around all of it: httpx's own timeouts bound each read, and a trickle of bytes would go on for ever.
        async with asyncio.timeout(PROBE_WITHIN_S):
            answer = await http.get(f"{url}/readyz", timeout=PROBE_WITHIN_S)
    except (httpx.TimeoutException, TimeoutError):
        return Probe("silent")
    except httpx.ConnectError as error:
        refused = trust.refusal(url, error)
        return Probe("refused") if refused is None else Probe("not_ready", (str(refused),))
    except httpx.HTTPError as error:
        return Probe("not_ready", (f"its answer broke off ({error!r})",))
    if answer.status_code == 200:
        return Probe("ready")
    try:
        reasons = _readiness.decode(answer.content).not_ready
    except UNDECODABLE:
        reasons = []
    return Probe("not_ready", tuple(reasons) or (f"it answers {answer.status_code}",))


_WITHIN_S = 5.0
_MARK = "*"


class NoRunYetError(UsageError):
    """Redis knows no run at all: one that starts is known from its first service on."""


async def find_run(redis: Redis, run_id: str | None) -> str:
    """The run that was named, or the only one that Redis knows.

    Raises UsageError where there is no such run, or no telling which, NoRunYetError where there is none and none was
    named; DeadlineError where Redis does not answer.
    """
    try:
        async with asyncio.timeout(_WITHIN_S):
            if run_id is not None and await _exists(redis, run_id):
                return run_id
            known = await _runs(redis)
    except TimeoutError as error:
        raise DeadlineError(f"Redis has not answered within {_WITHIN_S:g} s", "see whether it runs") from error
    shown = ", ".join(known) or "none"
    if run_id is not None:
        raise UsageError(f"Redis knows no run {run_id!r}", f"known: {shown}")
    if not known:
        raise NoRunYetError(
            "Redis knows no run yet", "one that starts is known from its first service on: look again then"
        )
    if len(known) != 1:
        raise UsageError(f"Redis knows {len(known)} runs", f"name one with --run-id; known: {shown}")
    return known[0]


async def _exists(redis: Redis, run_id: str) -> bool:
    keys = RunKeys(run_id)
    return bool(await redis.exists(keys.accounts, keys.services))


async def _runs(redis: Redis) -> list[str]:
    before, _, after = RunKeys(_MARK).accounts.partition(_MARK)
    found = {as_text(key) async for key in redis.scan_iter(match=RunKeys(_MARK).accounts, count=1000)}
    return sorted(key.removeprefix(before).removesuffix(after) for key in found)
