"""An engine that generates by the clock: answers of heavy-tailed lengths, a token every `token_s`, at no cost in computing.

    generate ── place free? ──► the answer's length is sampled ──► sleep length · token_s ──► random tokens, each with the
                                                                                           version of its own moment
    stage, commit, digest ──► a real engine, which never decodes

What a benchmark of the trainer needs: latencies of a fleet of GPUs on a machine whose cores the trainer has to itself,
and real weight updates. The tokens are uniform over the vocabulary, and so are their logprobs; nothing can be learnt.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated
from zlib import crc32

import typer

from clients.environments.base import Answer, Ended, NextTurn, Problem, Split
from rollout_server.engines.base import Engine, EngineStatus, FinishReason, GenerationDelta, GenerationRequest
from rollout_server.engines.request_check import check_request
from services.wire.errors import ConflictError
from services.wire.trajectory import VersionSpan
from services.wire.weights_api import CommitAnswer, PauseMode, StageAnswer


@dataclass(frozen=True)
class ClockPace:
    """Lengths are log-normal: the logarithm has the mean `ln(median)` and the deviation `sigma`; longer ones are sampled
    again, so that nothing piles up at `longest`. `places`: answers that are sampled at once.
    """

    median: float
    sigma: float
    longest: int
    token_s: float
    places: int

    def length(self, chance: Random) -> int:
        """In tokens, at least 1."""
        while (length := round(chance.lognormvariate(math.log(self.median), self.sigma))) > self.longest:
            pass
        return max(1, length)


class ClockEngine:
    """Implements `rollout_server.engines.base.Engine`, but for pausing, which no benchmark of the trainer does."""

    def __init__(self, weights: Engine, pace: ClockPace, vocabulary: int, seed: int) -> None:
        """`weights`: the engine that takes updates. `vocabulary`: tokens are sampled from 0 … vocabulary − 1."""
        self._weights = weights
        self._pace = pace
        self._vocabulary = vocabulary
        self._chance = Random(seed)
        self._places = Places(pace.places)
        self._asked = 0
        self._sampling: dict[object, float] = {}
        self._tokens = 0
        self._commits: list[float] = []
        """When versions began to be served, by the event loop's clock."""
        self._versions: list[int] = [weights.policy_version]

    @property
    def policy_version(self) -> int:
        return self._weights.policy_version

    @property
    def max_model_len(self) -> int:
        return self._weights.max_model_len

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._weights.eos_token_ids

    async def start(self) -> None:
        await self._weights.start()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationDelta]:
        """One delta a sample, streamed or not."""
        check_request(
            request, max_model_len=self.max_model_len, vocabulary=self._vocabulary, eos_token_ids=self.eos_token_ids
        )
        samples = [asyncio.create_task(self._sample(request, index)) for index in range(request.n)]
        self._asked += request.n
        try:
            for sample in asyncio.as_completed(samples):
                yield await sample
        finally:
            self._asked -= request.n
            for task in samples:
                task.cancel()
            await asyncio.gather(*samples, return_exceptions=True)

    async def _sample(self, request: GenerationRequest, index: int) -> GenerationDelta:
        planned = self._pace.length(self._chance)
        length = min(planned, request.sampling.max_tokens)
        async with self._places.one(background=request.background):
            clock = asyncio.get_running_loop().time
            began = self._sampling[request.request_id, index] = clock()
            try:
                await asyncio.sleep(length * self._pace.token_s)
            finally:
                del self._sampling[request.request_id, index]
        self._tokens += length
        ends = self.eos_token_ids
        tokens = self._chance.choices([token for token in range(self._vocabulary) if token not in ends], k=length)
        reason: FinishReason = "length"
        if planned == length:
            tokens[-1], reason = ends[0], "stop"
        spans = self._spans([began + (place + 1) * self._pace.token_s for place in range(length)])
        logprob = -math.log(self._vocabulary)
        return GenerationDelta(request.request_id, index, tokens, [logprob] * length, spans, reason)

    def _spans(self, moments: list[float]) -> list[VersionSpan]:
        spans: list[VersionSpan] = []
        for place, moment in enumerate(moments):
            version = self._versions[bisect_right(self._commits, moment)]
            if spans and spans[-1].version == version:
                spans[-1] = spans[-1].over(spans[-1].start, spans[-1].length + 1)
            else:
                spans.append(VersionSpan(place, 1, version))
        return spans

    async def abort(self, request_ids: list[str] | None = None) -> int:
        raise ConflictError(f"a paced engine ends no request early, {request_ids} neither")

    async def pause(self, mode: PauseMode) -> None:
        raise ConflictError(f"a paced engine does not pause, with {mode} neither")

    async def resume(self) -> None:
        return

    async def stage(self, manifest: bytes) -> StageAnswer:
        return await self._weights.stage(manifest)

    async def commit(self, version: int) -> CommitAnswer:
        report = await self._weights.commit(version)
        self._note_version()
        return report

    async def rollback(self, version: int) -> CommitAnswer:
        report = await self._weights.rollback(version)
        self._note_version()
        return report

    def _note_version(self) -> None:
        if self.policy_version != self._versions[-1]:
            self._commits.append(asyncio.get_running_loop().time())
            self._versions.append(self.policy_version)

    async def weights_digest(self) -> str:
        return await self._weights.weights_digest()

    def status(self) -> EngineStatus:
        status = self._weights.status()
        running = len(self._sampling)
        tokens = self._tokens
        if running:
            now = asyncio.get_running_loop().time()
            tokens += sum(int((now - began) / self._pace.token_s) for began in self._sampling.values())
        return EngineStatus(
            name="paced",
            policy_version=status.policy_version,
            running=running,
            waiting=self._asked - running,
            paused=False,
            tokens_generated=tokens,
            commits=status.commits,
            failure=status.failure,
            staged_version=status.staged_version,
        )

    async def close(self) -> None:
        await self._weights.close()


