"""What kind of engine answers at a URL: found out by asking it, and by drawing a few tokens."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from dataclasses import dataclass

import structlog

from rollout_server.engines.base import GenerationRequest
from rollout_server.engines.http_peer import Peer
from rollout_server.engines.http_wire import generate_body
from services.wire.errors import DeadlineError, UsageError
from services.wire.sampling import SamplingParams

_log = structlog.get_logger()
_REHEARSAL_S = 60.0
_REHEARSED = 8
_EXACT = 1e-4


@dataclass(frozen=True)
class Traits:
    """`label`: what the engine calls its weights, None without routes for operators (`operated`).

    `ours`: a rollout server, which stamps every token and goes on from drawn ones. `processed`: logprobs are of the
    distribution really drawn from; else of the plain softmax, which is another one under most sampling parameters.
    """

    max_model_len: int
    label: str | None
    ours: bool
    processed: bool

    @property
    def operated(self) -> bool:
        return self.label is not None

    def check_sampling(self, sampling: SamplingParams, url: str) -> None:
        """Raise UsageError for parameters whose logprobs this engine cannot tell."""
        if self.processed or (not sampling.shifts and sampling.temperature == 0.0) or _plain(sampling):
            return
        raise UsageError(
            f"the engine at {url} tells logprobs of the plain softmax, not of what these sampling parameters draw from",
            "start it with --logprobs-mode processed_logprobs, or draw at temperature 1 without cuts and penalties",
        )


def _plain(sampling: SamplingParams) -> bool:
    return sampling.whole and sampling.temperature == 1.0


async def meet(peer: Peer) -> Traits:
    """Ask the engine what it is; one that stands paused is let go on, for nobody else would.

    Raises EngineLostError where nobody answers, UsageError for an engine that cannot serve, as it was started.
    """
    longest = await peer.max_model_len()
    label = await peer.weight_label()
    if label is not None and await peer.is_paused():
        _log.warning("the engine stood paused, by whoever used it before", url=peer.url)
        await peer.resume()
    ours, processed = await _rehearse(peer)
    return Traits(longest, label, ours, processed)


async def _rehearse(peer: Peer) -> tuple[bool, bool]:
    """Draw a few tokens, each the likeliest: what the engine refuses, it refuses here, with its reason."""
    asked = GenerationRequest("rehearsal", [0], SamplingParams(max_tokens=_REHEARSED, top_k=1, ignore_eos=True))
    body = generate_body(asked, name="rehearsal", limit=_REHEARSED, ours=False, vocabulary=1, eos_token_ids=())
    ours, logprobs = False, list[float]()
    try:
        async with asyncio.timeout(_REHEARSAL_S), aclosing(peer.generate(body)) as chunks:
            async for chunk in chunks:
                for choice in chunk.choices:
                    ours = ours or choice.version_spans is not None
                    content = None if choice.logprobs is None else choice.logprobs.content
                    logprobs += [entry.logprob for entry in content or ()]
    except TimeoutError as error:
        raise DeadlineError(f"{peer.url} drew no token within {_REHEARSAL_S:g} s", "see its log") from error
    if not logprobs:
        raise UsageError(f"the engine at {peer.url} tells no logprobs", "use one that does")
    return ours, all(_of_the_likeliest(logprob) for logprob in logprobs)


def _of_the_likeliest(logprob: float) -> bool:
    """Drawn from the likeliest token alone its probability is 1; from k that are equally likely, 1 / k."""
    candidates = math.exp(-logprob)
    return abs(candidates - round(candidates)) <= _EXACT
