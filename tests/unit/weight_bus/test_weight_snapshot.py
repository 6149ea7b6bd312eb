"""Folders of safetensors as versions: every byte named once, whole or refused, and snapshots that are never half there."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from services.wire.errors import UsageError  # noqa: E402
from tests.contract.weight_bus.transport_peers import draft_of  # noqa: E402
from tests.weight_parts import PlainTarget, make_weights  # noqa: E402
from weight_bus.errors import TransportError  # noqa: E402
from weight_bus.manifest.manifest import FileSource, ShmSource, decode_manifest, encode_manifest  # noqa: E402
from weight_bus.manifest.snapshot import (  # noqa: E402
    INDEX_FILE,
    MANIFEST_FILE,
    manifest_of_folder,
    newest_snapshot,
    snapshot_folders,
)
from weight_bus.receiver.receiver import Receiver  # noqa: E402
from weight_bus.transports.file import FileExporter, FileReader  # noqa: E402
from weight_bus.transports.nccl.exporter import CollectiveExporter  # noqa: E402
from weight_bus.transports.nccl.reader import CollectiveReader  # noqa: E402
from weight_bus.transports.select import make_exporter, make_readers  # noqa: E402
from weight_bus.transports.shm import ShmReader  # noqa: E402


def write_folder(folder: Path, *files: dict[str, torch.Tensor], index: bool = True) -> Path:
    folder.mkdir(exist_ok=True)
    homes = {}
    for number, tensors in enumerate(files):
        save_file(tensors, folder / f"model-{number}.safetensors")
        homes |= dict.fromkeys(tensors, f"model-{number}.safetensors")
    if index:
        (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    return folder


@pytest.mark.parametrize("count", [1, 2])
def test_a_receiver_serves_what_lies_in_a_folder(tmp_path: Path, count: int) -> None:
    weights = make_weights(3, scale=5)
    names = list(weights)
    files = [{name: weights[name] for name in names[number::count]} for number in range(count)]
    folder = write_folder(tmp_path / "model", *files, index=count > 1)
    manifest = decode_manifest(encode_manifest(manifest_of_folder(folder, "run", 4, bucket_bytes=700)))
    assert len(manifest.owners) == count
    target = PlainTarget(make_weights(0, scale=5))
    receiver = Receiver(target, "run", [FileReader(tmp_path)])
    receiver.stage(manifest)
    receiver.commit(4)
    for name, expected in weights.items():
        assert torch.equal(target.live()[name], expected), name
    receiver.close()


def test_a_tied_head_is_left_out(tmp_path: Path) -> None:
    shared = torch.randn(4, 16)
    folder = write_folder(tmp_path / "m", {"embed": shared, "lm_head.weight": shared.clone()}, index=False)
    names = lambda: [entry.name for entry in manifest_of_folder(folder, "run", 1).layout.tensors]  # noqa: E731
    assert sorted(names()) == ["embed", "lm_head.weight"]
    (folder / "config.json").write_text('{"tie_word_embeddings": true}')
    assert names() == ["embed"]


def test_unsound_folders_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no safetensors"):
        manifest_of_folder(tmp_path, "run", 1)
    folder = write_folder(tmp_path / "m", {"a": torch.zeros(4)}, {"b": torch.zeros(4)})
    with pytest.raises(UsageError, match="a is float32, not bfloat16"):
        manifest_of_folder(folder, "run", 1, "bfloat16")
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(UsageError, match="cannot read"):
        manifest_of_folder(folder, "run", 1)
    whole = (folder / "model-0.safetensors").read_bytes()
    (folder / INDEX_FILE).unlink()
    for broken, said in [
        (whole[:-1], "is the file whole"),
        (b"\xff" * 64, "its head would be"),
        ((5).to_bytes(8, "little") + b"{nope", "is no safetensors file"),
        (whole.replace(b'"F32"', b'"I32"'), "cannot be served"),
    ]:
        (folder / "model-0.safetensors").write_bytes(broken)
        with pytest.raises(UsageError, match=said):
            manifest_of_folder(folder, "run", 1)


def test_snapshots_are_whole_kept_by_number_and_carry_their_own_digest(tmp_path: Path) -> None:
    root = tmp_path / "snapshots"
    assert newest_snapshot(root) is None
    exporter = FileExporter(root, keep=2, key="k" * 32)
    arena = exporter.allocate(64 << 10)
    for version in (1, 2, 3):
        arena.view[:] = bytes([version]) * (64 << 10)
        draft = draft_of("run", version, bytes(arena.view))
        exporter.export(arena, draft)
        found = newest_snapshot(root)
        assert found is not None
        assert (found.version, found.manifest.root_digest) == (version, draft.root_digest)
        assert found.manifest.signature
        assert load_file(found.folder / "model.safetensors")["weight"].numpy().tobytes() == bytes(arena.view)
        assert manifest_of_folder(found.folder, "run", version).root_digest == draft.root_digest
    assert [path.name[:11] for path in snapshot_folders(root)] == ["v0000000002", "v0000000003"]
    assert not list(root.glob(".writing-*"))
    exporter.close()


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path) -> None:
    twice = write_folder(tmp_path / "twice", {"a": torch.zeros(4)}, {"a": torch.zeros(4)}, index=False)
    with pytest.raises(UsageError, match="holds a tensor twice"):
        manifest_of_folder(twice, "run", 1)
    folder = write_folder(tmp_path / "m", {"a": torch.zeros(4)})
    for homes, said in [
        ({"a": "../twice/model-0.safetensors"}, "names '../twice/model-0.safetensors', which is no file beside it"),
        ({"a": "model-0.safetensors", "b": "model-0.safetensors"}, r"names \['b'\], which its files do not hold"),
        ({}, "names nothing, which its files do not hold"),
    ]:
        (folder / INDEX_FILE).write_text(json.dumps({"weight_map": homes}))
        with pytest.raises(UsageError, match=said):
            manifest_of_folder(folder, "run", 1)


def test_the_newest_snapshot_is_never_passed_over_for_an_older_one(tmp_path: Path) -> None:
    exporter = FileExporter(tmp_path)
    arena = exporter.allocate(64)
    for version in (1, 2):
        exporter.export(arena, draft_of("run", version, bytes(64)))
    newest = snapshot_folders(tmp_path)[-1]
    (newest / MANIFEST_FILE).write_bytes(b"no manifest")
    with pytest.raises(UsageError, match=f"{newest / MANIFEST_FILE} cannot be read"):
        newest_snapshot(tmp_path)
    (newest / MANIFEST_FILE).unlink()
    with pytest.raises(UsageError, match=f"{newest} has no {MANIFEST_FILE}"):
        newest_snapshot(tmp_path)
    exporter.close()


def test_a_snapshot_is_a_model_where_its_configuration_is_known(tmp_path: Path) -> None:
    model, root = tmp_path / "model", tmp_path / "snapshots"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", INDEX_FILE, "README.md"):
        (model / name).write_text(name)
    (root / ".writing-left-by-a-killed-publisher").mkdir(parents=True)
    exporter = FileExporter(root, model_folder=model)
    exporter.export(exporter.allocate(64), draft_of("run", 1, bytes(64)))
    [folder] = root.iterdir()
    files = {path.name for path in folder.iterdir()}
    assert files == {"config.json", "tokenizer.json", "manifest.msgpack", "model.safetensors"}
    exporter.close()


def test_a_snapshot_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="0 snapshots cannot be kept"):
        FileExporter(tmp_path, keep=0)
    exporter = FileExporter(tmp_path / "snapshots", model_folder=tmp_path / "gone")
    arena, draft = exporter.allocate(64), draft_of("run", 1, bytes(64))
    for none in (
        None,
        msgspec.structs.replace(draft, owners=[]),
        msgspec.structs.replace(draft, owners=draft.owners * 2),
    ):
        with pytest.raises(UsageError, match="one owner that has all weights"):
            exporter.export(arena, none)
    with pytest.raises(UsageError, match="an arena of 64 bytes is no layout of"):
        exporter.export(arena, draft_of("run", 1, bytes(4096)))
    with pytest.raises(TransportError, match=r"cannot write the snapshot .*gone"):
        exporter.export(arena, draft)
    assert list((tmp_path / "snapshots").iterdir()) == []
    exporter.close()


def source_of(path: Path, length: int = 4) -> FileSource:
    return FileSource(path=str(path), length=length, data_offset=0, host="")


def content_of(reader: FileReader, path: Path) -> bytes:
    out = bytearray(4)
    reader.read(source_of(path), 0, memoryview(out))
    return bytes(out)


def test_only_whole_files_under_the_root_are_read(tmp_path: Path) -> None:
    root, outside, inside = tmp_path / "root", tmp_path / "outside", tmp_path / "root" / "inside"
    root.mkdir()
    outside.write_bytes(b"1234")
    inside.write_bytes(b"abcd")
    reader = FileReader(root)
    shared = ShmSource(path=str(inside), length=4, host="")
    readable = [shared, source_of(outside), source_of(root / "gone"), source_of(inside)]
    assert [reader.can_read(source) for source in readable] == [False, False, False, True]
    for source, said in [
        (shared, "the file reader cannot read a ShmSource"),
        (source_of(outside), "lies outside"),
        (source_of(root / "gone"), "was the snapshot pruned"),
        (source_of(inside, length=5), "has 4 bytes, the source says 5"),
    ]:
        with pytest.raises(TransportError, match=said):
            reader.read(source, 0, memoryview(bytearray(4)))
    assert content_of(reader, inside) == b"abcd"
    reader.close()


def open_below(folder: Path) -> int:
    """How many files of `folder` this process has open; a deleted one counts too."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(str(link.readlink()).startswith(f"{folder}/") for link in links)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="no list of open files here")
