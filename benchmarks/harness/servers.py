"""The servers that are measured: ours, and vLLM's own beside it, on the same folder with the same bounds."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Literal

import aiohttp
import msgspec
import tomli_w

from benchmarks.harness.processes import (
    LOOPBACK,
    PYTHON,
    free_port,
    running,
)
from benchmarks.harness.revision import Checkout
from benchmarks.harness.timing import Rate, in_parallel
from benchmarks.harness.workload import TIMED_KV_POLICY, Exchange
from services.config.settings import RunSettings
from services.supervisor.processes import Child
from services.wire.errors import RollmeshError
from services.wire.sampling import KvPolicy

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
    """Client of one server under test: sessions are opened before the clock starts, and aborted after it.

    Each request is a call in its own session, over kept-alive connections. `tail`: the end of the server's log. Without
    `sessions` it is any OpenAI server.
    """

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


_OURS_WITHIN_S = 300.0
_GATEWAY_WITHIN_S = 60.0
_THEIRS_WITHIN_S = 420.0
# More sessions than a benchmark ever opens at once, and none that expires while it runs.
_GROUPS = 1 << 16
_TIMEOUT_S = 86400.0


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU that two engines stand on at once: their dtype, and each one's share of its memory."""

    dtype: Literal["bfloat16"] = "bfloat16"
    share: float = 0.42


@dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """What the processes of one run have in common. `settings`: the file with the run's configuration.

    `of`: the checkout whose modules they run; None for those that are installed.
    """

    run_id: str
    redis_url: str
    settings: Path
    model: Path
    engine: str
    folder: Path
    of: Checkout | None

    def command(self, name: str, port: int) -> list[str]:
        """The command line of one of them, as anybody would start it."""
        python = [*PYTHON, "services"] if self.of is None else self.of.command("services")
        command = [*python, name, "--run-id", self.run_id, "--port", str(port)]
        return [*command, "--redis-url", self.redis_url, "--config", str(self.settings)]

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that all of them have beside this process's own."""
        return {} if self.of is None else self.of.environ


async def plan_mesh(
    run_id: str,
    *,
    redis_url: str,
    model: Path,
    engine: str,
    max_running: int,
    folder: Path,
    kv_policy: KvPolicy = TIMED_KV_POLICY,
    card: Card | None = None,
    of: Checkout | None = None,
) -> MeshPlan:
    """Write a run's configuration: the defaults, but for what is given and for admission, which never closes.

    Defaults are left out of the file: those of another checkout are its own.
    """
    settings = RunSettings()
    if card is not None:
        settings.model.dtype = card.dtype
        settings.rollout.vllm.gpu_memory_utilization = card.share
    settings.rollout.max_running = max_running
    settings.rollout.groups_per_step = _GROUPS
    settings.rollout.group_timeout_s = _TIMEOUT_S
    settings.rollout.kv_policy = kv_policy
    path = folder / f"{run_id}.toml"
    await asyncio.to_thread(path.write_text, tomli_w.dumps(settings.model_dump(mode="json", exclude_defaults=True)))
    return MeshPlan(run_id=run_id, redis_url=redis_url, settings=path, model=model, engine=engine, folder=folder, of=of)


@asynccontextmanager
async def running_server(
    plan: MeshPlan,
    server_id: str,
    http: aiohttp.ClientSession,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[tuple[HttpArm, Child]]:
    """`rollmesh rollout-server`, ready. Raises RollmeshError when it does not come up."""
    port = free_port()
    command = plan.command("rollout-server", port)
    command += ["--server-id", server_id, "--model", str(plan.model), "--engine", plan.engine]
    url = f"http://{LOOPBACK}:{port}"
    name = f"server {plan.run_id} {server_id}"
    async with running(name, command, plan.folder, environment={**plan.environment, **environ}) as child:
        await child.until(lambda: _answers(http, f"{url}/readyz"), _OURS_WITHIN_S)
        yield HttpArm(http, url, child.tail), child


@asynccontextmanager
async def running_gateway(plan: MeshPlan, http: aiohttp.ClientSession) -> AsyncIterator[tuple[HttpArm, Child]]:
    """`rollmesh gateway` in front of the run's servers. Raises RollmeshError when it does not come up."""
    port = free_port()
    url = f"http://{LOOPBACK}:{port}"
    name, command = f"gateway {plan.run_id}", plan.command("gateway", port)
    async with running(name, command, plan.folder, environment=plan.environment) as child:
        await child.until(lambda: _answers(http, f"{url}/readyz"), _GATEWAY_WITHIN_S)
        yield HttpArm(http, url, child.tail), child


@asynccontextmanager
async def running_ours(
    engine: str,
    model: Path,
    redis_url: str,
    max_running: int,
    folder: Path,
    http: aiohttp.ClientSession,
    name: str,
    card: Card | None = None,
) -> AsyncIterator[tuple[HttpArm, Child]]:
    """A server in a run of its own. `name`: unique in the benchmark. `card`: of engine vllm, that it shares."""
    plan = await plan_mesh(
        name, redis_url=redis_url, model=model, engine=engine, max_running=max_running, folder=folder, card=card
    )
    async with running_server(plan, name, http) as started:
        yield started


def vllm_serve_command(model: Path, max_running: int, port: int, card: Card | None) -> list[str]:
    """vLLM's OpenAI server: its own defaults, but what must be equal in both."""
    command = [*PYTHON, "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "policy"]
    command += ["--host", LOOPBACK, "--port", str(port), "--max-num-seqs", str(max_running)]
    command += ["--no-enable-prefix-caching", "--generation-config", "vllm"]
    command += ["--disable-log-stats", "--disable-uvicorn-access-log"]
    if card is not None:
        return [*command, "--dtype", card.dtype, "--gpu-memory-utilization", str(card.share)]
    return [*command, "--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(1 << 30)]


@asynccontextmanager
async def running_vllm_serve(
    model: Path, max_running: int, folder: Path, http: aiohttp.ClientSession, card: Card | None = None
) -> AsyncIterator[HttpArm]:
    """Ready. `card`: both stand on it."""
    port = free_port()
    command = vllm_serve_command(model, max_running, port, card)
    of_cpu = {
        "OMP_NUM_THREADS": "1",
        # Eager in both: its first answers would otherwise wait for a compiler.
        "TORCHDYNAMO_DISABLE": "1",
    }
    environment = {
        **({} if card is not None else of_cpu),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": LOOPBACK,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    url = f"http://{LOOPBACK}:{port}"
    # It leaves sockets and rendezvous files behind; the path of a socket must be short.
    with TemporaryDirectory(prefix="rollmesh-", ignore_cleanup_errors=True) as sockets:
        environment["TMPDIR"] = sockets
        async with running("vllm serve", command, folder, environment=environment) as child:
            await child.until(lambda: _answers(http, f"{url}/health"), _THEIRS_WITHIN_S)
            yield HttpArm(http, url, child.tail, sessions=False)


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url) as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False