class Places:
    """So many at once; those in the background begin after all that wait and are not."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: dict[bool, deque[asyncio.Future[None]]] = {False: deque(), True: deque()}

    @asynccontextmanager
    async def one(self, *, background: bool) -> AsyncIterator[None]:
        if self._free:
            self._free -= 1
        else:
            turn = asyncio.get_running_loop().create_future()
            self._waiting[background].append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._give()
                raise
        try:
            yield
        finally:
            self._give()

    def _give(self) -> None:
        """A place to the next that still waits."""
        for waiting in (self._waiting[False], self._waiting[True]):
            while waiting:
                turn = waiting.popleft()
                if not turn.done():
                    turn.set_result(None)
                    return
        self._free += 1


app = typer.Typer(add_completion=False)


@app.command()
def paced_server(
    run_id: Annotated[str, typer.Option()],
    server_id: Annotated[str, typer.Option()],
    port: Annotated[int, typer.Option()],
    redis_url: Annotated[str, typer.Option()],
    bus_url: Annotated[str, typer.Option()],
    model: Annotated[Path, typer.Option(help="Complete: it is not waited for")],
    config: Annotated[Path, typer.Option()],
    median: Annotated[float, typer.Option(help="Of answers' lengths, in tokens")],
    sigma: Annotated[float, typer.Option(help="Deviation of their logarithm")],
    longest: Annotated[int, typer.Option(help="In tokens; longer answers are sampled again")],
    token_s: Annotated[float, typer.Option(help="Seconds a token")],
    places: Annotated[int, typer.Option(help="Answers that are sampled at once")],
) -> None:
    """Serve random answers at a given pace, and take weights as any engine does."""
    from rollout_server.app import make_rollout_app
    from rollout_server.engines.request_check import vocabulary_size
    from rollout_server.engines.torch.core import EngineCore
    from rollout_server.engines.torch.engine import CoreSettings, TorchEngine
    from rollout_server.server import ServerPlan
    from services.config.load import load_settings
    from services.http.app import Stop, open_port, serve
    from services.observability.logging import configure_logging
    from weight_bus.client.bus_client import BusClient

    configure_logging(server_id, run_id=run_id)
    settings = load_settings(config, [])
    listener = open_port("127.0.0.1", port)
    core = EngineCore(
        CoreSettings(
            model=str(model),
            run_id=run_id,
            dtype=settings.model.dtype,
            max_running=1,
            threads=1,
            transport=settings.weights.transport,
            seed=0,
        )
    )
    weights = TorchEngine(core)
    pace = ClockPace(median=median, sigma=sigma, longest=longest, token_s=token_s, places=places)
    engine = ClockEngine(
        weights, pace, vocabulary_size(model), settings.seed * 1_000_003 + zlib.crc32(server_id.encode())
    )
    weights.preload()
    plan = ServerPlan(
        run_id=run_id,
        server_id=server_id,
        url=f"http://127.0.0.1:{port}",
        redis_url=redis_url,
        model=model,
        settings=settings,
    )
    bus = BusClient(bus_url, run_id, deadline_s=2.0)
    stop = Stop()
    serve(make_rollout_app(plan, engine, bus, stop), "127.0.0.1", port, listener=listener, stop=stop)


class Coin:
    """A task with random rewards, a hash of each answer, so that groups have different rewards under any policy.

    For benchmarks of throughput, as `python:benchmarks.harness.clock_engine:Coin`. Splits differ in their prompts.
    """

    name = "coin"

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        return Problem(split=split, index=index, prompt=f"{split} {seed} {index:06d}: ")

    def start(self, problem: Problem) -> CoinEpisode:
        return CoinEpisode(problem)


@dataclass(frozen=True)
class CoinEpisode:
    problem: Problem

    @property
    def first_turn(self) -> str:
        return self.problem.prompt

    def respond(self, answer: Answer) -> NextTurn | Ended:
        success = crc32((self.problem.prompt + answer.text).encode()) % 2 == 0
        return Ended(reward=float(success), success=success)


if __name__ == "__main__":
    app()
