"""HTTP client of an external engine: connection pool, deadlines, server-sent events, typed errors.

The routes are vLLM's (0.32). All but the token route and the list of models are there only where it was started with
`VLLM_SERVER_DEV_MODE=1`; a rollout server has them always.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any, TypeVar

import aiohttp
import msgspec

from rollout_server.engines.http.wire import EngineChunk, read_answer, read_chunk
from services.policies.training.deadlines import within
from services.security.connections import kept_connections
from services.security.tls import PUBLIC, Trust
from services.wire import errors
from services.wire.error_answer import PromptTooLongError, typed_error
from services.wire.errors import UNDECODABLE
from services.wire.weights_api import PauseMode
from weight_bus.errors import StageError, TransportError
from weight_bus.vllm.protocol import BACKEND

GENERATE = "/inference/v1/generate"
_CONNECT_S = 5.0
_CALL_S = 60.0
_BYTES_S = 600.0
"""To pull a version's buckets, at the least; the bus, which asks for it, gives up before."""
# vLLM's server closes a connection after five idle seconds: the client must close it first, or reuse may fail.
_KEEP_ALIVE_S = 3.0

_Answer = TypeVar("_Answer")


class _Card(msgspec.Struct):
    id: str
    max_model_len: int


class _Models(msgspec.Struct):
    data: list[_Card]


class _Weights(msgspec.Struct):
    weight_version: str


class _Paused(msgspec.Struct):
    is_paused: bool


class _Checksums(msgspec.Struct):
    checksums: dict[str, str]


