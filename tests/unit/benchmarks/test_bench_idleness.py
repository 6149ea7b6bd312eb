"""The paced mesh of `./dev bench trainer`: engines keep their pace and stamp each token with its moment's version."""

from __future__ import annotations

import asyncio
import random
import statistics

import pytest

from benchmarks.harness.clock_engine import ClockEngine, ClockPace
from rollout_server.engines.base import GenerationRequest, collect
from services.wire.sampling import SamplingParams
from tests.support.bus_fleet import manifest_of
from tests.support.scripted_engine import ScriptedEngine
from weight_bus.manifest.manifest import encode_manifest

PACE = ClockPace(median=24, sigma=1.0, longest=200, token_s=0.002, places=3)


def test_lengths_are_heavy_tailed_and_the_typical_longest_is_typical() -> None:
    pytest.importorskip("torch")
    from benchmarks.trainer.idleness import typical_longest

    chance = random.Random(1)
    batches = [[PACE.length(chance) for _ in range(64)] for _ in range(400)]
    lengths = [length for batch in batches for length in batch]
    assert min(lengths) >= 1 and max(lengths) <= PACE.longest
    assert statistics.median(lengths) == pytest.approx(24, abs=1.5)
    longest = statistics.median(max(batch) for batch in batches)
    assert typical_longest(24, 1.0, 200, 64) == pytest.approx(longest, rel=0.05)
    assert longest > 4 * statistics.mean(lengths)


async def test_an_engine_keeps_its_pace_and_its_places() -> None:
    engine = ClockEngine(ScriptedEngine(), PACE, vocabulary=64, seed=3)
    clock = asyncio.get_running_loop().time
    began = clock()
    request = GenerationRequest("a", [5, 6], SamplingParams(max_tokens=60), n=8)
    generating = asyncio.create_task(collect(engine.generate(request)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    status = engine.status()
    assert (status.running, status.waiting) == (3, 5)
    sampled = await generating
    took = clock() - began
    lengths = [len(delta.token_ids) for delta in sampled]
    assert took >= max(max(lengths), sum(lengths) / PACE.places) * PACE.token_s
    for delta in sampled:
        length = len(delta.token_ids)
        assert [(span.start, span.length, span.version) for span in delta.versions] == [(0, length, 0)]
        assert len(delta.logprobs) == length <= 60
        ended = delta.token_ids[-1] in engine.eos_token_ids
        assert delta.finish_reason == ("stop" if ended else "length")
        assert not set(delta.token_ids[:-1]) & set(engine.eos_token_ids)
    assert engine.status().tokens_generated == sum(lengths)


async def test_tokens_are_of_the_version_of_their_moment() -> None:
    engine = ClockEngine(ScriptedEngine(), ClockPace(1000, 0.01, 2000, token_s=0.002, places=1), vocabulary=64, seed=3)
    clock = asyncio.get_running_loop().time
    request = GenerationRequest("a", [5, 6], SamplingParams(max_tokens=100))
    began = clock()
    generating = asyncio.create_task(collect(engine.generate(request)))
    await asyncio.sleep(0.06)
    await engine.stage(encode_manifest(manifest_of("r", 7)))
    await engine.commit(7)
    committed = clock() - began
    (delta,) = await generating
    first, second = delta.versions
    assert (first.version, second.version, second.start + second.length) == (0, 7, 100)
    assert first.length * PACE.token_s == pytest.approx(committed, abs=0.01)
