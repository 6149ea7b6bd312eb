"""Start and stop a vLLM engine: environment variables, configuration, the engine-core process.

    preload ─ imports (seconds) ─► launch ─ configuration, fork, model load ─► AsyncLLM ─► end

On a CPU the engine core is forked from this process, with every module already imported, which saves most of its start
(2.4 s instead of 17). Hence the order: environment, imports, configuration, then the fork, before any torch work here.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shlex
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import structlog
import torch

from rollout_server.engines.request_check import read_json
from rollout_server.engines.vllm import arguments
from rollout_server.engines.vllm.arguments import Plan, Platform
from services.config.settings import PackedWeights, ShadowPlace
from services.host.devices import VISIBLE
from services.host.models import check_code
from services.wire.errors import RollmeshError, UsageError
from weight_bus.vllm.protocol import SCRATCH

# Imported before the fork, so that the engine core does not import them after it.
_MODULES = (
    "vllm.engine.arg_utils",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.core.sched.scheduler",
    "weight_bus.vllm.core",
    "weight_bus.vllm.worker",
)
_CPU_MODULES = (
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.model_loader.default_loader",
)
_RPC_FOLDER = "VLLM_RPC_BASE_PATH"
_log = structlog.get_logger()


def set_environment(
    platform: Platform, threads: int, given: Mapping[str, Any], shadow: ShadowPlace, *, packed: PackedWeights
) -> None:
    """Called before vLLM and torch are imported, and never at import time."""
    os.environ.update(arguments.environment(platform, threads, given, shadow, packed=packed))
    for name, value in arguments.DEFAULTS.items():
        os.environ.setdefault(name, value)


def import_everything(
    threads: int, given: Mapping[str, Any], shadow: ShadowPlace, *, packed: PackedWeights = "auto"
) -> None:
    """Import vLLM, which takes several seconds. `given`: engine arguments of the user's. Raises UsageError where it is
    missing or broken."""
    set_environment(arguments.installed_platform(), threads, given, shadow, packed=packed)
    try:
        with warnings.catch_warnings():
            # Deprecation warnings inside vLLM are of no use in the server's log.
            warnings.simplefilter("ignore", FutureWarning)
            for module in _MODULES:
                importlib.import_module(module)
            for module in _CPU_MODULES if on_cpu() else ():
                importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"vLLM cannot be imported ({error})",
            "./dev test and ./dev up --engine vllm install it, or use --engine torch",
        ) from error


def on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def launch(plan: Plan) -> tuple[Any, Path]:
    """An AsyncLLM and its scratch folder. Blocks until the model is loaded: a second on a CPU, minutes on a GPU.

    On a CPU call it on the main thread with no other thread at work, for it forks; on a GPU on any thread. Raises
    UsageError for a model that needs code of its own, unless `plan` trusts it; RollmeshError with vLLM's reason when the
    engine does not come up.
    """
    check_code(plan.model, trusted=plan.trust_remote_code)
    from vllm.v1.engine.async_llm import AsyncLLM

    from weight_bus.vllm.core import started_by_rollmesh

    scratch = Path(tempfile.mkdtemp(prefix="rollmesh-vllm-"))
    os.environ[_RPC_FOLDER] = os.environ[SCRATCH] = str(scratch)
    try:
        if on_cpu():
            register_architectures(plan.model)
            if plan.tensor_parallel > 1:
                # The system schedules the ranks over all cores; vLLM would bind each to a NUMA node of its own.
                os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        config = configure(plan)
        with forking() if on_cpu() else contextlib.nullcontext():
            with started_by_rollmesh():
                return AsyncLLM.from_vllm_config(config, disable_log_stats=True), scratch
    except UsageError:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    except Exception as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise RollmeshError(
            f"vLLM could not start on {plan.model} ({type(error).__name__}: {error})",
            "the lines above it in this log say more; VLLM_LOGGING_LEVEL=INFO says all",
        ) from error


def configure(plan: Plan) -> Any:
    """vLLM's configuration. Raises UsageError for arguments of the user's that it does not take, and where there are fewer
    GPUs than ranks."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    found = arguments.arguments(plan, "cpu" if on_cpu() else "gpu")
    if on_cpu():
        found["ir_op_priority"] = norm_priority()
    elif (there := current_platform.device_count()) < plan.tensor_parallel:
        raise UsageError(
            f"rollout.tensor_parallel={plan.tensor_parallel} wants as many GPUs, and this process sees {there} "
            f"({VISIBLE}={os.environ.get(VISIBLE, 'not set')})",
            "give it more, or split the model over fewer ranks",
        )
    _log.info("vllm_starts", arguments=shlex.join(arguments.command_line(found)))
    # Of a server: else vLLM would take a quarter of the tokens a step on a large GPU that its own server takes.
    usage = None if on_cpu() else UsageContext.OPENAI_API_SERVER
    try:
        return AsyncEngineArgs(**found).create_engine_config(usage)
    except (ValueError, TypeError) as error:
        if not plan.given:
            raise
        named = ", ".join(f"{name}={value}" for name, value in plan.given.items())
        raise UsageError(f"vLLM does not take [rollout.vllm] {named} ({error})", "see its documentation") from error


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """vLLM sets `spawn` while it makes a configuration for CPUs; a fork brings the imported modules along."""
    before = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD")
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    try:
        yield
    finally:
        if before is None:
            del os.environ["VLLM_WORKER_MULTIPROC_METHOD"]
        else:
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = before