def test_a_file_that_was_replaced_is_read_anew_and_few_stay_open(tmp_path: Path) -> None:
    reader = FileReader(tmp_path)
    files = [tmp_path / f"{number:04}" for number in range(20)]
    for file in files:
        file.write_bytes(file.name.encode())
    assert [content_of(reader, file) for file in files * 2] == [file.name.encode() for file in files * 2]
    assert open_below(tmp_path) == 16
    fresh = tmp_path / "fresh"
    fresh.write_bytes(b"anew")
    fresh.replace(files[-1])
    assert content_of(reader, files[-1]) == b"anew"
    assert open_below(tmp_path) == 16
    reader.close()
    assert open_below(tmp_path) == 0


def test_transports_are_made_by_name_and_files_need_a_folder(tmp_path: Path) -> None:
    for make in (lambda: make_exporter("file", "run"), lambda: make_readers("file")):
        with pytest.raises(UsageError, match="the file transport has no folder"):
            make()
    exporter = make_exporter("file", "run", file_root=tmp_path, file_keep=1)
    arena = exporter.allocate(64)
    for version in (1, 2):
        exporter.export(arena, draft_of("run", version, bytes(64)))
    assert [path.name[:11] for path in snapshot_folders(tmp_path)] == ["v0000000002"]
    exporter.close()
    assert isinstance(make_exporter("nccl", "run"), CollectiveExporter)
    assert isinstance(make_exporter("nccl", "run", host="192.0.2.1", key="k" * 32), CollectiveExporter)
    for host, why in (("192.0.2.1", "there is no weights key"), ("0.0.0.0", "no address that an engine can call")):
        with pytest.raises(UsageError, match=rf"weights.broadcast_host={host} .*{why}"):
            make_exporter("nccl", "run", host=host)
    kinds = {
        name: [type(reader) for reader in make_readers(name, file_root=tmp_path)] for name in ("file", "nccl", "shm")
    }
    assert kinds == {
        "file": [FileReader, ShmReader],
        "nccl": [CollectiveReader, ShmReader, FileReader],
        "shm": [ShmReader, FileReader],
    }
    assert [type(reader) for reader in make_readers("shm")] == [ShmReader]
