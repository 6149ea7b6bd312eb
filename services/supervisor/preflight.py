"""Preflight checks, before anything is started or written: each mistake is one line and exit code 2."""

from __future__ import annotations

import asyncio
import datetime
import importlib.util
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from services.config.base import changed_fields
from services.config.checks import check_dtype, check_engine
from services.config.fitting import annotated, as_begun, fit, read_facts
from services.config.load import dump_settings, load_settings
from services.config.model_folder import read_model_files
from services.config.settings import RunSettings, TrainerSettings
from services.config.traces import with_environ
from services.config.tracking import TrackingSettings
from services.host.commands import OURS
from services.host.engine_choice import choose_engine, has_gpu
from services.host.files import write_whole
from services.host.models import check_code, is_folder
from services.host.process import memory_bytes, usable_cores
from services.host.run_folder import RunFolder, check_space, is_complete, make_run_folder, refuse_taken
from services.host.vllm_arguments import check_arguments
from services.observability.setup import check_installed
from services.policies.diagnosis.environment import of_dialects
from services.policies.diagnosis.finding import FINDING_IDS, Finding, FindingId, error, refuse, refused_as
from services.policies.diagnosis.plan import least_host_bytes, of_memory, of_model
from services.policies.placement.place import Placement
from services.policies.training.memory import MemoryOptions
from services.run_store.client import check_store, reached_by
from services.security.keys import KeyPlaces
from services.security.tls import read_tls
from services.supervisor.devices import NOWHERE, find_placement, share_of_engines
from services.supervisor.launch_plan import LOOPBACK, has_teacher, warm_start_commands
from services.supervisor.user_code import check_tasks, with_algorithm
from services.wire.errors import RollmeshError, UsageError
from services.wire.extras import install
from services.wire.tasks.name import parse_task
from services.wire.tasks.trial import TaskTrial


async def _check_surroundings(settings: RunSettings, keys: KeyPlaces) -> None:
    """Libraries, keys, certificates and a Redis of the user's."""
    check_installed(settings.telemetry)
    check_libraries(settings.trainer)
    check_trackers(settings.tracking)
    if settings.telemetry.trainer_port:
        from services.http.app import open_port

        # The trainer takes it only once it has imported torch. Keys are looked at there.
        with refused_as("port-in-use"):
            open_port(settings.telemetry.trainer_host, settings.telemetry.trainer_port, lacking=()).close()
    with refused_as("keys"):
        password = keys.read("supervisor").redis
        tls = read_tls(keys.tls)
        if tls.identity is not None:
            tls.identity.check(LOOPBACK, tls.trust)
    if settings.redis_url is not None:
        await check_store(reached_by(settings.redis_url, password, tls.trust))
    elif keys.redis_password is not None:
        raise UsageError("a Redis password without a Redis of yours", "give --redis-url, or leave the password out")
    elif keys.folder is not None and password is None:
        raise UsageError(f"{keys.folder} has no redis.key", f"`rollmesh keys init {keys.folder}` adds what is missing")


async def find_interrupted(folder: RunFolder, keys: KeyPlaces) -> Resolved:
    """The run that was interrupted in `folder`, to go on with under the settings that it began with.

    Raises UsageError where the folder holds none, or one that has ended.
    """
    try:
        run_id = folder.run_id.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UsageError(
            f"{folder.root} holds no run of `rollmesh up` to go on with ({error.strerror})", "name its run folder"
        ) from error
    if folder.summary.exists():
        raise UsageError(f"the run in {folder.root} has ended: see {folder.summary}", "start another one")
    settings = load_settings(folder.config, [])
    if settings.redis_url is None and not any(folder.redis.glob("appendonlydir/*")):
        raise UsageError(f"{folder.redis} is gone, where the run was kept", "start another run")
    await _check_surroundings(settings, keys)
    return Resolved(settings, folder, run_id, {}, await find_placement(settings, gpu=has_gpu()))


