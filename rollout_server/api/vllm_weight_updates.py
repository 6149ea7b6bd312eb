"""vLLM's weight update routes over rollmesh's transports: a manifest is staged, then committed between two steps.

For trainers that push weights to one server themselves. In a mesh the weight bus updates all (`weight_routes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import structlog
from fastapi import APIRouter, Body
from pydantic import JsonValue

from rollout_server.api.routes import ERRORS, Ready
from rollout_server.engines.base import Engine
from services.wire import vllm_api
from services.wire.errors import ConflictError, UsageError
from services.wire.weights_api import CommitAnswer
from weight_bus.manifest.manifest import manifest_bytes
from weight_bus.vllm.protocol import BACKEND

_log = structlog.get_logger()
# Keys of the init_info of vLLM's own backends, which send tensors from GPU to GPU.
_TELLTALES = {"master_address": "nccl", "master_port": "nccl", "rank_offset": "nccl"}


def weight_update_routes(engine: Ready[Engine], on_commit: Callable[[], None], dependencies: list[Any]) -> APIRouter:
    """Routes for a trainer that updates one server. Wrong order: 409; a failed step leaves the old version serving."""
    router = APIRouter(tags=["weights"], responses=ERRORS, dependencies=dependencies)
    update = WeightUpdate()

    @router.post("/init_weight_transfer_engine")
    async def init_weight_transfer_engine(call: vllm_api.InitWeightTransfer) -> vllm_api.Message:
        """Begin; an unfinished update is abandoned. `init_info`: `{"backend": "rollmesh"}`, or empty."""
        engine()
        _check_backend(call.init_info)
        update.init()
        return vllm_api.Message(message="Weight transfer initialized")

    @router.post("/start_weight_update")
    async def start_weight_update() -> vllm_api.Message:
        engine()
        update.start()
        return vllm_api.Message(message="Weight update started")

    @router.post("/update_weights")
    async def update_weights(call: vllm_api.UpdateWeights) -> vllm_api.Message:
        """Pull the manifest's buckets into shadow memory while requests run."""
        await update.update(engine(), manifest_bytes(call.update_info.manifest))
        return vllm_api.Message(message="Weights updated")

    @router.post("/finish_weight_update")
    async def finish_weight_update(
        call: Annotated[vllm_api.FinishWeightUpdate | None, Body()] = None,
    ) -> vllm_api.Message:
        """Serve the staged version from the next decode step on; requests in flight go on under it."""
        report = await update.finish(engine(), call.weight_version if call is not None else None)
        on_commit()
        _log.info("commit", version=report.version, flip_ms=round(report.flip_ms, 3), running=report.requests_in_flight)
        return vllm_api.Message(message="Weight update finished")

    @router.get("/weight_info")
    async def weight_info() -> vllm_api.WeightInfo:
        return vllm_api.WeightInfo(weight_version=str(engine().policy_version))

    @router.post("/update_weight_version")
    async def update_weight_version(call: vllm_api.UpdateWeightVersion) -> vllm_api.Message:
        """Always refused: a version belongs to its bytes."""
        engine()
        raise UsageError(
            f"the weights being served cannot be called {call.new_version!r}",
            "a version is fixed by its manifest: send that through /update_weights",
        )

    @router.post("/weight_checker")
    async def weight_checker(call: vllm_api.WeightCheck) -> vllm_api.Checksums | vllm_api.Comparison:
        """Digest of the bytes that are really served, or how it compares. `reset` is refused."""
        served = engine()
        if call.action == "reset":
            raise UsageError("reset would overwrite the weights being served", "use checksum and compare")
        if call.action == "compare" and call.baseline is None:
            raise UsageError("compare needs a baseline", "give what checksum answered")
        checksums = {"root": await served.weights_digest()}
        if call.action == "checksum" or call.baseline is None:
            return vllm_api.Checksums(checksums=checksums)
        baseline = call.baseline
        wrong = sorted(key for key in checksums | baseline if checksums.get(key) != baseline.get(key))
        return vllm_api.Comparison(match=not wrong, mismatches=wrong)

    return router


def _check_backend(init_info: Mapping[str, JsonValue]) -> None:
    """Raise UsageError for any backend but ours, by its name where `init_info` tells it."""
    backend = init_info.get("backend")
    named = (
        backend if backend is not None else next((_TELLTALES[key] for key in _TELLTALES if key in init_info), BACKEND)
    )
    if named != BACKEND:
        raise UsageError(
            f"weight transfer backend {named!r} is not served here",
            f'send init_info {{"backend": "{BACKEND}"}} and manifests; tensors then travel by NIXL, or shared memory',
        )


State = Literal["unset", "idle", "started", "staging", "staged", "committing"]
_NEXT: dict[State, str] = {
    "unset": "/init_weight_transfer_engine",
    "idle": "/start_weight_update",
    "started": "/update_weights",
    "staging": "the answer of /update_weights",
    "staged": "/finish_weight_update",
    "committing": "the answer of /finish_weight_update",
}


class WeightUpdate:
    """State machine of one weight update through vLLM's routes.

        unset ─ init ─► idle ─ start ─► started ─ update ─► staging ──► staged ─ finish ─► committing ──► idle
                         ▲                 ▲                   │ failed                        │ failed
                         │                 └───────────────────┴───────────────────────────────┘
                         └── init, from any state but staging and committing: abandons an unfinished update

    Every other order is refused. Whatever fails, the old version is served on. Used on the event loop only; each call
    changes the state before it awaits.
    """

    def __init__(self) -> None:
        self._state: State = "unset"
        self._staged: int | None = None

    def init(self) -> None:
        """Begin anew."""
        if self._state in ("staging", "committing"):
            raise self._wrong("/init_weight_transfer_engine")
        self._state, self._staged = "idle", None

    def start(self) -> None:
        if self._state != "idle":
            raise self._wrong("/start_weight_update")
        self._state = "started"

    async def update(self, engine: Engine, manifest: bytes) -> int:
        """Stage what the manifest lists; returns its version. Raises ConflictError, and as `Engine.stage` does."""
        if self._state != "started":
            raise self._wrong("/update_weights")
        self._state = "staging"
        try:
            self._staged = (await engine.stage(manifest)).version
        except BaseException:
            self._state = "started"
            raise
        self._state = "staged"
        return self._staged

    async def finish(self, engine: Engine, weight_version: str | None) -> CommitAnswer:
        """Commit what was staged. Raises ConflictError, also for a `weight_version` that is another one."""
        if self._state != "staged" or self._staged is None:
            raise self._wrong("/finish_weight_update")
        if weight_version is not None and weight_version != str(self._staged):
            raise ConflictError(
                f"version {self._staged} is staged, not {weight_version!r}", "finish that one, or begin anew with init"
            )
        self._state = "committing"
        try:
            report = await engine.commit(self._staged)
        except BaseException:
            self._state = "started"
            raise
        self._state, self._staged = "idle", None
        return report

    def _wrong(self, call: str) -> ConflictError:
        return ConflictError(f"{call} is out of order (the update is {self._state})", f"next: {_NEXT[self._state]}")
