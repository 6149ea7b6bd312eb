"""Asking services whether they are ready, with a deadline that no stopped process can stretch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import httpx
import msgspec

from services.policies.wait_causes import ProbeOutcome
from services.tls import PUBLIC, Trust

PROBE_WITHIN_S = 1.5


class _Readiness(msgspec.Struct):
    not_ready: list[str] = []


_readiness = msgspec.json.Decoder(_Readiness)


@dataclass(frozen=True)
class Probe:
    """What became of one `GET /readyz`. `reasons`: why the service is not ready."""

    outcome: ProbeOutcome
    reasons: tuple[str, ...] = ()


async def probe_all(http: httpx.AsyncClient, urls: Mapping[str, str], trust: Trust = PUBLIC) -> dict[str, Probe]:
    """Name → what became of asking it at its URL; all at once, within PROBE_WITHIN_S. `trust`: `http`'s."""
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
    except msgspec.MsgspecError:
        reasons = []
    return Probe("not_ready", tuple(reasons) or (f"it answers {answer.status_code}",))
