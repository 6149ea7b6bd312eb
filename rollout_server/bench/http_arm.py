"""A server as an arm: sessions opened before the clock starts, calls over kept-alive connections, sessions given up after.

The client is this process; each request is a call in a session of its own, as an agent's first call is.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Literal

import aiohttp
import msgspec

from rollout_server.bench.rate import Rate, in_parallel
from rollout_server.bench.workload import Exchange
from services.wire.errors import RollmeshError

Way = Literal["plain", "streamed", "tokens"]
"""A whole chat completion, a streamed one, or vLLM's token route."""
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
_USAGE_BYTES = 1024
_AT_ONCE = 64


class Opened(msgspec.Struct, frozen=True):
    """A session."""

    session_id: str
    api_key: str
    group_id: str


class EngineMoment(msgspec.Struct, frozen=True):
    """What `GET /engine` says of a server, so far: CPU seconds of its event loop, and tokens that it prefilled."""

    http_cpu_s: float
    prefill_tokens: int


class HttpArm:
    """Speaks to one server at `url`, whose log ends as `tail` says. Without `sessions` it is any OpenAI server."""

    def __init__(
        self, http: aiohttp.ClientSession, url: str, tail: Callable[[], str], *, sessions: bool = True
    ) -> None:
        self._http = http
        self._url = self.url = url
        self._tail = tail
        self._sessions = sessions

    async def load(self, exchanges: Sequence[Exchange], concurrency: int, way: Way) -> Rate:
        """Answer `exchanges`, so many at a time. Raises RollmeshError for any answer that is not what was asked for."""
        opened = await self.open(len(exchanges)) if self._sessions else []
        rate = await self.timed(exchanges, opened, concurrency, way)
        await self.give_up(opened)
        return rate

    async def as_agents(self, exchanges: Sequence[Exchange], concurrency: int, way: Way) -> tuple[Rate, list[Opened]]:
        """As agents do: `concurrency` of them, each of which opens a session, asks in it, and goes on to the next.

        Whoever places sessions sees who is busy at that moment. Returns the sessions, to be given up after the clock.
        """
        opened: list[Opened] = []

        async def play(exchange: Exchange) -> int:
            session = await self.open_one()
            opened.append(session)
            return await self.answer(exchange, session, way)

        return await in_parallel(list(exchanges), concurrency, play), opened

    async def timed(self, exchanges: Sequence[Exchange], opened: Sequence[Opened], concurrency: int, way: Way) -> Rate:
        """Answer each exchange in a session of its own, of those `opened`; in none, for another server."""
        sessions: Sequence[Opened | None] = opened or [None] * len(exchanges)
        pairs = list(zip(exchanges, sessions, strict=True))
        return await in_parallel(pairs, concurrency, lambda pair: self.answer(*pair, way))

    def through(self, http: aiohttp.ClientSession) -> HttpArm:
        """The same server over other connections."""
        return HttpArm(http, self._url, self._tail, sessions=self._sessions)

    async def single_s(self, exchange: Exchange) -> float:
        """Seconds that one chat completion takes alone."""
        return (await self.load([exchange], 1, "plain")).seconds

    async def open_one(self, **wishes: str | int) -> Opened:
        """A new session, a group of its own unless `wishes` (fields of the opening's body) say otherwise."""
        body = msgspec.json.encode({"wait_s": 10.0, **wishes})
        async with self._http.post(f"{self._url}/sessions", data=body) as answer:
            return msgspec.json.decode(await self.checked(answer), type=Opened)

    async def open(self, count: int) -> list[Opened]:
        """New sessions, each a group of its own."""
        opened: list[Opened] = []

        async def open_one(_: int) -> int:
            opened.append(await self.open_one())
            return 0

        await in_parallel(range(count), _AT_ONCE, open_one)
        return opened

    async def give_up(self, opened: Sequence[Opened]) -> None:
        async def abort(session: Opened) -> int:
            async with self._http.post(f"{self._url}/sessions/{session.session_id}/abort") as answer:
                await self.checked(answer)
            return 0

        await in_parallel(opened, _AT_ONCE, abort)

    async def answer(self, exchange: Exchange, session: Opened | None, way: Way) -> int:
        """Ask for one answer and read all of it; returns its tokens, which are as many as were asked for."""
        end = b""
        async with self.asking(exchange, session, way) as answer:
            if way != "streamed":
                end = await answer.read()
            else:
                async for chunk in answer.content.iter_any():
                    end = (end + chunk)[-_USAGE_BYTES:]
        return completion_tokens(end, exchange.max_tokens)

    @asynccontextmanager
    async def asking(
        self, exchange: Exchange, session: Opened | None, way: Way
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask for one answer, which has begun. Raises RollmeshError, with the end of the log, if it is an error."""
        base, headers = self._url, {}
        if session is not None:
            base, headers = f"{base}/sessions/{session.session_id}", {"Authorization": f"Bearer {session.api_key}"}
        path = "/inference/v1/generate" if way == "tokens" else "/v1/chat/completions"
        body = exchange.token_body() if way == "tokens" else exchange.chat_body(stream=way == "streamed")
        async with self._http.post(base + path, data=msgspec.json.encode(body), headers=headers) as answer:
            if answer.status >= 400:
                await self.checked(answer)
            yield answer

    async def scrape(self) -> None:
        """Read its figures, as Prometheus does."""
        async with self._http.get(f"{self._url}/metrics") as answer:
            await self.checked(answer)

    async def engine(self) -> EngineMoment:
        """The server's engine now; a gateway has none."""
        async with self._http.get(f"{self._url}/engine") as answer:
            return msgspec.json.decode(await self.checked(answer), type=EngineMoment)

    async def check_prompts(self, exchanges: Sequence[Exchange]) -> None:
        """Raise RollmeshError unless the server makes the very tokens of the messages that a bare engine is given."""
        for exchange in exchanges:
            if await self.prompt_tokens(exchange) != exchange.token_ids:
                raise RollmeshError("a server renders other prompts than the bare engine is given", "a bug: report it")

    async def prompt_tokens(self, exchange: Exchange) -> list[int]:
        """The prompt that the server makes of the exchange's messages."""
        body = exchange.chat_body(stream=False) | {"max_tokens": 1, "return_token_ids": True}
        opened = await self.open(1) if self._sessions else []
        base = f"{self._url}/sessions/{opened[0].session_id}" if opened else self._url
        async with self._http.post(f"{base}/v1/chat/completions", data=msgspec.json.encode(body)) as answer:
            prompt = msgspec.json.decode(await self.checked(answer), type=_WithPrompt).prompt_token_ids
        await self.give_up(opened)
        return prompt

    async def checked(self, answer: aiohttp.ClientResponse) -> bytes:
        """The whole answer. Raises RollmeshError, with the end of the log, for one that is an error."""
        body = await answer.read()
        if answer.status >= 400:
            raise RollmeshError(f"{answer.url} answered {answer.status}: {body[:300]!r}", self._tail())
        return body


class _WithPrompt(msgspec.Struct, frozen=True):
    prompt_token_ids: list[int]


def completion_tokens(answer: bytes, wanted: int) -> int:
    """The tokens of an answer by its usage. Raises RollmeshError unless they are as many as wanted: work must be equal."""
    found = _COMPLETION_TOKENS.search(answer)
    if found is None or int(found[1]) != wanted:
        raise RollmeshError(f"an answer should have had {wanted} tokens: {answer[-300:]!r}", "see the server's log")
    return wanted


def client() -> aiohttp.ClientSession:
    """A client without limits of its own."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={"Content-Type": "application/json"},
    )
