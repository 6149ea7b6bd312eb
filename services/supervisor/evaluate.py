"""`rollmesh eval`: a policy's success on held-out problems, measured by rollout servers that serve it and train nothing.

run folder ─ export ─► model folder ─► Valkey, rollout servers, (gateway, rewards) ─► environment ─► Evaluation
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from services.config.load import dump_settings, load_settings
from services.config.settings import RunSettings
from services.config.training.algorithm import AdvantageSettings, LossSettings
from services.config.training.teacher import TeacherSettings
from services.host.aio import telling, to_its_end
from services.host.commands import OURS
from services.host.files import shm_directory, shm_prefix, write_whole
from services.host.process import missing_tunables
from services.host.run_folder import RunFolder
from services.policies.training.deadlines import within
from services.policies.training.evaluation import evaluation_of
from services.security.keys import NO_PLACES
from services.supervisor.devices import environments_here
from services.supervisor.launch_plan import LaunchPlan, PortReservation, plan_launch
from services.supervisor.mesh import STOP_DEADLINE_S
from services.supervisor.plane import run_plane, until_stopped
from services.supervisor.preflight import in_line, preflight
from services.supervisor.processes import ManagedProcess, Reaper
from services.supervisor.stopping import checkpoint_bytes
from services.supervisor.summary import lost_in_words
from services.wire.errors import DeadlineError, RollmeshError, UsageError
from services.wire.rollout_api import Evaluation, EvaluationAnswers

EXPORT_LEAST_S = 3600.0
_LONGEST_LINE = 300
_CALL = "<tool_call>"


@dataclass(frozen=True)
class Asked:
    """`checkpoint`: a run folder, or a checkpoint in one; None where settings name a model. `at`: a version, or best."""

    checkpoint: Path | None
    at: str | None
    overrides: list[str]


def evaluate_in_foreground(asked: Asked, *, as_json: bool) -> int:
    """Measure and print; returns the exit code, 1 where every episode was lost. Raises RollmeshError."""
    say = Console(stderr=True, soft_wrap=True, highlight=False)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rollmesh-eval-") as scratch:
        evaluation = asyncio.run(until_stopped(_measure(asked, Path(scratch), say)))
    if isinstance(evaluation, signal.Signals):
        return 128 + evaluation
    if as_json:
        sys.stdout.write(evaluation.model_dump_json(indent=2, exclude={"due", "first_version", "last_version"}) + "\n")
    else:
        Console(soft_wrap=True, highlight=False).print(
            *evaluation_lines(evaluation, time.monotonic() - began), sep="\n", markup=False
        )
    # Where every episode was lost, nothing was measured.
    return int(evaluation.lost == evaluation.problems * evaluation.samples)


def evaluation_lines(found: Evaluation, took_s: float) -> list[str]:
    """What `rollmesh eval` prints. `took_s`: seconds, starting and stopping included."""
    lost = lost_in_words(found.lost, found.problems * found.samples, found.lost_why)
    how = "greedily" if found.temperature == 0.0 else f"at temperature {found.temperature:g}"
    rows = {
        "task": found.task,
        "success": f"{found.success:.1%} ({found.low:.1%} to {found.high:.1%} at 95 %)",
        **{f"pass@{k}": f"{share:.1%}" for k, share in found.pass_at.items() if k > 1},
        **({"episodes": lost} if lost else {}),
        "problems": f"{found.problems}{_repeats(found)}, {found.samples} answers each, {how}",
        "answer length": f"{found.mean_length:.1f} tokens" + _cut_off(found),
        **_same(found),
        **({} if found.mean_reward is None else {"reward": f"{found.mean_reward:.3f} in the mean"}),
        **{f"mean {name}": f"{value:.3g}" for name, value in found.components.items()},
        **_signal(found),
        **{
            f"  {name}": f"{each.success:.1%} ({each.low:.1%} to {each.high:.1%}) of {each.problems}, "
            f"{each.mean_length:.1f} tokens"
            for name, each in found.tasks.items()
        },
        "took": f"{found.seconds:.1f} s, and {max(0.0, took_s - found.seconds):.0f} s to start and stop the servers",
    }
    widest = max(map(len, rows))
    return [f"{name:{widest}}  {value}" for name, value in rows.items()] + _answers(found)


def _answers(found: Evaluation) -> list[str]:
    """Some answers as they were, each text on a line of its own."""
    if not found.shown:
        return []
    lines = ["", f"answers to the first {len(found.shown)} problems:"]
    for number, each in enumerate(found.shown, 1):
        outcome = "solved" if each.success else "not solved"
        lines += [
            f"{number}  reward {each.reward:g}, {outcome}",
            f"   asked     {_on_a_line(each.asked)}",
            *([f"   then      {_on_a_line(each.between)}"] if each.between else []),
            f"   answered  {_on_a_line(each.answer)}",
        ]
    if any(_CALL in each.answer for each in found.shown):
        lines += ["", f"answers hold {_CALL} as text, which no parser read: set rollout.tool_parser=hermes"]
    return lines


def _on_a_line(text: str) -> str:
    """As JSON, so that line feeds and spaces at its ends can be seen."""
    shown = json.dumps(text, ensure_ascii=False)
    return shown if len(shown) <= _LONGEST_LINE else shown[:_LONGEST_LINE] + " …"


def _repeats(found: Evaluation) -> str:
    return "" if found.different in (None, found.problems) else f" ({found.different} different)"


def _cut_off(found: Evaluation) -> str:
    if found.cut_off is None:
        return ""
    return f", {found.cut_off / (found.problems * found.samples):.0%} cut off by rollout.max_tokens"


def _same(found: Evaluation) -> dict[str, str]:
    """Whether the policy looks at the problems at all."""
    same = found.commonest
    if same is None:
        return {}
    often = f"; {same.share:.0%} are {_on_a_line(same.answer)}" if same.share > 1.0 / same.different else ""
    return {"answers": f"{same.different} different" + often}


def _signal(found: Evaluation) -> dict[str, str]:
    """What training on such problems would have to learn from, where several answers to each tell."""
    if found.equal_rewards is None or found.lost:
        return {}
    share = found.equal_rewards / found.problems
    return {"equal rewards": f"in {share:.0%} of the problems: a group of such answers teaches nothing"}


async def _measure(asked: Asked, scratch: Path, say: Console) -> Evaluation:
    settings = await _settings(asked, scratch, say)
    resolved = await preflight(settings, NO_PLACES, trainer=False)
    for warning in resolved.warnings:
        say.print(in_line(warning), markup=False)
    settings, folder = resolved.settings, resolved.folder
    write_whole(folder.config, dump_settings(settings).encode())
    folder.redis.mkdir(exist_ok=True)
    say.print(f"{settings.servers} × {settings.engine} engine, {settings.task_in_words}", markup=False)
    with PortReservation() as ports:
        plan = plan_launch(
            settings,
            folder,
            resolved.run_id,
            ports.of_mesh(settings.servers),
            NO_PLACES,
            missing_tunables(),
            fixed=True,
            devices=environments_here(settings, resolved.placement),
        )
        async with Reaper(shm_directory() / shm_prefix(resolved.run_id)) as reaper:
            return await _play(plan, folder, reaper, say)


async def _settings(asked: Asked, scratch: Path, say: Console) -> RunSettings:
    """Those of the checkpoint's run, its policy as a model folder, and what was asked for over them."""
    run = None if asked.checkpoint is None else _run_of(asked.checkpoint)
    if run is None:
        settings = load_settings(None, asked.overrides)
        if settings.model.path is None:
            raise UsageError(
                "nothing is named that could answer", "name a run folder or a checkpoint of one, or set model.path"
            )
        return _alone(settings, scratch)
    folder, at = run
    model = scratch / "model"
    command = [*OURS, "export", str(folder.root), "--out", str(model)]
    version = asked.at or at
    say.print(f"exporting {'the newest checkpoint' if version is None else f'checkpoint {version}'} of {folder.root}")
    process = await asyncio.create_subprocess_exec(
        *command, *([] if version is None else ["--at", version]), stdout=asyncio.subprocess.DEVNULL
    )
    code = await exported(process, checkpoint_bytes(folder.checkpoints, None), say.print)
    if code:
        raise UsageError(f"no checkpoint of {folder.root} could be exported", "see what is said above")
    return _alone(load_settings(folder.config, [*asked.overrides, f"model.path={json.dumps(str(model))}"]), scratch)


