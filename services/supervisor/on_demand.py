"""A service that starts when somebody calls it: its port listens from the beginning, its process begins at the first call.

    listen ──a caller connects──► process started, with the listening socket ──► it answers that call, and all after it

So a page that nobody opens costs a run nothing. A process that dies is started again; callers wait meanwhile.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

from services.host.ports import bound_socket
from services.supervisor.launch_plan import LOOPBACK
from services.supervisor.processes import ManagedProcess, Say
from services.wire.errors import RollmeshError


async def run_on_demand(managed: ManagedProcess, port: int, say: Say) -> None:
    """Listen on a port of loopback, wait for the first caller, then run the process, which takes the option `--fd`.

    What it is for goes on where it cannot run: that is said.
    """
    try:
        with bound_socket(LOOPBACK, port) as listener:
            listener.listen()
            await _first_call(listener)
            number = listener.fileno()
            command = (*managed.spec.command, "--fd", str(number))
            managed.spec = replace(managed.spec, command=command, inherited=(number,))
            await managed.run()
    except RollmeshError as error:
        say(f"{error}: the run goes on without it")


async def _first_call(listener: socket.socket) -> None:
    loop, called = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(listener, called.set)
    try:
        await called.wait()
    finally:
        loop.remove_reader(listener)