@dataclass(frozen=True)
class Resolved:
    """`settings`: with nothing left open; `folder`: made for them (config.toml is not written yet). `found`: dotted name →
    why, of settings that were found here. `placement`: the GPUs of each process. `warnings`: the run works, though not as
    its user may want."""

    settings: RunSettings
    folder: RunFolder
    run_id: str
    found: dict[str, str]
    placement: Placement = NOWHERE
    warnings: Sequence[Finding] = ()


async def preflight(
    settings: RunSettings,
    keys: KeyPlaces,
    *,
    trainer: bool = True,
    label: str | None = None,
    only_look: bool = False,
) -> Resolved:
    """See whether a mesh of these settings can be started, and make its run folder. `trainer`: whether it has one. `label`:
    what its run id begins with, in place of the task's.

    `only_look`: nothing is made, and no model fetched: of one that is known by its name alone, nothing is said.

    Raises UsageError, with nothing left behind, for environment variables in which the run cannot work.
    """
    engine = choose_engine(settings.engine)
    check_engine(settings, engine)
    check_arguments(settings.rollout.vllm.arguments())
    settings = find_tasks(settings)
    check_files(settings)
    settings, added = await with_algorithm(settings)
    named = settings.model.path is not None and not is_folder(settings.model.path)
    if not (only_look and named):
        settings = await asyncio.to_thread(with_model_folder, settings)
        check_first_policy(settings)
    for each in settings.played:
        if parse_task(each.task).kind == "prompts" and not settings.rewards.enabled:
            raise UsageError(
                f"task {each.task} has nobody to judge its answers", "set rewards.enabled and its components"
            )
    warnings = _warnings(settings, await check_tasks(settings))
    settings = settings.model_copy(update={"telemetry": with_environ(settings.telemetry, os.environ)})
    if only_look and named:
        await _check_surroundings(settings, keys)
        return _looked_at(settings, warnings)
    settings, found = fitted(settings)
    check_dtype(settings)
    await _check_surroundings(settings, keys)
    settings = settings.model_copy(update={"engine": engine})
    with refused_as("memory"):
        placement = await find_placement(settings, gpu=has_gpu(), trainer=trainer)
    if placement == NOWHERE:
        check_memory(settings, trainer=trainer)
    if only_look:
        return _looked_at(settings, warnings)
    share = share_of_engines(settings, placement)
    if engine == "vllm" and share is not None:
        settings = with_share(settings, share)
        found["rollout.vllm.gpu_memory_utilization"] = "what the trainer leaves of the GPU that they share"
    run_id = new_run_id(label or ("mixture" if settings.tasks else parse_task(settings.task).label))
    root = (settings.run_dir or Path("runs") / run_id).expanduser().absolute()
    with refused_as("disk"):
        folder = make_run_folder(root)
    settings = settings.model_copy(update={"run_dir": root})
    return Resolved(settings, folder, run_id, found | added, placement, warnings)


def look(settings: RunSettings, keys: KeyPlaces) -> int:
    """`rollmesh up --check`: prints what would refuse the run, as a finding. Raises that refusal; returns exit code 0.

    What would not refuse it is said on standard error: a program reads the other.
    """
    try:
        resolved = asyncio.run(preflight(settings, keys, only_look=True))
    except UsageError as refused:
        which: FindingId = "plan-refused"
        which = next((each for each in FINDING_IDS if each == refused.finding), which)
        found = error(which, refused.what, "`rollmesh up` would not start", refused.remedy)
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
        sys.stdout.flush()
        raise
    for each in resolved.warnings:
        sys.stderr.write(f"{in_line(each)}\n")
    sys.stderr.write(f"the run can start: {resolved.settings.task_in_words}, in {resolved.folder.root}\n")
    return 0


def in_line(found: Finding) -> str:
    """A warning as a line of the console."""
    return f"warning: {found.cause}: {found.remedy}"


def _warnings(settings: RunSettings, tried: Sequence[TaskTrial]) -> list[Finding]:
    """Of a model that is known by its name alone, nothing is said."""
    model = settings.model.path
    if model is None or not is_folder(model):
        return []
    return list(of_dialects(tried, chat_template=read_model_files(model.expanduser()).chat_template))


