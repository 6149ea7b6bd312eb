"""What the KV policies are held against: an engine short of memory, weights that alternate, a replay in transformers."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import DynamicCache, Qwen3ForCausalLM

from rollout_server.engines.base import Engine, GenerationDelta, GenerationRequest
from rollout_server.engines.factory import EngineClass, make_engine
from services.config.engines.vllm import VllmSettings
from services.config.settings import RolloutSettings, RunSettings, WeightSettings
from services.wire.sampling import KvPolicy
from tests.contract.rollout_server.engine_harness import VOCABULARY, InFlight, check_spans, request
from tests.support.until import until
from trainer.sft.tiny_model import build_model, save_policy
from weight_bus.manifest.manifest import encode_manifest
from weight_bus.publisher.publisher import Publisher
from weight_bus.transports.select import make_exporter

BLOCK = 32
"""vLLM finds whole blocks of so many tokens in its cache, the torch engine single tokens."""
_WEIGHT_SETS = 3
_MAX_RUNNING = 12
_STEP_TOKENS = 64
_MEMORY_TOKENS = 1280


@dataclass
class Case:
    """An engine under a policy. Version v has the weights of `models[v % len(models)]`."""

    engine: Engine
    policy: KvPolicy
    models: list[Qwen3ForCausalLM]
    publisher: Publisher
    version: int = 0
    answered: list[tuple[GenerationRequest, GenerationDelta]] = field(default_factory=list)

    async def next_version(self) -> None:
        """Publish, stage and commit."""
        await self.stage_next()
        await self.commit_next()

    async def stage_next(self) -> None:
        """Publish and stage: what takes a while, so that a commit falls where a test wants it."""
        version = self.version + 1
        manifest = self.publisher.publish(version, dict(self.model(version).named_parameters())).manifest()
        await self.engine.stage(encode_manifest(manifest))

    async def commit_next(self) -> None:
        """Flip to what was staged."""
        await self.engine.commit(self.version + 1)
        self.version += 1

    def model(self, version: int) -> Qwen3ForCausalLM:
        return self.models[version % len(self.models)]

    async def ask(self, asked: GenerationRequest) -> GenerationDelta:
        """The only sample of a request's answer."""
        (sample,) = await asyncio.wait_for(InFlight(asked.request_id).read(self.engine, asked), 60.0)
        self.answered.append((asked, sample))
        return sample

    async def prefilled_by(self, asked: GenerationRequest) -> tuple[GenerationDelta, int]:
        """A request's answer, and how many tokens the engine computed for it that it did not generate."""
        before = self.engine.status().prefill_tokens
        sample = await self.ask(asked)
        return sample, self.engine.status().prefill_tokens - before

    @asynccontextmanager
    async def asking(self, clients: int, seed: int) -> AsyncIterator[None]:
        """Clients that ask without a pause for the time of the block, many with prompts that begin alike."""
        beginnings = list(prompts(3, 140, seed))
        stop = asyncio.Event()

        async def client(number: int) -> None:
            choice = random.Random(seed * 1000 + number)
            while not stop.is_set():
                prompt = choice.choice(beginnings)[: choice.choice([20, 140, 140])]
                prompt = prompt + [choice.randrange(2, VOCABULARY) for _ in range(choice.choice([0, 0, 9]))]
                await self.ask(request(prompt, choice.randrange(8, 100), stream=True, ignore_eos=True))

        tasks = [asyncio.create_task(client(number)) for number in range(clients)]
        try:
            yield
            stop.set()
            await asyncio.wait_for(asyncio.gather(*tasks), 60.0)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def sampled(self, tokens: int) -> None:
        """Return when the engine has sampled so many more tokens."""
        wanted = self.engine.status().tokens_generated + tokens
        await until(lambda: self.engine.status().tokens_generated >= wanted, deadline_s=30.0)

    def largest_gap(self) -> float:
        """Between the logprobs of all answers so far and those that their spans say."""
        return max(float((torch.tensor(s.logprobs) - self.replayed(a, s)).abs().max()) for a, s in self.answered)

    @torch.inference_mode()
    def replayed(self, asked: GenerationRequest, sample: GenerationDelta) -> torch.Tensor:
        """The logprobs of a sample, each span under its version over the keys and values that its `kv` says."""
        check_spans(sample)
        sequence = torch.tensor([asked.prompt_token_ids + sample.token_ids])
        found = []
        cache, done = DynamicCache(), 0
        for span in sample.versions:
            if span.kv == "recompute":
                cache, done = DynamicCache(), 0
            first = len(asked.prompt_token_ids) + span.start
            end = first + span.length
            logits = self.model(span.version)(sequence[:, done : end - 1], past_key_values=cache, use_cache=True).logits
            logprobs = logits[0, -span.length :].log_softmax(-1)
            found.append(logprobs.gather(1, sequence[0, first:end].unsqueeze(1)).squeeze(1))
            done = end - 1
        return torch.cat(found)


def prompts(count: int, length: int, seed: int) -> Iterator[list[int]]:
    choice = random.Random(seed)
    for _ in range(count):
        yield [choice.randrange(2, VOCABULARY) for _ in range(length)]


@asynccontextmanager
async def serving(name: EngineClass, policy: KvPolicy, folder: Path) -> AsyncIterator[Case]:
    """`name` over a policy whose versions differ a lot. vLLM has so little memory that it must take some back."""
    run_id = f"kv-{uuid.uuid4().hex[:8]}"
    models = [_model(seed) for seed in range(_WEIGHT_SETS)]
    save_policy(models[0], folder)
    rollout = RolloutSettings(max_running=_MAX_RUNNING, kv_policy=policy)
    if name == "vllm":
        # It prefills by pieces and cannot hold all that it runs.
        few = {"block_size": BLOCK, "num_gpu_blocks_override": _MEMORY_TOKENS // BLOCK}
        rollout.vllm = VllmSettings.model_validate({"max_num_batched_tokens": _STEP_TOKENS, **few})
    engine = make_engine(name, folder, run_id, RunSettings(rollout=rollout, weights=WeightSettings(transport="shm")))
    await engine.start()
    publisher = Publisher(run_id, dict(models[0].named_parameters()), "float32", make_exporter("shm", run_id), 1 << 16)
    try:
        yield Case(engine, policy, models, publisher)
    finally:
        await engine.close()
        publisher.close()


def _model(seed: int) -> Qwen3ForCausalLM:
    model = build_model(seed).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(1.5)
    return model
