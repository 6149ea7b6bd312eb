"""Exactness check of `vllm serve` with the plug-in: after many updates under load, compare with a fresh server.

vllm serve + plug-in  ◄─ stage, commit ─ version 1 … n, while requests decode ──► greedy tokens, logprobs ┐
vllm serve            ◄─ loads a snapshot of version n ─────────────────────────► greedy tokens, logprobs ┴─► equal?
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness.processes import LOOPBACK, PYTHON, free_port, running
from benchmarks.weights.arms import Sampled
from benchmarks.weights.report import Exactness
from services.wire.errors import RollmeshError
from weight_bus.coordinator.engine_client import EngineClient
from weight_bus.manifest.manifest import encode_manifest
from weight_bus.publisher.publisher import Publisher
from weight_bus.transports.shm import ShmExporter

_RUN = "exact"
_START_S = 240.0
_CALL_S = 120.0
_BUCKET_BYTES = 16 << 20
_STREAMS = 4
_PROMPTS = 8
_TOKENS = 32
_CHANGE = 0.05
"""Each update adds noise of this share of a tensor's own spread."""
_SERVE = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": LOOPBACK,
    "GLOO_SOCKET_IFNAME": "lo",
}
_PLUGGED_IN = {"VLLM_PLUGINS": "rollmesh", "ROLLMESH_VLLM_LIVE_WEIGHTS": "1", "ROLLMESH_RUN_ID": _RUN}


async def plain_serve(folder: Path, updates: int, say: Callable[[str], None]) -> Exactness:
    """`folder`: a complete Hugging Face model in float32 with one `model.safetensors`. It is left as it is.

    Raises RollmeshError for a server that does not come up, refuses a version, or answers with something else than tokens.
    """
    with TemporaryDirectory(prefix="rollmesh-exact-") as name:
        work = Path(name)
        weights = load_file(folder / "model.safetensors")
        say("plain vllm serve: starting it with the plug-in")
        async with _serving(folder, work / "updated", _PLUGGED_IN) as url:
            await _update(url, weights, updates, say)
            found = await _sample(url, _vocabulary(weights))
        await asyncio.to_thread(shutil.copytree, folder, work / "snapshot")
        save_file(weights, work / "snapshot" / "model.safetensors", metadata={"format": "pt"})
        say("plain vllm serve: loading a fresh one")
        async with _serving(work / "snapshot", work / "fresh", {}) as url:
            expected = await _sample(url, _vocabulary(weights))
        return compare(updates, found, expected)


async def _update(url: str, weights: dict[str, torch.Tensor], updates: int, say: Callable[[str], None]) -> None:
    """Versions 1 … `updates`, each other weights, committed while requests decode; `weights` become the last."""
    generator = torch.Generator().manual_seed(0)
    exporter = ShmExporter(_RUN)
    publisher = Publisher(_RUN, weights, "float32", exporter, _BUCKET_BYTES)
    engine = EngineClient(_CALL_S)
    async with AsyncExitStack() as stack:
        stack.callback(publisher.close)
        stack.push_async_callback(engine.close)
        await stack.enter_async_context(_load(url, _vocabulary(weights)))
        for version in range(1, updates + 1):
            for tensor in weights.values():
                spread = float(tensor.std()) if tensor.numel() > 1 else 1.0
                tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=_CHANGE * (spread or 0.01))
            manifest = await asyncio.to_thread(publisher.publish(version, weights).manifest)
            await engine.stage(url, encode_manifest(manifest), engine.timeout_s)
            await engine.commit(url, version)
            publisher.release(version)
            if version % 10 == 0 or version == updates:
                say(f"plain vllm serve: {version} of {updates} updates")
        digest = await engine.digest(url, engine.timeout_s)
        if (digest.version, digest.root_digest) != (updates, manifest.root_digest):
            raise RollmeshError(f"vllm serve serves version {digest.version}, digest {digest.root_digest[:16]}…")


