"""The processes of `./dev bench weights`: the publisher and the engine under test, started as subprocesses."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
import psutil
import torch

from benchmarks.harness.processes import PYTHON, Piped, answer_lines, replies_only, running, running_piped
from benchmarks.weights.arms import (
    Broadcast,
    Change,
    Done,
    Join,
    Publish,
    Published,
    PublishRounds,
    Save,
    Span,
    TimePublishing,
    ToPublisher,
)
from benchmarks.weights.in_place import broadcast, make_group
from services.host.aio import first_failure
from services.wire.errors import RollmeshError
from weight_bus.manifest.layout import DEFAULT_BUCKET_BYTES
from weight_bus.manifest.manifest import encode_manifest
from weight_bus.memory.arena import populate, private_arena
from weight_bus.publisher.contiguous import lay_contiguous
from weight_bus.publisher.publisher import Publisher
from weight_bus.transports.base import Exporter
from weight_bus.transports.select import make_exporter

RUN_ID = "bench-weights"
_POLICY_MODULE = "benchmarks.harness.workload"
_ENGINE_MODULE = "benchmarks.weights.engine"
_PUBLISHER_MODULE = "benchmarks.weights.processes"
_START_WITHIN_S = 300.0
_POLICY_WITHIN_S = 120.0
PROMPT_TOKENS = 48
_VOCABULARY = 256


def prompts(streams: int, seed: int, tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    """One prompt of random tokens for each stream: the same for every arm."""
    rng = random.Random(seed)
    return [[rng.randrange(_VOCABULARY) for _ in range(tokens)] for _ in range(streams)]


async def save_policy(folder: Path, scratch: Path, *, hidden_size: int, layers: int, seed: int) -> int:
    """Write a random policy with a tied output head; returns the bytes of its weights. Raises RollmeshError."""
    command = [*PYTHON, _POLICY_MODULE, str(folder), str(hidden_size), str(layers), str(seed)]
    async with running("random policy", command, scratch) as child:
        weights = folder / "model.safetensors"

        async def ended() -> bool:
            return child.process.returncode == 0

        await child.until(ended, _POLICY_WITHIN_S)
    if not weights.exists():
        raise RollmeshError(f"no weights in {folder}", child.tail())
    return weights.stat().st_size


@asynccontextmanager
async def running_engine(
    engine: str, model: Path, scratch: Path, streams: int, name: str = "engine", memory: Sequence[str] = ()
) -> AsyncIterator[Piped]:
    """An engine that serves the folder as version 0, with memory for so many streams. `memory`: see its module."""
    command = [*PYTHON, _ENGINE_MODULE, engine, str(model), RUN_ID, str(streams), *memory]
    async with running_piped(f"{engine} {name}", command, scratch, start_within_s=_START_WITHIN_S) as piped:
        yield piped


@asynccontextmanager
async def running_publisher(model: Path, scratch: Path) -> AsyncIterator[Piped]:
    """A publisher that holds the folder's weights."""
    command = [*PYTHON, _PUBLISHER_MODULE, str(model), RUN_ID]
    async with running_piped("publisher", command, scratch, start_within_s=_START_WITHIN_S) as piped:
        yield piped


@asynccontextmanager
async def running_both(engine: str, model: Path, scratch: Path, streams: int) -> AsyncIterator[tuple[Piped, Piped]]:
    """A publisher and an engine, started at the same time: most of a start is imports."""
    async with AsyncExitStack() as stack:
        with first_failure():
            async with asyncio.TaskGroup() as starting:
                publisher = starting.create_task(stack.enter_async_context(running_publisher(model, scratch)))
                under_test = starting.create_task(
                    stack.enter_async_context(running_engine(engine, model, scratch, streams))
                )
        yield publisher.result(), under_test.result()


@asynccontextmanager
async def no_spare_core(scratch: Path) -> AsyncIterator[None]:
    """All cores but one are busy during the block."""
    async with AsyncExitStack() as stack:
        for number in range((os.cpu_count() or 1) - 1):
            busy = [sys.executable, "-c", "while True: pass"]
            await stack.enter_async_context(running(f"neighbour {number}", busy, scratch))
        yield


# The publisher process: it has the weights, changes them and publishes, saves or broadcasts them.
#
#     python -m benchmarks.weights.processes MODEL RUN_ID

_CHANGED = 4096
_DTYPE = "float32"


def load_weights(model: Path) -> dict[str, torch.Tensor]:
    """The folder's weights by name, in contiguous memory of their own, as our trainer has them."""
    from safetensors.torch import load_file

    weights: dict[str, torch.Tensor] = load_file(model / "model.safetensors")
    if not lay_contiguous(weights):
        raise RollmeshError(
            f"the weights of {model} could not be laid out contiguously", "give it weights in host memory"
        )
    return weights


