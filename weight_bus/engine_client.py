"""The bus's calls to an engine's weight routes; whatever goes wrong is an EngineCallError that says what."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from services.wire.errors import RollmeshError
from weight_bus.bus_api import CommitAnswer, CommitCall, DigestAnswer, StageAnswer
from weight_bus.http_errors import raise_for_error

_MSGPACK = {"content-type": "application/msgpack"}
_JSON = {"content-type": "application/json"}
_Answer = TypeVar("_Answer", bound=BaseModel)


class EngineCallError(RollmeshError):
    """An engine refused, broke off, or did not answer in time."""

    status = 502
    code = "engine"


class EngineClient:
    """Connections to all engines. `timeout_s` bounds each call as a whole."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(timeout=None)

    async def stage(self, url: str, manifest: bytes) -> StageAnswer:
        return await self._call(StageAnswer, "POST", f"{url}/weights/stage", manifest, _MSGPACK)

    async def commit(self, url: str, version: int) -> CommitAnswer:
        body = CommitCall(version=version).model_dump_json().encode()
        return await self._call(CommitAnswer, "POST", f"{url}/weights/commit", body, _JSON)

    async def digest(self, url: str) -> DigestAnswer:
        return await self._call(DigestAnswer, "GET", f"{url}/weights/digest", None, None)

    async def close(self) -> None:
        await self._http.aclose()

    async def _call(
        self, answer: type[_Answer], method: str, url: str, body: bytes | None, headers: dict[str, str] | None
    ) -> _Answer:
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._http.request(method, url, content=body, headers=headers)
            raise_for_error(response)
            return answer.model_validate_json(response.content)
        except TimeoutError as error:
            raise EngineCallError(f"{url} did not answer within {self._timeout_s} s") from error
        except httpx.HTTPError as error:
            raise EngineCallError(f"{url} could not be reached ({error!r})") from error
        except ValidationError as error:
            raise EngineCallError(f"{url} answered something else than {answer.__name__}") from error
