"""The servers that are measured: ours, and vLLM's own beside it, on the same folder with the same bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from rollout_server.bench.http_arm import HttpArm
from rollout_server.bench.processes import LOOPBACK, PYTHON, Child, free_port, running
from services.config_file import dump_settings
from services.settings import RunSettings

_OURS_WITHIN_S = 300.0
_THEIRS_WITHIN_S = 420.0
# More sessions than a benchmark ever opens at once, and none that expires while it runs.
_GROUPS = 1 << 16
_TIMEOUT_S = 86400.0


@asynccontextmanager
async def running_ours(
    engine: str, model: Path, redis_url: str, max_running: int, folder: Path, http: aiohttp.ClientSession, name: str
) -> AsyncIterator[tuple[HttpArm, Child]]:
    """`rollmesh rollout-server`, as anybody starts it. `name`: unique in the benchmark."""
    settings = RunSettings()
    settings.rollout.max_running = max_running
    settings.rollout.groups_per_step = _GROUPS
    settings.rollout.group_timeout_s = _TIMEOUT_S
    config = folder / f"{name}.toml"
    await asyncio.to_thread(config.write_text, dump_settings(settings))
    port = free_port()
    command = [*PYTHON, "services", "rollout-server", "--run-id", name, "--server-id", name, "--port", str(port)]
    command += ["--redis-url", redis_url, "--model", str(model), "--engine", engine, "--config", str(config)]
    url = f"http://{LOOPBACK}:{port}"
    async with running(f"server {name}", command, folder) as child:
        await child.until(lambda: _answers(http, f"{url}/readyz"), _OURS_WITHIN_S)
        yield HttpArm(http, url, child.tail), child


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
    async with running("vllm serve", command, folder, environment=environment) as child:
        await child.until(lambda: _answers(http, f"{url}/health"), _THEIRS_WITHIN_S)
        yield HttpArm(http, url, child.tail, sessions=False)


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url) as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False
