"""What the engine contract is held against: plain transformers forwards, and weights published by a real process."""

from __future__ import annotations

import asyncio
import base64
import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rollout_server.engines.base import Engine, GenerationDelta, GenerationRequest, collect
from services.wire.sampling import SamplingParams
from trainer.sft.tiny_model import build_model, save_policy

VOCABULARY = 64
END = 1
MAX_RUNNING = 32
LOGPROB_GAP = 1e-5
_request_numbers = itertools.count()


def save_sharp_policy(folder: Path, seed: int) -> Path:
    """A tiny policy whose distributions are far from flat, so that two engines cannot differ by a near tie."""
    model = build_model(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    save_policy(model, folder)
    return folder


@cache
def reference(folder: Path) -> Any:
    """The folder as plain transformers loads it, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def greedy_tokens(folder: Path, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What transformers' own `generate` answers, token ids up to and including the end token."""
    model = reference(folder)
    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
    return [int(token) for token in answer[0, len(prompt) :]]


def next_logits(folder: Path, prompt: Sequence[int], tokens: Sequence[int] = ()) -> torch.Tensor:
    """float64 logits `[len(tokens) + 1, vocabulary]` after `prompt` and after each of `tokens`, without a cache."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits: torch.Tensor = reference(folder)(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
    return logits.double()


def teacher_forced(
    folder: Path, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """float32 logprobs of `tokens` after `prompt`, in one forward without a cache."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits = reference(folder)(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(list(tokens)).unsqueeze(1)).squeeze(1)


def prompts(count: int, *, seed: int, shortest: int = 9, longest: int = 9) -> list[list[int]]:
    """Random prompts without the end token."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator)
    return [torch.randint(2, VOCABULARY - 2, (int(length),), generator=generator).tolist() for length in lengths]


def request(
    prompt: list[int],
    max_tokens: int,
    *,
    n: int = 1,
    temperature: float = 1.0,
    stream: bool = False,
    ignore_eos: bool = False,
    top_logprobs: int = 0,
    **sampling: Any,
) -> GenerationRequest:
    """A request with an id of its own."""
    parameters = SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=ignore_eos, **sampling)
    return GenerationRequest(
        f"request-{next(_request_numbers)}", prompt, parameters, n, stream, top_logprobs=top_logprobs
    )


def sample_of(samples: list[GenerationDelta]) -> GenerationDelta:
    """The only sample of an answer."""
    assert len(samples) == 1
    return samples[0]


def check_spans(sample: GenerationDelta) -> None:
    """Spans must cover the tokens exactly, in order."""
    position = 0
    for span in sample.versions:
        assert span.start == position
        assert span.length > 0
        position += span.length
    assert position == len(sample.token_ids) == len(sample.logprobs)


@dataclass
class InFlight:
    """A request being read in the background. `seen`: tokens of all its samples so far; `started` is set by the first."""

    request_id: str
    deltas: list[GenerationDelta] = field(default_factory=list)
    seen: int = 0
    started: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, engine: Engine, asked: GenerationRequest) -> list[GenerationDelta]:
        async for delta in engine.generate(asked):
            self.deltas.append(delta)
            self.seen += len(delta.token_ids)
            if delta.token_ids:
                self.started.set()
        return await collect(_replay(self.deltas))


async def _replay(deltas: list[GenerationDelta]) -> Any:
    for delta in deltas:
        yield delta


@dataclass
class EngineCase:
    """An engine under test, and what it must be serving: `folder`'s weights as `version`."""

    engine: Engine
    publisher: WeightPublisher
    folder: Path
    version: int = 0

    async def one(self, asked: GenerationRequest) -> list[GenerationDelta]:
        return await asyncio.wait_for(collect(self.engine.generate(asked)), 60.0)

    async def many(self, asked: Sequence[GenerationRequest]) -> list[list[GenerationDelta]]:
        return list(await asyncio.gather(*(self.one(each) for each in asked)))

    @contextmanager
    def in_flight(self, asked: GenerationRequest) -> Iterator[tuple[InFlight, asyncio.Task[list[GenerationDelta]]]]:
        """Read a request in the background for the time of the block."""
        reading = InFlight(asked.request_id)
        task = asyncio.create_task(reading.read(self.engine, asked))
        try:
            yield reading, task
        finally:
            task.cancel()

    async def stage_next(self, seed: int, folder: Path) -> int:
        """Publish fresh weights from the publisher's process and stage them; returns their version."""
        save_sharp_policy(folder, seed)
        version = self.publisher.next_version()
        manifest = await asyncio.to_thread(self.publisher.publish, version, folder)
        report = await self.engine.stage(manifest)
        assert report.version == version
        assert report.bytes_read > 0
        return version

    async def commit(self, version: int, folder: Path) -> None:
        report = await self.engine.commit(version)
        assert report.version == version
        self.version, self.folder = version, folder


class WeightPublisher:
    """`tests.support.weight_publisher` in its own process."""

    def __init__(self, run_id: str, transport: str) -> None:
        self._version = 0
        command = [sys.executable, "-m", "tests.support.weight_publisher", run_id, transport]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def next_version(self) -> int:
        self._version += 1
        return self._version

    def publish(self, version: int, folder: Path) -> bytes:
        """The encoded manifest of `folder`'s weights as `version`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{version} {folder}\n")
        self._process.stdin.flush()
        return base64.b64decode(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)
        self._process.stdout.close()
