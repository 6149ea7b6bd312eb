"""A mesh in the foreground of a terminal: signals in, view out, exit code back.

Exit codes: 0 trained and summarised; 1 the run failed; 2 misuse; 128 + n after signal n (130 for Ctrl-C, 143 for
SIGTERM), everything stopped.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping

from rich.console import Console

from services.config.fitting import value_of
from services.config.settings import RunSettings
from services.security.keys import KeyPlaces
from services.supervisor.live_view import make_view
from services.supervisor.mesh import Mesh
from services.supervisor.preflight import preflight
from services.supervisor.summary import closing_lines

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_in_foreground(settings: RunSettings, origins: Mapping[str, str], keys: KeyPlaces, *, plain: bool) -> int:
    """Run a mesh until it has ended; returns the exit code. Raises RollmeshError where the run cannot be begun or fails.

    `origins`: dotted name → where the setting comes from, for the run's config.toml.
    """
    return asyncio.run(_run(settings, origins, keys, plain=plain))


async def _run(settings: RunSettings, origins: Mapping[str, str], keys: KeyPlaces, *, plain: bool) -> int:
    console = Console(soft_wrap=True)
    resolved = await preflight(settings, keys)
    settings, folder, run_id = resolved.settings, resolved.folder, resolved.run_id
    received: list[signal.Signals] = []
    with make_view(console, settings.steps, settings.k, plain=plain) as view:
        view.say(f"run {run_id}: {settings.task}, seed {settings.seed}, {settings.engine} engine, in {folder.root}")
        for name, why in resolved.found.items():
            if name != "trainer.threads":
                view.say(f"{name} = {value_of(settings, name)}, {why}")
        mesh = Mesh(settings, folder, run_id, view, keys, {**origins, **resolved.found})
        running = asyncio.create_task(mesh.run())

        def on_signal(which: signal.Signals) -> None:
            received.append(which)
            if len(received) == 1:
                view.say(f"{which.name}: stopping every service")
                running.cancel()
            else:
                mesh.kill()

        loop = asyncio.get_running_loop()
        for which in _STOPPING:
            loop.add_signal_handler(which, on_signal, which)
        try:
            summary = await running
        except asyncio.CancelledError:
            if not received:
                raise
            view.say("everything has stopped")
            return 128 + received[0]
    console.print("", *closing_lines(folder, summary), sep="\n", markup=False, highlight=False)
    return 0
