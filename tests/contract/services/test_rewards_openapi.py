"""Schemathesis over the reward service's own OpenAPI document: whatever is sent, the answer is one that it declares."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.examples import examples
from tests.support.rewards_host import judging

EXAMPLES = 25
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
FUNCTION = """
def length(answer, metadata):
    if metadata: raise ValueError("no metadata, please")
    return len(answer)
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A service in a thread of its own."""
    folder: Path = tmp_path_factory.mktemp("judges")
    (folder / "openapi_judges.py").write_text(FUNCTION)
    ready, done = threading.Event(), asyncio.Event()
    found: list[tuple[str, asyncio.AbstractEventLoop]] = []

    async def live() -> None:
        async with judging({"name": "length", "function": "openapi_judges:length"}) as http:
            found.append((str(http.base_url), asyncio.get_running_loop()))
            ready.set()
            await done.wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        thread = threading.Thread(target=lambda: asyncio.run(live()))
        thread.start()
        try:
            assert ready.wait(30.0)
            yield found[0][0]
        finally:
            for _, loop in found:
                loop.call_soon_threadsafe(done.set)
            thread.join(20.0)


def test_every_call_is_answered_as_the_document_says(url: str) -> None:
    with requests.Session() as http:
        document = schemathesis.openapi.from_dict(http.get(f"{url}/openapi.json", timeout=10).json())
        operations: list[Any] = [found.ok() for found in document.get_all_operations()]  # type: ignore[union-attr]
        seen = {operation.label: fuzz(url, http, operation) for operation in operations}
    assert len(seen) >= 6
    assert {200, 422, 424} <= set(seen["POST /v1/rewards"]), seen


def fuzz(url: str, http: requests.Session, operation: Any) -> Counter[int]:
    statuses: Counter[int] = Counter()
    send(url, http, operation, GenerationMode.POSITIVE, statuses)
    if operation.body:
        send(url, http, operation, GenerationMode.NEGATIVE, statuses)
    return statuses


def send(url: str, http: requests.Session, operation: Any, mode: GenerationMode, statuses: Counter[int]) -> None:
    @settings(examples(EXAMPLES), suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def call(case: Any) -> None:
        if mode == GenerationMode.POSITIVE and isinstance(case.body, dict):
            # Exactly one of them, which the document does not tell.
            case.body.pop("messages", None)
            case.body["prompt"] = "p"
        answer = case.call(base_url=url, session=http, timeout=20.0)
        statuses[answer.status_code] += 1
        case.validate_response(answer, checks=CHECKS)

    call()
