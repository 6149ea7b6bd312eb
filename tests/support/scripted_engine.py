"""A small engine behind the Engine interface that generates tokens by a rule, so that tests know what must come out.

Sample `index` of a prompt answers `2 + (sum(prompt) + index + i) % 9` for `i = 0, 1, …`, then the end token after
`answer_length` tokens (or is cut by `max_tokens`); logprobs are `-(i + 1) / 8`. Alternatives, where asked for, are the
sampled token and then ids from 20 on, each `0.125` less likely than the one before. Logprobs of a prompt's token `t` at
place `i`, where asked for, are `-i / 16`, its rank `t`. A streamed request gets one delta a token. One decode step a turn
of the event loop. A request that resumes an earlier one goes on where that one ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from rollout_server.engines.base import (
    EngineStatus,
    FinishReason,
    GenerationDelta,
    GenerationRequest,
    PromptLogprobs,
)
from services.wire.errors import ConflictError, NotReadyError, RollmeshError
from services.wire.trajectory import VersionSpan
from services.wire.weights_api import CommitAnswer, PauseMode, StageAnswer
from weight_bus.manifest.manifest import decode_manifest

END = 1


class ScriptedEngine:
    """Implements `rollout_server.engines.base.Engine`."""

    def __init__(self, *, answer_length: int = 4, max_model_len: int = 256, step_s: float = 0.0) -> None:
        self.answer_length = answer_length
        self.requests: list[GenerationRequest] = []
        self.aborted_early = 0
        """Iterators that were closed before their end."""
        self.crash: RollmeshError | None = None
        """Raised instead of the next token."""
        self.failure: str | None = None
        """Why it serves nothing any more."""
        self._max_model_len = max_model_len
        self._step_s = step_s
        self._version = 0
        self._staged: StageAnswer | None = None
        self._before: tuple[int, str] | None = None
        self._digest = "initial"
        self._running = asyncio.Event()
        self._running.set()
        self._active: dict[str, bool] = {}
        self._idle = asyncio.Event()
        self._tokens = 0
        self._commits = 0
        self.started = False

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return (END,)

    async def start(self) -> None:
        self.started = True

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationDelta]:
        self.requests.append(request)
        self._active[request.request_id] = True
        self._idle.clear()
        whole = self.answer_length + 1 - request.resumed
        length = min(whole, request.sampling.max_tokens)
        versions: list[int] = []
        try:
            while len(versions) < length and self._active[request.request_id]:
                await asyncio.sleep(self._step_s)
                if self.crash is not None:
                    raise self.crash
                if not self._running.is_set():
                    await self._running.wait()
                    continue
                versions.append(self._version)
                self._tokens += request.n
                if request.stream and len(versions) < length:
                    for index in range(request.n):
                        yield _delta(request, index, versions, len(versions) - 1, self.answer_length, None)
            for index in range(request.n):
                reason: FinishReason = "length"
                if len(versions) == whole:
                    reason = "stop"
                elif len(versions) < length:
                    reason = "abort"
                sent = min(len(versions), length - 1) if request.stream else 0
                yield _delta(request, index, versions, sent, self.answer_length, reason)
        finally:
            if len(versions) < length and self._active[request.request_id]:
                self.aborted_early += 1
            del self._active[request.request_id]
            if not self._active:
                self._idle.set()

    async def abort(self, request_ids: list[str] | None = None) -> int:
        found = [name for name in (self._active if request_ids is None else request_ids) if name in self._active]
        for name in found:
            self._active[name] = False
        return len(found)

    async def pause(self, mode: PauseMode) -> None:
        if mode == "abort":
            await self.abort()
        if mode == "wait" and self._active:
            await self._idle.wait()
        self._running.clear()

    async def resume(self) -> None:
        self._running.set()

    async def stage(self, manifest: bytes) -> StageAnswer:
        decoded = decode_manifest(manifest)
        self._staged = StageAnswer(decoded.version, decoded.root_digest, decoded.layout.total_bytes, 0.0)
        return self._staged

    async def commit(self, version: int) -> CommitAnswer:
        if self._staged is None or self._staged.version != version:
            raise ConflictError(f"version {version} is not staged")
        self._before = self._version, self._digest
        self._version, self._digest, self._staged = version, self._staged.root_digest, None
        self._commits += 1
        return CommitAnswer(version=version, flip_ms=0.01, requests_in_flight=len(self._active))

    async def rollback(self, version: int) -> CommitAnswer:
        if self._before is None or self._before[0] != version:
            raise ConflictError(f"version {version} is not kept")
        (self._version, self._digest), self._before = self._before, None
        self._commits += 1
        return CommitAnswer(version=version, flip_ms=0.01, requests_in_flight=len(self._active))

    def set_version(self, version: int) -> None:
        """A commit without its ceremony."""
        self._version = version

    async def weights_digest(self) -> str:
        if not self.started:
            raise NotReadyError("not started")
        return self._digest

    def status(self) -> EngineStatus:
        return EngineStatus(
            name="scripted",
            policy_version=self._version,
            running=len(self._active),
            waiting=0,
            paused=not self._running.is_set(),
            tokens_generated=self._tokens,
            commits=self._commits,
            failure=self.failure,
        )

    async def close(self) -> None:
        self.started = False


def _delta(
    request: GenerationRequest,
    index: int,
    versions: list[int],
    sent: int,
    answer_length: int,
    reason: FinishReason | None,
) -> GenerationDelta:
    """Tokens from place `sent` on of those sampled so far, one for each of `versions`."""
    before = request.resumed
    seed = sum(request.prompt_token_ids[: len(request.prompt_token_ids) - before])
    seed += request.first_index + index
    places = range(before + sent, before + len(versions))
    tokens = [END if i == answer_length else 2 + (seed + i) % 9 for i in places]
    likeliest = [
        [(token if k == 0 else 19 + k, -(i + 1 + k) / 8) for k in range(request.top_logprobs)]
        for i, token in zip(places, tokens, strict=True)
    ]
    return GenerationDelta(
        request_id=request.request_id,
        index=index,
        token_ids=tokens,
        logprobs=[-(i + 1) / 8 for i in places],
        versions=_spans(versions[sent:]),
        finish_reason=reason,
        top_logprobs=likeliest if request.top_logprobs else None,
        prompt_logprobs=scores_of(request) if versions and not sent else None,
    )


def scores_of(request: GenerationRequest) -> PromptLogprobs | None:
    """What is told of a prompt; None where it was not asked for."""
    if not request.prompt_logprobs:
        return None
    later = request.prompt_token_ids[1:]
    return PromptLogprobs([-place / 16 for place in range(1, len(later) + 1)], list(later))


def _spans(versions: list[int]) -> list[VersionSpan]:
    spans: list[VersionSpan] = []
    for position, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(spans[-1].start, spans[-1].length + 1, version)
        else:
            spans.append(VersionSpan(position, 1, version))
    return spans
