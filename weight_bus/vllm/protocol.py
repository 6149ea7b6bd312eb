"""RPC messages between an API process and its vLLM engine core, and the names that both sides use.

vLLM's utility calls carry plain msgpack values and turn every exception into a string. So a reply is one of the structs
below, encoded, and a failure keeps its type: it is raised again in the API process.

Importing this module imports neither torch nor vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from services.wire.errors import ConflictError, NotReadyError, RollmeshError, UsageError, WireError
from services.wire.weights_api import CommitAnswer, DigestAnswer, StageAnswer
from weight_bus.errors import SignatureError, StageError, TransportError

LIVE_WEIGHTS = "ROLLMESH_VLLM_LIVE_WEIGHTS"
"""Environment variable: `1` asks the plug-in to make this vLLM's weights replaceable while it serves."""
SCRATCH = "ROLLMESH_VLLM_SCRATCH"
"""Environment variable: the folder for the sockets and rendezvous files of one engine; it goes when the engine goes."""
SHADOW = "ROLLMESH_WEIGHTS_SHADOW"
"""Environment variable: where a version is staged, as `weights.shadow` says (`weight_bus.vllm.sets`)."""
PACKED = "ROLLMESH_WEIGHTS_PACKED"
"""Environment variable: how matrices are held on a CPU, as `weights.packed` says (`weight_bus.vllm.packed`)."""
BACKEND = "rollmesh"
"""The name of our weight backend in vLLM's configuration and in the init_info of its routes."""
WORKER_EXTENSION = "weight_bus.vllm.worker.RollmeshWorker"


class Staged(msgspec.Struct, frozen=True, kw_only=True, tag="staged"):
    result: StageAnswer


class Committed(msgspec.Struct, frozen=True, kw_only=True, tag="committed"):
    """`at`: when the flip ended, on the host's monotonic clock (seconds)."""

    result: CommitAnswer
    at: float


class Digest(msgspec.Struct, frozen=True, kw_only=True, tag="digest"):
    result: DigestAnswer


class Attached(msgspec.Struct, frozen=True, kw_only=True, tag="attached"):
    """Views into the live weights were built: `tensors` by their Hugging Face names, `total_bytes` in all `ranks`."""

    tensors: int
    total_bytes: int
    ranks: int = 1


class Pending(msgspec.Struct, frozen=True, kw_only=True, tag="pending"):
    """The workers are separate processes and still busy: call `rollmesh_poll` with `ticket` until they are done."""

    ticket: int


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """`running`: of a run that was paused, how many requests go on."""

    running: int = 0


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    code: str
    what: str
    remedy: str = ""


Reply = Staged | Committed | Digest | Attached | Pending | Done | Failed

_POLL_S = 0.02
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_KINDS: dict[str, type[RollmeshError]] = {
    kind.code: kind
    for kind in (StageError, SignatureError, TransportError, ConflictError, UsageError, WireError, NotReadyError)
}


def label_of(versions: Sequence[int]) -> str:
    """vLLM's label for what it serves: the versions in all slots. Until the first commit it has its own, `default`."""
    return " ".join(map(str, versions))


def version_in(label: str, slot: int) -> int:
    """What `label` says of a slot."""
    return 0 if label == "default" else int(label.split(" ")[slot - 1])


def encode_reply(reply: Reply) -> bytes:
    return _encoder.encode(reply)


def failure(error: Exception) -> Failed:
    """An exception as a reply; one that is not a RollmeshError keeps its type's name."""
    if isinstance(error, RollmeshError):
        return Failed(code=error.code, what=error.what, remedy=error.remedy)
    return Failed(code=RollmeshError.code, what=f"{type(error).__name__}: {error}")


def read_reply(payload: bytes) -> Reply:
    """The reply, also where it is a failure."""
    return _decoder.decode(payload)


def decode_reply(payload: bytes) -> Reply:
    """The reply, or the failure it carries, raised as the kind it had in the engine core."""
    reply = read_reply(payload)
    if isinstance(reply, Failed):
        raise _KINDS.get(reply.code, RollmeshError)(reply.what, reply.remedy)
    return reply


async def ask(core: Any, method: str, *arguments: Any) -> Reply:
    """The reply to a utility call of `core`, vLLM's client of the engine core; a pending one is polled until it is done.

    Raises the failure that it carries. No deadline.
    """
    reply = decode_reply(await core.call_utility_async(method, *arguments))
    while isinstance(reply, Pending):
        await asyncio.sleep(_POLL_S)
        reply = decode_reply(await core.call_utility_async("rollmesh_poll", reply.ticket))
    return reply
