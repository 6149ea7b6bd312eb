"""What a plain `vllm serve` is told about the mesh, by environment variables: vLLM's command line is its own.

| variable                    | meaning                                               | without it           |
|-----------------------------|-------------------------------------------------------|----------------------|
| `ROLLMESH_RUN_ID`           | the run whose manifests are taken                     | no routes of ours    |
| `ROLLMESH_BUS_URL`          | the weight bus to register with                       | it joins none        |
| `ROLLMESH_ENGINE_ID`        | what it is called there                               | `vllm-HOST-PORT`     |
| `ROLLMESH_ENGINE_URL`       | where the bus finds it                                | `http://HOST:PORT`   |
| `ROLLMESH_TRANSPORT`        | the run's `weights.transport`                         | `auto`               |
| `ROLLMESH_KV_POLICY`        | `salt`, `recompute`; `keep` without prefix cache only | `salt`               |
| `ROLLMESH_FILE_ROOT`        | the folder that weight files may be read from         | none is read         |
| `ROLLMESH_KEYS_DIR`         | a folder with admin, peer and weights key             | the three files here |
| `ROLLMESH_ADMIN_KEY_FILE`   | the key that `/weights/*` wants as bearer             | loopback only        |
| `ROLLMESH_BUS_KEY_FILE`     | the key that is shown to the bus                      | the peer key, if any |
| `ROLLMESH_WEIGHTS_KEY_FILE` | the key that manifests are signed with                | any manifest is taken |
| `ROLLMESH_TLS_DIR`          | certificates: the bus is called by TLS, as vLLM is    | plain HTTP           |

Importing this module imports neither torch nor vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from services.security.keys import KEYS_DIR, read_key, read_keys
from services.security.permissions import Keys
from services.security.tls import TLS_DIR, Tls, read_tls
from services.wire.errors import UsageError
from services.wire.sampling import KvPolicy

_WEIGHTS_KEY = "ROLLMESH_WEIGHTS_KEY_FILE"


@dataclass(frozen=True)
class EngineSettings:
    """`bus_url` None: updates come from whoever calls the routes."""

    run_id: str
    bus_url: str | None
    engine_id: str
    url: str
    transport: str
    kv_policy: KvPolicy
    keys: Keys
    bus_key: str | None
    file_root: str | None
    tls: Tls


def read_settings(host: str, port: int, environment: Mapping[str, str] | None = None) -> EngineSettings | None:
    """The settings of a vLLM that listens on `host:port`; None where it was given no run.

    Raises UsageError for a policy that is unknown, and for a key or a certificate that cannot be read.
    """
    given = os.environ if environment is None else environment
    run_id = given.get("ROLLMESH_RUN_ID")
    if not run_id:
        return None
    policy = given.get("ROLLMESH_KV_POLICY", "salt")
    if policy not in get_args(KvPolicy):
        raise UsageError(f"no KV policy {policy!r}", f"ROLLMESH_KV_POLICY: {', '.join(get_args(KvPolicy))}")
    tls = read_tls(_path(given, TLS_DIR))
    return EngineSettings(
        run_id=run_id,
        bus_url=given.get("ROLLMESH_BUS_URL") or None,
        engine_id=given.get("ROLLMESH_ENGINE_ID") or f"vllm-{host}-{port}",
        url=tls.own_url(host, port, given.get("ROLLMESH_ENGINE_URL") or None),
        transport=given.get("ROLLMESH_TRANSPORT", "auto"),
        kv_policy=cast("KvPolicy", policy),
        keys=read_keys(
            "engine",
            _path(given, KEYS_DIR),
            {"admin": _path(given, "ROLLMESH_ADMIN_KEY_FILE"), "weights": _path(given, _WEIGHTS_KEY)},
        ),
        bus_key=_key(given, "ROLLMESH_BUS_KEY_FILE"),
        file_root=given.get("ROLLMESH_FILE_ROOT") or None,
        tls=tls,
    )


def weights_key() -> str | None:
    """The key with which manifests must be signed. Raises UsageError for a file that holds none."""
    folder = _path(os.environ, KEYS_DIR)
    return read_keys("engine", folder, {"weights": _path(os.environ, _WEIGHTS_KEY)}).weights


def file_root() -> str | None:
    """The folder that weight files may be read from; None: none is."""
    return os.environ.get("ROLLMESH_FILE_ROOT") or None


def _key(environment: Mapping[str, str], name: str) -> str | None:
    path = _path(environment, name)
    return None if path is None else read_key(path)


def _path(environment: Mapping[str, str], name: str) -> Path | None:
    return Path(environment[name]) if environment.get(name) else None