async def exported(process: Process, nbytes: int, say: Callable[[str], None]) -> int:
    """The exit code of a process that exports a checkpoint of so many bytes. What it has taken so far is said meanwhile.

    Raises DeadlineError where it does not end in time; it is killed then.
    """
    within_s = within(EXPORT_LEAST_S, nbytes)

    def tell(passed_s: float) -> None:
        say(f"exporting {nbytes / 1e9:.1f} GB: {passed_s:.0f} s so far, it has {within_s:.0f} s")

    try:
        async with asyncio.timeout(within_s):
            return await telling(process.wait(), tell)
    except TimeoutError as error:
        raise DeadlineError(
            f"the export of {nbytes / 1e9:.1f} GB did not end within {within_s:.0f} s", "is the disk stuck?"
        ) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _alone(settings: RunSettings, scratch: Path) -> RunSettings:
    """Without what belongs to training, and in a folder and a Redis of its own."""
    once = settings.evaluation.model_copy(update={"every": 0, "stop_at": None})
    # Whose code need not be here.
    plain = {"loss": LossSettings(), "advantage": AdvantageSettings(), "teacher": TeacherSettings()}
    trainer = settings.trainer.model_copy(update=plain)
    changes = {"run_dir": scratch / "run", "redis_url": None, "evaluation": once, "trainer": trainer}
    return settings.model_copy(update=changes)


def _run_of(path: Path) -> tuple[RunFolder, str | None]:
    """The run, and the version where a checkpoint of one was named. Raises UsageError for what is neither."""
    path = path.expanduser().absolute()
    if (path / "config.toml").exists():
        return RunFolder(path), None
    version = path.name.rpartition("-")[2]
    if (path / "meta.json").exists() and version.isdecimal():
        return RunFolder(path.parent.parent), str(int(version))
    raise UsageError(
        f"{path} is neither a run folder nor a checkpoint of one", "for a model of yours, set model.path=FOLDER"
    )


async def _play(plan: LaunchPlan, folder: RunFolder, reaper: Reaper, say: Console) -> Evaluation:
    environment = ManagedProcess(plan.environment, folder.logs, reaper, say.print)

    async def play() -> None:
        try:
            await environment.run()
        finally:
            await to_its_end(environment.stop(STOP_DEADLINE_S))

    await run_plane(plan, folder, reaper, say.print, play)
    try:
        return evaluation_of(EvaluationAnswers.model_validate_json(folder.evaluation.read_bytes()))
    except (OSError, ValueError) as error:
        raise RollmeshError(f"{folder.evaluation} holds no evaluation ({error})", f"see {folder.logs}") from error
