"""The readiness probe of containers, against a service that is ready, one that is not, TLS, and a real Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from services.http.probe import main
from tests.conftest import free_port
from tests.support.certificates import make_certificates
from tests.support.served_app import served

Ask = Callable[..., Awaitable[tuple[int, str]]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """The exit code and what was printed."""

    async def asked(*arguments: str) -> tuple[int, str]:
        code = await asyncio.to_thread(main, list(arguments))
        return code, capsys.readouterr().out.strip()

    return asked


def answering(answer: Response) -> FastAPI:
    app = FastAPI()
    app.add_api_route("/readyz", lambda: answer)
    return app


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (JSONResponse({"ready": True}), (0, "ready")),
        (JSONResponse({"not_ready": ["no engine", "no bus"]}, 503), (1, "no engine; no bus")),
        (JSONResponse(["no engine"], 503), (1, "/readyz answers 503")),
        (PlainTextResponse("gone", 404), (1, "/readyz answers 404")),
    ],
)
async def test_a_service_is_as_ready_as_it_says(ask: Ask, answer: Response, told: tuple[int, str]) -> None:
    async with served(answering(answer)) as url:
        assert await ask(url) == told


async def test_one_that_is_not_there_is_not_ready(ask: Ask) -> None:
    for scheme in ("http", "redis"):
        code, said = await ask(address := f"{scheme}://127.0.0.1:{free_port()}")
        assert (code, said.startswith(f"{address} does not answer")) == (1, True)


async def test_a_certificate_is_verified(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates = make_certificates(tmp_path)
    monkeypatch.setenv("ROLLMESH_TLS_DIR", str(certificates.ours))
    ready = answering(JSONResponse({"ready": True}))
    async with served(ready, identity=certificates.shown(certificates.ours)) as url:
        assert await ask(url) == (0, "ready")
        code, said = await ask(url, "--host", "elsewhere.internal")
        assert (code, "elsewhere.internal" in said) == (1, True)
    async with served(ready, identity=certificates.shown(certificates.misplaced)) as url:
        assert await ask(url, "--host", "elsewhere.internal") == (0, "ready")
        assert (await ask(url))[0] == 1
    async with served(ready, identity=certificates.shown(certificates.strange)) as url:
        code, said = await ask(url)
        assert (code, "certificate" in said) == (1, True)


async def test_redis_answers_a_ping_and_refuses_a_password_that_it_does_not_know(
    ask: Ask, redis_url: str, tmp_path: Path
) -> None:
    assert await ask(redis_url) == (0, "ready")
    password = tmp_path / "redis.key"
    password.write_text("unknown\n")
    code, said = await ask(redis_url, "--password-file", str(password))
    assert (code, said[:1]) == (1, "-")
