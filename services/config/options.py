"""Command-line options that several commands share: types for the parameters of Typer commands.

A command names the parameter as the option is named, and gives its default. Imports nothing heavy: every command's start
waits for this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from services.wire.errors import UsageError

LOOPBACK = "127.0.0.1"

RunId = Annotated[str, typer.Option(help="The run's id: its name in Redis, on the bus and in logs")]
RedisUrl = Annotated[str, typer.Option(help="Redis that carries the run, redis://host:port/db")]
FoundRedisUrl = Annotated[
    str | None,
    typer.Option(
        "--redis-url",
        envvar="ROLLMESH_REDIS_URL",
        help="Redis that carries the run; left out: that of the newest run that runs in ./runs, else the one at"
        " 127.0.0.1:6379",
    ),
]
FoundRunId = Annotated[str | None, typer.Option("--run-id", help="The run; left out: the one run that Redis knows")]
Config = Annotated[Path, typer.Option(help="Configuration of the run (TOML)")]
OptionalConfig = Annotated[Path | None, typer.Option(help="Configuration of the run (TOML)")]
Seed = Annotated[int, typer.Option(min=0, help="Problems are generated from it")]

Port = Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on")]
Host = Annotated[str, typer.Option(help="Address to listen on; one that is not loopback needs keys (--keys-dir)")]
OwnUrl = Annotated[str | None, typer.Option(help="URL that other services reach this one at; else HOST:PORT")]

KeysDir = Annotated[Path | None, typer.Option(envvar="ROLLMESH_KEYS_DIR", help="Folder of keys (`rollmesh keys init`)")]
AdminKeyFile = Annotated[Path | None, typer.Option(help="File with the weight bus's admin key; else from --keys-dir")]
BusKeyFile = Annotated[
    Path | None, typer.Option(help="File with the weight bus's admin key; else the peer key is used")
]
WeightsKeyFile = Annotated[
    Path | None, typer.Option(help="File with the key that weight manifests are signed with; else from --keys-dir")
]
RedisPasswordFile = Annotated[
    Path | None, typer.Option(envvar="ROLLMESH_REDIS_PASSWORD_FILE", help="File with Redis's password")
]
TlsDir = Annotated[
    Path | None,
    typer.Option(
        "--tls-dir",
        envvar="ROLLMESH_TLS_DIR",
        help="Folder with ca.pem, cert.pem and key.pem (`rollmesh keys tls`): speak TLS; else plain HTTP",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of tables, one line for each item")]


def overrides_of(arguments: Sequence[str]) -> list[str]:
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
