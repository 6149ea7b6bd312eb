"""The service's side of one worker: started, asked one call at a time, killed when it is of no more use.

start ──Ready──► idle ◄──outcome in time── calling ──cancelled | no outcome──► lost ──close──► killed
  └──Refused | silence──► UsageError | RollmeshError
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TypeVar

import msgspec

from services.host.aio import to_its_end
from services.host.commands import end_piped
from services.policies.rewards import RewardFailure
from services.rewards.sandbox import protocol
from services.wire.errors import RollmeshError, UsageError

START_DEADLINE_S = 120.0
"""For the import of the function's module."""
_GRACE_S = 2.0
"""A worker that is silent for so long after its call's time limit is lost itself."""
_TOLD_BYTES = 2000
_COMMAND = (sys.executable, "-P", "-m", "services.rewards.sandbox.worker")
_PASSED_ON = ("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
_PASSED_ON_PREFIXES = ("LC_", "PYTHON")

AnswerT = TypeVar("AnswerT")


class WorkerLostError(RollmeshError):
    """The worker itself has ended, or cannot be understood."""


class WorkerProcess:
    """One worker. Made by `start`; `close` it in any case."""

    def __init__(self, process: asyncio.subprocess.Process, limits: protocol.Limits) -> None:
        self._process = process
        self._limits = limits
        self._said = b""
        self._listening = asyncio.create_task(self._listen(), name="worker-output")
        self.held_by = ""
        self.not_confined: list[str] = []

    @classmethod
    async def start(
        cls, function: str, limits: protocol.Limits, files: protocol.Files | None = None, *, must_hold: bool = True
    ) -> WorkerProcess:
        """Raises UsageError for a function that cannot be called, RollmeshError for a worker that does not start.

        `files`: this process's working directory where left out. `must_hold`: UsageError, too, where a limit cannot be
        enforced on this machine.
        """
        process = await asyncio.create_subprocess_exec(
            *_COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=protocol.MAX_REPLY_BYTES,
            env=_environ(),
            start_new_session=True,
        )
        worker = cls(process, limits)
        try:
            files = files or protocol.Files(folder=str(Path.cwd()), readable=[], hidden=[])
            order = protocol.Order(function=function, files=files, limits=limits, must_hold=must_hold)
            started = await worker._ask(msgspec.json.encode(order), protocol.started_decoder, START_DEADLINE_S)
            if isinstance(started, protocol.Refused):
                raise UsageError(started.why, started.remedy)
            worker.held_by, worker.not_confined = started.held_by, started.not_confined
        except BaseException:
            await worker.close()
            raise
        return worker

    async def call(self, sample: protocol.Sample) -> protocol.Outcome:
        """The outcome of one call. Raises WorkerLostError; that, or cancelling it, leaves a worker to be closed."""
        question = msgspec.json.encode(protocol.Call(sample))
        return await self._ask(question, protocol.outcome_decoder, self._limits.time_s + _GRACE_S)

    async def close(self) -> None:
        """End the worker, with what it runs: also where this is cancelled."""
        await to_its_end(self._close())

    async def _close(self) -> None:
        self._listening.cancel()
        await asyncio.wait([self._listening])
        await end_piped(self._process)

    async def _ask(self, question: bytes, answer: msgspec.json.Decoder[AnswerT], deadline_s: float) -> AnswerT:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            async with asyncio.timeout(deadline_s):
                stdin.write(question + b"\n")
                await stdin.drain()
                line = await stdout.readline()
            if not line:
                raise WorkerLostError(f"the worker has ended{await self._last_words()}")
            return protocol.read(line, answer)
        except TimeoutError as error:
            raise WorkerLostError(f"the worker was silent for {deadline_s:g} s{self._told()}") from error
        except ConnectionError as error:
            # Its end is seen while the question is written.
            raise WorkerLostError(f"the worker has ended{await self._last_words()}") from error
        except (OSError, ValueError, protocol.ProtocolError) as error:
            raise WorkerLostError(f"the worker cannot be understood ({error!r}){self._told()}") from error

    async def _last_words(self) -> str:
        await asyncio.wait([self._listening], timeout=1.0)
        return self._told()

    def _told(self) -> str:
        said = self._said.decode(errors="replace").strip()
        return f"; it said:\n{said}" if said else ""

    async def _listen(self) -> None:
        """Read what the module's import, or the worker itself, writes; its end is kept for an error."""
        stderr = self._process.stderr
        assert stderr is not None
        while piece := await stderr.read(1 << 16):
            self._said = (self._said + piece)[-_TOLD_BYTES:]


def lost(error: WorkerLostError) -> protocol.Failed:
    """What becomes of a call whose worker is lost."""
    return protocol.Failed(RewardFailure.CRASH, str(error))


def _environ() -> dict[str, str]:
    """No keys: what the service knows from its environment is not the functions' to see."""
    kept = {
        name: value for name, value in os.environ.items() if name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)
    }
    return kept | {"OMP_NUM_THREADS": "1"}
