"""HTTP client of the bus for an engine's weight routes. Failures are EngineCallError or UntrustedError."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

import msgspec
from pydantic import TypeAdapter, ValidationError

from services.observability.tracing import NO_TRACING, Tracing
from services.security.tls import PUBLIC, Trust
from services.wire.errors import UNDECODABLE, RollmeshError
from services.wire.weights_api import CommitAnswer, CommitCall, DigestAnswer, PauseMode, RollbackCall, StageAnswer
from weight_bus.client.connections import FAILURES, Connections

_MSGPACK = {"content-type": "application/msgpack"}
_JSON = {"content-type": "application/json"}
_Answer = TypeVar("_Answer", StageAnswer, CommitAnswer, DigestAnswer)


class EngineCallError(RollmeshError):
    """An engine refused, broke off, or did not answer in time."""

    status = 502
    code = "engine"


class _Sampled(msgspec.Struct):
    token_ids: list[int]


class _GenerateAnswer(msgspec.Struct):
    """The fields of vLLM's token answer that a canary needs."""

    choices: list[_Sampled]


_generate_decoder = msgspec.json.Decoder(_GenerateAnswer)


class EngineClient:
    """Connections to all engines. `timeout_s` bounds each call as a whole, those that move or hash a model's bytes at the
    least; `key` is shown to every engine.

    `trust`: whose certificates engines may show.
    """

    def __init__(
        self, timeout_s: float, key: str | None = None, trust: Trust = PUBLIC, tracing: Tracing = NO_TRACING
    ) -> None:
        self.timeout_s, self._trust, self._tracing = timeout_s, trust, tracing
        # Made once: to make one takes longer than all else of a call.
        self._stage_answer, self._commit_answer = TypeAdapter(StageAnswer), TypeAdapter(CommitAnswer)
        self._digest_answer = TypeAdapter(DigestAnswer)
        self._http = Connections(key, trust)

    async def stage(self, url: str, manifest: bytes, within_s: float) -> StageAnswer:
        return await self._call(self._stage_answer, "POST", f"{url}/weights/stage", manifest, _MSGPACK, within_s)

    async def commit(self, url: str, version: int) -> CommitAnswer:
        body = CommitCall(version=version).model_dump_json().encode()
        return await self._call(self._commit_answer, "POST", f"{url}/weights/commit", body, _JSON)

    async def rollback(self, url: str, version: int) -> CommitAnswer:
        body = RollbackCall(version=version).model_dump_json().encode()
        return await self._call(self._commit_answer, "POST", f"{url}/weights/rollback", body, _JSON)

    async def digest(self, url: str, within_s: float) -> DigestAnswer:
        return await self._call(self._digest_answer, "GET", f"{url}/weights/digest", None, None, within_s)

    async def generate(self, url: str, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """The tokens that greedy decoding generates after `prompt`."""
        sampling = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
        body = msgspec.json.encode({"token_ids": list(prompt), "sampling_params": sampling})
        content = await self._send("POST", f"{url}/inference/v1/generate", body, _JSON)
        try:
            return _generate_decoder.decode(content).choices[0].token_ids
        except (*UNDECODABLE, IndexError) as error:
            raise EngineCallError(f"{url} answered a token call with something else than tokens ({error})") from error

    async def pause(self, url: str, mode: PauseMode) -> None:
        # vLLM's route would drop every prefix with the cache; a pause by hand changes no weights.
        await self._send("POST", f"{url}/pause?mode={mode}&clear_cache=false", None, None)

    async def resume(self, url: str) -> None:
        await self._send("POST", f"{url}/resume", None, None)

    async def close(self) -> None:
        await self._http.close()

    async def _call(
        self,
        answer: TypeAdapter[_Answer],
        method: str,
        url: str,
        body: bytes | None,
        headers: dict[str, str] | None,
        within_s: float | None = None,
    ) -> _Answer:
        content = await self._send(method, url, body, headers, within_s)
        try:
            return answer.validate_json(content)
        except ValidationError as error:
            raise EngineCallError(f"{url} answered something else than {error.title}") from error

    async def _send(
        self, method: str, url: str, body: bytes | None, headers: dict[str, str] | None, within_s: float | None = None
    ) -> bytes:
        headers, within_s = (headers or {}) | self._tracing.headers(), within_s or self.timeout_s
        try:
            async with asyncio.timeout(within_s):
                return await self._http.send(method, self._trust.address(url), body, headers)
        except TimeoutError as error:
            raise EngineCallError(f"{url} did not answer within {within_s:g} s") from error
        except FAILURES as error:
            if (refused := self._trust.refusal(url, error)) is not None:
                raise refused from error
            raise EngineCallError(f"{url} could not be reached ({error!r})") from error


def why_not_prepared(answer: StageAnswer, version: int, root_digest: str, ranks: int) -> str | None:
    """What is wrong with the result of a stage; None if the engine is prepared: all ranks have staged the same bytes. Pure.

    An engine of several ranks may answer for all at once, or list each rank's digest: then none may be missing.
    """
    if (answer.version, answer.root_digest) != (version, root_digest):
        return f"it staged version {answer.version}, digest {answer.root_digest[:16]}…, not {root_digest[:16]}…"
    if answer.rank_digests is None:
        return None
    if len(answer.rank_digests) != ranks:
        return f"{len(answer.rank_digests)} of {ranks} ranks staged version {version}"
    for rank, digest in enumerate(answer.rank_digests):
        if digest != root_digest:
            return f"rank {rank} staged digest {digest[:16]}…, not {root_digest[:16]}…"
    return None
