"""The option of every command that serves or calls over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TlsDir = Annotated[
    Path | None,
    typer.Option(
        "--tls-dir",
        envvar="ROLLMESH_TLS_DIR",
        help="Folder with ca.pem, cert.pem and key.pem (`rollmesh keys tls`): speak TLS; else plain HTTP",
    ),
]
