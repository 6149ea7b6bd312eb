"""What every process of a run reads before it builds its application: settings, tracing, keys, certificates, Redis."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from services.config.load import load_settings
from services.config.settings import RunSettings
from services.config.traces import with_environ
from services.observability.setup import open_tracing
from services.observability.tracing import Tracing
from services.security.keys import read_keys
from services.security.permissions import KeyName, Keys, ServiceName, lacking
from services.security.tls import Tls, read_tls

if TYPE_CHECKING:
    import socket


@dataclass(frozen=True)
class ProcessContext:
    service: ServiceName
    settings: RunSettings
    tracing: Tracing
    keys: Keys
    tls: Tls

    def redis_url(self, url: str, *, check: bool = False) -> str:
        """`url` with this process's password and authority.

        `check`: raise UsageError where that Redis cannot hold a run (`check_store`). One that starts is waited for.
        """
        from services.run_store.client import START_WITHIN_S, check_store, reached_by

        url = reached_by(url, self.keys.redis, self.tls.trust)
        if check:
            asyncio.run(check_store(url, within_s=START_WITHIN_S))
        return url

    def open_port(self, host: str, port: int) -> socket.socket:
        """Called before anything slow: a port in use is known at once, and probes are answered while a model loads."""
        from services.http.app import open_port

        return open_port(host, port, lacking=lacking(self.keys, self.service))


def read_context(
    service: ServiceName,
    run_id: str,
    instance: str,
    *,
    config: Path | None,
    keys_dir: Path | None,
    key_files: Mapping[KeyName, Path | None],
    tls_dir: Path | None,
    overrides: Sequence[str] = (),
) -> ProcessContext:
    """`instance`: this process's name among those of its service, in traces. Raises UsageError."""
    settings = load_settings(config, overrides)
    tracing = open_tracing(with_environ(settings.telemetry, os.environ), service, run_id, instance)
    return ProcessContext(service, settings, tracing, read_keys(service, keys_dir, key_files), read_tls(tls_dir))
