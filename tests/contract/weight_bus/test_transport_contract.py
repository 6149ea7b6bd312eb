"""What every weight transport promises, checked on each: bytes of another process, whole, or a TransportError."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from services.host.files import remove_shm_files, shm_directory, shm_prefix
from services.wire.errors import UsageError
from tests.contract.weight_bus.transport_peers import NBYTES, Peer, draft_of, exporter_of, pattern, reader_of
from weight_bus.errors import TransportError
from weight_bus.manifest.manifest import CollectiveSource, FileSource, NixlSource, ShmSource, Source
from weight_bus.memory.arena import private_arena
from weight_bus.transports import select
from weight_bus.transports.base import Reader
from weight_bus.transports.select import nixl_installed
from weight_bus.transports.shm import ShmExporter, ShmReader, host_identity

NAMES = [
    "shm",
    "nccl",
    "file",
    pytest.param("nixl", marks=pytest.mark.skipif(not nixl_installed(), reason="NIXL is not installed")),
    pytest.param("nixl-device", marks=pytest.mark.skipif(not nixl_installed(), reason="NIXL is not installed")),
]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def peer(name: str, run_id: str, tmp_path: Path) -> Iterator[Peer]:
    peer = Peer(name, run_id, tmp_path)
    yield peer
    peer.end()
    remove_shm_files(run_id)


@pytest.fixture
def reader(name: str, tmp_path: Path) -> Iterator[Reader]:
    reader = reader_of(name, tmp_path, deadline_s=3.0)
    yield reader
    reader.close()


def test_the_bytes_of_another_process_arrive_whole_and_by_range(peer: Peer, reader: Reader) -> None:
    buffer = private_arena(NBYTES)
    for seed, source in enumerate(peer.sources):
        assert reader.can_read(source)
        expected = pattern(seed)
        reader.read(source, 0, buffer.view)
        assert bytes(buffer.view) == expected
        for offset, length in [(0, 1), (4096, 100_000), (NBYTES - 5, 5), (12_345, 0)]:
            reader.read(source, offset, buffer.view[7 : 7 + length])
            assert bytes(buffer.view[7 : 7 + length]) == expected[offset : offset + length]
    buffer.close()


def test_a_range_outside_the_source_is_refused(peer: Peer, reader: Reader) -> None:
    buffer = private_arena(64)
    for offset in (NBYTES - 63, -1, 1 << 62):
        with pytest.raises(TransportError, match="lie outside a source"):
            reader.read(peer.sources[0], offset, buffer.view)
    buffer.close()


def test_a_source_that_lies_about_itself_is_an_error(peer: Peer, reader: Reader) -> None:
    buffer = private_arena(64)
    source = peer.sources[0]
    lies: list[Source]
    if isinstance(source, ShmSource):
        lies = [
            msgspec.structs.replace(source, length=2 * NBYTES),
            msgspec.structs.replace(source, path="/etc/hostname"),
            msgspec.structs.replace(source, path=source.path + "-gone"),
        ]
    elif isinstance(source, CollectiveSource):
        lies = [msgspec.structs.replace(source, port=1), msgspec.structs.replace(source, host="nobody.invalid")]
    elif isinstance(source, FileSource):
        lies = [
            msgspec.structs.replace(source, length=2 * NBYTES),
            msgspec.structs.replace(source, data_offset=-8),
            msgspec.structs.replace(source, path="/etc/hostname"),
            msgspec.structs.replace(source, path=source.path + "-gone"),
            msgspec.structs.replace(source, path=f"{source.path}/../../../hostname"),
        ]
    else:
        lies = [
            msgspec.structs.replace(source, address=source.address + (1 << 40)),
            msgspec.structs.replace(source, address=-1),
            msgspec.structs.replace(source, agent="somebody-else"),
            msgspec.structs.replace(source, metadata=b"nonsense"),
            msgspec.structs.replace(source, memory="VRAM"),
        ]
    for lie in lies:
        with pytest.raises(TransportError):
            reader.read(lie, 0, buffer.view)
    reader.read(source, 0, buffer.view)
    assert bytes(buffer.view) == pattern(0)[:64]
    buffer.close()


def test_many_pieces_arrive_each_where_it_belongs(peer: Peer, reader: Reader) -> None:
    buffer = private_arena(NBYTES)
    step = 40_001
    pieces = [(offset, buffer.view[offset : offset + step]) for offset in range(0, NBYTES, step)]
    assert sorted(reader.read_many(peer.sources[1], pieces)) == list(range(len(pieces)))
    assert bytes(buffer.view) == pattern(1)
    early = reader.read_many(peer.sources[0], pieces)
    next(early)
    early.close()  # type: ignore[attr-defined]
    with pytest.raises(TransportError, match="lie outside a source"):
        list(reader.read_many(peer.sources[0], [(0, buffer.view[:64]), (NBYTES - 1, buffer.view[:64])]))
    reader.read(peer.sources[0], 0, buffer.view)
    assert bytes(buffer.view) == pattern(0)


def test_a_publisher_killed_between_two_pieces_is_an_error(peer: Peer, reader: Reader, name: str, run_id: str) -> None:
    if name == "file":
        pytest.skip("a snapshot needs nobody")
    buffer = private_arena(NBYTES)

    def pieces() -> Iterator[tuple[int, memoryview]]:
        yield 0, buffer.view[:100_000]
        peer.kill()
        for offset in range(100_000, 300_000, 50_000):
            yield offset, buffer.view[offset : offset + 50_000]

    # Gloo may have had the rest under way; joining again finds nobody.
    with pytest.raises(TransportError):
        list(reader.read_many(peer.sources[0], pieces()))
        reader.read(peer.sources[0], 0, buffer.view)


def test_a_publisher_that_was_killed_is_an_error_and_the_next_one_is_read(
    peer: Peer, reader: Reader, name: str, run_id: str, tmp_path: Path
) -> None:
    buffer = private_arena(NBYTES)
    reader.read(peer.sources[0], 0, buffer.view)
    peer.kill()
    remove_shm_files(run_id)
    if name in ("nixl", "nixl-device", "nccl"):
        with pytest.raises(TransportError, match="is the publisher gone"):
            reader.read(peer.sources[0], 0, buffer.view)
    elif name == "file":
        # Snapshots outlive whoever wrote them.
        reader.read(peer.sources[0], 0, buffer.view)
    else:
        for source in peer.sources:
            assert not reader.can_read(source)
            with pytest.raises(TransportError, match="is the publisher gone"):
                reader.read(source, 0, buffer.view)
    successor = Peer(name, run_id, tmp_path)
    try:
        reader.read(successor.sources[1], 0, buffer.view)
        assert bytes(buffer.view) == pattern(1)
    finally:
        successor.end()
    buffer.close()


def test_several_readers_read_at_once(peer: Peer, name: str, tmp_path: Path) -> None:
    readers = [reader_of(name, tmp_path, 10.0) for _ in range(3)]
    buffers = [private_arena(NBYTES) for _ in readers]
    for _ in range(3):
        for reader, buffer in zip(readers, buffers, strict=True):
            reader.read(peer.sources[1], 0, buffer.view)
            assert bytes(buffer.view) == pattern(1)
    for reader in readers:
        reader.close()


def test_closing_leaves_nothing_behind(name: str, run_id: str, tmp_path: Path) -> None:
    exporter = exporter_of(name, run_id, str(tmp_path))
    arena = exporter.allocate(NBYTES)
    exporter.export(arena, draft_of(run_id, 1, bytes(arena.view)))
    exporter.close()
    assert list(shm_directory().glob(f"{shm_prefix(run_id)}*")) == []


def test_shared_memory_belongs_to_its_user_and_is_found_by_prefix_after_a_kill(run_id: str) -> None:
    exporter = ShmExporter(run_id, sealed=False)
    arenas = [exporter.allocate(NBYTES) for _ in range(2)]
    files = list(shm_directory().glob(f"{shm_prefix(run_id)}*"))
    assert len(files) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    del arenas
    assert sorted(remove_shm_files(run_id)) == sorted(files)
    assert not any(path.exists() for path in files)


def test_a_full_shared_memory_is_one_line_that_says_what_to_do(run_id: str) -> None:
    # More than all of it, which is refused at once; merely more than is left would be filled up first.
    status = os.statvfs(shm_directory())
    whole = status.f_blocks * status.f_frsize
    with pytest.raises(UsageError, match=r"has no \d+ bytes left .* weights\.transport=nixl"):
        ShmExporter(run_id, sealed=False).allocate(whole + (1 << 30))
    assert list(shm_directory().glob(f"{shm_prefix(run_id)}*")) == []


def test_a_link_is_not_followed(run_id: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 64)
    link = shm_directory() / f"{shm_prefix(run_id)}link"
    link.symlink_to(secret)
    reader, buffer = ShmReader(), private_arena(64)
    try:
        with pytest.raises(TransportError, match="cannot open"):
            reader.read(ShmSource(path=str(link), length=64, host=host_identity()), 0, buffer.view)
    finally:
        link.unlink()


def test_a_reader_leaves_sources_of_another_kind_or_host_alone() -> None:
    reader = ShmReader()
    assert not reader.can_read(NixlSource(agent="a", metadata=b"", address=1, length=1, device=0))
    assert not reader.can_read(ShmSource(path="/dev/shm/rollmesh-x", length=1, host="another-host"))


def test_asking_for_nixl_where_it_is_missing_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "nixl_module", lambda: None)
    assert select.resolve("auto") == "shm"
    with pytest.raises(UsageError, match="pip install 'nixl-cu12"):
        select.resolve("nixl")
    with pytest.raises(UsageError, match="no weight transport 'rdma'"):
        select.resolve("rdma")
