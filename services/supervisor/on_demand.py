"""A service that starts when somebody calls it, or once there is time for it: its port listens from the beginning.

    listen ──a caller connects, or `at_last`──► process started, with the listening socket ──► it answers all calls

So it takes nothing of a run's start, which is what its users wait for, and a page that is opened later is there at once.
A process that dies is started again; callers wait meanwhile.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

from services.host.ports import bound_socket
from services.supervisor.launch_plan import LOOPBACK
from services.supervisor.processes import ManagedProcess, Say
from services.wire.errors import RollmeshError


async def run_on_demand(managed: ManagedProcess, port: int, say: Say, at_last: asyncio.Event) -> None:
    """Listen on a port of loopback, wait for the first caller or `at_last`, then run the process, which takes the option
    `--fd`.

    What it is for goes on where it cannot run: that is said.
    """
    try:
        with bound_socket(LOOPBACK, port) as listener:
            listener.listen()
            await _first_call(listener, at_last)
            number = listener.fileno()
            command = (*managed.spec.command, "--fd", str(number))
            managed.spec = replace(managed.spec, command=command, inherited=(number,))
            await managed.run()
    except RollmeshError as error:
        say(f"{error}: the run goes on without it")


async def _first_call(listener: socket.socket, at_last: asyncio.Event) -> None:
    loop, called = asyncio.get_running_loop(), asyncio.Event()
    waiting = [asyncio.create_task(event.wait()) for event in (called, at_last)]
    loop.add_reader(listener, called.set)
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        loop.remove_reader(listener)
        for task in waiting:
            task.cancel()
