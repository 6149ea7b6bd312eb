"""A folder of safetensors becomes a version that a real receiver serves, without any trainer."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from services.security.permissions import Keys  # noqa: E402
from tests.support.served_app import served  # noqa: E402
from tests.weight_parts import PlainTarget, SmallEngine, make_weights  # noqa: E402
from weight_bus.client.bus_client import BusClient  # noqa: E402
from weight_bus.coordinator.app import build_app  # noqa: E402
from weight_bus.receiver.receiver import Receiver  # noqa: E402
from weight_bus.transports.select import make_readers  # noqa: E402

KEY = "a-weights-key-of-many-letters"


async def test_a_pushed_folder_is_served_and_one_outside_the_trusted_root_is_not(run_id: str, tmp_path: Path) -> None:
    trusted, elsewhere = tmp_path / "trusted", tmp_path / "elsewhere"
    for place in (trusted / "step-5", elsewhere):
        place.mkdir(parents=True)
        save_file({name: tensor.clone() for name, tensor in make_weights(5).items()}, place / "model.safetensors")
    readers = make_readers("shm", 5.0, file_root=trusted)
    engine = SmallEngine("a", Receiver(PlainTarget(make_weights(0)), run_id, readers, key=KEY))
    async with AsyncExitStack() as stack:
        stack.callback(engine.receiver.close)
        url = await stack.enter_async_context(served(build_app(run_id, 5.0, keys=Keys(weights=KEY))))
        engine_url = await stack.enter_async_context(served(engine.app()))
        bus = await stack.enter_async_context(BusClient(url, run_id))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20))
        await bus.register("a", engine_url, 3)
        pushed = await http.post("/v1/snapshots?wait_s=10", json={"folder": str(trusted / "step-5")})
        assert (pushed.status_code, pushed.json()["version"], pushed.json()["state"]) == (202, 4, "committed")
        for name, tensor in make_weights(5).items():
            assert torch.equal(engine.receiver.target.live()[name], tensor), name
        assert (await bus.verify()).match
        again = await http.post("/v1/snapshots", json={"folder": str(trusted / "step-5"), "version": 4})
        assert again.status_code == 200
        stranger = await http.post("/v1/snapshots?wait_s=10", json={"folder": str(elsewhere)})
        assert stranger.json()["state"] == "failed"
        assert "lies outside this engine's weights.file_root" in stranger.json()["engines"][0]["why"]
        assert engine.receiver.version == 4
        for folder, why in ((str(tmp_path), "no safetensors"), ("step-5", "not an absolute path")):
            refused = await http.post("/v1/snapshots", json={"folder": folder})
            assert (refused.status_code, refused.json()["error"]["code"]) == (422, "usage"), why


async def test_a_push_that_failed_is_not_served_by_engines_that_join_later(run_id: str, tmp_path: Path) -> None:
    """The engine that was there may read no files, and says so; one that may joins after the operator was told."""
    folder = tmp_path / "step-5"
    folder.mkdir()
    save_file({name: tensor.clone() for name, tensor in make_weights(5).items()}, folder / "model.safetensors")
    engines = {
        name: SmallEngine(
            name, Receiver(PlainTarget(make_weights(0)), run_id, make_readers("shm", 5.0, file_root=root))
        )
        for name, root in (("without", None), ("with", tmp_path))
    }
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(served(build_app(run_id, 5.0)))
        bus = await stack.enter_async_context(BusClient(url, run_id))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20))
        urls = {}
        for name, engine in engines.items():
            stack.callback(engine.receiver.close)
            urls[name] = await stack.enter_async_context(served(engine.app()))
        await bus.register("without", urls["without"], 0)
        pushed = (await http.post("/v1/snapshots?wait_s=10", json={"folder": str(folder)})).json()
        assert pushed["state"] == "failed"
        assert "set this engine's weights.file_root" in pushed["engines"][0]["why"]
        for _ in range(3):
            for name in urls:
                await bus.register(name, urls[name], 0)
        assert (await http.get("/v1/updates/1?wait_s=0.3")).json()["state"] == "failed"
        assert [engine.receiver.version for engine in engines.values()] == [0, 0]
        again = await http.post("/v1/snapshots?wait_s=10", json={"folder": str(folder), "version": 1})
        assert (again.status_code, again.json()["state"], engines["with"].receiver.version) == (200, "committed", 1)