class EngineClient:
    """`key`: shown as bearer with every call. Every method raises EngineLostError where nobody answers.

    UntrustedError where `trust` does not take the certificate of who does.
    """

    def __init__(self, url: str, key: str | None, trust: Trust = PUBLIC) -> None:
        self._trust = trust
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._http: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        # Admission bounds how many requests there are; a bound here would only queue them unseen.
        connector = kept_connections(self._trust.verify, _KEEP_ALIVE_S)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        self._http = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)

    async def close(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    async def max_model_len(self) -> int:
        """Of the first model in `/v1/models`: adapters come after it."""
        models = await self._call(_Models, "GET", "/v1/models", _CALL_S)
        if not models.data:
            raise errors.WireError(
                f"{self.url}/v1/models lists no model", "give the address of an engine that serves one"
            )
        return models.data[0].max_model_len

    async def weight_label(self, deadline_s: float = _CALL_S) -> str | None:
        """What it calls its weights; None where it has no routes for operators."""
        try:
            return (await self._call(_Weights, "GET", "/weight_info", deadline_s)).weight_version
        except errors.NotFoundError:
            return None

    async def health(self, deadline_s: float) -> None:
        """Raises unless it answers that it is healthy, or has no such route."""
        with suppress(errors.NotFoundError):
            await self._send("GET", "/health", deadline_s)

    async def is_paused(self) -> bool:
        return (await self._call(_Paused, "GET", "/is_paused", _CALL_S)).is_paused

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        await self._send("POST", f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}", _CALL_S)

    async def resume(self) -> None:
        await self._send("POST", "/resume", _CALL_S)

    async def stage(self, manifest: bytes, run_id: str, transport: str, nbytes: int) -> None:
        """Begin an update anew and give it the manifest, of so many bytes; it has pulled them all when this returns."""
        init = {"init_info": {"backend": BACKEND, "run_id": run_id, "transport": transport}}
        await self._send("POST", "/init_weight_transfer_engine", _CALL_S, init)
        try:
            await self._send("POST", "/start_weight_update", _CALL_S)
        except errors.RollmeshError as error:
            # vLLM cannot abandon an update that was begun, but takes another version's bytes into it.
            if "already active" not in error.what:
                raise
        update = {"update_info": {"manifest": base64.b64encode(manifest).decode()}}
        await self._send("POST", "/update_weights", within(_BYTES_S, nbytes), update)

    async def finish_update(self, version: int) -> None:
        await self._send("POST", "/finish_weight_update", _CALL_S, {"weight_version": str(version)})

    async def rollback(self, version: int) -> None:
        """Raises NotFoundError where the engine has no such route."""
        await self._send("POST", "/weights/rollback", _CALL_S, {"version": version})

    async def checksums(self, nbytes: int) -> dict[str, str]:
        """`nbytes`: of the weights; 0 where it is not known."""
        asked = {"action": "checksum"}
        return (await self._call(_Checksums, "POST", "/weight_checker", within(_BYTES_S, nbytes), asked)).checksums

    async def generate(self, body: bytes) -> AsyncGenerator[EngineChunk, None]:
        """The chunks of one answer. Closing it closes the connection, which aborts the request there.

        No deadline: a request may wait in the engine's queue as long as its own client waits.
        """
        reader = EventReader()
        answer: aiohttp.ClientResponse | None = None
        try:
            answer = await self._opened().post(self.url + GENERATE, data=body)
            if answer.status != 200:
                raise engine_error(
                    self.url + GENERATE, answer.status, answer.headers.get("Retry-After"), await answer.read()
                )
            async for piece in answer.content.iter_any():
                for event in reader.feed(piece):
                    chunk = read_chunk(event)
                    if chunk.error is not None:
                        raise stream_error(self.url + GENERATE, bytes(chunk.error))
                    yield chunk
            if not reader.ended:
                raise EngineLostError(f"the engine at {self.url} broke an answer off", "send the request again")
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(error) from error
        finally:
            if answer is not None:
                if reader.ended:
                    answer.release()
                else:
                    answer.close()

    async def generate_whole(self, body: bytes, *, ours: bool) -> AsyncGenerator[EngineChunk, None]:
        """An answer that is not streamed, as its only chunk. Closing it closes the connection, as of `generate`."""
        try:
            async with self._opened().post(self.url + GENERATE, data=body) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(error) from error
        if answer.status != 200:
            raise engine_error(self.url + GENERATE, answer.status, answer.headers.get("Retry-After"), content)
        yield read_answer(content, ours)

    async def _call(
        self, kind: type[_Answer], method: str, path: str, deadline_s: float, body: dict[str, Any] | None = None
    ) -> _Answer:
        content = await self._send(method, path, deadline_s, body)
        try:
            return msgspec.json.decode(content, type=kind)
        except UNDECODABLE as error:
            raise errors.WireError(f"{self.url}{path} answered {content[:200]!r} ({error})") from error

    async def _send(self, method: str, path: str, deadline_s: float, body: dict[str, Any] | None = None) -> bytes:
        """A whole call. Raises DeadlineError, and the error that the engine answered."""
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with asyncio.timeout(deadline_s):
                async with self._opened().request(method, self.url + path, data=data) as answer:
                    content = await answer.read()
        except aiohttp.ClientError as error:
            raise self._lost(error) from error
        except TimeoutError as error:
            raise errors.DeadlineError(
                f"{self.url}{path} did not answer within {deadline_s:g} s", "see its log"
            ) from error
        except OSError as error:
            raise self._lost(error) from error
        if answer.status != 200:
            raise engine_error(self.url + path, answer.status, answer.headers.get("Retry-After"), content)
        return content

    def _lost(self, error: Exception) -> errors.RollmeshError:
        if isinstance(error, aiohttp.InvalidURL):
            return errors.WireError(f"{self.url} is no address of an engine")
        if (refused := self._trust.refusal(self.url, error)) is not None:
            return refused
        return EngineLostError(f"the engine at {self.url} does not answer ({error!r})", "another server may")

    def _opened(self) -> aiohttp.ClientSession:
        if self._http is None:
            raise EngineLostError(f"the engine at {self.url} is being closed", "send the request to another server")
        return self._http


_LONGEST = 64 << 20
_END = b"[DONE]"


class EventReader:
    """Parser of server-sent events from a byte stream. `ended`: `[DONE]` was received."""

    def __init__(self) -> None:
        self._rest = b""
        self.ended = False

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that this piece completes. Raises WireError for an event without an end."""
        *whole, self._rest = (self._rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(self._rest) > _LONGEST:
            raise errors.WireError(f"the engine sent {len(self._rest)} bytes without an end of an event")
        found = []
        for event in whole:
            # Comments keep a connection alive and say nothing.
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            data = b"\n".join(lines)
            if data == _END:
                self.ended = True
            elif data:
                found.append(data)
        return found


class EngineLostError(errors.NotReadyError):
    """The engine behind this server does not answer; another server may take the request."""

    code = "engine_lost"


class _Detail(msgspec.Struct):
    message: str = ""
    code: str | int | None = None


class _Body(msgspec.Struct):
    """vLLM answers `error` as a text on its routes for operators, else as an object; FastAPI itself says `detail`."""

    error: _Detail | str | None = None
    detail: msgspec.Raw | None = None


_bodies = msgspec.json.Decoder(_Body)


def engine_error(call: str, status: int, retry_after: str | None, content: bytes) -> errors.RollmeshError:
    """The error answer `status` to `call` as a typed error. `retry_after`: that header, in seconds."""
    try:
        body = _bodies.decode(content)
    except UNDECODABLE:
        body = _Body(error=content[:200].decode(errors="replace"))
    if isinstance(body.error, _Detail) and isinstance(body.error.code, str):
        error = typed_error(call, status, retry_after, content, (StageError, TransportError))
        if type(error) is not errors.RollmeshError or status != errors.NotReadyError.status:
            return error
        return errors.NotReadyError(error.what)
    said = body.error.message if isinstance(body.error, _Detail) else body.error
    if said is None:
        said = "" if body.detail is None else bytes(body.detail).decode(errors="replace")
    return _by_status(f"{call} answered {status} ({said})", status)


def stream_error(call: str, raw: bytes) -> errors.RollmeshError:
    """The error that an event carried after the answer had begun."""
    status = 500
    try:
        code = msgspec.json.decode(raw, type=_Detail).code
        status = code if isinstance(code, int) else status
    except UNDECODABLE:
        pass
    return engine_error(call, status, None, b'{"error":' + raw + b"}")


def _by_status(what: str, status: int) -> errors.RollmeshError:
    if "maximum context length" in what:
        return PromptTooLongError(what)
    if "scale-out" in what:
        return errors.UsageError(what, "start that vLLM with --enable-scale-out")
    kinds: dict[int, type[errors.RollmeshError]] = {
        400: errors.UsageError,
        401: errors.UnauthenticatedError,
        404: errors.NotFoundError,
        405: errors.NotFoundError,
        409: errors.ConflictError,
        422: errors.UsageError,
        503: errors.NotReadyError,
    }
    if status == errors.CapacityError.status:
        return errors.CapacityError(what, 1.0)
    return kinds.get(status, errors.RollmeshError)(what)
