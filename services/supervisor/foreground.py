"""A mesh in the foreground of a terminal: signals in, view out, exit code back.

Exit codes: 0 trained and summarised; 1 the run failed; 2 misuse; 128 + n after signal n (130 for Ctrl-C, 143 for
SIGTERM), everything stopped.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path

from rich.console import Console

from services.config.fitting import value_of
from services.config.settings import RunSettings
from services.host.run_folder import RunFolder
from services.observability.run_view.observer import MetricsTail
from services.security.keys import KeyPlaces
from services.supervisor.devices import in_words
from services.supervisor.mesh import Mesh
from services.supervisor.preflight import Resolved, find_interrupted, in_line, preflight
from services.supervisor.summary import closing_lines
from services.supervisor.view.views import make_view
from services.wire.errors import RollmeshError, UsageError

_NOTIFY_WITHIN_S = 30.0
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_in_foreground(settings: RunSettings, origins: Mapping[str, str], keys: KeyPlaces, *, plain: bool) -> int:
    """Run a mesh until it has ended; returns the exit code. Raises RollmeshError where the run cannot be begun or fails.

    `origins`: dotted name → where the setting comes from, for the run's config.toml.
    """
    return asyncio.run(_run(preflight(settings, keys), origins, keys, plain=plain))


def resume_in_foreground(root: Path, keys: KeyPlaces, *, plain: bool) -> int:
    """Go on with the interrupted run in this folder, as `run_in_foreground` does."""
    folder = RunFolder(root.expanduser().absolute())
    return asyncio.run(_run(find_interrupted(folder, keys), {}, keys, plain=plain))


async def _run(
    resolving: Coroutine[None, None, Resolved], origins: Mapping[str, str], keys: KeyPlaces, *, plain: bool
) -> int:
    # Not when the process did: `./dev up` installs first, in the same process.
    began_at = time.time()
    console = Console(soft_wrap=True)
    resolved = await resolving
    settings, folder, run_id = resolved.settings, resolved.folder, resolved.run_id
    received: list[signal.Signals] = []
    with make_view(console, plain=plain) as view:
        view.say(
            f"run {run_id}: {settings.task_in_words}, seed {settings.seed}, {settings.engine} engine, in {folder.root}"
        )
        for name, why in resolved.found.items():
            if name != "trainer.threads":
                view.say(f"{name} = {value_of(settings, name)}, {why}")
        if resolved.placement.places:
            view.say(in_words(resolved.placement))
        for warning in resolved.warnings:
            view.say(in_line(warning))
        found = {**origins, **resolved.found}
        mesh = Mesh(settings, folder, run_id, view, keys, found, resolved.placement, began_at=began_at)
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
            _say_how_to_go_on(console, folder, settings.steps)
            await _notify(console, settings.notify, folder, "interrupted")
            return 128 + received[0]
        except RollmeshError as error:
            # Misuse is told of before anything has begun; the same again would come to the same.
            if not isinstance(error, UsageError):
                _say_how_to_go_on(console, folder, settings.steps)
            await _notify(console, settings.notify, folder, "failed")
            raise
    await _notify(console, settings.notify, folder, "done")
    console.print("", *closing_lines(folder, summary), sep="\n", markup=False, highlight=False)
    return 0


def _say_how_to_go_on(console: Console, folder: RunFolder, steps: int) -> None:
    """What there is so far, and the command that goes on."""
    line = MetricsTail(folder.metrics).read()
    if line is not None:
        so_far = f"{line.step} of {steps} steps are made, success of the last batch {line.success:.0%}"
        console.print(f"{so_far}; curves: {folder.curves}", markup=False, highlight=False)
    if folder.run_id.exists():
        console.print(f"go on with: rollmesh up --resume {folder.root}", markup=False, highlight=False)


async def _notify(console: Console, command: str | None, folder: RunFolder, outcome: str) -> None:
    """Run the user's command; one that fails is told of, and changes nothing."""
    if command is None:
        return
    environ = {**os.environ, "ROLLMESH_RUN_DIR": str(folder.root), "ROLLMESH_OUTCOME": outcome}
    try:
        # A shell, as the user would type it.
        process = await asyncio.create_subprocess_shell(command, stdin=asyncio.subprocess.DEVNULL, env=environ)
        try:
            async with asyncio.timeout(_NOTIFY_WITHIN_S):
                code = await process.wait()
        except TimeoutError:
            process.kill()
            code = await process.wait()
    except OSError as error:
        console.print(f"notify: {command!r} cannot be run ({error.strerror})", markup=False, highlight=False)
        return
    if code:
        console.print(f"notify: {command!r} ended with exit code {code}", markup=False, highlight=False)
