"""`rollmesh up`: the whole mesh on this machine, from one command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from services.config import options
from services.config.options import overrides_of
from services.security.keys import KeyPlaces
from services.wire.errors import UsageError

app = typer.Typer(add_completion=False, rich_markup_mode=None)
prepare_app = typer.Typer(add_completion=False, rich_markup_mode=None)
eval_app = typer.Typer(add_completion=False, rich_markup_mode=None)
serve_app = typer.Typer(add_completion=False, rich_markup_mode=None)
play_app = typer.Typer(add_completion=False, rich_markup_mode=None)
redis_app = typer.Typer(add_completion=False, rich_markup_mode=None)

_HELP = """Run the whole mesh on this machine: warm-start a small policy, train it through real services, measure it.

Every setting has a dotted name (see docs/configuration.md) and can follow as an override.

\b
Examples:
  rollmesh up
  rollmesh up --task guess-number --seed 2 --servers 2
  rollmesh up --recipe smollm2
  rollmesh up --resume runs/mine
  rollmesh up --engine vllm --steps 20 --run-dir runs/mine trainer.learning_rate=1e-4
"""


@app.command(help=_HELP, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def up(
    context: typer.Context,
    task: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="running-sums (default), guess-number, or another of docs/environments.md"),
    ] = None,
    seed: Annotated[str | None, typer.Option(metavar="N", help="Problems, weights and sampling follow from it")] = None,
    engine: Annotated[str | None, typer.Option(metavar="NAME", help="auto (default), torch or vllm")] = None,
    servers: Annotated[str | None, typer.Option(metavar="N", help="Rollout servers (default 1)")] = None,
    steps: Annotated[str | None, typer.Option(metavar="N", help="Optimizer steps (default 60)")] = None,
    k: Annotated[str | None, typer.Option("--k", metavar="N", help="Largest staleness of a token (default 2)")] = None,
    run_dir: Annotated[str | None, typer.Option(metavar="DIR", help="Run folder (default runs/<task>-<time>)")] = None,
    redis_url: Annotated[str | None, typer.Option(metavar="URL", help="A Redis of yours; default: embedded")] = None,
    keys_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", envvar="ROLLMESH_KEYS_DIR", help="Folder of keys (`rollmesh keys init`) for every process"
        ),
    ] = None,
    redis_password_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", envvar="ROLLMESH_REDIS_PASSWORD_FILE", help="The password of a Redis of yours"),
    ] = None,
    tls_dir: options.TlsDir = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Settings as TOML; flags go before it")] = None,
    recipe: Annotated[str | None, typer.Option(metavar="NAME", help="Settings of a recipe, such as smollm2")] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Go on with the interrupted run in this run folder")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines instead of the live view")] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Only see whether it could start; a refusal is printed as JSON too"),
    ] = False,
) -> None:
    from services.config.load import load_settings, origins_of
    from services.config.recipes import find_recipe

    places = KeyPlaces(keys_dir, redis_password_file, tls_dir)
    if recipe is not None:
        if config is not None:
            raise UsageError("--recipe and --config both say the settings", "give one of them")
        config = find_recipe(recipe)
    flags = {
        "task": task,
        "seed": seed,
        "engine": engine,
        "servers": servers,
        "steps": steps,
        "k": k,
        "run_dir": run_dir,
        "redis_url": redis_url,
    }
    texts = {"task", "engine", "run_dir", "redis_url"}
    overrides = [
        f"{key}={json.dumps(value) if key in texts else value}" for key, value in flags.items() if value is not None
    ]
    overrides += overrides_of(context.args)
    if resume is not None:
        if overrides or config is not None:
            raise UsageError(
                "--resume goes on under the settings that the run began with",
                "leave other settings out; for more steps, or others, begin a run from this one's policy: "
                "`rollmesh export RUN --out FOLDER`, then model.path=FOLDER",
            )
        if check:
            raise UsageError("--check looks at a run that is new", "leave --resume or --check out")
        from services.supervisor.foreground import resume_in_foreground

        raise SystemExit(resume_in_foreground(resume, places, plain=plain))
    settings, origins = load_settings(config, overrides), origins_of(config, overrides)

    if check:
        from services.supervisor.preflight import look

        raise SystemExit(look(settings, places))

    from services.supervisor.foreground import run_in_foreground

    raise SystemExit(run_in_foreground(settings, origins, places, plain=plain))


@eval_app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    help="Measure a policy on held-out problems: rollout servers serve it, nothing is trained. Prints success with its "
    "interval, pass@k and lengths. Settings (docs/configuration.md) may follow; those of a checkpoint's run hold else. "
    "Exit code 1 where every episode was lost.\n\n"
    "\b\nExamples:\n"
    "  rollmesh eval --checkpoint runs/mine --at best\n"
    "  rollmesh eval --task sums --samples 4 --temperature 1 model.path=smollm2-135m",
)
def evaluate(
    context: typer.Context,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A run folder, or RUN/checkpoints/step-…; else set model.path")
    ] = None,
    at: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Of the run's checkpoints, or `best` (default: the newest)")
    ] = None,
    task: Annotated[str | None, typer.Option(metavar="NAME", help="Default: the run's")] = None,
    problems: Annotated[int | None, typer.Option(min=1, metavar="N", help="Held-out problems")] = None,
    samples: Annotated[int | None, typer.Option(min=1, metavar="N", help="Answers to each, for pass@k")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, metavar="T", help="0: greedily")] = None,
    engine: Annotated[str | None, typer.Option(metavar="NAME", help="auto, torch or vllm")] = None,
    servers: Annotated[int | None, typer.Option(min=1, metavar="N", help="Rollout servers")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    flags = {
        "task": None if task is None else json.dumps(task),
        # In place of several of a run.
        "tasks": None if task is None else "[]",
        "engine": None if engine is None else json.dumps(engine),
        "servers": servers,
        "evaluation.problems": problems,
        "evaluation.samples": samples,
        "evaluation.temperature": temperature,
    }
    overrides = [f"{key}={value}" for key, value in flags.items() if value is not None]
    overrides += overrides_of(context.args)
    if checkpoint is None and at is not None:
        raise UsageError("--at names a checkpoint of a run", "name the run with --checkpoint")

    from services.supervisor.evaluate import Asked, evaluate_in_foreground

    raise SystemExit(evaluate_in_foreground(Asked(checkpoint, at, overrides), as_json=as_json))


@serve_app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    help="Serve a model to agents: a Redis, the weight bus, rollout servers and the gateway, in the foreground, without a "
    "trainer. Prints the addresses and a call to try. Settings (docs/configuration.md) may follow.\n\n"
    "Exit code 130 after Ctrl-C, 1 where a service gave up, 2 for misuse.\n\n"
    "\b\nExamples:\n"
    "  rollmesh serve smollm2-135m --servers 2\n"
    "  rollmesh serve models/mine --engine vllm --port 8001 rollout.temperature=0.7",
)
def serve(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Hugging Face folder, or a name (`rollmesh models`)")],
    servers: Annotated[int, typer.Option(min=1, metavar="N", help="Rollout servers")] = 1,
    engine: Annotated[str | None, typer.Option(metavar="NAME", help="auto (default), torch or vllm")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="Of the gateway; 0: any")] = 8000,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of logs and configuration (default runs/serve-<time>)")
    ] = None,
    redis_url: Annotated[str | None, typer.Option(metavar="URL", help="A Redis of yours; default: embedded")] = None,
    keys_dir: options.KeysDir = None,
    redis_password_file: options.RedisPasswordFile = None,
    tls_dir: options.TlsDir = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Settings as TOML; flags go before it")] = None,
) -> None:
    from services.config.load import load_settings

    flags = {
        "model.path": json.dumps(str(model)),
        "servers": servers,
        "engine": None if engine is None else json.dumps(engine),
        "run_dir": None if run_dir is None else json.dumps(str(run_dir)),
        "redis_url": None if redis_url is None else json.dumps(redis_url),
        "gateway.enabled": '"always"',
    }
    overrides = [f"{key}={value}" for key, value in flags.items() if value is not None]
    settings = load_settings(config, [*overrides, *overrides_of(context.args)])

    from services.supervisor.serve import serve_in_foreground

    places = KeyPlaces(keys_dir, redis_password_file, tls_dir)
    raise SystemExit(serve_in_foreground(settings, places, port=port))


@prepare_app.command(
    help="Make the run folder of a mesh whose parts are started one by one: write the resolved settings, which every part "
    "is given as --config RUN_DIR/config.toml, and warm-start a small policy into RUN_DIR/model.\n\n"
    "With model.path there is no warm start. What is there stays; other settings than the run began with are refused.\n\n"
    "Example: rollmesh prepare --run-dir runs/demo task=guess-number steps=30"
)
def prepare(
    run_dir: Annotated[Path, typer.Option(help="Run folder; made where it is not there")],
    config: options.OptionalConfig = None,
    settings_only: Annotated[
        bool, typer.Option("--settings-only", help="Leave the warm start to another call; torch is not needed then")
    ] = False,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]…", help="Settings, such as steps=30")
    ] = None,
) -> None:
    from services.config.load import load_settings
    from services.supervisor import preflight as preparing

    preparing.prepare(load_settings(config, overrides or []), run_dir, settings_only=settings_only)


@play_app.command(
    help="Play a run's task as its settings say until the run has concluded: `rollmesh run-environment`, with flags from "
    "the configuration. ROLLMESH_REWARDS_URL, ROLLMESH_KEYS_DIR and the like hold for it too.\n\n"
    "Example: rollmesh play --run-id demo --config runs/demo/config.toml --rollout-url http://127.0.0.1:8000"
)
def play(
    run_id: options.RunId,
    config: options.Config,
    rollout_url: Annotated[list[str], typer.Option(help="The gateway, or a rollout server; repeat it for each")],
    run_dir: Annotated[
        Path | None, typer.Option(help="evaluation.json is written here; else into the folder of --config")
    ] = None,
    name: Annotated[
        str,
        typer.Option(
            envvar="ROLLMESH_RUNNER_NAME",
            help="Name of this runner, unique in the run: a process that starts again under it takes its place at once",
        ),
    ] = "environment",
) -> None:
    import os

    from services.config.load import load_settings
    from services.config.traces import as_environ
    from services.host.commands import OURS
    from services.supervisor.launch_plan import environment_command

    settings = load_settings(config, [])
    command = (*OURS, *environment_command(settings, config, run_id, run_dir or config.parent, rollout_url, name))
    # In this process's place: signals and the exit code are the environment's own.
    os.execve(command[0], command, {**os.environ, **as_environ(settings.telemetry)})


@redis_app.command(
    help="Run the Redis of a mesh: the Valkey that comes with rollmesh, kept by an append-only file. Where it is given a "
    "password, whoever speaks to it must show that. Another Redis will do as well.\n\n"
    "Example: rollmesh redis --data-dir redis --port 6379 --keys-dir keys"
)
def redis(
    data_dir: Annotated[Path, typer.Option(help="Where it keeps its data; made where it is not there")],
    port: options.Port,
    host: options.Host = options.LOOPBACK,
    keys_dir: options.KeysDir = None,
    redis_password_file: options.RedisPasswordFile = None,
) -> None:
    import os

    from services.security.keys import read_keys
    from services.security.permissions import require_loopback
    from services.supervisor.launch_plan import ValkeyPlan, write_users
    from services.wire.errors import UsageError

    password = read_keys("reader", keys_dir, {"redis": redis_password_file}).redis
    require_loopback(host, () if password else ("redis",))
    plan = ValkeyPlan(data_dir=data_dir.absolute(), port=port, host=host, asks_password=password is not None)
    command = plan.command()
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        if password is not None:
            write_users(data_dir, password)
        # In this process's place: signals and the exit code are the server's own.
        os.execv(command[0], command)
    except OSError as error:
        raise UsageError(
            f"Redis cannot be started in {data_dir} ({error})", "name a folder that can be written"
        ) from error
