"""`rollmesh up`: the whole mesh on this machine, from one command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from services.tls_option import TlsDir
from services.wire.errors import UsageError

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_HELP = """Run the whole mesh on this machine: warm-start a small policy, train it through real services, measure it.

Every setting has a dotted name (see docs/configuration.md) and can follow as an override.

\b
Examples:
  rollmesh up
  rollmesh up --task guess-number --seed 2 --servers 2
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
    tls_dir: TlsDir = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Settings as TOML; flags go before it")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines instead of the live view")] = False,
) -> None:
    from services.config_file import load_settings
    from services.key_files import KeyPlaces

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
    settings = load_settings(config, [*overrides, *_overrides(context.args)])

    from services.supervisor.foreground import run_in_foreground

    raise SystemExit(run_in_foreground(settings, KeyPlaces(keys_dir, redis_password_file, tls_dir), plain=plain))


def _overrides(arguments: Sequence[str]) -> list[str]:
    """`key=value`, `--key=value` and `--key value` as `key=value`. Raises UsageError for anything else."""
    overrides: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if "=" in argument:
            overrides.append(argument.removeprefix("--"))
        elif argument.startswith("--"):
            overrides.append(f"{argument.removeprefix('--')}={next(rest, '')}")
        else:
            raise UsageError(
                f"{argument!r} is no setting", "write section.key=value, such as trainer.learning_rate=1e-4"
            )
    return overrides
