"""Health checks of an external engine: is it reachable, was it restarted, does it serve the committed weights?

    unseen ── found ──► serving ◄── found, with the committed version ───────┐
                           │ a probe or a request gets no answer              │
                           ▼                                                  │
                         lost ── found, with other weights ──► strange ── commit

An engine that lost its weights (its process was restarted) serves nothing until a version is committed to it: otherwise
tokens would be stamped with a version that did not sample them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

import structlog

from rollout_server.engines.base import GenerationRequest
from rollout_server.engines.http.client import EngineClient, EngineLostError
from rollout_server.engines.http.wire import OtherWeightsError, generate_body
from rollout_server.engines.vllm.convert import version_number
from services.wire.errors import DeadlineError, NotReadyError, RollmeshError, UsageError
from services.wire.sampling import SamplingParams

_log = structlog.get_logger()
_EVERY_S = 1.0
_PROBE_S = 10.0
_RETRY_S = 0.25


class Watch:
    """Probes an external engine and keeps `health` and `traits` current.

    `on_lost` ends the requests in flight; `on_met` is called when the engine is back.

    `busy`: an update is under way, in which the engine may answer nothing else for long.
    """

    def __init__(
        self,
        client: EngineClient,
        health: EngineHealth,
        *,
        on_lost: Callable[[RollmeshError], None],
        on_met: Callable[[], Awaitable[None]],
        busy: Callable[[], bool],
    ) -> None:
        self._client = client
        self._health = health
        self._on_lost = on_lost
        self._on_met = on_met
        self._busy = busy
        self._poked = asyncio.Event()
        self.traits: Traits | None = None

    async def meet_within(self, deadline_s: float) -> None:
        """Wait for the engine to answer. Raises what it answered last, at once where waiting mends nothing."""
        said = False
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    try:
                        await self._meet()
                        return
                    except NotReadyError as error:
                        if not said:
                            _log.warning("waiting", waiting_for=f"the engine at {self._client.url}", why=error.what)
                        said = True
                        self._health.lose(error.what)
                    await asyncio.sleep(_RETRY_S)
        except TimeoutError as error:
            raise NotReadyError(self._health.failure or "", f"it had {deadline_s:g} s: see that it runs") from error

    def lose(self, error: RollmeshError) -> None:
        """The engine did not answer a request or a probe."""
        if not self._health.lost:
            _log.warning("engine lost", url=self._client.url, why=error.what)
        self._health.lose(error.what)
        self._poked.set()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                if self._health.lost:
                    await self._find_again()
                else:
                    await self._sleep(_EVERY_S)
                    await self._probe()
        except Exception as error:  # a bug: unwatched, the engine must not seem to be well
            _log.exception("the watch of the engine failed", url=self._client.url)
            self._health.lose(f"its watch failed ({error!r})")
            self._on_lost(NotReadyError(self._health.failure or "", "restart this rollout server"))
            raise

    async def _find_again(self) -> None:
        try:
            await self._meet()
            await self._on_met()
        except RollmeshError as error:
            self._health.lose(error.what)
            await asyncio.sleep(_RETRY_S)
            return
        _log.info("engine found again", url=self._client.url, version=self._health.version, why=self._health.failure)

    async def _meet(self) -> None:
        self.traits = traits = await meet(self._client)
        self._health.find(traits.label)

    async def _probe(self) -> None:
        if self._health.lost or self._busy():
            return
        try:
            label = None
            if self.traits is not None and self.traits.operated:
                label = await self._client.weight_label(_PROBE_S)
            else:
                await self._client.health(_PROBE_S)
        except RollmeshError as error:
            self.lose(error)
            self._on_lost(error)
            return
        if not self._busy() and not self._health.serves(label):
            self._health.find(label)
            _log.error("weights nobody committed here", url=self._client.url, why=self._health.failure)

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._poked.wait()
        except TimeoutError:
            pass
        self._poked.clear()


FIRST_VERSION = 0


class EngineHealth:
    """What is known of an external engine's availability and weight version. `url` names it in errors. Pure."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lost: str | None = "it was not asked yet"
        self._strange: str | None = None
        self._seen = False
        self._committing: int | None = None
        self.version = FIRST_VERSION
        """What tokens are stamped with; after a loss of weights the version that the engine says."""
        self.known: set[int] = set()
        """Versions that tokens may carry: those committed since the engine was found, and one being committed."""
        self.older: set[int] = set()
        """Those among them that the engine went back to."""

    @property
    def failure(self) -> str | None:
        """Why nothing is served; None while something is."""
        if self._lost is not None:
            return f"the engine at {self._url} does not answer: {self._lost}"
        if self._strange is not None:
            return f"the engine at {self._url} serves unknown weights: {self._strange}"
        return None

    @property
    def lost(self) -> bool:
        return self._lost is not None

    def check(self) -> None:
        """Raise EngineLostError or OtherWeightsError unless requests can be sampled for."""
        failure = self.failure
        if failure is None:
            return
        kind = EngineLostError if self._lost is not None else OtherWeightsError
        raise kind(failure, "send the request to another server")

    def lose(self, why: str) -> None:
        self._lost = why

    def find(self, label: str | None) -> None:
        """It answers. `label`: what it calls its weights; None where it does not say and nobody can change them."""
        self._lost = None
        version = self._number(label)
        if not self._seen and version is not None:
            self._seen, self.version = True, version
        elif version is None:
            self._strange = f"it calls them {label!r}, which is no version"
        elif version != self.version or self._strange is not None:
            self._strange = self._strange or f"it says version {label} where {self.version} was committed"
            self.version = version
        self.known, self.older = {self.version}, set()

    def estrange(self, why: str) -> None:
        """It sampled with weights that nobody committed through this server."""
        self._strange = why

    def rolling_back(self, version: int) -> None:
        """From now on tokens may carry this older version, also those of requests that were sent under a newer one."""
        self.older.add(version)

    def committing(self, version: int) -> None:
        """From now on tokens may carry `version` too."""
        self._committing = version
        self.known.add(version)

    def committed(self, version: int) -> None:
        self._seen, self._strange, self._committing = True, None, None
        self.version = version

    def commit_failed(self) -> None:
        """The engine said that it still serves what it served."""
        self._committing = None

    def serves(self, label: str | None) -> bool:
        """Does the engine's label say what is expected, now or while a version is being committed?"""
        return self._number(label) in (self.version, self._committing)

    def _number(self, label: str | None) -> int | None:
        if label is None:
            return FIRST_VERSION
        try:
            return version_number(label)
        except ValueError:
            return None


