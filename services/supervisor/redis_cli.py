"""`rollmesh redis`: the Redis of a mesh whose parts are started one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    help="Run the Redis of a mesh: the Valkey that comes with rollmesh, kept by an append-only file. Where it is given a "
    "password, whoever speaks to it must show that. Another Redis will do as well.\n\n"
    "Example: rollmesh redis --data-dir redis --port 6379 --keys-dir keys"
)
def redis(
    data_dir: Annotated[Path, typer.Option(help="Where it keeps its data; made where it is not there")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on")],
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that is not loopback needs the password")
    ] = "127.0.0.1",
    keys_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="ROLLMESH_KEYS_DIR", help="Folder of keys (`rollmesh keys init`): redis.key is the password"
        ),
    ] = None,
    redis_password_file: Annotated[
        Path | None, typer.Option(envvar="ROLLMESH_REDIS_PASSWORD_FILE", help="File with the password")
    ] = None,
) -> None:
    import os

    from services.key_files import read_keys
    from services.loopback import require_loopback
    from services.supervisor.valkey import ValkeyPlan, write_users
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