def _looked_at(settings: RunSettings, warnings: Sequence[Finding]) -> Resolved:
    root = (settings.run_dir or Path("runs")).expanduser().absolute()
    folder = RunFolder(root)
    refuse_taken(folder)
    with refused_as("disk"):
        check_space(root)
    return Resolved(settings, folder, "", {}, warnings=warnings)


def check_memory(settings: RunSettings, *, trainer: bool = True) -> None:
    """Raises UsageError, with the sum, for a model that this machine cannot hold: weights, gradients, moments alone."""
    shape = None if settings.model.path is None else read_model_files(settings.model.path).shape
    if shape is None:
        return
    asked = settings.trainer
    options = MemoryOptions(
        tokens=1, optimizer=asked.optimizer.kind, state_bits=asked.optimizer.state_bits, lora_rank=asked.lora.rank
    )
    item_bytes = 2.0 if settings.model.dtype == "bfloat16" else 4.0
    least = least_host_bytes(shape, options if trainer else None, engines=settings.servers, item_bytes=item_bytes)
    refuse(of_memory(least, memory_bytes()))


def with_share(settings: RunSettings, share: float) -> RunSettings:
    """Told what a vLLM may take of the GPU that it shares."""
    vllm = settings.rollout.vllm.model_copy(update={"gpu_memory_utilization": share})
    return settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"vllm": vllm})})


def with_model_folder(settings: RunSettings) -> RunSettings:
    """With folders in place of the names of the policy's model and of a teacher's that is served here: where one is not
    there, `rollmesh models fetch` makes it, with progress.

    Raises UsageError where that fails, which has said why, and for one that needs code of its own, which nobody asked to
    run.
    """
    model, teacher, trusted = settings.model.path, settings.trainer.teacher, settings.model.trust_remote_code
    if model is not None:
        settings = settings.model_copy(
            update={"model": settings.model.model_copy(update={"path": _folder_of(model, "model.path", trusted)})}
        )
    if has_teacher(settings):
        found = _folder_of(Path(str(teacher.model)), "trainer.teacher.model", trusted).expanduser().absolute()
        check_teacher(found)
        teacher = teacher.model_copy(update={"model": str(found)})
        settings = settings.model_copy(update={"trainer": settings.trainer.model_copy(update={"teacher": teacher})})
    return settings


