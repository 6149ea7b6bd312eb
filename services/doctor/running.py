"""A run: what its folder says, and while it runs, its Redis, its weight bus and its servers.

folder ─► metrics.jsonl, logs, summary ─► of_steps, of_logs
Redis  ─► status report, accounts, two or three looks at the servers ─► of_causes, of_account, of_stragglers
HTTP   ─► weight bus: digests, events; a scripted session; clocks ─► of_weights, of_events, of_session, of_clocks
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime

import httpx
import pydantic

from services.config.load import flat_settings
from services.doctor.session import of_session
from services.host.files import LineTail, end_of
from services.host.run_folder import RunFolder, is_held
from services.observability.mesh_status.collector import StatusCollector
from services.policies.diagnosis.finding import Finding, error
from services.policies.diagnosis.fleet import Sampling, of_account, of_events, of_stragglers, of_weights, stragglers
from services.policies.diagnosis.logs import LOG_BYTES, of_interrupted, of_logs
from services.policies.diagnosis.mesh import of_causes, of_unread
from services.policies.diagnosis.store import of_clocks, of_store
from services.policies.diagnosis.training import of_steps
from services.run_store.client import connect, read_store
from services.run_store.discovery import ServerRecord, ServiceRegistry
from services.run_store.ledger import Ledger
from services.security.keys import KeyPlaces, read_keys
from services.security.tls import Trust
from services.wire.run_metrics import StepMetrics, decode_step_metrics
from services.wire.weights_api import VerifyView, WeightEvent

_LOOK_S = 2.2
"""Servers announce what they have sampled every second."""
_HASHING_S = 6.0
"""For engines to hash what they serve: with large models that takes longer, and nothing is said."""
_EVENTS_S = 1.5


def examine_folder(folder: RunFolder) -> list[Finding]:
    """What the files of a run, or of a rollout plane, say."""
    lines = read_steps(folder)
    logs = {path.stem: end_of(path, LOG_BYTES) for path in sorted(folder.logs.glob("*.log"))}
    found = [*of_steps(lines), *of_logs(logs)]
    if folder.run_id.is_file() and not is_held(folder) and not folder.summary.exists():
        steps = flat_settings(folder.config).get("steps")
        last = lines[-1].step if lines else 0
        found += of_interrupted(str(folder.root), last, steps if isinstance(steps, int) else last, logs)
    return found


def read_steps(folder: RunFolder) -> list[StepMetrics]:
    """The lines of metrics.jsonl that can be read."""
    return [line for line in map(decode_step_metrics, LineTail(folder.metrics).new_lines()) if line is not None]


async def examine_mesh(url: str, run_id: str, keys: KeyPlaces, trust: Trust) -> list[Finding]:
    """What the services of a run say. `url`: of its Redis, with password and authority. Raises UsageError where no Redis
    answers."""
    store, clock = await read_store(url)
    redis_ahead = clock - time.time()
    redis = connect(url)
    try:
        async with httpx.AsyncClient(trust_env=False, verify=trust.verify) as http:
            collector = StatusCollector(redis, run_id, http, trust=trust)
            registry, ledger = ServiceRegistry(redis, run_id), Ledger(redis, run_id)
            services = [each for each in await registry.services() if each.alive]
            urls = {each.record.name: each.record.url for each in services}
            servers = {each.record.name: each.record.url for each in services if each.record.kind == "rollout-server"}
            bus = next((each.record.url for each in services if each.record.kind == "weight-bus"), None)
            admin, agent = read_keys("operator", keys.folder).admin, read_keys("environment", keys.folder).agent
            async with asyncio.TaskGroup() as tasks:
                collecting = tasks.create_task(collector.collect())
                comparing = tasks.create_task(_straggling(registry))
                counting = tasks.create_task(ledger.account.count())
                telling = tasks.create_task(_clocks(http, urls))
                asking = [] if bus is None else [tasks.create_task(_of_bus(http, bus, admin))]
                asking += [tasks.create_task(of_session(http, name, at, agent)) for name, at in servers.items()]
    finally:
        await redis.aclose()
    report, snapshot = collecting.result(), counting.result()
    queue = report.queue
    return [
        *of_store(store),
        *of_clocks({"Redis' host": redis_ahead, **telling.result()}, "this host"),
        # The services of a run that has concluded end one after the other.
        *([] if queue is not None and queue.concluded else of_causes(report.causes, report.at)),
        *of_unread(report.unread),
        *of_account(
            snapshot.counted,
            unaccounted=0 if queue is None else queue.unaccounted,
            corrected=0 if queue is None else queue.corrected,
            read=snapshot.read,
        ),
        *comparing.result(),
        *(each for asked in asking for each in asked.result()),
    ]


async def _straggling(registry: ServiceRegistry) -> list[Finding]:
    """Two looks; a third where somebody was slow in the first two."""
    looks = [await registry.servers()]
    if len(looks[0]) < 2:
        return []
    found: list[Mapping[str, str]] = []
    while len(found) < 2:
        await asyncio.sleep(_LOOK_S)
        looks.append(await registry.servers())
        found.append(stragglers(_between(*looks[-2:])))
        if not found[-1]:
            return []
    return list(of_stragglers(*found))


def _between(before: Sequence[ServerRecord], now: Sequence[ServerRecord]) -> list[Sampling]:
    earlier = {(each.name, each.incarnation): each for each in before}
    return [
        Sampling(each.name, each.sampled_tokens - was.sampled_tokens, min(each.running, was.running))
        for each in now
        if (was := earlier.get((each.name, each.incarnation))) is not None
    ]


async def _of_bus(http: httpx.AsyncClient, url: str, key: str | None) -> list[Finding]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    found: list[Finding] = []
    try:
        answer = await http.post(f"{url}/v1/verify", json={}, headers=headers, timeout=_HASHING_S)
        if answer.status_code in (401, 403):
            what = "the weight bus does not take the admin key"
            remedy = "give --keys-dir the folder of this mesh's keys"
            return [error("keys", what, f"POST /v1/verify answers {answer.status_code}", remedy)]
        found += of_weights(VerifyView.model_validate_json(answer.raise_for_status().content))
        found += of_events(await _events(http, url, headers), time.time())
    except (httpx.HTTPError, pydantic.ValidationError):
        # Whether it answers at all, the status report says.
        return found
    return found


async def _events(http: httpx.AsyncClient, url: str, headers: Mapping[str, str]) -> list[WeightEvent]:
    """Those that it remembers: they come at once, and what follows is not waited for."""
    events: list[WeightEvent] = []
    try:
        async with asyncio.timeout(_EVENTS_S), http.stream("GET", f"{url}/v1/events", headers=headers) as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: "):
                    events.append(WeightEvent.model_validate_json(line.removeprefix("data: ")))
    except TimeoutError:
        pass
    return events


async def _clocks(http: httpx.AsyncClient, urls: Mapping[str, str]) -> dict[str, float]:
    """By how many seconds the clock of each service's host is ahead, of those that tell."""
    told = await asyncio.gather(*(_clock(http, url) for url in urls.values()))
    return {name: seconds for name, seconds in zip(urls, told, strict=True) if seconds is not None}


async def _clock(http: httpx.AsyncClient, url: str) -> float | None:
    try:
        answer = await http.get(f"{url}/livez", timeout=1.5)
        # To the second below.
        return parsedate_to_datetime(answer.headers["date"]).timestamp() + 0.5 - time.time()
    except (httpx.HTTPError, KeyError, ValueError):
        return None
