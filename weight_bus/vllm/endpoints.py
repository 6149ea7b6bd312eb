"""vLLM endpoint plug-in (`vllm.endpoint_plugins`): weight routes and bus membership for a plain `vllm serve`.

    VLLM_PLUGINS=rollmesh ROLLMESH_VLLM_LIVE_WEIGHTS=1 ROLLMESH_RUN_ID=… ROLLMESH_BUS_URL=… \\
        vllm serve MODEL --host 127.0.0.1 --no-async-scheduling

    API process                                        engine core
    POST /weights/stage     manifest  ───────────────► a thread pulls buckets into shadow memory; decoding goes on
    POST /weights/commit    version   ───────────────► between two steps: flip, relabel
    POST /weights/rollback  version   ───────────────► likewise, one step back
    GET  /weights/digest              ───────────────► a thread hashes what is served
    registered with the bus while it listens; the lease is renewed with the version served

Bodies and answers are those of `weight_bus.client.engine_routes`; `EngineSettings` lists the environment variables. vLLM
loads the plug-in only where `VLLM_PLUGINS` names it. Importing this module imports neither torch nor vLLM.
"""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import structlog
from fastapi import Depends, FastAPI, Request, Response

from services.config.model_folder import weight_file_bytes
from services.http.app import error_answer
from services.http.auth import Authorizer
from services.policies.training.deadlines import within
from services.security.keys import KEYS_DIR, read_key, read_keys
from services.security.permissions import NO_KEYS, Keys, is_loopback
from services.security.tls import TLS_DIR, Tls, read_tls
from services.wire.errors import DeadlineError, NotReadyError, RollmeshError, UsageError
from services.wire.sampling import KvPolicy
from services.wire.weights_api import CommitAnswer, DigestAnswer, StageAnswer
from weight_bus.client.bus_client import BusClient
from weight_bus.client.engine_routes import weight_routes
from weight_bus.client.membership import Membership
from weight_bus.vllm.protocol import LIVE_WEIGHTS, Attached, Committed, Digest, Staged, ask

_log = structlog.get_logger()
_PROBE_S = 0.05
_LISTENING_S = 60.0


class RollmeshEndpoints:
    """The plug-in of one API process. vLLM calls `attach_router` before the engine exists, then `init_state`."""

    name = "rollmesh"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self.engine = PlainEngine()
        self._settings: EngineSettings | None = None
        self._listens: tuple[str, int] = ("127.0.0.1", 0)

    def attach_router(self, app: FastAPI) -> None:
        """The routes, where this vLLM was given a run."""
        if not os.environ.get("ROLLMESH_RUN_ID"):
            return
        app.include_router(weight_routes(self.engine, dependencies=[Depends(self.engine.admit)]))

        @app.exception_handler(RollmeshError)
        async def on_typed_error(_: Request, error: RollmeshError) -> Response:
            return error_answer(error)

        inner = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(own: FastAPI) -> AsyncIterator[Any]:
            async with inner(own) as state, self._joined():
                yield state

        app.router.lifespan_context = lifespan

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:  # noqa: ARG002 - vLLM's signature
        """Build the views into the weights. Raises, so that vLLM does not start, where new weights could not be loaded."""
        settings = read_settings(args.host or "0.0.0.0", args.port)
        if settings is None or engine_client is None:
            return
        if os.environ.get(LIVE_WEIGHTS) != "1":
            raise UsageError(f"{LIVE_WEIGHTS} is not 1: this vLLM packs its weights away", "set it and start again")
        if (getattr(args, "api_server_count", None) or 1) > 1:
            raise UsageError("several API servers would each register this engine", "leave --api-server-count out")
        check_address(args.host, settings)
        check_served_by_tls(getattr(args, "ssl_certfile", None), settings)
        await self.engine.attach(engine_client, settings)
        self._settings = settings
        self._listens = (args.host or "127.0.0.1", args.port)

    @asynccontextmanager
    async def _joined(self) -> AsyncIterator[None]:
        """Registered with the bus during the block, from when the server listens."""
        settings = self._settings
        if settings is None or settings.bus_url is None:
            yield
            return
        key = settings.bus_key or settings.keys.peer
        bus = BusClient(settings.bus_url, settings.run_id, key=key, trust=settings.tls.trust)
        membership = Membership(
            bus,
            settings.engine_id,
            settings.url,
            lambda: self.engine.policy_version,
            lambda: self.engine.staged_version,
            lambda: self.engine.ranks,
        )
        task = asyncio.create_task(self._run(membership), name="rollmesh membership")
        async with AsyncExitStack() as stack:
            stack.push_async_callback(membership.leave)
            stack.push_async_callback(_end, task)
            yield

    async def _run(self, membership: Membership) -> None:
        host, port = self._listens
        await _until_listening(host, port)
        await membership.run()


