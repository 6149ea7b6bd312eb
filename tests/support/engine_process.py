"""Servers that hold an engine, each in a process of its own, for tests that put a rollout server in front or kill them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx


class EngineProcess:
    """Started, and answering with 200 on `probe`. What it says goes to `log`."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self._process = process
        self.url = url
        self.log = log

    async def until_ready(self, probe: str, deadline_s: float) -> None:
        async with asyncio.timeout(deadline_s), httpx.AsyncClient() as http:
            while True:
                if self._process.poll() is not None:
                    raise RuntimeError(f"it ended with {self._process.returncode}:\n{self.log.read_text()[-4000:]}")
                try:
                    if (await http.get(self.url + probe)).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.05)

    def kill(self) -> None:
        """As a machine that goes down would: no goodbye."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(timeout=10)

    async def end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                await asyncio.to_thread(self._process.wait, 20)
            except subprocess.TimeoutExpired:
                self.kill()


@asynccontextmanager
async def engine_process(
    arguments: Sequence[str], *, port: int, probe: str, log: Path, deadline_s: float, environment: dict[str, str]
) -> AsyncIterator[EngineProcess]:
    """`python -m …arguments` until the block ends."""
    process = _start(arguments, log, environment)
    running = EngineProcess(process, f"http://127.0.0.1:{port}", log)
    try:
        await running.until_ready(probe, deadline_s)
        yield running
    finally:
        await running.end()


def _start(arguments: Sequence[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        command = [sys.executable, "-m", *arguments]
        return subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **environment})


def rollout_server_process(
    folder: Path, redis_url: str, run_id: str, port: int, log: Path
) -> AbstractAsyncContextManager[EngineProcess]:
    """`rollmesh rollout-server` with the torch engine."""
    arguments = ["services", "rollout-server", "--run-id", run_id, "--server-id", "behind", "--port", str(port)]
    arguments += ["--redis-url", redis_url, "--model", str(folder), "--engine", "torch"]
    return engine_process(arguments, port=port, probe="/readyz", log=log, deadline_s=60.0, environment={})


@asynccontextmanager
async def vllm_process(
    folder: Path, port: int, log: Path, *options: str, environment: dict[str, str] | None = None
) -> AsyncIterator[EngineProcess]:
    """vLLM's own server over `folder`, in float32 and eager, with its token route and the routes for operators."""
    arguments = ["vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "policy"]
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-num-seqs", "32"]
    arguments += ["--enforce-eager", "--generation-config", "vllm", "--disable-uvicorn-access-log"]
    arguments += ["--kv-cache-memory-bytes", str(64 << 20), "--enable-scale-out", *options]
    variables = {
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_SERVER_DEV_MODE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "ROLLMESH_VLLM_LIVE_WEIGHTS": "1",
        **(environment or {}),
    }
    # It leaves sockets and rendezvous files behind; the path of a socket must be short.
    with TemporaryDirectory(prefix="rollmesh-", ignore_cleanup_errors=True) as sockets:
        variables["TMPDIR"] = sockets
        async with engine_process(
            arguments, port=port, probe="/health", log=log, deadline_s=240.0, environment=variables
        ) as running:
            yield running
