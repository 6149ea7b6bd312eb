"""An operator and a rollout server with a real engine: canary, rollback to the very tokens of before, pause and resume."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

pytest.importorskip("torch")

from clients.weights.client import WeightsClient
from rollout_server.engines.factory import make_engine
from services.wire.weights_api import VerifyView
from tests.support.rollout_host import hosting, small_batch
from tests.support.served_app import served
from trainer.sft.tiny_model import build_model
from weight_bus.client.bus_client import BusClient
from weight_bus.coordinator.app import build_app
from weight_bus.publisher.publisher import Publisher
from weight_bus.transports.shm import ShmExporter


async def test_a_rollback_samples_the_tokens_of_the_version_before(
    redis_url: str, run_id: str, tiny_policy: Path
) -> None:
    settings = small_batch(k=2)
    settings.weights.transport = "shm"
    engine = make_engine("torch", tiny_policy, run_id, settings)
    weights = {version: dict(build_model(seed=version).state_dict()) for version in (1, 2)}
    publisher = Publisher(run_id, weights[1], "float32", ShmExporter(run_id), 1 << 20)
    async with AsyncExitStack() as stack:
        stack.callback(publisher.close)
        bus_url = await stack.enter_async_context(served(build_app(run_id, 20.0)))
        bus = await stack.enter_async_context(BusClient(bus_url, run_id))
        membership = BusClient(bus_url, run_id, deadline_s=2.0)
        host = await stack.enter_async_context(
            hosting(engine, redis_url=redis_url, run_id=run_id, model=tiny_policy, settings=settings, bus=membership)
        )
        operator = stack.enter_context(WeightsClient(bus_url))

        async def canary() -> VerifyView:
            view = await asyncio.to_thread(operator.verify)
            assert view.match
            assert view.canary is not None
            assert view.canary.agree
            assert [len(tokens) for tokens in view.canary.engines[0].tokens] == [8, 8, 8]
            return view

        sampled = {}
        for version in (1, 2):
            await bus.announce(publisher.publish(version, weights[version]).manifest(), wait_s=10.0)
            sampled[version] = (await canary()).canary
        assert sampled[1] != sampled[2]
        begun = await asyncio.to_thread(operator.rollback)
        assert (await asyncio.to_thread(operator.wait, begun.update.version, 10)).state == "committed"
        back = await canary()
        assert (back.version, back.canary) == (1, sampled[1])
        again = await asyncio.to_thread(operator.commit, 2)
        assert (await asyncio.to_thread(operator.wait, again.version, 10)).state == "committed"
        assert (await canary()).canary == sampled[2]
        paused = await asyncio.to_thread(operator.pause, "keep")
        assert [each.done for each in paused.engines] == [True]
        assert (await host.http.get("/is_paused")).json() == {"is_paused": True}
        await asyncio.to_thread(operator.resume)
        assert (await host.http.get("/is_paused")).json() == {"is_paused": False}
