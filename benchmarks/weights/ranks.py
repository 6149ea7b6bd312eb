"""What each of two tensor parallel ranks reads of a version: its bytes ÷ the version's (`tp_read_share`).

    this process    publish(v) ── shm ──► vLLM's engine core ─► rank 0, rank 1        each answers what it read
                    dense, then deltas: one number of each two hundred changes

Run as a process of its own: `python -m benchmarks.weights.ranks MODEL`. vLLM forks from its main thread.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.harness.processes import PYTHON, answer_lines, replies_only, running_piped
from services.wire.errors import RollmeshError

RANKS = 2
_RUN = "ranks"
_BUCKET_BYTES = 16 << 20
_START_WITHIN_S = 300.0
_WITHIN_S = 600.0
_ONE_IN = 200
_DELTA_MAX_RATIO = 0.25


class Read(msgspec.Struct, frozen=True, tag=True):
    """Have so many versions read, dense and as deltas."""

    updates: int


class Shares(msgspec.Struct, frozen=True):
    """By version: the bytes of the rank that read the most, of the version's or of its delta's."""

    dense: list[float]
    delta: list[float]


async def read_shares(model: Path, scratch: Path, updates: int, say: Callable[[str], None]) -> Shares:
    """`model`: a Hugging Face folder in float32 with one `model.safetensors`. Raises RollmeshError."""
    say(f"vllm on {RANKS} ranks: what each reads of {updates} versions, and of as many deltas")
    command = [*PYTHON, "benchmarks.weights.ranks", str(model)]
    async with running_piped("vllm ranks", command, scratch, start_within_s=_START_WITHIN_S) as piped:
        return await piped.ask(Read(updates), Shares, _WITHIN_S)


async def _serve(model: Path, replies: int) -> None:
    import torch
    from safetensors.torch import load_file

    from rollout_server.engines.vllm.engine import VllmEngine
    from weight_bus.manifest.manifest import encode_manifest
    from weight_bus.publisher.publisher import Publisher
    from weight_bus.transports.shm import ShmExporter

    engine = VllmEngine(
        model,
        run_id=_RUN,
        dtype="float32",
        max_running=2,
        threads=1,
        transport="shm",
        seed=0,
        tensor_parallel=RANKS,
    )
    await engine.start()
    weights = load_file(model / "model.safetensors")
    publisher = Publisher(_RUN, weights, "float32", ShmExporter(_RUN), _BUCKET_BYTES, delta_max_ratio=_DELTA_MAX_RATIO)
    version = 0

    async def share(one_in: int) -> tuple[float, bool]:
        """Of the next version, of which one number in so many is another; whether it came as a delta."""
        nonlocal version
        version += 1
        for tensor in weights.values():
            tensor.view(-1)[version % one_in :: one_in].add_(0.01 * torch.randn(()))
        manifest = await asyncio.to_thread(publisher.publish(version, weights).manifest)
        staged = await engine.stage(encode_manifest(manifest))
        await engine.commit(version)
        publisher.release(version)
        if staged.rank_bytes is None:
            raise RollmeshError("the engine does not say what its ranks read")
        total = manifest.total_bytes if manifest.delta is None else manifest.delta.total_bytes
        return max(staged.rank_bytes) / total, manifest.delta is not None

    async def read(command: Read) -> Shares:
        dense = [await share(1) for _ in range(command.updates)]
        sparse = [await share(_ONE_IN) for _ in range(command.updates)]
        return Shares(
            [found for found, delta in dense + sparse if not delta], [found for found, delta in sparse if delta]
        )

    try:
        await answer_lines(replies, Read, read)
    finally:
        await engine.close()
        publisher.close()


if __name__ == "__main__":
    answers = replies_only()
    os.environ["OMP_NUM_THREADS"] = "1"
    asyncio.run(_serve(Path(sys.argv[1]), answers))