def register_architectures(model: Path) -> None:
    """Let vLLM see the model class in this process; else it starts another Python to look at it, once a machine (10 s)."""
    from vllm.model_executor.models import ModelRegistry

    for architecture in read_json(model / "config.json").get("architectures", []):
        known = ModelRegistry.models.get(architecture)
        if known is not None:
            ModelRegistry.register_model(architecture, known.load_model_cls())


def end(llm: Any, scratch: Path, deadline_s: float) -> None:
    """End the engine-core process for sure, reap it and remove what it left. Blocks up to `deadline_s`, then kills."""
    manager = llm.engine_core.resources.engine_manager
    processes = [] if manager is None else list(manager.processes)
    workers = [worker for process in processes for worker in _started_by(process.pid)]
    try:
        llm.shutdown(timeout=deadline_s)
    except psutil.NoSuchProcess as gone:
        # vLLM kills what has not ended in time, and stumbles where a worker ends just then; it leaves the others.
        _log.info("a worker of vLLM ended while it was to be killed", pid=gone.pid)
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join(5.0)
        shutil.rmtree(scratch, ignore_errors=True)
        # Another vLLM that this process starts must not look for its sockets there.
        for name in (_RPC_FOLDER, SCRATCH):
            if os.environ.get(name) == str(scratch):
                del os.environ[name]


def _started_by(pid: int | None) -> list[psutil.Process]:
    """Processes that an engine core has started, such as one a rank."""
    try:
        return psutil.Process(pid).children(recursive=True) if pid is not None else []
    except psutil.NoSuchProcess:
        return []


# RMS norms on a CPU by vLLM's compiled kernels. vLLM has them for CPUs too, but in eager mode it runs six tensor
# operations for each norm: five times as long, a twelfth of a step of a small model. Where a kernel does not support its
# arguments, vLLM falls back to its native norm. The functions must have that norm's whole signature, used or not.

# ruff: noqa: ARG001


PROVIDER = "rollmesh"


def norm_priority() -> dict[str, list[str]]:
    """vLLM's `ir_op_priority` with ours first; empty where this build of vLLM lacks the kernels. Idempotent."""
    from vllm import ir
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if not (hasattr(torch.ops._C, "rms_norm") and hasattr(torch.ops._C, "fused_add_rms_norm")):
        return {}
    rms_norm, add_rms_norm = ir.ops.rms_norm, ir.ops.fused_add_rms_norm
    if PROVIDER not in rms_norm.impls:
        rms_norm.register_impl(PROVIDER, supports_args=_takes_norm)(_rms_norm)
        add_rms_norm.register_impl(PROVIDER, supports_args=_takes_sum, inplace=True)(_fused_add_rms_norm)
    return {"rms_norm": [PROVIDER], "fused_add_rms_norm": [PROVIDER]}


def _takes_norm(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return variance_size is None and weight is not None and weight.dtype == x.dtype


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    # The kernel takes rows that lie one after another; the queries of a joint projection do not.
    rows = x.contiguous()
    normed = torch.empty_like(rows)
    torch.ops._C.rms_norm(normed, rows, weight, epsilon)
    return normed


def _takes_sum(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    lies_well = x.is_contiguous() and x_residual.is_contiguous() and x_residual.dtype == x.dtype
    return lies_well and _takes_norm(x, weight, epsilon, variance_size)


def _fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