def _folder_of(model: Path, setting: str, trusted: bool) -> Path:
    if is_folder(model):
        check_code(model.expanduser(), trusted=trusted)
        return model
    options = ["--trust-remote-code"] if trusted else []
    done = subprocess.run(
        [*OURS, "models", "fetch", str(model), *options], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise UsageError(
            f"there is no folder {model}, and no model of that name could be fetched",
            f"see what is said above, or set {setting}=FOLDER",
        )
    return Path(done.stdout.strip().splitlines()[-1])


def check_teacher(model: Path) -> None:
    """Raises UsageError for a folder that holds no model."""
    if not is_complete(model):
        raise UsageError(f"trainer.teacher.model={model} is no Hugging Face model folder", "it must hold a config.json")


def fitted(settings: RunSettings) -> tuple[RunSettings, dict[str, str]]:
    """With what suits the model and this machine, where nobody set it; dotted name → why. Raises UsageError."""
    model = settings.model.path
    facts = None if model is None else read_facts(model)
    return fit(settings, facts, cores=usable_cores(), gpu=has_gpu())


_NAME_ONE = "name one: model.path=FOLDER, or a name such as model.path=smollm2-135m (`rollmesh models`)"


def check_first_policy(settings: RunSettings) -> None:
    """Raises UsageError where a run would have no policy to start from: a model, or a warm start for its one task."""
    model = settings.model.path
    if model is not None:
        refuse(of_model(read_model_files(model.expanduser())))
        return
    if settings.tasks:
        raise UsageError(
            "[[tasks]] need a model: the tiny one is warm-started on the demonstrations of one task alone",
            _NAME_ONE,
        )
    if not parse_task(settings.task).demonstrated:
        raise UsageError(f"task {settings.task} has no demonstrations to warm-start a model with", _NAME_ONE)


def new_run_id(task_label: str) -> str:
    """`running-sums-20260131-120000-1a2b`: sorts by time, unique, safe in file names and Redis keys."""
    now = datetime.datetime.now(tz=datetime.UTC)
    return f"{task_label}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def find_task(task: str) -> str:
    """The task's name with a file in it as an absolute path, so that it means the same wherever it is read again."""
    return str(parse_task(task).with_files(lambda file: str(Path(file).expanduser().absolute())))


def check_files(settings: RunSettings) -> None:
    """Raises UsageError for a file of a task that is not there."""

    def there(name: str) -> str:
        if not Path(name).exists():
            raise UsageError(f"there is no file {name}, which the task is in", "correct its path")
        return name

    for each in settings.played:
        parse_task(each.task).with_files(there)


def find_tasks(settings: RunSettings) -> RunSettings:
    """With `find_task` of each task."""
    tasks = [each.model_copy(update={"task": find_task(each.task)}) for each in settings.tasks]
    return settings.model_copy(update={"task": find_task(settings.task), "tasks": tasks})


def check_libraries(trainer: TrainerSettings) -> None:
    """Raises UsageError where a setting needs a library of an extra that is not installed."""
    needed = [
        (f"trainer.lora.rank={trainer.lora.rank}", trainer.lora.rank > 0, "peft", "lora"),
        ("trainer.optimizer.state_bits=8", trainer.optimizer.state_bits == 8, "bitsandbytes", "adam8bit"),
    ]
    for setting, wanted, library, extra in needed:
        if wanted and not _installed(library):
            raise UsageError(
                f"{setting} needs {library}, which is not installed",
                f"use ./dev up {setting}, or {install(extra)}",
            )


def check_trackers(tracking: TrackingSettings) -> None:
    """Raises UsageError where the library of a logging backend is not installed."""
    for name in tracking.backends:
        if not _installed(name):
            raise UsageError(
                f"tracking.backends: {name} is not installed",
                f"use ./dev up tracking.backends='[\"{name}\"]', or {install('trackers')}",
            )


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


_log = structlog.get_logger()


def prepare(settings: RunSettings, run_dir: Path, *, settings_only: bool = False) -> RunFolder:
    """Make the run folder: the resolved settings, and a policy to start from. Returns once the run can be started.

        settings ─► config.toml ─► demonstrations ─► sft ─► model/

    May be repeated: what is there stays, and other settings than those that the run began with are refused.

    `settings_only`: without the warm start, for which trainer and servers wait by themselves.

    Raises UsageError for a folder that holds a run of other settings, and for a task without demonstrations where no
    model is given; RollmeshError when the warm start fails.
    """
    if settings.notify is not None:
        raise UsageError("notify is read by `rollmesh up` alone", "leave it out")
    for name, value in changed_fields(settings.placement).items():
        raise UsageError(
            f"placement.{name}={value} is read by `rollmesh up` alone",
            "leave it out: whoever starts the parts gives them their GPUs (docs/clusters.md)",
        )
    if settings.redis_url is not None:
        raise UsageError(
            f"redis_url={settings.redis_url} is read by `rollmesh up` alone",
            "give each part --redis-url in place of it",
        )
    if settings.gateway.enabled != RunSettings().gateway.enabled:
        raise UsageError(
            f"gateway.enabled={settings.gateway.enabled} is read by `rollmesh up` alone",
            "leave it out: there is a gateway where one is started",
        )
    root = run_dir.expanduser().absolute()
    settings, added = asyncio.run(with_algorithm(settings.model_copy(update={"run_dir": root})))
    settings = with_model_folder(settings)
    check_first_policy(settings)
    folder = RunFolder(root)
    if folder.config.exists():
        began_with = load_settings(folder.config, [])
        _refuse_others(as_begun(settings, began_with), began_with, folder)
        _log.info("settings are there", config=str(folder.config))
    else:
        make_run_folder(root)
        settings, found = fitted(settings)
        found |= added
        write_whole(folder.config, annotated(dump_settings(settings), found).encode())
        _log.info("settings resolved", config=str(folder.config), **{name: found[name] for name in sorted(found)})
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
