"""Utility calls that rollmesh adds to vLLM's engine core: attach, stage, commit, rollback, digest; pause of one run.

    rollout server ── fork ──► run_engine_core ── vLLM's own loop ──► step · step · [commit] · step …
                                                                               ▲ one call: flip the weights and
                                                                                 change the version label

vLLM's loop serves utility calls only between two steps. Flipping the weights and setting the weight version in one such
call is therefore atomic for every token: no pause, no wrong version; the KV policy (`weight_bus.vllm.kv_cache`) is
applied in the same call. That needs steps that do not overlap (`async_scheduling=False`), which `commit` checks.

Where several runs' adapters are served, each call is of one run, named by its slot (1, 2, …), and the label names the
versions in all slots, in their order: "3 5". Else there is slot 1 alone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import structlog

from services.wire.errors import ConflictError, RollmeshError
from services.wire.sampling import KvPolicy
from weight_bus.memory.arena import shared_arena
from weight_bus.receiver.rank_sharing import sharing_bytes
from weight_bus.vllm import protocol
from weight_bus.vllm.kv_cache import KvMemory
from weight_bus.vllm.replies import agree, agreed
from weight_bus.vllm.room import leave_room_for_updates
from weight_bus.vllm.slots.requests import PausedRuns

_log = structlog.get_logger()


def install() -> None:
    """Give this process's EngineCore our utility calls, and room for updates; on a CPU, layers that read their live weight.

    Idempotent."""
    from vllm.platforms import current_platform
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    leave_room_for_updates(Executor)
    EngineCore.rollmesh_extend = extend
    EngineCore.rollmesh_attach = attach
    EngineCore.rollmesh_stage = stage
    EngineCore.rollmesh_poll = poll
    EngineCore.rollmesh_commit = commit
    EngineCore.rollmesh_rollback = rollback
    EngineCore.rollmesh_digest = digest
    EngineCore.rollmesh_detach = detach
    EngineCore.rollmesh_pause = pause
    EngineCore.rollmesh_resume = resume
    # Imported here: they bring torch.
    from weight_bus.vllm.quantised import keep_plain_weights_from_start

    keep_plain_weights_from_start(WorkerWrapperBase)
    if current_platform.is_cpu():
        from weight_bus.vllm.experts import keep_experts_beside_adapters, keep_experts_live

        keep_linears_live()
        keep_experts_live()
        keep_experts_beside_adapters()


def keep_linears_live() -> None:
    """Make vLLM use its fallback, a plain product with `layer.weight`, instead of a packed copy of each weight.

    vLLM's packed copy would still be used after a flip; `weight_bus.vllm.packed.layers` packs copies that follow it.
    """
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False


def extend(core: Any) -> None:
    """Called before `attach` in a vLLM whose worker class was not ours to choose."""
    from weight_bus.vllm.worker import extend_worker

    core.model_executor.collective_rpc(extend_worker)


def attach(
    core: Any,
    run_id: str,
    transport: str,
    kv_policy: KvPolicy,
    key: str | None = None,
    file_root: str | None = None,
    adapter: tuple[int, str | list[str]] | None = None,
    experts: bool = False,
    slot: int = 1,
) -> bytes:
    """Called once for each run, before its first request. `key`: the run's weight key; None takes manifests unsigned.

    `file_root`: the folder that weight files may be read from. `adapter`: rank and targets, where adapters are served.
    `experts`: whether samples tell which experts were chosen (`weight_bus.vllm.routing`). This and `kv_policy` are those of
    the first run.
    """
    try:
        _check_steps(core)
        if not hasattr(core, "rollmesh_kv"):
            _prepare(core, kv_policy, experts=experts)
    except RollmeshError as error:
        return protocol.encode_reply(protocol.failure(error))
    with _shared_by_ranks(core, run_id) as path:
        arguments = (run_id, transport, key, file_root, path, adapter, experts, slot)
        return agree(core.model_executor.collective_rpc("rollmesh_attach", args=arguments))


def _prepare(core: Any, kv_policy: KvPolicy, *, experts: bool) -> None:
    adapters = getattr(core.vllm_config, "lora_config", None)
    slots = 1 if adapters is None else int(adapters.max_loras)
    core.rollmesh_kv = KvMemory(core, kv_policy, shared=slots > 1)
    core.rollmesh_versions = [0] * slots
    if slots > 1:
        core.rollmesh_paused = PausedRuns(core.scheduler)
    if experts:
        # Imported here: it brings torch.
        from weight_bus.vllm.routing import take_experts

        take_experts(core.scheduler)


def detach(core: Any, slot: int) -> bytes:
    """A run of several has ended: nothing is staged into its slot any more. Its requests are to have ended before."""
    paused: PausedRuns | None = getattr(core, "rollmesh_paused", None)
    if paused is not None:
        paused.resume(slot)
    return agree(core.model_executor.collective_rpc("rollmesh_detach", args=(slot,)))


def pause(core: Any, slot: int, frozen: bool) -> bytes:
    """Let no request of one run of several begin; `frozen`: nor go on. Answers how many go on."""
    return protocol.encode_reply(protocol.Done(running=core.rollmesh_paused.pause(slot, running=frozen)))


def resume(core: Any, slot: int) -> bytes:
    core.rollmesh_paused.resume(slot)
    return protocol.encode_reply(protocol.Done())


@contextlib.contextmanager
def _shared_by_ranks(core: Any, run_id: str) -> Iterator[str | None]:
    """A file in shared memory that several ranks may open within the block; they keep its memory, the file goes.

    None for a single rank, and where shared memory has no room: each rank reads every byte then, and the log says so.
    """
    if _in_this_process(core) or core.vllm_config.parallel_config.world_size == 1:
        yield None
        return
    try:
        arena = shared_arena(sharing_bytes(), run_id)
    except RollmeshError as error:
        _log.warning("every rank reads all bytes of an update", why=str(error))
        yield None
        return
    try:
        yield str(arena.path)
    finally:
        arena.close()


def stage(core: Any, manifest: bytes, slot: int = 1) -> Future[bytes] | bytes:
    """Prepared when every rank is. The loop answers when the future is done and goes on stepping meanwhile."""
    core.rollmesh_stages = call = getattr(core, "rollmesh_stages", 0) + 1
    return _in_background(core, "rollmesh_stage", manifest, call, slot)


def digest(core: Any, slot: int = 1) -> Future[bytes] | bytes:
    return _in_background(core, "rollmesh_digest", slot)


def poll(core: Any, ticket: int) -> bytes:
    """The reply of all ranks to a ticket, or Pending while one is busy."""
    replies = core.model_executor.collective_rpc("rollmesh_poll", args=(ticket,))
    return agree(replies) if all(replies) else protocol.encode_reply(protocol.Pending(ticket=ticket))


def _in_background(core: Any, method: str, *arguments: Any) -> Future[bytes] | bytes:
    """A worker in this process answers with a future. Those in other processes are polled: they cannot send one."""
    if _in_this_process(core):
        return agreed(core.model_executor.collective_rpc(method, args=arguments))
    core.rollmesh_tickets = ticket = getattr(core, "rollmesh_tickets", 0) + 1
    core.model_executor.collective_rpc("rollmesh_start", args=(ticket, method, arguments))
    return protocol.encode_reply(protocol.Pending(ticket=ticket))


def _in_this_process(core: Any) -> bool:
    """Whether the one worker is here, not in a process of its own."""
    return hasattr(core.model_executor, "driver_worker")


def commit(core: Any, version: int, slot: int = 1) -> bytes:
    """Flip all ranks and relabel between two steps: tokens of later steps carry `version`, those of earlier ones do not."""
    return _serve(core, "rollmesh_flip", version, slot)


def rollback(core: Any, version: int, slot: int = 1) -> bytes:
    """As `commit`, back to the version that was served before the last one."""
    return _serve(core, "rollmesh_flip_back", version, slot)


def _serve(core: Any, method: str, version: int, slot: int) -> bytes:
    """Apply the KV policy, then flip: if the first fails, the old version is served on."""
    kv: KvMemory | None = getattr(core, "rollmesh_kv", None)
    versions: list[int] = getattr(core, "rollmesh_versions", [0])
    running, _ = core.scheduler.get_request_counts()
    if kv is not None and len(versions) > 1:
        running = len(kv.running(slot))
    try:
        _check_steps(core)
        if kv is not None:
            kv.apply_policy(slot)
    except Exception as error:  # noqa: BLE001 - crosses a process boundary: raised again on the other side
        return protocol.encode_reply(protocol.failure(error))
    replies = core.model_executor.collective_rpc(method, args=(version, running, slot))
    reply = agree(replies)
    if isinstance(protocol.read_reply(reply), protocol.Committed):
        versions[slot - 1] = version
        core.set_weight_version(protocol.label_of(versions))
    elif any(isinstance(protocol.read_reply(each), protocol.Committed) for each in replies):
        # Some ranks flipped and some did not: undo, since all ranks must serve one version.
        core.model_executor.collective_rpc("rollmesh_unflip", args=(version, slot))
    return reply


def _check_steps(core: Any) -> None:
    if core.batch_queue is not None:
        raise ConflictError(
            "steps overlap here, a commit between them would mis-tag tokens",
            "start vLLM with --no-async-scheduling (async_scheduling=False)",
        )


@contextlib.contextmanager
def started_by_rollmesh() -> Iterator[None]:
    """Within the block, engine-core processes begin in `run_engine_core`."""
    from vllm.v1.engine.core import EngineCoreProc

    original = EngineCoreProc.run_engine_core
    EngineCoreProc.rollmesh_original_run = staticmethod(original)
    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
    try:
        yield
    finally:
        EngineCoreProc.run_engine_core = staticmethod(original)
        del EngineCoreProc.rollmesh_original_run


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """Entry of the engine-core process, forked or spawned: end with the parent, close its connections, run vLLM's loop."""
    import torch
    from vllm.v1.engine.core import EngineCoreProc

    # Ctrl-C in a terminal is for the rollout server, which ends its engine when it has answered its clients.
    os.setpgid(0, 0)
    scratch = os.environ.get(protocol.SCRATCH)
    if scratch:
        # vLLM leaves a rendezvous file in the temporary folder; here it goes when the engine goes.
        tempfile.tempdir = scratch
    end_with_parent(Path(scratch) if scratch else None)
    close_inherited_sockets()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit():
        torch.set_num_threads(int(threads))
    install()
    # Spawned, this process has vLLM's own entry; forked, it has inherited ours.
    original = getattr(EngineCoreProc, "rollmesh_original_run", EngineCoreProc.run_engine_core)
    try:
        original(*args, **kwargs)
    finally:
        # Also where the server ended without closing its engine.
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)


def end_with_parent(scratch: Path | None) -> None:
    """Exit as soon as the parent is gone, also after kill -9, removing `scratch`.

    Waits on multiprocessing's pipe from the parent: unlike PR_SET_PDEATHSIG it does not depend on which of the parent's
    threads forked, and it works for spawned processes too.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="rollmesh-parent-watch", daemon=True).start()


def close_inherited_sockets() -> None:
    """Point inherited internet sockets at /dev/null: a fork must not keep the server's port or a client's connection open.

    The descriptors stay in use, so that code that still has their numbers cannot reach a file opened later.
    """
    table = Path("/proc/self/fd")
    if not table.is_dir():
        return
    null = os.open(os.devnull, os.O_RDWR)
    for entry in [int(name.name) for name in table.iterdir()]:
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(entry).st_mode):
                continue
            probe = socket.socket(fileno=os.dup(entry))
            family = probe.family
            probe.close()
            if family in (socket.AF_INET, socket.AF_INET6):
                os.dup2(null, entry)
    os.close(null)
