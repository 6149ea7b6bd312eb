"""A planned run: what `rollmesh up` would refuse, its Redis, its tasks, the disk and how weights would travel.

settings ─► `rollmesh up --check` ─► the refusal, if any          ┐
         ─► `rollmesh run-environment --trial` ─► of_trial        ├─ at once ─► findings
         ─► Redis, model folder, `rollmesh transports` ─► of_…    ┘
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from services.config.load import dump_settings, load_settings
from services.config.model_folder import read_model_files
from services.config.settings import RunSettings
from services.doctor.installation import in_thread_installation, try_transport, untried
from services.host.commands import ask
from services.host.models import is_folder
from services.policies.diagnosis.environment import of_dialects, of_trial
from services.policies.diagnosis.finding import Finding, error
from services.policies.diagnosis.plan import of_characters, of_model
from services.policies.diagnosis.store import of_clocks, of_store
from services.run_store.client import reached_by, read_store
from services.security.keys import KeyPlaces
from services.security.tls import read_trust
from services.wire.errors import UNDECODABLE, DeadlineError, RollmeshError, UsageError
from services.wire.tasks.trial import TaskTrial

_CHECK_WITHIN_S = 40.0
"""They take a second; on a machine that has much else to do, many."""


@dataclass(frozen=True)
class Planned:
    """What `rollmesh up` would be given. `config`: a file; `overrides`: section.key=value."""

    config: Path | None
    overrides: Sequence[str]
    keys: KeyPlaces


async def examine_plan(planned: Planned) -> list[Finding]:
    """The findings, each id once or for each thing that has it. Raises UsageError for settings that cannot be."""
    settings = load_settings(planned.config, planned.overrides)
    installed, refused, (tried, hung), store, transport = await asyncio.gather(
        in_thread_installation(),
        _refusal(planned),
        _trials(settings),
        _store(settings, planned.keys),
        try_transport(settings.weights.transport),
    )
    own = [
        *store,
        *_model(settings, tried),
        *(found for trial in tried for found in of_trial(trial)),
        *hung,
        *transport,
    ]
    said = {each.id for each in own}
    # It says the first of what is wrong alone, and much of it is found here too.
    said.discard("not-tried")  # each is of something else
    covered = refused is not None and (refused.id in said or (refused.id == "plan-refused" and _by_task(own)))
    return [*installed, *([] if refused is None or covered else [refused]), *own]


def _by_task(found: Sequence[Finding]) -> bool:
    return any(each.id == "environment-fails" for each in found)


async def _refusal(planned: Planned) -> Finding | None:
    config = () if planned.config is None else ("--config", str(planned.config))
    flags = {
        "--keys-dir": planned.keys.folder,
        "--redis-password-file": planned.keys.redis_password,
        "--tls-dir": planned.keys.tls,
    }
    places = [part for flag, value in flags.items() if value is not None for part in (flag, str(value))]
    command = ("up", "--check", *config, *places, *planned.overrides)
    try:
        said = await ask(command, "the settings were not checked", within_s=_CHECK_WITHIN_S, fails=True)
        lines = said.strip().splitlines()
        return msgspec.json.decode(lines[-1], type=Finding) if lines else None
    except UsageError as refused:
        return error("plan-refused", refused.what, "`rollmesh up` would not start", "see what it says")
    except DeadlineError as hangs:
        wrong = error("plan-refused", "the settings could not be checked", hangs.what, "see `rollmesh up --check`")
        return untried("the settings", hangs) or wrong
    except (RollmeshError, *UNDECODABLE) as failed:
        return error("plan-refused", "the settings could not be checked", str(failed), "see `rollmesh up --check`")


async def _trials(settings: RunSettings) -> tuple[list[TaskTrial], list[Finding]]:
    """Of each task; or that they could not be tried."""
    flags = ("--config", "/dev/stdin", "--trial", "--seed", str(settings.seed))
    hangs = "the trial did not end"
    try:
        said = await ask(("run-environment", *flags), hangs, dump_settings(settings).encode(), within_s=_CHECK_WITHIN_S)
        return [msgspec.json.decode(line, type=TaskTrial) for line in said.splitlines() if line.startswith(b"{")], []
    except (RollmeshError, *UNDECODABLE) as failed:
        busy = untried(settings.task_in_words, failed) if isinstance(failed, DeadlineError) else None
        if busy is not None:
            return [], [busy]
        return [TaskTrial(task=settings.task_in_words, speaks="text", failed=str(failed))], []


async def _store(settings: RunSettings, keys: KeyPlaces) -> list[Finding]:
    """Of a Redis of the user's; `up --check` says where it cannot be reached."""
    if settings.redis_url is None:
        return []
    try:
        url = reached_by(settings.redis_url, keys.read("reader").redis, read_trust(keys.tls))
        store, clock = await read_store(url)
    except RollmeshError:
        return []
    return [*of_store(store), *of_clocks({"Redis' host": clock - time.time()}, "this host")]


def _model(settings: RunSettings, tried: Sequence[TaskTrial]) -> list[Finding]:
    path = settings.model.path
    if path is None or not is_folder(path):
        return []
    model = read_model_files(path.expanduser())
    chats = any(trial.speaks != "text" for trial in tried)
    return [
        *of_model(model, chats=chats),
        *of_dialects(tried, chat_template=model.chat_template),
        *(found for trial in tried for found in of_characters(model, trial.task, trial.characters)),
    ]
