"""Several ranks, one engine: prepared and flipped together, or not at all."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from services.wire.errors import ConflictError
from services.wire.weights_api import CommitAnswer, DigestAnswer, StageAnswer
from weight_bus.errors import StageError
from weight_bus.manifest.layout import root_digest
from weight_bus.vllm import core as vllm_core
from weight_bus.vllm.protocol import (
    Attached,
    Committed,
    Digest,
    Pending,
    Reply,
    Staged,
    decode_reply,
    encode_reply,
    failure,
)
from weight_bus.vllm.replies import agreed


def staged(version: int = 7, digest: str = "a" * 64, nbytes: int = 10) -> Reply:
    return Staged(result=StageAnswer(version, digest, nbytes, nbytes / 10))


def committed(version: int) -> Reply:
    return Committed(result=CommitAnswer(version, 1.0, 2), at=3.0)


def refused() -> Reply:
    return failure(ConflictError("nothing is staged"))


def futures(*replies: Reply) -> list[Future[bytes]]:
    made = []
    for reply in replies:
        future: Future[bytes] = Future()
        future.set_result(encode_reply(reply))
        made.append(future)
    return made


def test_an_engine_is_prepared_when_all_its_ranks_are() -> None:
    late: Future[bytes] = Future()
    answer = agreed([*futures(staged(nbytes=10)), late])
    assert not answer.done()
    late.set_result(encode_reply(staged(nbytes=30)))
    reply = decode_reply(answer.result(timeout=1))
    assert reply == Staged(result=StageAnswer(7, "a" * 64, 40, 3.0, ["a" * 64] * 2, [10, 30]))


@pytest.mark.parametrize("other", [staged(digest="b" * 64), staged(version=8)])
def test_ranks_that_staged_different_things_are_not_prepared(other: Reply) -> None:
    with pytest.raises(StageError, match="rank 1 says prepared"):
        decode_reply(agreed(futures(staged(), other)).result())


def test_a_rank_that_failed_speaks_for_the_engine() -> None:
    with pytest.raises(StageError, match="rank 1: bad hash"):
        decode_reply(agreed(futures(staged(), failure(StageError("bad hash")))).result())
    with pytest.raises(StageError, match=r"^bad hash"):
        decode_reply(agreed(futures(failure(StageError("bad hash")))).result())


def digest(version: int, letter: str) -> Reply:
    return Digest(result=DigestAnswer(version, letter * 64))


def test_what_ranks_serve_has_the_digest_that_all_say_or_that_of_all_together() -> None:
    same = decode_reply(agreed(futures(digest(3, "a"), digest(3, "a"))).result())
    assert same == digest(3, "a")
    slices = decode_reply(agreed(futures(digest(0, "a"), digest(0, "b"))).result())
    assert slices == Digest(result=DigestAnswer(0, root_digest(["a" * 64, "b" * 64])))
    turned = decode_reply(agreed(futures(digest(0, "b"), digest(0, "a"))).result())
    assert turned != slices
    with pytest.raises(StageError, match="rank 1 says digest of version 4, rank 0 digest of version 3"):
        decode_reply(agreed(futures(digest(3, "a"), digest(4, "a"))).result())


def test_how_many_ranks_there_are_is_told_with_the_bytes_of_all() -> None:
    attached = Attached(tensors=5, total_bytes=10)
    assert decode_reply(agreed(futures(attached, attached)).result()) == Attached(tensors=5, total_bytes=20, ranks=2)


class Executor:
    """Ranks that answer what they are told to, by method."""

    def __init__(self, **answers: list[Reply | None]) -> None:
        self.answers = answers
        self.calls: list[tuple[str, Any]] = []

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[bytes | None]:
        self.calls.append((method, args))
        return [b"" if reply is None else encode_reply(reply) for reply in self.answers.get(method, [])]


def core(executor: Executor) -> Any:
    labels: list[str] = []
    return SimpleNamespace(
        model_executor=executor,
        batch_queue=None,
        scheduler=SimpleNamespace(get_request_counts=lambda: (2, 0)),
        labels=labels,
        set_weight_version=labels.append,
    )


def test_all_ranks_flip_in_one_call_and_the_label_follows() -> None:
    executor = Executor(rollmesh_flip=[committed(7), committed(7)])
    flipping = core(executor)
    assert isinstance(decode_reply(vllm_core.commit(flipping, 7)), Committed)
    assert (flipping.labels, executor.calls) == (["7"], [("rollmesh_flip", (7, 2, 1))])


def test_where_one_rank_did_not_flip_the_others_go_back() -> None:
    executor = Executor(rollmesh_flip=[committed(7), refused()])
    flipping = core(executor)
    with pytest.raises(ConflictError, match="rank 1: nothing is staged"):
        decode_reply(vllm_core.commit(flipping, 7))
    assert flipping.labels == []
    assert [method for method, _ in executor.calls] == ["rollmesh_flip", "rollmesh_unflip"]


def test_ranks_in_other_processes_are_asked_until_the_last_is_done() -> None:
    executor = Executor(rollmesh_poll=[staged(), None])
    staging = core(executor)
    reply = decode_reply(vllm_core.stage(staging, b"manifest"))  # type: ignore[arg-type]
    assert isinstance(reply, Pending)
    assert executor.calls == [("rollmesh_start", (reply.ticket, "rollmesh_stage", (b"manifest", 1, 1)))]
    assert decode_reply(vllm_core.poll(staging, reply.ticket)) == reply
    executor.answers["rollmesh_poll"] = [staged(), staged()]
    assert isinstance(decode_reply(vllm_core.poll(staging, reply.ticket)), Staged)
