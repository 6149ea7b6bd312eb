"""`python -m services.http.probe ADDRESS`: the readiness probe of a container. Standard library only.

    http://…, https://…   GET /readyz answers 200 (`--live`: /livez); else the reasons are printed
    redis://…             AUTH where a password is given, then PING is answered by PONG

It is run every few seconds beside each service, so it starts in a tenth of the time that `rollmesh` takes.
Exit codes: 0 ready, 1 not ready.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import ssl
import sys
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

DEADLINE_S = 4.0
_MOST_BYTES = 65536


def main(arguments: list[str]) -> int:
    """Ask once; returns the exit code."""
    parser = argparse.ArgumentParser(prog="services.http.probe", description="Ask a service whether it is ready.")
    parser.add_argument("address", help="such as http://127.0.0.1:8000 or redis://127.0.0.1:6379")
    parser.add_argument("--password-file", type=Path, help="Redis's password")
    parser.add_argument("--host", help="the name that the service's certificate bears, where the address has another")
    parser.add_argument(
        "--live", action="store_true", help="ask whether the service lives, and not whether it is ready"
    )
    chosen = parser.parse_args(arguments)
    parts = urlsplit(chosen.address)
    try:
        said = (
            _redis(parts, chosen.password_file)
            if parts.scheme == "redis"
            else _http(parts, chosen.host, live=chosen.live)
        )
    except (OSError, http.client.HTTPException, ValueError) as error:
        said = f"{chosen.address} does not answer ({error or type(error).__name__})"
    sys.stdout.write(f"{said or 'ready'}\n")
    return 1 if said else 0


def _http(parts: SplitResult, named: str | None, *, live: bool) -> str:
    """The reasons of `/readyz` for not being ready; empty: it is ready. `live`: of `/livez`."""
    path = "/livez" if live else "/readyz"
    address = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
    connection = http.client.HTTPConnection(*address, timeout=DEADLINE_S)
    connection.sock = socket.create_connection(address, DEADLINE_S)
    if parts.scheme == "https":
        # Certificates are verified everywhere in the mesh, even on loopback.
        folder = os.environ.get("ROLLMESH_TLS_DIR")
        trust = ssl.create_default_context(cafile=None if folder is None else str(Path(folder) / "ca.pem"))
        connection.sock = trust.wrap_socket(connection.sock, server_hostname=named or address[0])
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read(_MOST_BYTES)
    if answer.status == 200:
        return ""
    try:
        reasons = json.loads(body)["not_ready"]
    except (ValueError, KeyError, TypeError):
        return f"{path} answers {answer.status}"
    return "; ".join(map(str, reasons))


def _redis(parts: SplitResult, password_file: Path | None) -> str:
    password = "" if password_file is None else password_file.read_text(encoding="ascii").strip()
    with socket.create_connection((parts.hostname or "", parts.port or 6379), DEADLINE_S) as connection:
        call = _command("AUTH", password) if password else b""
        connection.sendall(call + _command("PING"))
        with connection.makefile("rb") as answers:
            for _ in range(1 + bool(call)):
                answer = answers.readline(_MOST_BYTES).decode(errors="replace").strip()
                if answer not in ("+OK", "+PONG"):
                    return answer or "the connection was closed"
    return ""


def _command(*words: str) -> bytes:
    """As Redis reads it."""
    lines = [f"*{len(words)}", *(line for word in words for line in (f"${len(word.encode())}", word))]
    return ("\r\n".join(lines) + "\r\n").encode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
