"""A vLLM engine in a process of its own, for tests that end it roughly.

    python -m tests.support.vllm_life MODEL RANKS

Prints one JSON line when the engine serves: its pids, its scratch folder, a port this process listens on. Then it keeps a
request running until something ends it.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from pathlib import Path

from rollout_server.engines.base import GenerationRequest, collect
from rollout_server.engines.vllm.engine import VllmEngine
from services.observability.logging import configure_logging
from services.wire.sampling import SamplingParams


async def live(model: Path, ranks: int) -> None:
    configure_logging("life")
    engine = VllmEngine(
        model, run_id="life", dtype="float32", max_running=4, threads=1, transport="shm", seed=0, tensor_parallel=ranks
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await engine.start()
        core = engine.core.running().engine_core.resources.engine_manager.processes[0].pid
        said = {
            "pid": os.getpid(),
            "core": core,
            "scratch": str(engine.core.scratch),
            "port": listener.getsockname()[1],
        }
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()
        number = 0
        while True:
            number += 1
            sampling = SamplingParams(max_tokens=200, ignore_eos=True)
            await collect(engine.generate(GenerationRequest(f"r{number}", [5, 6, 7], sampling)))


if __name__ == "__main__":
    asyncio.run(live(Path(sys.argv[1]), int(sys.argv[2])))
