"""What a caller may cost before it shows a key: size and time of heads and bodies, and connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI, Request
from hypothesis import given
from hypothesis import strategies as st

from services.http.app import BodyLimit, make_app
from services.http.auth import AuthMiddleware, Authorizer
from services.http.connection import (
    MOST_AHEAD,
    MOST_HEAD_BYTES,
    MOST_HEADERS,
    SLOWEST_BODY,
    Bounds,
    JoinedWrites,
    seconds_left,
)
from services.security.permissions import Keys
from tests.support.raw_http import RawConnection, connected, head
from tests.support.served_app import served

KEY = "the-agent-key-of-this-test"
BEARER = {"authorization": f"Bearer {KEY}"}
QUICK = Bounds(head_within_s=0.3, body_within_s=0.3, strangers=4, stranger_s=0.0)


@asynccontextmanager
async def _nothing(_: FastAPI) -> AsyncIterator[None]:
    yield


def echo() -> FastAPI:
    """A service with one route, which answers what it was sent: how many bytes, and which headers."""
    app = make_app("echo", "0", _nothing, not_ready=list)

    @app.post("/echo")
    async def answer(request: Request) -> dict[str, object]:
        body = await request.body()
        return {"bytes": len(body), "headers": sorted(request.headers)}

    app.add_middleware(BodyLimit, limit_bytes=1 << 20)
    app.add_middleware(AuthMiddleware, authorizer=Authorizer(Keys(agent=KEY)))
    return app


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with served(echo()) as url:
        yield url


@pytest.fixture
async def quick() -> AsyncIterator[str]:
    async with served(echo(), bounds=QUICK) as url:
        yield url


async def _flood(connection: RawConnection, piece: bytes, most: int) -> int:
    """Send `piece` again and again until the other side closes, `most` bytes at the most; how many were sent."""
    sent = 0
    try:
        while sent < most:
            await connection.send(piece)
            sent += len(piece)
    except ConnectionError:
        pass
    return sent


async def alive(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/livez")).status_code == 200
        answer = await http.post("/echo", content=b"x" * 10, headers=BEARER)
        assert (answer.status_code, answer.json()["bytes"]) == (200, 10)


@pytest.mark.parametrize(
    "begin", [b"GET /livez HTTP/1.1\r\nx: ", b"GET /livez?x=", b"GET /livez HTTP/1.1\r\n", b"GET /livez HTTP/1.1\r\nx"]
)
async def test_a_head_that_is_too_large_is_refused_before_it_is_whole(url: str, begin: bytes) -> None:
    piece = b"a: b\r\n" * 10_000 if begin.endswith(b"\n") else b"a" * (60 << 10)
    async with connected(url) as connection:
        await connection.send(begin + piece)
        await connection.send(piece)
        answer = await connection.answer()
        assert (answer.status, answer.code) == (431, "head_too_large")
        assert answer.headers["connection"] == "close"
        assert await connection.is_closed()
    await alive(url)


@pytest.mark.parametrize(("bytes_", "status"), [(MOST_HEAD_BYTES - 200, 200), (MOST_HEAD_BYTES + 1, 431)])
async def test_the_bound_of_a_head_holds_in_one_piece_too(url: str, bytes_: int, status: int) -> None:
    body = b"y" * 5000
    async with connected(url) as connection:
        request = head("POST", "/echo", **BEARER, content_length=len(body), x_long="x" * bytes_)
        await connection.send(request + body)
        assert (await connection.answer()).status == status
    await alive(url)


@pytest.mark.parametrize(("count", "status"), [(MOST_HEADERS - 4, 200), (MOST_HEADERS + 1, 431)])
async def test_the_number_of_headers_is_bounded(url: str, count: int, status: int) -> None:
    async with connected(url) as connection:
        await connection.send(head("GET", "/livez", **{f"x{index}": "" for index in range(count)}))
        assert (await connection.answer()).status == status


async def test_a_head_that_does_not_come_in_time_is_ended(quick: str) -> None:
    async with connected(quick) as silent, connected(quick) as slow:
        await slow.send(b"GET /livez HTTP/1.1\r\nhost:")
        answer = await slow.answer()
        assert (answer.status, answer.code) == (408, "request_timeout")
        assert await slow.is_closed()
        assert await silent.is_closed()
    await alive(quick)


async def test_a_body_that_does_not_come_in_time_is_ended(quick: str, caplog: pytest.LogCaptureFixture) -> None:
    async with connected(quick) as connection:
        await connection.send(head("POST", "/echo", **BEARER, content_length=100) + b"some")
        answer = await connection.answer()
        assert (answer.status, answer.code) == (408, "request_timeout")
        assert await connection.is_closed()
    await alive(quick)
    assert not [record for record in caplog.records if record.exc_info]


async def test_the_body_of_a_call_without_a_key_is_neither_waited_for_nor_read_for_ever(quick: str) -> None:
    async with connected(quick) as connection:
        await connection.send(head("POST", "/echo", content_length=1 << 40) + b"x" * 1000)
        answer = await connection.answer()
        assert (answer.status, answer.code) == (401, "invalid_api_key")
        assert await connection.is_closed(), "the rest is not read for ever"
    await alive(quick)


async def test_who_is_refused_may_try_again_on_its_connection(url: str) -> None:
    async with connected(url) as connection:
        await connection.send(head("POST", "/echo", content_length=100_000))
        assert (await connection.answer()).status == 401
        await connection.send(b"x" * 100_000 + head("POST", "/echo", **BEARER, content_length=3) + b"abc")
        assert b'"bytes":3' in (await connection.answer()).body


async def test_a_slow_body_with_a_key_may_take_as_long_as_its_bytes() -> None:
    bounds = Bounds(head_within_s=0.2, body_within_s=0.2)
    async with served(echo(), bounds=bounds) as url, connected(url) as connection:
        whole = 4 * SLOWEST_BODY
        await connection.send(head("POST", "/echo", **BEARER, content_length=whole) + b"x" * (whole - 1))
        # Its bytes are worth four seconds.
        assert not await _closes_within(connection, 0.6)
        await connection.send(b"x")
        assert (await connection.answer()).status == 200


async def _closes_within(connection: RawConnection, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await connection.is_closed()
    except TimeoutError:
        return False


async def test_strangers_keep_nobody_out_and_a_caller_with_a_key_stays(quick: str) -> None:
    async with AsyncExitStack() as stack:
        known = await stack.enter_async_context(connected(quick))
        await known.send(head("POST", "/echo", **BEARER, content_length=0))
        assert (await known.answer()).status == 200
        first = await stack.enter_async_context(connected(quick))
        await first.send(head("GET", "/livez"))
        assert (await first.answer()).status == 200, "a probe shows no key"
        for _ in range(3 * QUICK.strangers):
            another = await stack.enter_async_context(connected(quick))
            await another.send(head("GET", "/livez"))
            assert (await another.answer()).status == 200
        assert await first.is_closed()
        await known.send(head("POST", "/echo", **BEARER, content_length=0))
        assert (await known.answer()).status == 200
        await another.send(head("GET", "/livez"))
        assert (await another.answer()).status == 200, "the newest stay"


async def test_many_callers_may_come_at_once() -> None:
    async with served(echo(), bounds=Bounds(strangers=4)) as url, AsyncExitStack() as stack:
        crowd = [await stack.enter_async_context(connected(url)) for _ in range(60)]
        for connection in crowd:
            await connection.send(head("POST", "/echo", **BEARER, content_length=0))
        assert [(await connection.answer()).status for connection in crowd] == [200] * len(crowd)
        await connected_and_alive(url, stack)
        # They are no strangers any more, and stay.
        await crowd[0].send(head("POST", "/echo", **BEARER, content_length=0))
        assert (await crowd[0].answer()).status == 200


async def connected_and_alive(url: str, stack: AsyncExitStack) -> None:
    for _ in range(10):
        another = await stack.enter_async_context(connected(url))
        await another.send(head("GET", "/livez"))
        assert (await another.answer()).status == 200


async def test_strangers_at_once_are_bounded_too_and_end_after_a_moment() -> None:
    bounds = Bounds(strangers=4, stranger_s=0.2, most_strangers=8)
    async with served(echo(), bounds=bounds) as url, AsyncExitStack() as stack:
        crowd = [await stack.enter_async_context(connected(url)) for _ in range(12)]
        assert [await connection.is_closed() for connection in crowd[:8]] == [True] * 8
        await crowd[-1].send(head("GET", "/livez"))
        assert (await crowd[-1].answer()).status == 200, "the newest stay"


async def test_in_a_crowd_a_head_comes_in_one_piece() -> None:
    bounds = Bounds(strangers=2, stranger_s=60.0)
    async with served(echo(), bounds=bounds) as url, AsyncExitStack() as stack:
        crowd = [await stack.enter_async_context(connected(url)) for _ in range(6)]
        await crowd[-1].send(b"GET /livez HTTP/1.1\r\nx: " + b"x" * 1000)
        assert (await crowd[-1].answer()).status == 408
        await alive(url)


async def test_requests_ahead_of_their_answers_are_bounded(url: str) -> None:
    async with connected(url) as connection:
        await connection.send(head("GET", "/livez") * (20 * MOST_AHEAD))
        answered = 0
        try:
            while (await connection.answer()).status == 200:
                answered += 1
        except (EOFError, ConnectionError):
            pass
        assert answered <= MOST_AHEAD + 1
    await alive(url)


async def test_trailers_are_no_headers_and_are_bounded(url: str) -> None:
    chunked = head("POST", "/echo", **BEARER, transfer_encoding="chunked") + b"3\r\nabc\r\n0\r\n"
    async with connected(url) as connection:
        await connection.send(chunked + b"x-session-id: s\r\n\r\n")
        answer = await connection.answer()
        assert answer.status == 200
        assert b"x-session-id" not in answer.body
    async with connected(url) as connection:
        await connection.send(chunked)
        await _flood(connection, b"a: b\r\n" * 1000, 4 * MOST_HEAD_BYTES)
        assert (await connection.answer()).code == "head_too_large"
    await alive(url)


async def test_bytes_that_are_no_request_get_a_typed_refusal(url: str) -> None:
    for junk in (b"\x00\x01\x02\r\n\r\n", b"GET  HTTP/9\r\n\r\n", "GET /ä HTTP/1.1\r\n\r\n".encode()):
        async with connected(url) as connection:
            await connection.send(junk)
            answer = await connection.answer()
            assert (answer.status, answer.code) == (400, "bad_request")
            assert await connection.is_closed()
    await alive(url)


async def test_an_upload_that_breaks_off_leaves_no_traceback(url: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        async with connected(url) as connection:
            await connection.send(head("POST", "/echo", **BEARER, content_length=1000) + b"some")
        await alive(url)
    assert not [record for record in caplog.records if record.exc_info]


@given(st.floats(0, 1e5), st.integers(0, 1 << 40), st.booleans(), st.booleans())
def test_time_runs_out_for_every_request_and_a_body_earns_some(
    elapsed_s: float, body_bytes: int, head_done: bool, answered: bool
) -> None:
    bounds = Bounds()
    left = seconds_left(elapsed_s, bounds, head_done=head_done, answered=answered, body_bytes=body_bytes)
    allowed = left + elapsed_s
    if head_done and not answered:
        assert allowed == pytest.approx(bounds.body_within_s + body_bytes / SLOWEST_BODY)
    else:
        assert allowed == pytest.approx(bounds.head_within_s)


async def test_what_is_refused_before_a_key_writes_no_log(url: str, caplog: pytest.LogCaptureFixture) -> None:
    upgrade = head("GET", "/livez", connection="upgrade", upgrade="websocket")
    for junk in (b"\x00\r\n\r\n", b"GET /livez?" + b"x" * (70 << 10), upgrade, head("POST", "/echo", content_length=9)):
        async with connected(url) as connection:
            await connection.send(junk)
            await connection.answer()
    await alive(url)
    assert [record.getMessage() for record in caplog.records if record.name.startswith("uvicorn")] == []


class _Written(asyncio.Transport):
    """What a transport was given to write, a list a call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[bytes]] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.calls.append([bytes(data)])

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.calls.append([bytes(each) for each in list_of_data])

    def write_eof(self) -> None:
        self.calls.append([b"(end)"])

    def close(self) -> None:
        self.calls.append([b"(closed)"])


HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


@pytest.mark.parametrize(
    ("writes", "calls"),
    [
        ([HEAD, b"ok"], [[HEAD, b"ok"]]),
        ([HEAD, b""], [[HEAD]]),
        ([HEAD, b"ok", b"more"], [[HEAD, b"ok"], [b"more"]]),
        ([HEAD + b"ok"], [[HEAD + b"ok"]]),
        ([b"2\r\nok\r\n"], [[b"2\r\nok\r\n"]]),
        ([HEAD, b"ok", HEAD, b"no"], [[HEAD, b"ok"], [HEAD, b"no"]]),
        ([HEAD, HEAD], [[HEAD, HEAD]]),
    ],
)
async def test_a_head_goes_out_with_what_is_written_next(writes: list[bytes], calls: list[list[bytes]]) -> None:
    written = _Written()
    joined = JoinedWrites(written, asyncio.get_running_loop())
    for each in writes:
        joined.write(each)
    assert written.calls == calls
    await asyncio.sleep(0)
    assert written.calls == calls


@pytest.mark.parametrize("end", ["write_eof", "close", ""])
async def test_a_head_that_nothing_follows_goes_out_by_itself(end: str) -> None:
    written = _Written()
    joined = JoinedWrites(written, asyncio.get_running_loop())
    joined.write(HEAD)
    if end:
        getattr(joined, end)()
    await asyncio.sleep(0)
    assert written.calls == [[HEAD], *([[b"(end)" if end == "write_eof" else b"(closed)"]] if end else [])]
