"""Commands of ours as processes of their own: what needs a library that the caller must not import is asked of one."""

from __future__ import annotations

import asyncio
import os
import sys

from services.wire.errors import DeadlineError, UsageError

# -P: the folder that the user stands in must not shadow our packages.
OURS = (sys.executable, "-P", "-m", "services")
_WITHIN_S = 120.0


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
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode and not (fails and answered.strip()):
        lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
        last = lines[-1] if lines else f"exit code {process.returncode}"
        raise UsageError(last.removeprefix("rollmesh: "))
    return answered
