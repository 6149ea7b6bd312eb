"""`rollmesh run-environment`: play a task against rollout servers until their run has concluded."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import structlog
import typer

from services.config import options
from services.wire.errors import UsageError

if TYPE_CHECKING:
    from clients.environments.base import AnyEnvironment
    from clients.runner.tasks import PlayedTask
    from services.config.tasks import TaskSettings
    from services.policies.training.curriculum import CurriculumRules

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    epilog="Example: rollmesh run-environment --run-id demo --task running-sums --rollout-url http://127.0.0.1:8100 "
    "--run-dir runs/demo"
)
def run_environment(
    run_id: Annotated[
        str | None, typer.Option(help="The run's id, as the servers have it; not read by --check and --trial")
    ] = None,
    rollout_url: Annotated[
        list[str] | None,
        typer.Option(help="A rollout server; repeat it for each; not read by --check and --trial"),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="evaluation.json is written here; not read by --check and --trial")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="A task's name, such as running-sums or python:./agent.py:make")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="In place of --task: a run's configuration (TOML), whose tasks and curriculum are played"),
    ] = None,
    seed: options.Seed = 1,
    group_size: Annotated[int, typer.Option(min=1, help="Answers to each problem")] = 8,
    temperature: Annotated[float, typer.Option(min=0.0, help="For training groups")] = 1.0,
    greedy_baseline: Annotated[
        bool, typer.Option("--greedy-baseline", help="The first answer of a training group is sampled greedily (ReMax)")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens, a turn")] = 24,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Groups in play at once; (K + 1) · batch keeps all busy")
    ] = 48,
    evaluation_problems: Annotated[int, typer.Option(min=1, help="Held-out problems, before and after")] = 256,
    evaluation_temperature: Annotated[float, typer.Option(min=0.0, help="For those problems; 0: greedily")] = 0.0,
    evaluation_samples: Annotated[int, typer.Option(min=1, help="Answers to each of them")] = 1,
    evaluate_every: Annotated[int, typer.Option(min=0, help="Versions between evaluations beside training")] = 0,
    evaluate_only: Annotated[
        bool, typer.Option("--evaluate-only", help="Evaluate what is served, write it to evaluation.json, and end")
    ] = False,
    episode_timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that an episode may take")] = 600.0,
    start_timeout: Annotated[
        float,
        typer.Option(min=0.001, help="Seconds that the servers may take to start: to load a model, to compile it"),
    ] = 3600.0,
    retries: Annotated[int, typer.Option(min=0, help="How often a problem is played again whose group was lost")] = 2,
    name: Annotated[
        str | None,
        typer.Option(
            envvar="ROLLMESH_RUNNER_NAME",
            help="Name of this runner, unique in the run: a process that starts again under it takes its place at once",
        ),
    ] = None,
    rewards_url: Annotated[
        str | None, typer.Option(envvar="ROLLMESH_REWARDS_URL", help="Reward service, for tasks that it judges")
    ] = None,
    keys_dir: options.KeysDir = None,
    tls_dir: options.TlsDir = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only see whether the task can be made; no server needed")
    ] = False,
    trial: Annotated[
        bool,
        typer.Option(
            "--trial",
            help="Only pose its problems and play a few episodes, without a server; print what was found (JSON)",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --check: a JSON line for each task, as --trial prints it")
    ] = False,
) -> None:
    """Evaluate, play training groups until the run has concluded, evaluate again.

    Keys, where they are asked for: the agent key in --keys-dir, or what ROLLMESH_AGENT_KEY and ROLLMESH_REWARDS_KEY hold.
    """
    from clients.environments.registry import make_task
    from clients.environments.rewards import RewardsAddress
    from clients.runner.curricula import Curricula
    from clients.runner.evaluation import Terms
    from clients.runner.runner import RunnerPlan, evaluate_once, run_environment
    from clients.runner.tasks import PlayedTask, check_names
    from services.config.traces import TraceSettings, with_environ
    from services.observability.setup import open_tracing
    from services.policies.training.mixture import parts_of
    from services.security.keys import read_keys
    from services.security.tls import read_trust

    if as_json and not check:
        raise UsageError("--json is of --check", "leave it out: --trial prints JSON in any case")
    if not (check or trial):
        given = {"--run-id": run_id, "--rollout-url": rollout_url, "--run-dir": run_dir}
        if missing := [option for option, value in given.items() if not value]:
            raise UsageError(f"{', '.join(missing)} must be given", "only --check and --trial do without")
    run_id, run_dir = run_id or "check", run_dir or Path()
    # Its environment variables alone say whether it is traced: it may be given no configuration.
    tracing = open_tracing(with_environ(TraceSettings(), os.environ), "environment", run_id, "environment")
    trust = read_trust(tls_dir)
    key = read_keys("environment", keys_dir).agent
    rewards = None
    if rewards_url is not None:
        rewards = RewardsAddress(rewards_url, os.environ.get("ROLLMESH_REWARDS_KEY") or key, trust, tracing)
    asked, curriculum = _asked(task, config)
    parts = parts_of([each.weight for each in asked])
    tasks = []
    for each, share in zip(asked, parts, strict=True):
        made = make_task(each.task, rewards, each.name)
        tasks.append(
            PlayedTask(
                environment=made.environment,
                dialect=made.dialect,
                assumed=made.assumed,
                name=each.name or "",
                parts=share,
                max_tokens=each.max_tokens or max_tokens,
                temperature=each.temperature or temperature,
                episode_timeout_s=each.episode_timeout_s or episode_timeout,
            )
        )
    if check:
        check_names(tasks)
        for playable in tasks:
            _see_a_problem(playable.environment, seed)
        Curricula.opened([(each.label, each.environment) for each in tasks], seed, curriculum, run_dir, None)
        _say_made(tasks, as_json=as_json)
        return
    if trial:
        asyncio.run(_try_all(tasks, seed))
        return
    plan = RunnerPlan(
        tasks=tasks,
        seed=seed,
        group_size=group_size,
        greedy_baseline=greedy_baseline,
        curriculum=curriculum,
        concurrency=concurrency,
        evaluation=Terms(evaluation_problems, evaluation_temperature, evaluation_samples, evaluate_every),
        run_dir=run_dir,
        start_deadline_s=start_timeout,
        retries=retries,
        name=name,
        api_key=os.environ.get("ROLLMESH_AGENT_KEY") or key,
        trust=trust,
        tracing=tracing,
    )

    async def until_terminated() -> None:
        playing = asyncio.create_task((evaluate_once if evaluate_only else run_environment)(rollout_url or [], plan))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, playing.cancel)
        await playing

    names = [each.label for each in tasks]
    structlog.get_logger().info("environment starts", run=run_id, tasks=names, parts=parts, concurrency=concurrency)
    try:
        with tracing:
            _run(until_terminated())
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None


def _asked(task: str | None, config: Path | None) -> tuple[list[TaskSettings], CurriculumRules | None]:
    from services.config.load import load_settings
    from services.config.tasks import TaskSettings

    if (task is None) == (config is None):
        raise UsageError("what is to be played is not clear", "give exactly one of --task and --config")
    if task is not None:
        return [TaskSettings(task=task)], None
    settings = load_settings(config, [])
    return settings.played, settings.curriculum.rules


def _say_made(tasks: Sequence[PlayedTask], *, as_json: bool) -> None:
    import msgspec

    from clients.runner.trial import made_task

    words = {"text": "speaks plain text", "chat": "speaks in chat messages", "agent": "an agent plays it"}
    for each in tasks:
        made = made_task(each.label, each.environment, each.dialect, assumed=each.assumed)
        speaks = "takes chat where the model has a template" if each.dialect == "auto" else words[made.speaks]
        said = msgspec.json.encode(made).decode() if as_json else f"the task can be made: {made.task}, {speaks}"
        sys.stdout.write(said + "\n")


async def _try_all(tasks: Sequence[PlayedTask], seed: int) -> None:
    import msgspec

    from clients.runner.trial import made_task, try_task

    for each in tasks:
        made = made_task(each.label, each.environment, each.dialect, assumed=each.assumed)
        found = await try_task(made, each.environment, seed)
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")


def _see_a_problem(environment: AnyEnvironment, seed: int) -> None:
    """Raises UsageError when the environment cannot even pose one of each split."""
    from clients.environments.base import describe

    try:
        environment.problem("train", 0, seed)
        environment.problem("held_out", 0, seed)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{environment.name} cannot pose a problem ({describe(error)})", "fix its code") from error


def _run(main: Coroutine[None, None, None]) -> None:
    """Under uvloop where it is installed: it halves the cost of a call."""
    gc.freeze()  # what was imported stays for good
    try:
        import uvloop
    except ModuleNotFoundError:
        asyncio.run(main)
    else:
        uvloop.run(main)
