"""Reads that must not wait: done here and now within a host, and left to others wherever they would have to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.host.files import remove_shm_files
from tests.contract.weight_bus.transport_peers import NBYTES, Peer, pattern, reader_of
from weight_bus.errors import TransportError
from weight_bus.memory.arena import private_arena
from weight_bus.transports.base import NotAtOnceError, QuickReader, Reader, read_at_once
from weight_bus.transports.select import nixl_installed

nixl_only = pytest.mark.skipif(not nixl_installed(), reason="NIXL is not installed")
NAMES = ["shm", pytest.param("nixl", marks=nixl_only)]


@pytest.fixture
def name() -> str:
    return "nixl"


@pytest.fixture
def peer(name: str, run_id: str) -> Iterator[Peer]:
    peer = Peer(name, run_id)
    yield peer
    peer.end()
    remove_shm_files(run_id)


@pytest.fixture
def reader(name: str, tmp_path: Path) -> Iterator[Reader]:
    reader = reader_of(name, tmp_path, deadline_s=3.0)
    yield reader
    reader.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_source_that_was_read_before_is_read_at_once(peer: Peer, reader: Reader) -> None:
    assert isinstance(reader, QuickReader)
    buffer = private_arena(NBYTES)
    source = peer.sources[0]
    assert not reader.read_at_once(source, 0, buffer.view), "it has to be set up first"
    reader.read(source, 0, buffer.view)
    for offset, length in [(0, NBYTES), (12_345, 100_000), (NBYTES - 5, 5), (7, 0)]:
        buffer.view[:] = bytes(NBYTES)
        assert reader.read_at_once(source, offset, buffer.view[:length])
        assert bytes(buffer.view[:length]) == pattern(0)[offset : offset + length]
    with pytest.raises(TransportError, match="lie outside a source"):
        reader.read_at_once(source, NBYTES - 3, buffer.view[:4])
    buffer.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_publisher_that_is_gone_is_an_error_here_too(peer: Peer, reader: Reader, name: str) -> None:
    assert isinstance(reader, QuickReader)
    buffer = private_arena(NBYTES)
    reader.read(peer.sources[0], 0, buffer.view)
    peer.kill()
    try:
        read = reader.read_at_once(peer.sources[0], 0, buffer.view)
    except TransportError:
        read = False
    assert not read
    buffer.close()


@pytest.mark.parametrize("name", ["file", "nccl"])
def test_other_transports_are_left_to_threads(name: str, reader: Reader, tmp_path: Path) -> None:
    assert not isinstance(reader, QuickReader)


@nixl_only
def test_a_buffer_that_is_not_registered_is_not_read_into(peer: Peer, reader: Reader) -> None:
    assert isinstance(reader, QuickReader)
    known, other = private_arena(NBYTES), private_arena(NBYTES)
    reader.read(peer.sources[0], 0, known.view)
    assert not reader.read_at_once(peer.sources[0], 0, other.view)
    assert reader.read_at_once(peer.sources[0], 0, known.view)
    with pytest.raises(TransportError, match="impossible address"):
        reader.read_at_once(msgspec.structs.replace(peer.sources[0], address=-1), 0, known.view)
    known.close()
    other.close()


class Slow:
    """An agent whose reads are still going on when they were posted, as over a network."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self.posted = 0

    def transfer(self, handle: Any) -> str:
        self.posted += 1
        self._agent.transfer(handle)
        return "PROC"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)


@nixl_only
def test_an_agent_on_another_host_is_not_tried_for_ever(peer: Peer, reader: Any) -> None:
    buffer = private_arena(NBYTES)
    reader.read(peer.sources[0], 0, buffer.view)
    reader._agent = slow = Slow(reader._agent)
    pieces = [(0, buffer.view[:64])]
    for _ in range(10):
        with pytest.raises(NotAtOnceError):
            list(read_at_once(reader, peer.sources[0], pieces))
    assert slow.posted == 3
    assert list(reader.read_many(peer.sources[0], pieces)) == [0]
    assert bytes(buffer.view[:64]) == pattern(0)[:64]
    reader._agent = slow._agent
    buffer.close()
