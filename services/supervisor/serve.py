"""`rollmesh serve`: a standing rollout plane in the foreground. No trainer, no environment: agents come by themselves.

Exit codes: 1 a service gave up; 2 misuse; 128 + n after signal n (130 for Ctrl-C), everything stopped.
"""

from __future__ import annotations

import asyncio
import shlex
import shutil
import signal

import httpx
from rich.console import Console

from services.config.load import dump_settings
from services.config.settings import RunSettings
from services.host.files import remove_shm_files, shm_directory, shm_prefix, write_whole
from services.host.process import missing_tunables
from services.host.run_folder import held, note_redis
from services.observability.terminal import as_text
from services.run_store.client import without_password
from services.security.keys import KeyPlaces, key_file
from services.security.tls import read_trust
from services.supervisor.devices import environments_here
from services.supervisor.launch_plan import LaunchPlan, PortReservation, plan_launch, write_users
from services.supervisor.plane import run_plane, until_stopped
from services.supervisor.preflight import Resolved, preflight
from services.supervisor.processes import Reaper
from services.supervisor.readiness import named_urls, wait_for_http

SESSION = "hello"
"""Of the call that is shown."""


def serve_in_foreground(settings: RunSettings, keys: KeyPlaces, *, port: int) -> int:
    """Serve until a signal comes; returns the exit code. `port`: the gateway's. Raises RollmeshError."""
    console = Console(soft_wrap=True, highlight=False)
    ended = asyncio.run(until_stopped(_serve(settings, keys, port, console)))
    if not isinstance(ended, signal.Signals):
        return 0
    console.print(f"{ended.name}: everything has stopped", markup=False)
    return 128 + ended


async def _serve(settings: RunSettings, keys: KeyPlaces, port: int, console: Console) -> None:
    with PortReservation() as ports:
        # Before anything slow.
        reserved = ports.of_mesh(settings.servers, gateway=port, dashboard=settings.dashboard.port)
        resolved = await preflight(settings, keys, trainer=False, label="serve")
        settings, folder, run_id = resolved.settings, resolved.folder, resolved.run_id
        with held(folder):
            folder.redis.mkdir(exist_ok=True)
            write_whole(folder.config, dump_settings(settings).encode())
            known = keys.read("supervisor")
            if settings.redis_url is None and known.redis is not None:
                write_users(folder.redis, known.redis)
            plan = plan_launch(
                settings,
                folder,
                run_id,
                reserved,
                keys,
                missing_tunables(),
                devices=environments_here(settings, resolved.placement),
            )
            _say(console, f"{settings.servers} × {settings.engine} engine, {settings.model.path}, in {folder.root}")
            ready = asyncio.Event()
            try:
                async with Reaper(shm_directory() / shm_prefix(run_id)) as reaper:
                    await run_plane(
                        plan,
                        folder,
                        reaper,
                        lambda line: _say(console, line),
                        lambda: _stand(plan, resolved, keys, console, ready),
                        bus=True,
                        at_last=ready,
                        keys=known,
                        trust=read_trust(keys.tls),
                    )
            finally:
                remove_shm_files(run_id)
                folder.redis_url.unlink(missing_ok=True)
                shutil.rmtree(folder.redis, ignore_errors=True)


async def _stand(
    plan: LaunchPlan, resolved: Resolved, keys: KeyPlaces, console: Console, standing: asyncio.Event
) -> None:
    """Say where everything is once it is ready, set `standing`, and wait to be cancelled."""

    def say(line: str) -> None:
        _say(console, line)

    redis_url = without_password(plan.redis_url)
    note_redis(resolved.folder, redis_url)
    peer, deadline_s = keys.read("supervisor").peer, resolved.settings.rollout.start_timeout_s
    headers = {} if peer is None else {"authorization": f"Bearer {peer}"}

    async def ready(name: str, url: str) -> None:
        await wait_for_http(name, url, deadline_s, http, say)
        say(f"{name} is ready at {url}")

    async with httpx.AsyncClient(trust_env=False, headers=headers, verify=read_trust(keys.tls).verify) as http:
        await asyncio.gather(*(ready(name, url) for name, url in named_urls(plan)))
    standing.set()
    at = f"--redis-url {redis_url} --run-id {resolved.run_id}"
    say(f"run {resolved.run_id}; see how it is: rollmesh status {at}")
    say(f"is something wrong with it: rollmesh doctor {at}")
    if plan.dashboard_url is not None:
        say(f"dashboard: {plan.dashboard_url}")
    for command in example_calls(plan, keys):
        say(f"try: {command}")
    say("Ctrl-C stops it")
    await asyncio.Event().wait()


def example_calls(plan: LaunchPlan, keys: KeyPlaces) -> list[str]:
    """Two lines of a shell: a session that no trainer is to see, and an answer in it."""
    url = plan.gateway_url
    assert url is not None, "a standing plane has one"
    curl = "curl -s"
    if keys.tls is not None:
        curl += f" --cacert {shlex.quote(str((keys.tls / 'ca.pem').absolute()))}"
    if keys.folder is not None:
        # The shell reads the key: no file and no log has it.
        curl += f' -H "authorization: Bearer $(cat {shlex.quote(str(key_file(keys.folder.absolute(), "agent")))})"'
    curl += " -H 'content-type: application/json'"
    return [
        f'{curl} {url}/sessions -d \'{{"session_id": "{SESSION}", "purpose": "evaluate"}}\'',
        f'{curl} {url}/sessions/{SESSION}/v1/completions -d \'{{"prompt": "12+34=", "max_tokens": 16}}\'',
    ]


def _say(console: Console, line: str) -> None:
    console.print(as_text(line), markup=False)
