"""The servers that are measured: ours, and vLLM's own beside it, on the same folder with the same bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import aiohttp

from rollout_server.bench.http_arm import HttpArm
from rollout_server.bench.workload import TIMED_KV_POLICY
from services.bench.processes import LOOPBACK, PYTHON, Child, free_port, running
from services.config_file import dump_settings
from services.settings import RunSettings
from services.wire.kv_policy import KvPolicy

_OURS_WITHIN_S = 300.0
_GATEWAY_WITHIN_S = 60.0
_THEIRS_WITHIN_S = 420.0
# More sessions than a benchmark ever opens at once, and none that expires while it runs.
_GROUPS = 1 << 16
_TIMEOUT_S = 86400.0


@dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """What the processes of one run have in common. `settings`: the file with the run's configuration."""

    run_id: str
    redis_url: str
    settings: Path
    model: Path
    engine: str
    folder: Path

    def command(self, name: str, port: int) -> list[str]:
        """The command line of one of them, as anybody would start it."""
        command = [*PYTHON, "services", name, "--run-id", self.run_id, "--port", str(port)]
        return [*command, "--redis-url", self.redis_url, "--config", str(self.settings)]


async def plan_mesh(
    run_id: str,
    *,
    redis_url: str,
    model: Path,
    engine: str,
    max_running: int,
    folder: Path,
    kv_policy: KvPolicy = TIMED_KV_POLICY,
) -> MeshPlan:
    """Write a run's configuration: the defaults, but for what is given and for admission, which never closes."""
    settings = RunSettings()
    settings.rollout.max_running = max_running
    settings.rollout.groups_per_step = _GROUPS
    settings.rollout.group_timeout_s = _TIMEOUT_S
    settings.rollout.kv_policy = kv_policy
    path = folder / f"{run_id}.toml"
    await asyncio.to_thread(path.write_text, dump_settings(settings))
    return MeshPlan(run_id=run_id, redis_url=redis_url, settings=path, model=model, engine=engine, folder=folder)


@asynccontextmanager
async def running_server(
    plan: MeshPlan,
    server_id: str,
    http: aiohttp.ClientSession,
    surroundings: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[tuple[HttpArm, Child]]:
    """`rollmesh rollout-server`, ready. Raises RollmeshError when it does not come up."""
    port = free_port()
    command = plan.command("rollout-server", port)
    command += ["--server-id", server_id, "--model", str(plan.model), "--engine", plan.engine]
    url = f"http://{LOOPBACK}:{port}"
    name = f"server {plan.run_id} {server_id}"
    async with running(name, command, plan.folder, environment=surroundings) as child:
        await child.until(lambda: _answers(http, f"{url}/readyz"), _OURS_WITHIN_S)
        yield HttpArm(http, url, child.tail), child


@asynccontextmanager
async def running_gateway(plan: MeshPlan, http: aiohttp.ClientSession) -> AsyncIterator[tuple[HttpArm, Child]]:
    """`rollmesh gateway` in front of the run's servers. Raises RollmeshError when it does not come up."""
    port = free_port()
    url = f"http://{LOOPBACK}:{port}"
    async with running(f"gateway {plan.run_id}", plan.command("gateway", port), plan.folder) as child:
        await child.until(lambda: _answers(http, f"{url}/readyz"), _GATEWAY_WITHIN_S)
        yield HttpArm(http, url, child.tail), child


@asynccontextmanager
async def running_ours(
    engine: str, model: Path, redis_url: str, max_running: int, folder: Path, http: aiohttp.ClientSession, name: str
) -> AsyncIterator[tuple[HttpArm, Child]]:
    """A server in a run of its own. `name`: unique in the benchmark."""
    plan = await plan_mesh(
        name, redis_url=redis_url, model=model, engine=engine, max_running=max_running, folder=folder
    )
    async with running_server(plan, name, http) as started:
        yield started


@asynccontextmanager
async def running_vllm_serve(
    model: Path, max_running: int, folder: Path, http: aiohttp.ClientSession
) -> AsyncIterator[HttpArm]:
    """vLLM's OpenAI server: its own defaults, but what must be equal in both."""
    port = free_port()
    command = [*PYTHON, "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "policy"]
    command += ["--host", LOOPBACK, "--port", str(port), "--dtype", "float32", "--max-num-seqs", str(max_running)]
    command += ["--enforce-eager", "--no-enable-prefix-caching", "--generation-config", "vllm"]
    command += ["--disable-log-stats", "--disable-uvicorn-access-log", "--kv-cache-memory-bytes", str(1 << 30)]
    environment = {
        "OMP_NUM_THREADS": "1",
        # Eager in both: its first answers would otherwise wait for a compiler.
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": LOOPBACK,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    url = f"http://{LOOPBACK}:{port}"
    # It leaves sockets and rendezvous files behind; the path of a socket must be short.
    with TemporaryDirectory(prefix="rollmesh-", ignore_cleanup_errors=True) as sockets:
        environment["TMPDIR"] = sockets
        async with running("vllm serve", command, folder, environment=environment) as child:
            await child.until(lambda: _answers(http, f"{url}/health"), _THEIRS_WITHIN_S)
            yield HttpArm(http, url, child.tail, sessions=False)


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url) as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False