class _Trainer:
    def __init__(self, model: Path, run_id: str) -> None:
        self._run_id = run_id
        self._tensors = load_weights(model)
        self._publishers: dict[str, Publisher] = {}
        self._changes = 0
        self._group: object = None

    async def handle(self, command: ToPublisher) -> msgspec.Struct:
        match command:
            case Join(port):
                self._group = await asyncio.to_thread(make_group, port, 0)
                return Done()
            case Change():
                self._change()
                return Done()
            case Publish(transport, version):
                return await self._publish(transport, version)
            case TimePublishing(transport, rounds, apart):
                exporter = make_exporter(transport, self._run_id)
                tensors = {name: tensor.clone() for name, tensor in self._tensors.items()} if apart else self._tensors
                times = time_publishing(tensors, _DTYPE, exporter, DEFAULT_BUCKET_BYTES, rounds)
                return PublishRounds(times.memcpy_ms, times.publish_ms)
            case Save(path):
                from safetensors.torch import save_file

                return _timed(lambda: save_file(self._tensors, path, metadata={"format": "pt"}))
            case Broadcast():
                return await asyncio.to_thread(_timed, lambda: broadcast(self._group, self._tensors))

    async def _publish(self, transport: str, version: int) -> Published:
        publisher = self._publishers.get(transport)
        if publisher is None:
            exporter = make_exporter(transport, self._run_id)
            publisher = Publisher(self._run_id, self._tensors, _DTYPE, exporter, DEFAULT_BUCKET_BYTES)
            self._publishers[transport] = publisher
        publication = publisher.publish(version, self._tensors)
        return Published(encode_manifest(await asyncio.to_thread(publication.manifest)))

    def _change(self) -> None:
        """A few numbers of every tensor: every version differs everywhere, and the change itself costs nothing."""
        self._changes += 1
        factor = 1.01 if self._changes % 2 else 0.985
        with torch.no_grad():
            for tensor in self._tensors.values():
                tensor.view(-1)[:_CHANGED].mul_(factor)

    def close(self) -> None:
        for publisher in self._publishers.values():
            publisher.close()


def _timed(work: Callable[[], object]) -> Span:
    begin = time.monotonic()
    work()
    return Span(begin, time.monotonic())


async def _serve(replies: int, model: Path, run_id: str) -> None:
    trainer = _Trainer(model, run_id)
    try:
        await answer_lines(replies, ToPublisher, trainer.handle)
    finally:
        trainer.close()


def _main() -> None:
    from services.host.process import leave_quickly

    replies = replies_only()
    # The engine decodes meanwhile: this process uses one core, as the engine does.
    torch.set_num_threads(1)
    asyncio.run(_serve(replies, Path(sys.argv[1]), sys.argv[2]))
    leave_quickly()


@dataclass(frozen=True)
class PublishTimes:
    """Milliseconds that `publish` blocks, beside one memcpy of the same bytes (`nbytes`), round by round.

        rounds, interleaved:   memcpy, publish | publish, memcpy | …      both on warm memory, on the calling thread

    The manifest is awaited outside the measured time, so that the next `publish` finds a free buffer.
    """

    nbytes: int
    memcpy_ms: list[float]
    publish_ms: list[float]
    manifest_ms: list[float]
    """From the call of `publish` to its manifest."""

    @property
    def publish_vs_memcpy(self) -> float:
        """Medians: how often one memcpy goes into the time that `publish` blocks."""
        return median(self.publish_ms) / median(self.memcpy_ms)


def time_publishing(
    tensors: Mapping[str, torch.Tensor], dtype: str, exporter: Exporter, bucket_bytes: int, rounds: int
) -> PublishTimes:
    """Publish `tensors` (float, contiguous) `rounds` times and copy as many bytes as often. Closes the exporter."""
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    here, there = private_arena(nbytes), private_arena(nbytes)
    for arena in (here, there):
        populate(arena)
    publisher = Publisher("bench", tensors, dtype, exporter, bucket_bytes)
    times = PublishTimes(nbytes, [], [], [])
    try:
        # The first round warms both up and is not counted.
        for number in range(rounds + 1):
            for arm in ("memcpy", "publish") if number % 2 else ("publish", "memcpy"):
                started = time.perf_counter()
                if arm == "memcpy":
                    ctypes.memmove(there.address, here.address, nbytes)
                    times.memcpy_ms.append((time.perf_counter() - started) * 1e3)
                else:
                    publication = publisher.publish(number, tensors)
                    times.publish_ms.append((time.perf_counter() - started) * 1e3)
                    publication.manifest()
                    times.manifest_ms.append((time.perf_counter() - started) * 1e3)
        for figures in (times.memcpy_ms, times.publish_ms, times.manifest_ms):
            del figures[0]
        return times
    finally:
        publisher.close()
        here.close()
        there.close()


# CPU use of other processes during a measurement: a busy machine looks like a bad figure.

_IDLE = ("idle", "iowait", "guest", "guest_nice")
"""Not work, or counted already as a user's."""


@dataclass(frozen=True)
class CpuUse:
    """CPU seconds until a moment: of all, and of this process with all that it started. `all_s` holds stolen time, too."""

    at: float
    all_s: float
    own_s: float

    @classmethod
    def now(cls) -> CpuUse:
        times = psutil.cpu_times()._asdict()
        return cls(time.monotonic(), sum(v for name, v in times.items() if name not in _IDLE), _own())

    def others_since(self, before: CpuUse) -> float:
        """Cores that others kept busy, in the mean."""
        others = (self.all_s - before.all_s) - (self.own_s - before.own_s)
        return max(0.0, others) / max(self.at - before.at, 1e-9)


def _own() -> float:
    me = psutil.Process()
    spent = 0.0
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        # With those of its children that have ended.
        spent += times.user + times.system + times.children_user + times.children_system
    return spent


if __name__ == "__main__":
    _main()
