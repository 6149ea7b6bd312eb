"""Folders of safetensors as versions: every byte named once, whole or refused, and snapshots that are never half there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from services.wire.errors import UsageError  # noqa: E402
from tests.contract.weight_bus.transport_peers import draft_of  # noqa: E402
from tests.weight_parts import PlainTarget, make_weights  # noqa: E402
from weight_bus.manifest.manifest import decode_manifest, encode_manifest  # noqa: E402
from weight_bus.manifest.snapshot import INDEX_FILE, manifest_of_folder, newest_snapshot, snapshot_folders  # noqa: E402
from weight_bus.receiver.receiver import Receiver  # noqa: E402
from weight_bus.transports.file import FileExporter, FileReader  # noqa: E402


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
