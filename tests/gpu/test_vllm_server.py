"""vLLM on a GPU, as a rollout server starts it: a model of 8 B with the defaults, and the speed of vLLM's own server."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
import torch

from benchmarks.rollout.run import Shape, beside_vllm_serve
from rollout_server.engines.base import GenerationRequest, collect
from rollout_server.engines.factory import make_engine
from rollout_server.engines.vllm.arguments import installed_platform
from services.config.load import load_settings
from services.wire.sampling import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (rollmesh[vllm-gpu])"),
    pytest.mark.skipif(installed_platform() != "gpu", reason="the vLLM that is installed is built for CPUs"),
]
LEAST_SHARE = 0.97
MODEL_BYTES = 16_400_000_000
TOKENS = 64


async def test_at_256_requests_our_server_is_as_fast_as_vllms_own(tmp_path: Path) -> None:
    shape = Shape(
        engine="vllm",
        rounds=5,
        requests=768,
        concurrency=256,
        max_tokens=128,
        pairs=2,
        sessions=1,
        hidden_size=2048,
        layers=16,
        why_no_vllm=None,
    )
    speeds = await beside_vllm_serve(shape, tmp_path, print)
    shares = [ours / theirs for ours, theirs in zip(speeds["vllm_plain"], speeds["vllm_serve"], strict=True)]
    assert median(shares) >= LEAST_SHARE, (torch.cuda.get_device_name(), shares)


async def test_a_model_of_8_b_starts_on_80_gb_with_the_defaults(tmp_path: Path) -> None:
    """With room for an update, and keys and values of its longest context."""
    there = torch.cuda.get_device_properties(0).total_memory
    if not 75 << 30 <= there <= 100 << 30:
        pytest.skip(f"{torch.cuda.get_device_name()} has {there / (1 << 30):.0f} GiB, and this is about 80")
    if shutil.disk_usage(tmp_path).free < 2 * MODEL_BYTES:
        pytest.skip("no room on the disk for a model of 16 GB")
    model = tmp_path / "model"
    # In a process of its own: what it takes of the card is given back.
    command = [sys.executable, "-P", "-m", "tests.support.random_model", str(model)]
    await asyncio.to_thread(subprocess.run, command, check=True, timeout=600)
    engine = make_engine("vllm", model, "gpu", load_settings(None, ["engine=vllm", "model.dtype=bfloat16"]))
    await engine.start()
    try:
        assert engine.max_model_len == 40_960
        sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        [answer] = await collect(engine.generate(GenerationRequest("first", list(range(100, 200)), sampling)))
        assert len(answer.token_ids) == TOKENS
    finally:
        await engine.close()
