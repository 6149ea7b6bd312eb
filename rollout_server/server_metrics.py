"""A rollout server's figures, read off it when somebody scrapes: a token costs nothing more for being counted."""

from __future__ import annotations

from collections.abc import Iterator

from rollout_server.server import RolloutServer
from services import metric_catalog as catalog
from services.metrics import Reading
from services.wire.errors import NotReadyError


def server_readings(server: RolloutServer) -> Iterator[Reading]:
    """The engine's and the sessions' figures; none before the engine is up. For the event loop."""
    try:
        parts = server.parts()
    except NotReadyError:
        return
    status = parts.engine.status()
    yield Reading(catalog.ROLLOUT_VERSION, status.policy_version)
    if status.staged_version is not None:
        yield Reading(catalog.ROLLOUT_STAGED, status.staged_version)
    yield Reading(catalog.ROLLOUT_DRAWN, status.tokens_generated)
    yield Reading(catalog.ROLLOUT_PREFILLED, status.prefill_tokens)
    yield Reading(catalog.ROLLOUT_RUNNING, status.running)
    yield Reading(catalog.ROLLOUT_WAITING, status.waiting)
    yield Reading(catalog.ROLLOUT_PAUSED, status.paused)
    yield Reading(catalog.ROLLOUT_COMMITS, status.commits)
    if status.stalls_ms:
        yield Reading(catalog.ROLLOUT_STALL, status.stalls_ms[-1] / 1e3)
    yield Reading(catalog.ROLLOUT_GROUPS, len(parts.registry))
    yield Reading(catalog.ROLLOUT_SESSIONS, parts.registry.live_sessions)
    yield Reading(catalog.ROLLOUT_ADMISSION, parts.gate.waiting)
    yield Reading(catalog.ROLLOUT_HTTP, server.http_cpu_s())
