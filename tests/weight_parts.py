"""Parts that the weight tests share: a target made of plain tensors, and a small engine with real weight routes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import count

import torch
import uvicorn
from fastapi import FastAPI, Request

from services.http.app import make_app
from services.wire.weights_api import CommitAnswer, CommitCall, DigestAnswer, StageAnswer
from weight_bus.manifest.manifest import Manifest, decode_manifest
from weight_bus.receiver.receiver import Receiver


def make_weights(seed: int, *, scale: int = 1) -> dict[str, torch.Tensor]:
    """A few float32 tensors whose sizes are no multiples of the alignment or of a bucket."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "embed": (13 * scale, 7),
        "layer.0.q": (5, 3 * scale),
        "norm": (11,),
        "scale": (),
        "head": (7, 13 * scale),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class PlainTarget:
    """Two sets of tensors that change places. `like` is what is served first."""

    def __init__(self, like: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> None:
        self._live = {name: tensor.detach().to(dtype).clone() for name, tensor in like.items()}
        self._shadow = {name: torch.full_like(tensor, float("nan")) for name, tensor in self._live.items()}
        self.flips = 0

    def live(self) -> Mapping[str, torch.Tensor]:
        return self._live

    def shadow(self) -> Mapping[str, torch.Tensor]:
        return self._shadow

    def flip(self) -> None:
        self._live, self._shadow = self._shadow, self._live
        self.flips += 1

    def flip_back(self) -> None:
        self.flip()


class SmallEngine:
    """Weight routes over a receiver. A stage waits while `go_on` is cleared; `calls` records what was asked, in order."""

    def __init__(
        self,
        name: str,
        receiver: Receiver,
        journal: list[str] | None = None,
        not_ready: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.name = name
        self._not_ready = not_ready
        self.receiver = receiver
        self.calls: list[str] = journal if journal is not None else []
        self.go_on = threading.Event()
        self.go_on.set()

    def app(self) -> FastAPI:
        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            yield

        app = make_app("small-engine", "0", lifespan, lambda: [why for why in [self._not_ready()] if why is not None])

        @app.post("/weights/stage")
        async def stage(request: Request) -> StageAnswer:
            manifest = decode_manifest(await request.body())
            staged = await asyncio.to_thread(self._stage, manifest)
            self.calls.append(f"{self.name} staged {staged.version}")
            return staged

        @app.post("/weights/commit")
        async def commit(call: CommitCall) -> CommitAnswer:
            self.receiver.commit(call.version)
            self.calls.append(f"{self.name} committed {call.version}")
            return CommitAnswer(version=call.version, flip_ms=0.0, requests_in_flight=0)

        @app.get("/weights/digest")
        async def digest() -> DigestAnswer:
            return await asyncio.to_thread(self.receiver.digest)

        return app

    def _stage(self, manifest: Manifest) -> StageAnswer:
        if not self.go_on.wait(timeout=10):
            raise TimeoutError("the test never let the stage go on")
        return self.receiver.stage(manifest)


async def eventually(holds: Callable[[], bool], deadline_s: float = 10.0) -> None:
    """Return as soon as `holds()`; TimeoutError past the deadline."""
    async with asyncio.timeout(deadline_s):
        for _ in count():
            if holds():
                return
            await asyncio.sleep(0.002)


@asynccontextmanager
async def served(app: FastAPI) -> AsyncIterator[str]:
    """Serve `app` on a free port of loopback within this event loop; gives its URL."""
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", ws="none", timeout_graceful_shutdown=2)
    )
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server.serve())
    try:
        await eventually(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task