@asynccontextmanager
async def _load(url: str, vocabulary: int) -> AsyncIterator[None]:
    """A few streams that decode for the time of the block, one request after the other."""
    async with httpx.AsyncClient(base_url=url, timeout=_CALL_S) as http:

        async def stream(number: int) -> None:
            prompt = _prompt(number, vocabulary)
            while True:
                await _generate(http, prompt, 64, temperature=1.0)

        tasks = [asyncio.create_task(stream(100 + number), name=f"load {number}") for number in range(_STREAMS)]
        try:
            yield
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def _sample(url: str, vocabulary: int) -> Sampled:
    sampled = Sampled([], [])
    async with httpx.AsyncClient(base_url=url, timeout=_CALL_S) as http:
        for number in range(_PROMPTS):
            choice = await _generate(http, _prompt(number, vocabulary), _TOKENS, temperature=0.0)
            sampled.token_ids.append(choice["token_ids"])
            sampled.logprobs.append([entry["logprob"] for entry in choice["logprobs"]["content"]])
    return sampled


async def _generate(http: httpx.AsyncClient, prompt: list[int], tokens: int, *, temperature: float) -> dict[str, Any]:
    sampling = {"temperature": temperature, "max_tokens": tokens, "ignore_eos": True, "logprobs": 0}
    body = {"token_ids": prompt, "sampling_params": sampling, "stream": False}
    answer = await http.post("/inference/v1/generate", json=body)
    if answer.status_code != 200:
        raise RollmeshError(f"vllm serve answered {answer.status_code}: {answer.text[:300]}")
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


@asynccontextmanager
async def _serving(model: Path, folder: Path, environment: Mapping[str, str]) -> AsyncIterator[str]:
    """A plain `vllm serve` over `model`; its address."""
    await asyncio.to_thread(folder.mkdir)
    port = free_port()
    command = [*PYTHON, "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "policy"]
    command += ["--host", LOOPBACK, "--port", str(port), "--dtype", "float32", "--enforce-eager", "--enable-scale-out"]
    command += ["--generation-config", "vllm", "--max-num-seqs", "16", "--kv-cache-memory-bytes", str(256 << 20)]
    command += ["--max-model-len", "256", "--no-async-scheduling", "--skip-tokenizer-init", "--disable-log-stats"]
    url = f"http://{LOOPBACK}:{port}"
    # A socket's path must be short.
    with TemporaryDirectory(prefix="rollmesh-", ignore_cleanup_errors=True) as sockets:
        variables = {**_SERVE, "TMPDIR": sockets, **environment}
        async with running("vllm serve", command, folder, environment=variables) as child:
            async with httpx.AsyncClient(timeout=5.0) as http:
                await child.until(lambda: _healthy(http, url), _START_S)
            yield url


async def _healthy(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(f"{url}/health")).status_code == 200
    except httpx.TransportError:
        return False


def _vocabulary(weights: Mapping[str, torch.Tensor]) -> int:
    return next(int(tensor.shape[0]) for name, tensor in weights.items() if name.endswith("embed_tokens.weight"))


def _prompt(number: int, vocabulary: int) -> list[int]:
    generator = torch.Generator().manual_seed(number)
    return [int(token) for token in torch.randint(0, vocabulary, (12,), generator=generator)]


def compare(updates: int, found: Sampled, expected: Sampled) -> Exactness:
    """Token by token. Logprobs count as far as the tokens agree; of streams of other lengths, nothing agrees."""
    errors = [0.0]
    for tokens, logprobs, others, their_logprobs in zip(
        found.token_ids, found.logprobs, expected.token_ids, expected.logprobs, strict=True
    ):
        for ours, logprob, theirs, their_logprob in zip(tokens, logprobs, others, their_logprobs, strict=False):
            errors.append(abs(logprob - their_logprob))
            if ours != theirs:
                break
    return Exactness(
        updates=updates,
        tokens=sum(len(tokens) for tokens in expected.token_ids),
        tokens_equal=found.token_ids == expected.token_ids,
        max_logprob_error=max(errors),
    )
