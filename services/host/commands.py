"""Commands of ours as processes of their own: what needs a library that the caller must not import is asked of one."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import Process
from contextlib import suppress

from services.host.aio import to_its_end
from services.wire.errors import DeadlineError, UsageError

# -P: the folder that the user stands in must not shadow our packages.
OURS = (sys.executable, "-P", "-m", "services")
_WITHIN_S = 120.0
_OUTPUT_ENDS_WITHIN_S = 2.0


async def ask(
    command: tuple[str, ...], hangs: str, given: bytes = b"", *, within_s: float = _WITHIN_S, fails: bool = False
) -> bytes:
    """What a command of ours says on standard output. `hangs`: what is told where it does not end.

    `fails`: it may fail, where it has said something on standard output before.

    Raises UsageError with its last words where it fails, DeadlineError when it hangs.
    """
    process = await asyncio.create_subprocess_exec(
        *(*OURS, *command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # Its last words are for the user.
        env={**os.environ, "ROLLMESH_LOG_JSON": "0"},
    )
    try:
        async with asyncio.timeout(within_s):
            answered, said = await process.communicate(given)
    except TimeoutError as error:
        raise DeadlineError(f"{hangs} in {within_s:g} s", "see what its code waits for") from error
    finally:
        await end_piped(process)
    if process.returncode and not (fails and answered.strip()):
        lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
        last = lines[-1] if lines else f"exit code {process.returncode}"
        raise UsageError(last.removeprefix("rollmesh: "))
    return answered


async def end_piped(process: Process, within_s: float = _OUTPUT_ENDS_WITHIN_S) -> None:
    """Kill a process, nobody reading its output, and wait for its end and that of its pipes: also where this is cancelled.

    `within_s`: for asyncio's own `wait` has no end while a pipe is full, or while what the process started holds one.
    """
    with suppress(ProcessLookupError):
        process.kill()
    await to_its_end(_end_of(process, within_s))


async def _end_of(process: Process, within_s: float) -> None:
    outputs = [stream for stream in (process.stdout, process.stderr) if stream is not None]
    ending = [process.wait(), *(_read_on(stream) for stream in outputs)]
    _, left = await asyncio.wait([asyncio.ensure_future(each) for each in ending], timeout=within_s)
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left)


async def _read_on(stream: asyncio.StreamReader) -> None:
    while await stream.read(1 << 16):
        pass
