"""Applications of one process: each ends by itself, a signal ends all."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from textwrap import dedent

import httpx
import pytest
from fastapi import FastAPI

from services.http.app import Stop, make_app, open_port
from services.http.together import Served, serve_together
from services.wire.errors import RollmeshError

_WITHIN_S = 20.0


def application(run_id: str) -> tuple[Served, str]:
    """One that answers, and ends itself where it is told to; its address."""
    stop = Stop()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield

    app = make_app("rollmesh test", "1", lifespan, lambda: [])

    @app.post("/fail")
    async def fail() -> None:
        stop.fail(RollmeshError(f"{run_id} has failed"))

    listener = open_port("127.0.0.1", 0)
    return Served(run_id, app, listener, stop), f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_one_that_fails_leaves_the_others_and_its_failure_is_raised_at_the_end() -> None:
    (a, url_a), (b, url_b) = application("a"), application("b")

    def play() -> int:
        with httpx.Client(timeout=_WITHIN_S) as http:
            http.post(f"{url_a}/fail")
            with pytest.raises(httpx.TransportError):
                while True:
                    http.get(f"{url_a}/livez")
            answered = http.get(f"{url_b}/livez").status_code
            http.post(f"{url_b}/fail")
            return answered

    with ThreadPoolExecutor(1) as threads:
        playing = threads.submit(play)
        with pytest.raises(RollmeshError, match="a has failed"):
            serve_together([a, b])
        assert playing.result(_WITHIN_S) == 200


_PROGRAM = dedent(
    """
    from services.http.together import serve_together
    from tests.contract.services.test_serving_together import application
    made = [application("a"), application("b")]
    print(*(url for _, url in made), flush=True)
    serve_together([served for served, _ in made])
    """
)


@pytest.mark.parametrize("number", [15, 2], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_ends_all_and_is_how_the_process_ends(number: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        urls = process.stdout.readline().split()
        with httpx.Client(timeout=_WITHIN_S) as http:
            assert [http.get(f"{url}/livez").status_code for url in urls] == [200, 200]
        process.send_signal(number)
        _, said = process.communicate(timeout=_WITHIN_S)
        assert process.returncode == -number, said
    finally:
        process.kill()
        process.wait()
