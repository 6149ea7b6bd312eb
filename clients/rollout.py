"""The rollout client: open a group, take turns in it, finish it, over a rollout server's REST API.

    async with RolloutClient("http://127.0.0.1:8100") as client:
        sampling = SamplingBody(max_tokens=16)
        group = await client.open_group(OpenGroup(task="demo", group_size=2, sampling=sampling, wait_s=20))
        turns = [Turn(session_id=session, text="12340123=") for session in group.session_ids]
        taken = await client.take_turns(group.group_id, TakeTurns(turns=turns))
        rewards = [SessionReward(session_id=r.session_id, reward=1.0, components={"success": 1.0}) for r in taken.results]
        await client.finish_group(group.group_id, FinishGroup(rewards=rewards))

Error answers come back as the typed errors that the server raised. Repeated, with back-off, until `patience_s` is over:
connections that could not be made, 429 (after its Retry-After) and 503. A connection that broke after the request was
sent is repeated only where that is safe (`finish_group` and reads); elsewhere it raises ServerUnreachableError at once,
because the first call may have been carried out.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_delay, wait_random_exponential
from yarl import URL

from services.wire.error_answer import typed_error
from services.wire.errors import (
    CapacityError,
    NotReadyError,
    RollmeshError,
    WireError,
)
from services.wire.rollout_api import (
    FinishGroup,
    GroupFinished,
    GroupOpened,
    OpenGroup,
    RunState,
    TakeTurns,
    TurnsTaken,
)

TURN_TIMEOUT_S = 120.0
"""Longest wait for one answer; above it the server is taken for lost."""
CALL_TIMEOUT_S = 15.0
# A server closes a connection that was idle for 5 s; ours must be given up before, or a call meets a closing one.
_KEEP_ALIVE_S = 3.0
_JSON = {"Content-Type": "application/json"}

AnswerT = TypeVar("AnswerT", bound=BaseModel)


class ServerUnreachableError(RollmeshError):
    """No connection, or one that broke. `sent`: the request may have arrived and been carried out."""

    status = 502
    code = "unreachable"

    def __init__(self, url: str, why: str, *, sent: bool) -> None:
        super().__init__(f"{url} cannot be reached ({why})", "see whether the rollout server runs and is ready")
        self.sent = sent


class RolloutClient:
    """One server's rollout API. Use as an async context manager; any number of calls may be in flight."""

    def __init__(self, url: str, *, patience_s: float = 30.0) -> None:
        """`url` such as `http://127.0.0.1:8100`; `patience_s` bounds the time spent on repeating one call."""
        self.url = url.rstrip("/")
        self._patience_s = patience_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> RolloutClient:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(connector=connector, headers=_JSON, auto_decompress=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def open_group(self, body: OpenGroup) -> GroupOpened:
        """Open a group, held by the server up to `body.wait_s` for admission.

        Raises ConcludedError when the run is over, CapacityError when admission stayed closed throughout.
        """
        return await self._call("POST", "/groups", body, GroupOpened, body.wait_s + CALL_TIMEOUT_S)

    async def take_turns(self, group_id: str, body: TakeTurns) -> TurnsTaken:
        """Extend sessions and let the policy speak in each. Never repeated once sent: a turn is taken once."""
        return await self._call("POST", f"/groups/{group_id}/turns", body, TurnsTaken, TURN_TIMEOUT_S)

    async def finish_group(self, group_id: str, body: FinishGroup) -> GroupFinished:
        """Hand in the rewards; the trajectories are published exactly once, however often this is repeated."""
        path = f"/groups/{group_id}/finish"
        return await self._call("POST", path, body, GroupFinished, CALL_TIMEOUT_S, repeatable=True)

    async def run_state(self, patience_s: float | None = None) -> RunState:
        """How far the run is. `patience_s` overrides the client's, for waiting until a server has started."""
        return await self._call("GET", "/run", None, RunState, CALL_TIMEOUT_S, repeatable=True, patience_s=patience_s)

    async def _call(
        self,
        method: str,
        path: str,
        body: BaseModel | None,
        answer: type[AnswerT],
        timeout_s: float,
        *,
        repeatable: bool = False,
        patience_s: float | None = None,
    ) -> AnswerT:
        payload = None if body is None else body.model_dump_json(exclude_none=True).encode()
        try:
            # Nearly always this is all: the retrying machinery would cost half as much again as the call.
            content = await self._send(method, path, payload, timeout_s)
        except RollmeshError as error:
            patience_s = self._patience_s if patience_s is None else patience_s
            pause_s = _first_pause_s(error)
            if not _worth_repeating(error, repeatable) or pause_s > patience_s:
                raise
            await asyncio.sleep(pause_s)
            content = await self._repeat(method, path, payload, timeout_s, repeatable, patience_s - pause_s)
        try:
            return answer.model_validate_json(content)
        except ValidationError as error:
            what = f"{method} {self.url}{path} answered no {answer.__name__} ({error.error_count()} errors)"
            raise WireError(what, "run client and server of the same version") from error

    async def _repeat(
        self, method: str, path: str, payload: bytes | None, timeout_s: float, repeatable: bool, patience_s: float
    ) -> bytes:
        retrying = AsyncRetrying(
            retry=retry_if_exception(lambda error: _worth_repeating(error, repeatable)),
            wait=_pause,
            stop=stop_after_delay(patience_s),
            reraise=True,
        )
        content: bytes = await retrying(self._send, method, path, payload, timeout_s)
        return content

    async def _send(self, method: str, path: str, payload: bytes | None, timeout_s: float) -> bytes:
        if self._session is None:
            raise RuntimeError("use the client as an async context manager: async with RolloutClient(url) as client")
        url = URL(f"{self.url}{path}", encoded=True)
        try:
            async with self._session.request(
                method, url, data=payload, timeout=aiohttp.ClientTimeout(total=timeout_s)
            ) as response:
                content = await response.read()
        except aiohttp.ClientConnectorError as error:
            raise ServerUnreachableError(self.url, str(error.os_error.strerror), sent=False) from error
        except aiohttp.ClientError as error:
            raise ServerUnreachableError(self.url, str(error) or type(error).__name__, sent=True) from error
        except TimeoutError as error:
            raise ServerUnreachableError(self.url, f"no answer in {timeout_s:g} s", sent=True) from error
        if response.status < 400:
            return content
        raise typed_error(f"{method} {url}", response.status, response.headers.get("Retry-After"), content)


def _worth_repeating(error: BaseException, repeatable: bool) -> bool:
    match error:
        case ServerUnreachableError():
            return repeatable or not error.sent
        case CapacityError() | NotReadyError():
            return True
        case _:
            return False


def _first_pause_s(error: RollmeshError) -> float:
    return error.retry_after_s if isinstance(error, CapacityError) else 0.02


_back_off = wait_random_exponential(multiplier=0.05, max=0.3)


def _pause(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome is not None else None
    return error.retry_after_s if isinstance(error, CapacityError) else _back_off(state)
