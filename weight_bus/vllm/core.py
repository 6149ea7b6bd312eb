"""Utility calls that rollmesh adds to vLLM's engine core: attach, stage, commit, rollback, digest.

    rollout server ── fork ──► run_engine_core ── vLLM's own loop ──► step · step · [commit] · step …
                                                                               ▲ one call: flip the weights and
                                                                                 change the version label

vLLM's loop serves utility calls only between two steps. Flipping the weights and setting the weight version in one such
call is therefore atomic for every token: no pause, no wrong version; the KV policy (`weight_bus.vllm.kv_cache`) is
applied in the same call. That needs steps that do not overlap (`async_scheduling=False`), which `commit` checks.
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
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from services.wire.errors import ConflictError, RollmeshError
from services.wire.sampling import KvPolicy
from weight_bus.manifest.layout import root_digest
from weight_bus.vllm import protocol
from weight_bus.vllm.kv_cache import KvMemory
from weight_bus.vllm.room import leave_room_for_updates


def install() -> None:
    """Give this process's EngineCore our utility calls, and room for updates; on a CPU, layers that read their live weight.

    Idempotent."""
    from vllm.platforms import current_platform
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    leave_room_for_updates(Executor)
    EngineCore.rollmesh_extend = extend
    EngineCore.rollmesh_attach = attach
    EngineCore.rollmesh_stage = stage
    EngineCore.rollmesh_poll = poll
    EngineCore.rollmesh_commit = commit
    EngineCore.rollmesh_rollback = rollback
    EngineCore.rollmesh_digest = digest
    if current_platform.is_cpu():
        # Imported here: it brings torch.
        from weight_bus.vllm.experts import keep_experts_live

        keep_linears_live()
        keep_experts_live()


def keep_linears_live() -> None:
    """Make vLLM use its fallback, a plain product with `layer.weight`, instead of a packed copy of each weight.

    vLLM's packed copy would still be used after a flip; `weight_bus.vllm.packing` packs copies that follow it.
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
) -> bytes:
    """Called once, before the first request. `key`: the run's weight key; None takes manifests unsigned.

    `file_root`: the folder that weight files may be read from.
    """
    try:
        _check_steps(core)
        core.rollmesh_kv = KvMemory(core, kv_policy)
    except RollmeshError as error:
        return protocol.encode_reply(protocol.failure(error))
    return agree(core.model_executor.collective_rpc("rollmesh_attach", args=(run_id, transport, key, file_root)))


def stage(core: Any, manifest: bytes) -> Future[bytes] | bytes:
    """Prepared when every rank is. The loop answers when the future is done and goes on stepping meanwhile."""
    return _in_background(core, "rollmesh_stage", manifest)


def digest(core: Any) -> Future[bytes] | bytes:
    return _in_background(core, "rollmesh_digest")


def poll(core: Any, ticket: int) -> bytes:
    """The reply of all ranks to a ticket, or Pending while one is busy."""
    replies = core.model_executor.collective_rpc("rollmesh_poll", args=(ticket,))
    return agree(replies) if all(replies) else protocol.encode_reply(protocol.Pending(ticket=ticket))


def _in_background(core: Any, method: str, *arguments: Any) -> Future[bytes] | bytes:
    """A worker in this process answers with a future. Those in other processes are polled: they cannot send one."""
    if hasattr(core.model_executor, "driver_worker"):
        return agreed(core.model_executor.collective_rpc(method, args=arguments))
    core.rollmesh_tickets = ticket = getattr(core, "rollmesh_tickets", 0) + 1
    core.model_executor.collective_rpc("rollmesh_start", args=(ticket, method, arguments))
    return protocol.encode_reply(protocol.Pending(ticket=ticket))


def commit(core: Any, version: int) -> bytes:
    """Flip all ranks and relabel between two steps: tokens of later steps carry `version`, those of earlier ones do not."""
    return _serve(core, "rollmesh_flip", version)


def rollback(core: Any, version: int) -> bytes:
    """As `commit`, back to the version that was served before the last one."""
    return _serve(core, "rollmesh_flip_back", version)