async def _until_listening(host: str, port: int) -> None:
    """vLLM listens soon after its application has started; the bus calls as soon as it knows of the engine.

    Raises DeadlineError.
    """
    own = host if host != "0.0.0.0" else "127.0.0.1"
    try:
        async with asyncio.timeout(_LISTENING_S):
            while True:
                try:
                    _, writer = await asyncio.open_connection(own, port)
                except OSError:
                    await asyncio.sleep(_PROBE_S)
                    continue
                writer.close()
                return
    except TimeoutError as error:
        raise DeadlineError(
            f"vLLM did not listen on {own}:{port} within {_LISTENING_S:g} s, and is no member of the bus", "see its log"
        ) from error


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled() and task.exception() is not None:
        _log.error("membership of the weight bus broke", exc_info=task.exception())


_BYTES_S = 600.0
"""To attach to all weights, to read or to hash them, at the least; the bus, which asks for it, gives up before."""
_CALL_S = 60.0
_Answer = TypeVar("_Answer", Attached, Staged, Committed, Digest)


class PlainEngine:
    """Weight updates of a plain `vllm serve`, by calls to its engine core: `engine_routes.UpdatedEngine`.

    Before `attach` every call raises NotReadyError. Used on the event loop.
    """

    def __init__(self) -> None:
        self.policy_version = 0
        self.staged_version: int | None = None
        self.ranks = 1
        self._hashed_within = _BYTES_S
        self._authorizer = Authorizer(NO_KEYS)
        self._core: Any = None

    async def attach(self, engine_client: Any, settings: EngineSettings) -> None:
        """Build views into the live weights, in the core. Raises where that is impossible, and says what to change."""
        self._core = engine_client.engine_core
        self._authorizer = Authorizer(settings.keys)
        try:
            async with asyncio.timeout(_CALL_S):
                await self._core.call_utility_async("rollmesh_extend")
        except TimeoutError as error:
            raise DeadlineError(f"vLLM did not answer within {_CALL_S:g} s", "see its log") from error
        attached = await self._call(
            Attached,
            "rollmesh_attach",
            settings.run_id,
            settings.transport,
            settings.kv_policy,
            settings.keys.weights,
            settings.file_root,
            deadline_s=within(_BYTES_S, weight_file_bytes(Path(engine_client.vllm_config.model_config.model))),
        )
        self.ranks, self._hashed_within = attached.ranks, within(_BYTES_S, attached.total_bytes)
        _log.info(
            "takes weights",
            run_id=settings.run_id,
            tensors=attached.tensors,
            weight_bytes=attached.total_bytes,
            ranks=attached.ranks,
        )

    async def admit(self, request: Request) -> None:
        """FastAPI dependency of the routes: with keys each call needs scope `service` (`Authorizer.require`)."""
        self._authorizer.require(request.headers.get("authorization"), "service")

    async def stage(self, manifest: bytes) -> StageAnswer:
        self.staged_version = None
        staged = (await self._call(Staged, "rollmesh_stage", manifest, deadline_s=self._hashed_within)).result
        self.staged_version = staged.version
        return staged

    async def commit(self, version: int) -> CommitAnswer:
        return await self._serve("rollmesh_commit", version)

    async def rollback(self, version: int) -> CommitAnswer:
        return await self._serve("rollmesh_rollback", version)

    async def digest(self) -> DigestAnswer:
        found = (await self._call(Digest, "rollmesh_digest", deadline_s=self._hashed_within)).result
        self.policy_version = found.version
        return found

    async def _serve(self, method: str, version: int) -> CommitAnswer:
        committed = (await self._call(Committed, method, version)).result
        self.policy_version, self.staged_version = committed.version, None
        _log.info(method, version=version, flip_ms=round(committed.flip_ms, 3), running=committed.requests_in_flight)
        return committed

    async def _call(self, answer: type[_Answer], method: str, *arguments: Any, deadline_s: float = _CALL_S) -> _Answer:
        if self._core is None:
            raise NotReadyError("the engine is not started", "wait until it listens")
        try:
            async with asyncio.timeout(deadline_s):
                reply = await ask(self._core, method, *arguments)
        except TimeoutError as error:
            raise DeadlineError(f"vLLM did not answer {method} within {deadline_s:g} s", "see its log") from error
        if not isinstance(reply, answer):
            raise RollmeshError(f"vLLM answered {method} with {type(reply).__name__}")
        return reply


def check_served_by_tls(certificate: str | None, settings: EngineSettings) -> None:
    """Raise UsageError for a vLLM of plain HTTP in a mesh of TLS. `certificate`: its --ssl-certfile."""
    ours = settings.tls.identity
    if ours is not None and not certificate:
        raise UsageError(
            "this vLLM speaks plain HTTP, and the mesh TLS",
            f"start it with --ssl-certfile {ours.certificate} --ssl-keyfile {ours.key}",
        )


