"""An engine core in a process of its own: it ends with its server, a crash is told, and the server imports no torch.

What it generates and which weights it serves, the engines' contract holds it to.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from rollout_server.engines.base import EngineCrashedError, GenerationRequest, NonFiniteLogitsError, collect
from rollout_server.engines.torch.engine import CoreSettings, TorchEngine
from rollout_server.engines.torch.process.client import CoreProcess
from rollout_server.engines.torch.process.link import Failure
from services.wire.errors import ConflictError, DrainingError, NotReadyError, UsageError
from services.wire.sampling import SamplingParams
from weight_bus.errors import SignatureError

KEY = "not-for-the-command-line"


def core_of(folder: Path) -> CoreProcess:
    return CoreProcess(
        CoreSettings(
            model=str(folder),
            run_id="unit",
            dtype="float32",
            max_running=8,
            threads=1,
            transport="shm",
            seed=0,
            weights_key=KEY,
        ),
        600.0,
    )


def asked(name: str, tokens: int, *, stream: bool = False) -> GenerationRequest:
    return GenerationRequest(name, [5, 6, 7], SamplingParams(max_tokens=tokens, ignore_eos=True), stream=stream)


@pytest_asyncio.fixture
async def core(tiny_policy: Path) -> AsyncIterator[CoreProcess]:
    made = core_of(tiny_policy)
    yield made
    await made.close()


async def test_a_process_that_is_killed_is_told_to_everyone_who_waits(core: CoreProcess) -> None:
    engine = TorchEngine(core)
    await engine.start()
    assert core.pid is not None
    process = psutil.Process(core.pid)
    assert KEY not in " ".join(process.cmdline())
    # A terminal's Ctrl-C reaches it too, and is the server's to answer.
    process.send_signal(signal.SIGINT)
    (sample,) = await collect(engine.generate(asked("first", 8)))
    assert len(sample.token_ids) == 8
    streamed = engine.generate(asked("streamed", 250, stream=True))
    await anext(streamed)
    waiting = [asyncio.create_task(collect(engine.generate(asked(f"r{n}", 250)))) for n in range(3)]
    await asyncio.sleep(0)
    process.kill()
    for result in await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 20.0):
        assert isinstance(result, EngineCrashedError)
    with pytest.raises(EngineCrashedError, match="exit code -9"):
        async for _ in streamed:
            pass
    assert "exit code -9" in (engine.status().failure or "")
    with pytest.raises(EngineCrashedError):
        await engine.commit(1)
    with pytest.raises(EngineCrashedError):
        await collect(engine.generate(asked("later", 4)))


async def test_close_ends_the_process_and_what_waits(core: CoreProcess) -> None:
    engine = TorchEngine(core)
    with pytest.raises(NotReadyError):
        await collect(engine.generate(asked("early", 4)))
    assert engine.status().failure == "not started"
    await engine.start()
    assert core.pid is not None
    process = psutil.Process(core.pid)
    waiting = asyncio.create_task(collect(engine.generate(asked("a", 250))))
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(NotReadyError):
        await waiting
    assert not process.is_running()
    with pytest.raises(NotReadyError):
        await engine.resume()


async def test_a_folder_without_a_model_is_refused_as_in_one_process(tmp_path: Path) -> None:
    engine = TorchEngine(core_of(tmp_path))
    with pytest.raises(UsageError, match="holds no causal language model"):
        await engine.start()
    await engine.close()


def test_a_server_that_is_killed_leaves_no_process_and_had_no_torch(tiny_policy: Path) -> None:
    program = f"""
import asyncio, os, sys
from pathlib import Path
from rollout_server.engines.factory import make_engine
from services.config.settings import RunSettings
import rollout_server.app

async def main() -> None:
    engine = make_engine("torch", Path({str(tiny_policy)!r}), "unit", RunSettings(), own_process=True)
    engine.preload()
    await engine.start()
    print("core", engine._core.pid, "torch" in sys.modules, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    server = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        _, pid, has_torch = next(line.split() for line in server.stdout if line.startswith("core "))
        assert has_torch == "False"
        core = psutil.Process(int(pid))
    finally:
        os.kill(server.pid, signal.SIGKILL)
        server.communicate(timeout=10.0)
    core.wait(timeout=20.0)


@pytest.mark.parametrize("error", [ConflictError("a", "b"), SignatureError("c"), NonFiniteLogitsError(7)], ids=str)
def test_errors_arrive_as_they_were_raised(error: UsageError) -> None:
    arrived = Failure.of(error).error()
    assert type(arrived) is type(error)
    assert (str(arrived), arrived.what, arrived.remedy, arrived.status) == (
        str(error),
        error.what,
        error.remedy,
        error.status,
    )


def test_an_error_of_another_class_arrives_as_its_nearest_base() -> None:
    assert type(Failure.of(DrainingError("it ends")).error()) is NotReadyError
