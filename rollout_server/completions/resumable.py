"""Resuming generation after an abort: sampled tokens stay, the rest is asked for again with prompt + sampled tokens.

    engine ──delta──► … ──abort──► (until the engine takes requests again) ──prompt + sampled──► engine ──delta──► … ──► end
                                        └── this server is being drained: DrainingError, and another server resumes

So no client ever sees `finish_reason` abort, and a sample that a weight update interrupted has a span of each version.
What is left to ask for is decided in `services.policies.continuation`.
"""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import cast

import msgspec

from rollout_server.engines.base import Engine, GenerationDelta, GenerationRequest
from rollout_server.journal.journal import Journal
from rollout_server.journal.records import PartialHead, PartialPart
from services.policies.continuation import rest_of
from services.wire.errors import DeadlineError


class Progress:
    """Detects an engine that makes no progress, other than one that is slow or paused: call `check` now and then."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen = engine.status().tokens_generated

    def check(self) -> None:
        """Raise DeadlineError when the engine, not paused, sampled no token at all since the last check."""
        status = self._engine.status()
        if status.tokens_generated == self._seen and not status.paused:
            raise DeadlineError("the engine has stopped generating tokens", "see the rollout server's log")
        self._seen = status.tokens_generated


UntilAccepting = Callable[[], Awaitable[None]]
"""Returns once the engine takes requests; raises DrainingError when it will not any more."""


@dataclass(slots=True)
class _Sample:
    sampled: list[int] = field(default_factory=list)
    ended: bool = False

    def take(self, delta: GenerationDelta) -> None:
        self.sampled += delta.token_ids
        self.ended = delta.finish_reason is not None


async def resume(
    engine: Engine,
    request: GenerationRequest,
    until_accepting: UntilAccepting,
    known: AsyncIterator[GenerationDelta] | None = None,
    keep: Callable[[GenerationDelta], Awaitable[None] | None] | None = None,
) -> AsyncGenerator[GenerationDelta, None]:
    """Deltas of `request` as an engine gives them, none of them aborted.

    `known`: those of an earlier try come first. Each of the others is given out once what `keep` returns for it is done.
    """
    samples = [_Sample() for _ in range(request.n)]
    if known is not None:
        async for delta in known:
            samples[delta.index].take(delta)
            yield delta
    tries = 0
    while not all(sample.ended for sample in samples):
        if tries:
            await until_accepting()
        whole = tries == 0 and not any(sample.sampled or sample.ended for sample in samples)
        async with aclosing(
            _generate_rests(engine, request, samples, tries) if not whole else deltas_of(engine, request)
        ) as deltas:
            async for delta in deltas:
                if delta.finish_reason == "abort":
                    delta = replace(delta, finish_reason=None)
                samples[delta.index].take(delta)
                if delta.token_ids or delta.finish_reason is not None:
                    kept = None if keep is None else keep(delta)
                    if kept is not None:
                        await kept
                    yield delta
        tries += 1


def deltas_of(engine: Engine, request: GenerationRequest) -> AsyncGenerator[GenerationDelta, None]:
    """What `engine` generates: engines are asynchronous generators, though their interface does not say so.

    Closing it frees the engine at once.
    """
    return cast("AsyncGenerator[GenerationDelta, None]", engine.generate(request))


async def _generate_rests(
    engine: Engine, request: GenerationRequest, samples: Sequence[_Sample], tries: int
) -> AsyncGenerator[GenerationDelta, None]:
    """What is left of the samples that have not ended, each as a request of its own."""
    left: dict[int, GenerationRequest] = {}
    for index, sample in enumerate(samples):
        if sample.ended:
            continue
        rest = _rest_request(request, index, sample, tries)
        if rest is not None:
            left[index] = rest
        else:  # it was broken off after its last token
            yield GenerationDelta(request.request_id, index, [], [], [], "length")
    deltas: asyncio.Queue[GenerationDelta | BaseException | None] = asyncio.Queue()

    async def run(index: int, rest: GenerationRequest) -> None:
        try:
            async with aclosing(deltas_of(engine, rest)) as sampled:
                async for delta in sampled:
                    deltas.put_nowait(replace(delta, request_id=request.request_id, index=index))
            deltas.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - raised again by the reader of the queue
            deltas.put_nowait(error)

    tasks = [asyncio.create_task(run(index, rest)) for index, rest in left.items()]
    try:
        ended = 0
        while ended < len(tasks):
            got = await deltas.get()
            if isinstance(got, BaseException):
                raise got
            if got is None:
                ended += 1
            else:
                yield got
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _rest_request(request: GenerationRequest, index: int, sample: _Sample, tries: int) -> GenerationRequest | None:
    rest = rest_of(
        request.prompt_token_ids,
        sample.sampled,
        max_tokens=request.sampling.max_tokens,
        resumed=request.resumed,
        first_index=request.first_index,
        index=index,
    )
    if rest is None:
        return None
    return replace(
        request,
        request_id=f"{request.request_id}~{tries}.{index}",
        prompt_token_ids=rest.token_ids,
        sampling=msgspec.structs.replace(request.sampling, max_tokens=rest.max_tokens),
        n=1,
        resumed=rest.resumed,
        first_index=rest.first_index,
    )


class PartialAnswer:
    """What is sampled of one call's answer so far, journaled before its chunks are sent, so that another server can resume.

        engine ─► delta ─► noted ─► chunk ─► journal ─► agent   the server dies here: no agent has more than the journal
                             └── says nothing yet: it is written with the next that does
        another server: the journal's parts ─► the same code ─► the same chunks, byte for byte ─► engine

    A part belongs to one of the call's prompts. Parts are replayed in the order in which they were written, also where the
    prompts are sampled at once: their chunks are one stream. `known`: the parts that an earlier try wrote under `key`.
    """

    def __init__(
        self, journal: Journal, group_id: str, key: str, head: PartialHead, known: Sequence[PartialPart]
    ) -> None:
        self.key = key
        self._journal = journal
        self._group_id = group_id
        self._known = known
        self._replayed = 0
        self._turn = asyncio.Condition()
        self._numbers = itertools.count(len(known) + 1)
        self._unwritten: list[PartialHead | PartialPart] = [] if known else [head]
        self.unwritten_tokens = 0
        """Of what was noted and not written."""

    def note(self, prompt: int, delta: GenerationDelta) -> None:
        """A delta of this prompt: it is in the journal once what is noted has been written."""
        self.unwritten_tokens += len(delta.token_ids)
        self._unwritten.append(
            PartialPart(
                number=next(self._numbers),
                prompt=prompt,
                index=delta.index,
                tokens=array("i", delta.token_ids).tobytes(),
                logprobs=array("d", delta.logprobs).tobytes(),
                spans=delta.versions,
                finish_reason=delta.finish_reason,
                top_logprobs=delta.top_logprobs,
                kept=delta.kept,
                experts=delta.experts,
            )
        )

    def write(self) -> asyncio.Future[None] | None:
        """Write what was noted; what it returns is done then, and raises as `Journal.append` does. None: nothing was."""
        unwritten, self._unwritten, self.unwritten_tokens = self._unwritten, [], 0
        return self._journal.add_partial(self._group_id, self.key, *unwritten) if unwritten else None

    async def replay(self, prompt: int, request: GenerationRequest) -> AsyncGenerator[GenerationDelta, None]:
        """The deltas of this prompt that are written down, each when it is its turn among those of all prompts."""
        for place, part in enumerate(self._known):
            if part.prompt != prompt:
                continue
            async with self._turn:
                await self._turn.wait_for(lambda place=place: self._replayed >= place)  # type: ignore[misc]
            try:
                yield _delta(part, request.request_id)
            finally:
                async with self._turn:
                    self._replayed = place + 1
                    self._turn.notify_all()


def _delta(part: PartialPart, request_id: str) -> GenerationDelta:
    tokens, logprobs = array("i"), array("d")
    tokens.frombytes(part.tokens)
    logprobs.frombytes(part.logprobs)
    top = part.top_logprobs
    return GenerationDelta(
        request_id,
        part.index,
        tokens.tolist(),
        logprobs.tolist(),
        part.spans,
        part.finish_reason,
        top,
        kept=part.kept,
        experts=part.experts,
    )
