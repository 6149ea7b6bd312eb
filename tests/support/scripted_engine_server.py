"""A server that speaks vLLM's token route and generates what a test tells it, on a real socket in the test's event loop."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from weight_bus.manifest.layout import root_digest
from weight_bus.manifest.manifest import Bucket, Layout, Manifest, Owner, encode_manifest

MAX_MODEL_LEN = 256
FIRST_TOKEN = 5


def manifest(version: int) -> bytes:
    """A version of one byte: a scripted server reads none of it."""
    bucket = Bucket(offset=0, length=1, hash="00" * 32)
    layout = Layout(tensors=[], total_bytes=1, digest="")
    owner = Owner(total_bytes=1, sources=[])
    digest = root_digest([bucket.hash])
    return encode_manifest(
        Manifest(run_id="run", version=version, layout=layout, owners=[owner], buckets=[bucket], root_digest=digest)
    )


class ScriptedEngineServer:
    """A plain `vllm serve`: no versions but vLLM's, with the final chunk; routes for operators only if `operated`.

    Tokens are 5, 6, 7 …, a chunk each. `step`: cleared, an answer stands still after its first `free` tokens.
    """

    def __init__(self, *, operated: bool = True, processed: bool = True) -> None:
        self.operated = operated
        self.processed = processed
        self.label = "default"
        self.said: str | None = None
        """What the final chunk calls the weights, where that is not their label."""
        self.refusal: tuple[int, dict[str, Any]] | None = None
        self.event: dict[str, Any] | None = None
        """Sent in the place of the third token."""
        self.step = asyncio.Event()
        self.step.set()
        self.free = 0
        self.log: list[str] = []
        """Operators' calls and generate calls, in order."""
        self.calls: list[dict[str, Any]] = []
        self.in_flight = 0
        self.url = ""

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[ScriptedEngineServer]:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_post("/inference/v1/generate", self._generate)
        if self.operated:
            app.router.add_get("/weight_info", self._weight_info)
            app.router.add_get("/is_paused", self._is_paused)
            for name in ("pause", "resume", "init_weight_transfer_engine", "start_weight_update", "update_weights"):
                app.router.add_post(f"/{name}", self._operate)
            app.router.add_post("/finish_weight_update", self._finish)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        host, found = runner.addresses[0][:2]
        self.url = f"http://{host}:{found}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy", "max_model_len": MAX_MODEL_LEN}]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def _is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": False})

    async def _operate(self, request: web.Request) -> web.Response:
        self.log.append(request.path + (f"?{request.query_string}" if request.query_string else ""))
        return web.json_response({"message": "done"})

    async def _finish(self, request: web.Request) -> web.Response:
        self.log.append(request.path)
        assert self.in_flight == 0, "the weights change under a request"
        self.label = (await request.json())["weight_version"]
        return web.json_response({"message": "done"})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        call = await request.json()
        if self.refusal is not None:
            status, body = self.refusal
            return web.json_response(body, status=status)
        self.log.append("generate")
        self.calls.append(call)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        self.in_flight += 1
        try:
            await self._generate_tokens(call, answer)
        finally:
            self.in_flight -= 1
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def _generate_tokens(self, call: dict[str, Any], answer: web.StreamResponse) -> None:
        parameters = call["sampling_params"]
        rehearsal = parameters["top_k"] == 1
        logprob = 0.0 if rehearsal and self.processed else -0.5
        for number in itertools.count(1):
            if not rehearsal and number > self.free:
                await self.step.wait()
            if number == 3 and self.event is not None:
                await answer.write(b"data: " + json.dumps(self.event).encode() + b"\n\n")
                return
            token, last = FIRST_TOKEN + number - 1, number == parameters["max_tokens"]
            entry = {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": []}
            choice = {
                "index": 0,
                "token_ids": [token],
                "logprobs": {"content": [entry]},
                "finish_reason": "length" if last else None,
                "weight_versions": [{"version": self.said or self.label, "start": 0, "end": number}] if last else None,
            }
            await answer.write(b"data: " + json.dumps({"request_id": "r", "choices": [choice]}).encode() + b"\n\n")
            if last:
                return
