"""One reply of an engine from those of its ranks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import msgspec

from weight_bus.manifest.layout import root_digest
from weight_bus.vllm import protocol


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
                rank_bytes=[each.bytes_read for each in staged] if len(staged) > 1 else None,
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