def check_address(host: str | None, settings: EngineSettings) -> None:
    """Raise UsageError for weight routes that other hosts can call without a key, or an address that cannot be called."""
    # Without --host vLLM listens on every address.
    named = host or "0.0.0.0"
    if settings.keys.admin is None and not is_loopback(named):
        raise UsageError(
            f"{named} is not a loopback address, and /weights/* would take anybody's weights",
            "give --host 127.0.0.1, or keys by ROLLMESH_KEYS_DIR",
        )
    if settings.bus_url is not None and f"//{named}:" in settings.url and named in ("0.0.0.0", "::"):
        raise UsageError(f"the bus cannot call {settings.url}", "say where it finds this engine by ROLLMESH_ENGINE_URL")


_WEIGHTS_KEY = "ROLLMESH_WEIGHTS_KEY_FILE"


@dataclass(frozen=True)
class EngineSettings:
    """The plug-in's settings, from environment variables. `bus_url` None: updates come from direct calls of the routes.

    | variable                    | meaning                                               | without it           |
    |-----------------------------|-------------------------------------------------------|----------------------|
    | `ROLLMESH_RUN_ID`           | the run whose manifests are accepted                  | no routes of ours    |
    | `ROLLMESH_BUS_URL`          | the weight bus to register with                       | none is joined       |
    | `ROLLMESH_ENGINE_ID`        | the engine's id there                                 | `vllm-HOST-PORT`     |
    | `ROLLMESH_ENGINE_URL`       | the engine's address for the bus                      | `http://HOST:PORT`   |
    | `ROLLMESH_TRANSPORT`        | the run's `weights.transport`                         | `auto`               |
    | `ROLLMESH_KV_POLICY`        | `salt`, `recompute`; `keep` without prefix cache only | `salt`               |
    | `ROLLMESH_WEIGHTS_SHADOW`   | the run's `weights.shadow`, read in the workers       | `device`             |
    | `ROLLMESH_WEIGHTS_PACKED`   | `alone`, `beside` or `off`, as `weights.packed`       | by the model's size  |
    | `ROLLMESH_FILE_ROOT`        | the folder that weight files may be read from         | none is read         |
    | `ROLLMESH_KEYS_DIR`         | a folder with admin, peer and weights key             | the three files here |
    | `ROLLMESH_ADMIN_KEY_FILE`   | the bearer key that `/weights/*` requires             | loopback only        |
    | `ROLLMESH_BUS_KEY_FILE`     | the bearer key for the bus                            | the peer key, if any |
    | `ROLLMESH_WEIGHTS_KEY_FILE` | the key that manifests are signed with                | no signature needed  |
    | `ROLLMESH_TLS_DIR`          | certificates: the bus is called by TLS, as vLLM is    | plain HTTP           |
    """

    run_id: str
    bus_url: str | None
    engine_id: str
    url: str
    transport: str
    kv_policy: KvPolicy
    keys: Keys
    bus_key: str | None
    file_root: str | None
    tls: Tls


def read_settings(host: str, port: int, environment: Mapping[str, str] | None = None) -> EngineSettings | None:
    """The settings of a vLLM that listens on `host:port`; None where it was given no run.

    Raises UsageError for a policy that is unknown, and for a key or a certificate that cannot be read.
    """
    given = os.environ if environment is None else environment
    run_id = given.get("ROLLMESH_RUN_ID")
    if not run_id:
        return None
    policy = given.get("ROLLMESH_KV_POLICY", "salt")
    if policy not in get_args(KvPolicy):
        raise UsageError(f"no KV policy {policy!r}", f"ROLLMESH_KV_POLICY: {', '.join(get_args(KvPolicy))}")
    tls = read_tls(_path(given, TLS_DIR))
    return EngineSettings(
        run_id=run_id,
        bus_url=given.get("ROLLMESH_BUS_URL") or None,
        engine_id=given.get("ROLLMESH_ENGINE_ID") or f"vllm-{host}-{port}",
        url=tls.own_url(host, port, given.get("ROLLMESH_ENGINE_URL") or None),
        transport=given.get("ROLLMESH_TRANSPORT", "auto"),
        kv_policy=cast("KvPolicy", policy),
        keys=read_keys(
            "engine",
            _path(given, KEYS_DIR),
            {"admin": _path(given, "ROLLMESH_ADMIN_KEY_FILE"), "weights": _path(given, _WEIGHTS_KEY)},
        ),
        bus_key=_key(given, "ROLLMESH_BUS_KEY_FILE"),
        file_root=given.get("ROLLMESH_FILE_ROOT") or None,
        tls=tls,
    )


def weights_key() -> str | None:
    """The key with which manifests must be signed. Raises UsageError for a file that holds none."""
    folder = _path(os.environ, KEYS_DIR)
    return read_keys("engine", folder, {"weights": _path(os.environ, _WEIGHTS_KEY)}).weights


def file_root() -> str | None:
    """The folder that weight files may be read from; None: none is."""
    return os.environ.get("ROLLMESH_FILE_ROOT") or None


def _key(environment: Mapping[str, str], name: str) -> str | None:
    path = _path(environment, name)
    return None if path is None else read_key(path)


def _path(environment: Mapping[str, str], name: str) -> Path | None:
    return Path(environment[name]) if environment.get(name) else None
