"""An engine that generates anything: random, non-canonical token sequences whose logprobs follow from what stands
before them.

Its "model" is a checksum: the logprob of a token is a function of all tokens before it, the token itself and the policy
version. Whoever has a segment can therefore work every logprob out again, and finds at once if a single token of the
context is not the one that the engine saw.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from zlib import crc32

from rollout_server.engines.base import EngineStatus, FinishReason, GenerationDelta, GenerationRequest
from services.wire.trajectory import VersionSpan


def logprob_of(before: int, token: int, version: int) -> float:
    """`before`: crc32 of the tokens before it, as packed int32. Exact in float32."""
    return -(crc32(version.to_bytes(4, "little"), crc32(token.to_bytes(4, "little"), before)) % 4096 + 1) / 512


def checksum(tokens: Sequence[int]) -> int:
    return crc32(array("i", tokens).tobytes())


@dataclass
class Sampled:
    """What the engine sampled for one sample, whoever heard it."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class AnyTokensEngine:
    """The part of `rollout_server.engines.base.Engine` that calls of agents use. `write` makes the tokens of an answer."""

    def __init__(
        self, chance: random.Random, write: Callable[[], list[int]], stops: Sequence[int], *, max_model_len: int = 4096
    ) -> None:
        self.chance = chance
        self.write = write
        self.version = 0
        self.sampled: dict[tuple[str, int], Sampled] = {}
        self.max_model_len = max_model_len
        self.eos_token_ids = tuple(stops)

    @property
    def policy_version(self) -> int:
        return self.version

    def status(self) -> EngineStatus:
        return EngineStatus("any", self.version, 0, 0, False, 0, 0)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationDelta]:
        ends = frozenset((*self.eos_token_ids, *request.sampling.stop_token_ids))
        for index in range(request.n):
            sampled = self.sampled[request.request_id, index] = Sampled(list(request.prompt_token_ids))
            before = checksum(request.prompt_token_ids)
            planned, reason = _cut(self.write(), ends, request.sampling.max_tokens)
            at = 0
            while True:
                take = len(planned) if not request.stream else at + self.chance.randint(1, 4)
                piece = planned[at:take]
                if self.chance.random() < 0.1:
                    self.version += 1
                logprobs = []
                for token in piece:
                    logprobs.append(logprob_of(before, token, self.version))
                    before = crc32(token.to_bytes(4, "little"), before)
                sampled.tokens += piece
                sampled.versions += [self.version] * len(piece)
                at += len(piece)
                spans = [VersionSpan(0, len(piece), self.version)] if piece else []
                last = at >= len(planned)
                yield GenerationDelta(request.request_id, index, piece, logprobs, spans, reason if last else None)
                if last:
                    break
                if self.chance.random() < 0.3:
                    await asyncio.sleep(0)


def _cut(tokens: list[int], ends: frozenset[int], limit: int) -> tuple[list[int], FinishReason]:
    for position, token in enumerate(tokens[:limit]):
        if token in ends:
            return tokens[: position + 1], "stop"
    return tokens[:limit], "length"
