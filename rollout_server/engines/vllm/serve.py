"""vLLM's own server with the run's settings: its command line and variables. Pure.

with a weight bus   it joins the bus itself, and takes versions by the plug-in's routes (`weight_bus.vllm.endpoints`)
without             it stands behind a rollout server of engine http, which brings it new weights
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout_server.engines.vllm.arguments import Plan, Platform, arguments, command_line, environment
from services.config.settings import RunSettings
from services.wire.errors import UsageError
from weight_bus.vllm.protocol import BACKEND


@dataclass(frozen=True)
class Served:
    command: Sequence[str]
    environ: Mapping[str, str]


def vllm_server(
    settings: RunSettings,
    model: Path,
    platform: Platform,
    *,
    run_id: str,
    engine_id: str,
    seed: int,
    host: str,
    port: int,
    bus_url: str | None,
    more: Sequence[str] = (),
) -> Served:
    """`more`: flags of vLLM's server. `bus_url`: None where it stands behind a rollout server. Raises UsageError where
    versions are adapters, which requests of others do not ask for."""
    if settings.weights.publish == "adapter":
        raise UsageError(
            "weights.publish=adapter is not for a plain vllm serve, whose weights are whole",
            "use weights.publish=merged, or rollmesh rollout-server --engine vllm",
        )
    rollout = settings.rollout
    given = rollout.vllm.arguments()
    plan = Plan(
        model=model,
        dtype=settings.model.dtype,
        max_running=rollout.max_running,
        seed=seed,
        kv_policy=rollout.kv_policy,
        tensor_parallel=rollout.tensor_parallel,
        trust_remote_code=settings.model.trust_remote_code,
        given=given,
    )
    weights = settings.weights
    variables = environment(platform, rollout.threads, given, weights.shadow, packed=weights.packed)
    if platform == "cpu" and rollout.tensor_parallel > 1:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    words = [*command_line(arguments(plan, platform)), "--host", host, "--port", str(port)]
    if bus_url is None:
        # Its token route, and those by which new weights come.
        variables["VLLM_SERVER_DEV_MODE"] = "1"
        words += ["--enable-scale-out", "--weight-transfer-config", f'{{"backend": "{BACKEND}"}}']
    else:
        variables |= {
            "VLLM_PLUGINS": "rollmesh",
            "ROLLMESH_RUN_ID": run_id,
            "ROLLMESH_BUS_URL": bus_url,
            "ROLLMESH_ENGINE_ID": engine_id,
            "ROLLMESH_TRANSPORT": settings.weights.transport,
            "ROLLMESH_KV_POLICY": rollout.kv_policy,
        }
        if settings.weights.file_root is not None:
            variables["ROLLMESH_FILE_ROOT"] = str(settings.weights.file_root)
    # The `vllm` command itself is broken where vLLM was built for CPUs.
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", *words, *more]
    return Served(command, variables)