_REHEARSAL_S = 60.0
_REHEARSED = 8
_EXACT = 1e-4


@dataclass(frozen=True)
class Traits:
    """What an external engine can do: found out by asking it and by generating a few tokens.

    `label`: what it calls its weights, None without routes for operators (`operated`).

    `ours`: a rollout server, which stamps every token and goes on from sampled ones. `processed`: logprobs are of the
    distribution really sampled from; else of the plain softmax, which is another one under most sampling parameters.
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
        greedy = sampling.temperature == 0.0 and not sampling.shifts
        if self.processed or greedy or (sampling.whole and sampling.temperature == 1.0):
            return
        raise UsageError(
            f"the engine at {url} tells logprobs of the plain softmax, not of what these sampling parameters sample from",
            "start it with --logprobs-mode processed_logprobs, or generate at temperature 1 without cuts and penalties",
        )


async def meet(client: EngineClient) -> Traits:
    """Ask the engine what it can do; one that is paused is resumed, since nobody else would do it.

    Raises EngineLostError where nobody answers, UsageError for an engine that cannot serve, as it was started.
    """
    longest = await client.max_model_len()
    label = await client.weight_label()
    if label is not None and await client.is_paused():
        _log.warning("the engine was paused by an earlier client, resuming it", url=client.url)
        await client.resume()
    ours, processed = await _rehearse(client)
    return Traits(longest, label, ours, processed)


async def _rehearse(client: EngineClient) -> tuple[bool, bool]:
    """Generate a few tokens, each the likeliest: what the engine refuses, it refuses here, with its reason."""
    asked = GenerationRequest("rehearsal", [0], SamplingParams(max_tokens=_REHEARSED, top_k=1, ignore_eos=True))
    body = generate_body(asked, name="rehearsal", limit=_REHEARSED, ours=False, vocabulary=1, eos_token_ids=())
    ours, logprobs = False, list[float]()
    try:
        async with asyncio.timeout(_REHEARSAL_S), aclosing(client.generate(body)) as chunks:
            async for chunk in chunks:
                for choice in chunk.choices:
                    ours = ours or choice.version_spans is not None
                    content = None if choice.logprobs is None else choice.logprobs.content
                    logprobs += [entry.logprob for entry in content or ()]
    except TimeoutError as error:
        raise DeadlineError(f"{client.url} generated no token within {_REHEARSAL_S:g} s", "see its log") from error
    if not logprobs:
        raise UsageError(f"the engine at {client.url} tells no logprobs", "use one that does")
    return ours, all(_of_the_likeliest(logprob) for logprob in logprobs)


def _of_the_likeliest(logprob: float) -> bool:
    """Sampled from the likeliest token alone its probability is 1; from k that are equally likely, 1 / k."""
    candidates = math.exp(-logprob)
    return abs(candidates - round(candidates)) <= _EXACT
