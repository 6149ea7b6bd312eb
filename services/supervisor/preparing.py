"""What a run needs before its services start: a run folder with the resolved settings, and a policy to start from.

    settings ─► config.toml ─► demonstrations ─► sft ─► model/

All of it can be done again: what is there stays, and other settings than those that the run began with are refused.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import structlog

from services.config_file import dump_settings, load_settings
from services.model_folder import is_complete
from services.run_folder import RunFolder, make_run_folder
from services.settings import RunSettings
from services.supervisor.launch_plan import warm_start_commands
from services.supervisor.preflight import check_first_policy
from services.supervisor.processes import OURS
from services.wire.errors import RollmeshError, UsageError

_log = structlog.get_logger()


def prepare(settings: RunSettings, run_dir: Path, *, settings_only: bool = False) -> RunFolder:
    """Make the run folder ready for a run of these settings. Returns once it can be started.

    `settings_only`: without the warm start, for which trainer and servers wait by themselves.

    Raises UsageError for a folder that holds a run of other settings, and for a task without demonstrations where no
    model is given; RollmeshError when the warm start fails.
    """
    root = run_dir.expanduser().absolute()
    settings = settings.model_copy(update={"run_dir": root})
    check_first_policy(settings.model.path, settings.task)
    folder = RunFolder(root)
    if folder.config.exists():
        _refuse_others(settings, load_settings(folder.config, []), folder)
        _log.info("settings are there", config=str(folder.config))
    else:
        make_run_folder(root)
        partial = folder.config.with_suffix(".partial")
        partial.write_text(dump_settings(settings), encoding="utf-8")
        partial.rename(folder.config)
        _log.info("settings resolved", config=str(folder.config))
    if not settings_only and settings.model.path is None and not is_complete(folder.model):
        for command in warm_start_commands(settings, folder):
            _run(command)
    return folder


def _refuse_others(wanted: RunSettings, begun: RunSettings, folder: RunFolder) -> None:
    if wanted == begun:
        return
    other = ", ".join(name for name in type(wanted).model_fields if getattr(wanted, name) != getattr(begun, name))
    raise UsageError(
        f"{folder.root} holds a run that began with other settings ({other})",
        "start it with the same ones, or name another --run-dir (and another run id) for a new run",
    )


def _run(command: tuple[str, ...]) -> None:
    """Raises RollmeshError when it fails; what it says is in the same log as ours."""
    done = subprocess.run([*OURS, *command], check=False)
    if done.returncode:
        raise RollmeshError(f"`rollmesh {command[0]}` ended with exit code {done.returncode}", "see what it says above")
