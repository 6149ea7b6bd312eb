"""Schemathesis over the weight bus's own OpenAPI document: whatever is sent, the answer is one that it declares."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.bus_fleet import BusFleet
from tests.support.examples import examples

EXAMPLES = 8
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
NOT_HERE = ("/v1/events", "/v1/snapshots", "/v1/updates")
"""A stream without an end, one that needs a folder, and one whose body is bytes: all have tests of their own."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A bus with an engine and two versions, in a thread of its own."""
    ready, done = threading.Event(), asyncio.Event()
    found: list[tuple[str, asyncio.AbstractEventLoop]] = []

    async def live() -> None:
        async with AsyncExitStack() as stack:
            fleet = BusFleet("openapi", stack)
            await fleet.start(lease_s=600.0)
            await fleet.add("a")
            for version in (1, 2):
                await fleet.publish(version)
            found.append((fleet.url, asyncio.get_running_loop()))
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    assert ready.wait(30.0)
    yield found[0][0]
    found[0][1].call_soon_threadsafe(done.set)
    thread.join(20.0)


def test_every_call_is_answered_as_the_document_says(url: str) -> None:
    http = requests.Session()
    document = schemathesis.openapi.from_dict(http.get(f"{url}/openapi.json", timeout=10).json())
    operations: list[Any] = [found.ok() for found in document.get_all_operations()]  # type: ignore[union-attr]
    assert len(operations) > 12
    for operation in operations:
        if operation.path not in NOT_HERE:
            seen = fuzz(url, http, operation)
            assert seen, operation.label
    assert http.get(f"{url}/v1/versions", timeout=10).json()["versions"]


def fuzz(url: str, http: requests.Session, operation: Any) -> Counter[int]:
    statuses: Counter[int] = Counter()
    for mode in [GenerationMode.POSITIVE, GenerationMode.NEGATIVE][: 1 + bool(operation.body or operation.query)]:

        @settings(examples(EXAMPLES), suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode), known=st.booleans())
        def call(case: Any, known: bool) -> None:
            if known and "version" in (case.path_parameters or {}):
                case.path_parameters["version"] = 1 + statuses.total() % 2
            if case.query and "wait_s" in case.query:
                case.query["wait_s"] = 0
            answer = case.call(base_url=url, session=http, timeout=20.0)
            statuses[answer.status_code] += 1
            case.validate_response(answer, checks=CHECKS)

        call()
    return statuses
