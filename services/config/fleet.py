"""Several runs on one rollout server: what their settings must have in common. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    return getattr(getattr(settings, section), field)
