"""A broadcast with two receivers in processes of their own: whoever dies or comes late costs an epoch, never a version."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

from tests.conftest import free_port
from tests.contract.weight_bus.transport_peers import CHUNK, NBYTES, Peer, Receiving, pattern
from weight_bus.errors import TransportError
from weight_bus.manifest.layout import hash_bytes
from weight_bus.manifest.manifest import CollectiveSource
from weight_bus.transports.nccl.group import reach_store
from weight_bus.transports.nccl.reader import CollectiveReader
from weight_bus.transports.select import make_exporter

CHUNKS = -(-NBYTES // CHUNK)


@pytest.fixture
def publisher(run_id: str) -> Iterator[Peer]:
    peer = Peer("nccl", run_id)
    yield peer
    peer.end()


@pytest.fixture
def two(publisher: Peer) -> Iterator[list[Receiving]]:
    receivers = [Receiving(publisher.sources[0]) for _ in range(2)]
    yield receivers
    for receiver in receivers:
        receiver.kill()


def test_two_receivers_get_the_same_bytes_and_a_late_one_too(publisher: Peer, two: list[Receiving]) -> None:
    for receiver in two:
        receiver.go(CHUNKS)
    assert [receiver.rest() for receiver in two] == [hash_bytes(pattern(0))] * 2
    late = Receiving(publisher.sources[0])
    late.go(CHUNKS)
    assert late.rest() == hash_bytes(pattern(0))
    late.kill()


def test_a_receiver_killed_in_mid_broadcast_costs_the_other_one_epoch(two: list[Receiving]) -> None:
    for receiver in two:
        receiver.go()
    assert [receiver.answer() for receiver in two] == [0, 0]
    two[0].kill()
    two[1].go(CHUNKS - 1)
    assert two[1].rest() == hash_bytes(pattern(0))


def test_a_receiver_that_stalls_holds_the_other_up_for_no_longer_than_said(two: list[Receiving]) -> None:
    for receiver in two:
        receiver.go()
    assert [receiver.answer() for receiver in two] == [0, 0]
    two[1].go(CHUNKS - 1)
    assert two[1].rest() == hash_bytes(pattern(0))
    # The one that stalled finds its epoch gone and joins another.
    two[0].go(CHUNKS - 1)
    assert two[0].rest() == hash_bytes(pattern(0))


def test_a_publisher_killed_in_mid_broadcast_is_an_error_for_both(publisher: Peer, two: list[Receiving]) -> None:
    for receiver in two:
        receiver.go()
    assert [receiver.answer() for receiver in two] == [0, 0]
    publisher.kill()
    for receiver in two:
        receiver.go(CHUNKS - 1)
    for receiver in two:
        said = receiver.rest()
        # Chunks that were under way may have arrived all the same; what is missing has nobody to give it.
        assert said == hash_bytes(pattern(0)) or "broadcast" in str(said)


def test_an_engine_that_a_loopback_address_leads_to_itself_is_told_the_setting() -> None:
    with pytest.raises(
        TransportError, match=r"no broadcast store answers at 127\.0\.0\.1:.*set weights\.broadcast_host"
    ):
        reach_store("127.0.0.1", free_port(), 1.0)


def test_a_broadcast_is_offered_at_the_address_that_was_set() -> None:
    """127.0.0.2 is another address of this machine: what listens there does not answer at 127.0.0.1."""
    exporter = make_exporter("nccl", "elsewhere", host="127.0.0.2")
    arena = exporter.allocate(1 << 16)
    arena.view[:] = bytes(range(256)) * 256
    source = exporter.export(arena)
    assert isinstance(source, CollectiveSource)
    assert source.host == "127.0.0.2"
    reader, got = CollectiveReader(10.0), bytearray(1 << 16)
    reader.read(source, 0, memoryview(got))
    assert bytes(got) == bytes(arena.view)
    with pytest.raises(TransportError, match="no broadcast store answers"):
        reach_store("127.0.0.1", source.port, 1.0)
    reader.close()
    del got
    exporter.close()
