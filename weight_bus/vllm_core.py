"""The engine core's side: what rollmesh adds to vLLM's engine-core process.

    rollout server ── fork ──► run_engine_core ── vLLM's own loop ──► step · step · [commit] · step …
                                                                              ▲ one call: flip the weights and
                                                                                change the label of what follows

vLLM's loop serves utility calls only between two steps. Flipping the weights and setting the weight version in one such
call is therefore atomic for every token: no pause, no mis-tagged token; what becomes of the keys and values (`vllm_kv`)
belongs to the same call. That needs steps that do not overlap (`async_scheduling=False`), which `commit` insists on.
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

from services.wire.errors import ConflictError, UsageError
from services.wire.kv_policy import KvPolicy
from weight_bus.vllm_kv import KvMemory
from weight_bus.vllm_protocol import SCRATCH, Committed, decode_reply, encode_reply, failure


def install() -> None:
    """Give this process's EngineCore our utility calls and, on a CPU, layers that read their live weight. Idempotent."""
    from vllm.platforms import current_platform
    from vllm.v1.engine.core import EngineCore

    EngineCore.rollmesh_attach = attach
    EngineCore.rollmesh_stage = stage
    EngineCore.rollmesh_commit = commit
    EngineCore.rollmesh_digest = digest
    if current_platform.is_cpu():
        keep_linears_live()


def keep_linears_live() -> None:
    """Make vLLM take its own fallback, a plain product with `layer.weight`, instead of packing each weight away.

    A packed copy is closed over by a lambda and would go on being served after a flip. `vllm_packing` packs copies that
    are not.
    """
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = _never


def _never(*_: object) -> bool:
    return False


def attach(core: Any, run_id: str, transport: str, kv_policy: KvPolicy) -> bytes:
    """Called once, before the first request."""
    try:
        core.rollmesh_kv = KvMemory(core, kv_policy)
    except UsageError as error:
        return encode_reply(failure(error))
    reply: bytes = core.model_executor.collective_rpc("rollmesh_attach", args=(run_id, transport))[0]
    return reply


def stage(core: Any, manifest: bytes) -> Future[bytes]:
    """The loop answers when the future is done and goes on stepping meanwhile."""
    future: Future[bytes] = core.model_executor.collective_rpc("rollmesh_stage", args=(manifest,))[0]
    return future


def digest(core: Any) -> Future[bytes]:
    future: Future[bytes] = core.model_executor.collective_rpc("rollmesh_digest")[0]
    return future


def commit(core: Any, version: int) -> bytes:
    """Flip and relabel between two steps. Tokens of later steps carry `version`, those of earlier ones do not.

    The KV memory is seen to first: should that fail, the old version goes on being served.
    """
    if core.batch_queue is not None:
        overlap = ConflictError(
            "steps overlap here, a commit between them would mis-tag tokens", "async_scheduling=False"
        )
        return encode_reply(failure(overlap))
    running, _ = core.scheduler.get_request_counts()
    kv: KvMemory | None = getattr(core, "rollmesh_kv", None)
    try:
        if kv is not None:
            kv.turn_over()
    except Exception as error:  # noqa: BLE001 - crosses a process boundary: raised again on the other side
        return encode_reply(failure(error))
    reply: bytes = core.model_executor.collective_rpc("rollmesh_flip", args=(version, running))[0]
    with contextlib.suppress(Exception):
        if isinstance(decode_reply(reply), Committed):
            core.set_weight_version(str(version))
    return reply


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
    """The engine-core process, forked or spawned: end with the parent, keep none of its connections, then vLLM's loop."""
    import torch
    from vllm.v1.engine.core import EngineCoreProc

    # Ctrl-C in a terminal is for the rollout server, which ends its engine when it has answered its clients.
    os.setpgid(0, 0)
    scratch = os.environ.get(SCRATCH)
    if scratch:
        # vLLM leaves a rendezvous file in the temporary folder; here it goes when the engine goes.
        tempfile.tempdir = scratch
    end_with_parent(Path(scratch) if scratch else None)
    let_go_of_connections()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
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


def let_go_of_connections() -> None:
    """Point inherited internet sockets at /dev/null: a fork must not keep the server's port or a client's connection open.

    The numbers stay taken, so that nothing that believes to own one can hit a file opened later.
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
