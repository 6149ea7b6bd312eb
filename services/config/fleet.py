"""Several runs on one rollout server: how a command line names them, what their settings must have in common. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from services.config.base import Section
from services.config.settings import RunSettings
from services.wire.errors import UsageError

_ALIKE = (
    "model.path",
    "model.dtype",
    "model.trust_remote_code",
    "rollout.kv_policy",
    "rollout.tensor_parallel",
    "rollout.threads",
    "rollout.routing_replay",
    "rollout.vllm",
    "weights.transport",
    "weights.packed",
    "weights.nixl",
    "weights.nccl",
)
"""Settings of the one engine, and of the one process around it. Ranks and targets may differ: a slot has room for all."""


@dataclass(frozen=True)
class RunOptions:
    """What a rollout server is told of a run, by the options of its command line."""

    run_id: str
    port: int
    redis_url: str
    config: Path | None = None
    bus_url: str | None = None
    own_url: str | None = None
    keys_dir: Path | None = None
    agent_key_file: Path | None = None
    bus_key_file: Path | None = None
    weights_key_file: Path | None = None
    redis_password_file: Path | None = None


_NOT_SHARED = ("run_id", "port", "config", "bus_url", "own_url")
_NAMES = {field.name.replace("_", "-"): field for field in fields(RunOptions)}


def run_beside(text: str, first: RunOptions) -> RunOptions:
    """A further run: `run-id=b,port=8101,config=b.toml,bus-url=http://…`. Redis and keys that are left out are `first`'s.

    Raises UsageError, naming it, for what is no option of a run, has no value, comes twice or is missing.
    """
    given: dict[str, Any] = {}
    for part in text.split(","):
        option, _, value = part.partition("=")
        field = _NAMES.get(option.strip())
        if field is None:
            raise UsageError(f"--also {text}: a run has no option {option!r}", f"known: {', '.join(_NAMES)}")
        if not value or field.name in given:
            raise UsageError(
                f"--also {text}: {option} {'has no value' if not value else 'comes twice'}", "OPTION=VALUE,…"
            )
        given[field.name] = Path(value) if "Path" in str(field.type) else value
    for name in ("run_id", "port", "config"):
        if name not in given:
            raise UsageError(
                f"--also {text}: which {name.replace('_', '-')}?", "name run-id, port and config of each run"
            )
    if not given["port"].isdecimal() or not 0 < int(given["port"]) < 1 << 16:
        raise UsageError(f"--also {text}: port={given['port']} is no port", "1 to 65535")
    given["port"] = int(given["port"])
    own: dict[str, Any] = {**dict.fromkeys(_NOT_SHARED), **given}
    return replace(first, **own)


def check_fleet(runs: Mapping[str, RunSettings], engine: str) -> None:
    """Raises UsageError, naming run and setting, where these runs (by their ids) cannot be on one engine."""
    if engine != "vllm":
        raise UsageError(
            f"engine {engine} serves one run, and {len(runs)} are named ({', '.join(runs)})",
            "use --engine vllm, or a server for each run",
        )
    (first, like), *others = runs.items()
    for run_id, settings in runs.items():
        if settings.weights.publish != "adapter":
            raise UsageError(
                f"run {run_id} has weights.publish={settings.weights.publish}: runs on one server share the base, and "
                "publish adapters alone",
                "set weights.publish=adapter and trainer.lora.rank, or give the run a server of its own",
            )
    for run_id, settings in others:
        for name in _ALIKE:
            if (own := _read(settings, name)) != (expected := _read(like, name)):
                raise UsageError(
                    f"run {run_id} has {name}={own}, and run {first}, on the same server, {expected}",
                    "give both the same, or each a server of its own",
                )


def _read(settings: RunSettings, name: str) -> Any:
    section, _, field = name.partition(".")
    value = getattr(getattr(settings, section), field)
    return value.model_dump(exclude_defaults=True) if isinstance(value, Section) else value