def _serve(core: Any, method: str, version: int) -> bytes:
    """Apply the KV policy, then flip: if the first fails, the old version is served on."""
    running, _ = core.scheduler.get_request_counts()
    kv: KvMemory | None = getattr(core, "rollmesh_kv", None)
    try:
        _check_steps(core)
        if kv is not None:
            kv.apply_policy()
    except Exception as error:  # noqa: BLE001 - crosses a process boundary: raised again on the other side
        return protocol.encode_reply(protocol.failure(error))
    replies = core.model_executor.collective_rpc(method, args=(version, running))
    reply = agree(replies)
    if isinstance(protocol.read_reply(reply), protocol.Committed):
        core.set_weight_version(str(version))
    elif any(isinstance(protocol.read_reply(each), protocol.Committed) for each in replies):
        # Some ranks flipped and some did not: undo, since all ranks must serve one version.
        core.model_executor.collective_rpc("rollmesh_unflip", args=(version,))
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


def agree(replies: Sequence[bytes]) -> bytes:
    """Combine the encoded replies of all ranks, in rank order. A failure names its rank where there are several.

        rank 0  PREPARED(7, a1…) ┐
        rank 1  PREPARED(7, a1…) ┴─► the engine is prepared          rank 1 PREPARED(7, b2…): it is not, StageError

    An engine is prepared when every rank is, with the same version and digest. Where ranks serve different digests, they
    have slices that no manifest names, such as those of the model they were started with: the engine's digest is then the
    one over theirs, in rank order.
    """
    read = [protocol.read_reply(reply) for reply in replies]
    if not read:
        return protocol.encode_reply(protocol.Failed(code="internal", what="no rank answered"))
    for rank, reply in enumerate(read):
        if isinstance(reply, protocol.Failed):
            what = f"rank {rank}: {reply.what}" if len(read) > 1 else reply.what
            return protocol.encode_reply(msgspec.structs.replace(reply, what=what))
    first = read[0]
    for rank, reply in enumerate(read[1:], start=1):
        if _meaning(reply) != _meaning(first):
            what = f"rank {rank} says {_meaning(reply)}, rank 0 {_meaning(first)}"
            return protocol.encode_reply(
                protocol.Failed(code="stage_failed", what=what, remedy="stage the version again")
            )
    return protocol.encode_reply(_together(first, read))


def agreed(futures: Sequence[Future[bytes]]) -> Future[bytes]:
    """Done when every rank has answered; it never raises, a failure is a reply."""
    answer: Future[bytes] = Future()
    answer.set_running_or_notify_cancel()
    left = len(futures)
    lock = threading.Lock()

    def one_done(_: Future[bytes]) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        try:
            answer.set_result(agree([future.result() for future in futures]))
        except Exception as error:  # noqa: BLE001 - crosses a process boundary: raised again, typed, on the other side
            answer.set_result(protocol.encode_reply(protocol.failure(error)))

    if not futures:
        answer.set_result(agree([]))
    for future in futures:
        future.add_done_callback(one_done)
    return answer


def _meaning(reply: protocol.Reply) -> str:
    """The part of a reply that must be equal on all ranks."""
    if isinstance(reply, protocol.Staged):
        return f"prepared({reply.result.version}, {reply.result.root_digest[:16]}…)"
    if isinstance(reply, protocol.Committed):
        return f"committed({reply.result.version})"
    if isinstance(reply, protocol.Digest):
        return f"digest of version {reply.result.version}"
    return type(reply).__name__.lower()


def _together(first: protocol.Reply, read: Sequence[protocol.Reply]) -> protocol.Reply:
    """Bytes are those of all ranks; times those of the slowest."""
    if isinstance(first, protocol.Staged):
        staged = [reply.result for reply in read if isinstance(reply, protocol.Staged)]
        return protocol.Staged(
            result=replace(
                first.result,
                bytes_read=sum(each.bytes_read for each in staged),
                seconds=max(each.seconds for each in staged),
                rank_digests=[each.root_digest for each in staged] if len(staged) > 1 else None,
            )
        )
    if isinstance(first, protocol.Committed):
        flips = [reply for reply in read if isinstance(reply, protocol.Committed)]
        slowest = max(reply.result.flip_ms for reply in flips)
        return protocol.Committed(result=replace(first.result, flip_ms=slowest), at=max(reply.at for reply in flips))
    if isinstance(first, protocol.Attached):
        total = sum(reply.total_bytes for reply in read if isinstance(reply, protocol.Attached))
        return msgspec.structs.replace(first, total_bytes=total, ranks=len(read))
    if isinstance(first, protocol.Digest):
        digests = [reply.result.root_digest for reply in read if isinstance(reply, protocol.Digest)]
        together = digests[0] if len(set(digests)) == 1 else root_digest(digests)
        return protocol.Digest(result=replace(first.result, root_digest=together))
    return first
