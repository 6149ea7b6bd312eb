"""One answer for all ranks of an engine: what they all say, or what the first of them that failed said.

    rank 0  PREPARED(7, a1…) ┐
    rank 1  PREPARED(7, a1…) ┴─► the engine is prepared          rank 1 PREPARED(7, b2…): it is not, StageError

An engine is prepared when every rank is, with the same version and digest; one that is not keeps all from flipping.
What they serve has the digest that they all say. Ranks that say different ones hold slices that no manifest names, such as
those of the model that they were started with: theirs together is the digest over all of them, in rank order.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

import msgspec

from weight_bus.layout import root_digest
from weight_bus.vllm_protocol import (
    Attached,
    Committed,
    Digest,
    Failed,
    Reply,
    Staged,
    encode_reply,
    failure,
    read_reply,
)


def agree(replies: Sequence[bytes]) -> bytes:
    """The encoded replies of all ranks, in rank order, as one. A failure names its rank where there are several."""
    read = [read_reply(reply) for reply in replies]
    if not read:
        return encode_reply(Failed(code="internal", what="no rank answered"))
    for rank, reply in enumerate(read):
        if isinstance(reply, Failed):
            return encode_reply(_of_rank(reply, rank) if len(read) > 1 else reply)
    first = read[0]
    for rank, reply in enumerate(read[1:], start=1):
        if _meaning(reply) != _meaning(first):
            what = f"rank {rank} says {_meaning(reply)}, rank 0 {_meaning(first)}"
            return encode_reply(Failed(code="stage_failed", what=what, remedy="stage the version again"))
    return encode_reply(_together(first, read))


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
            answer.set_result(encode_reply(failure(error)))

    if not futures:
        answer.set_result(agree([]))
    for future in futures:
        future.add_done_callback(one_done)
    return answer


def _of_rank(reply: Failed, rank: int) -> Failed:
    return msgspec.structs.replace(reply, what=f"rank {rank}: {reply.what}")


def _meaning(reply: Reply) -> str:
    """What all ranks must say alike."""
    if isinstance(reply, Staged):
        return f"prepared({reply.version}, {reply.root_digest[:16]}…)"
    if isinstance(reply, Committed):
        return f"committed({reply.version})"
    if isinstance(reply, Digest):
        return f"digest of version {reply.version}"
    return type(reply).__name__.lower()


def _together(first: Reply, read: Sequence[Reply]) -> Reply:
    """Bytes are those of all ranks; times those of the slowest."""
    if isinstance(first, Staged):
        staged = [reply for reply in read if isinstance(reply, Staged)]
        return msgspec.structs.replace(
            first,
            bytes_read=sum(reply.bytes_read for reply in staged),
            seconds=max(reply.seconds for reply in staged),
            rank_digests=[reply.root_digest for reply in staged] if len(staged) > 1 else None,
        )
    if isinstance(first, Committed):
        flips = [reply for reply in read if isinstance(reply, Committed)]
        return msgspec.structs.replace(
            first, flip_ms=max(reply.flip_ms for reply in flips), at=max(reply.at for reply in flips)
        )
    if isinstance(first, Attached):
        total = sum(reply.total_bytes for reply in read if isinstance(reply, Attached))
        return msgspec.structs.replace(first, total_bytes=total, ranks=len(read))
    if isinstance(first, Digest):
        digests = [reply.root_digest for reply in read if isinstance(reply, Digest)]
        together = digests[0] if len(set(digests)) == 1 else root_digest(digests)
        return msgspec.structs.replace(first, root_digest=together)
    return first
