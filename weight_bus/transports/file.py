"""The file transport: every version becomes a safetensors snapshot on disk, for cold starts and plain readers.

    export(v)   .writing-… ─► model.safetensors, fsync ─► manifest.msgpack, fsync ─► rename to v…-…, fsync ─► prune

The data of the file is the arena byte for byte (what lies between tensors is named `__padding__.…`), so that the buckets,
the hashes and the root digest are those of the version over any other transport.
"""

from __future__ import annotations

import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path

import msgspec

from services.wire.errors import UsageError
from weight_bus.errors import TransportError
from weight_bus.manifest.manifest import FileSource, Manifest, Source, encode_manifest, sign
from weight_bus.manifest.snapshot import MANIFEST_FILE, MODEL_FILE, make_head, snapshot_folders, snapshot_name
from weight_bus.memory.arena import Arena, private_arena
from weight_bus.transports.base import check_range, read_in_order
from weight_bus.transports.shm import read_file

_OPEN_FILES = 16
_MODEL_ENDINGS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_INDEX = ".index.json"


class FileExporter:
    """Writes snapshots under `root` and keeps the newest `keep`.

    `key` signs their manifests. `model_folder`: where configuration and tokenizer lie that make a snapshot a model.
    """

    name = "file"

    def __init__(self, root: Path, *, keep: int = 2, key: str | None = None, model_folder: Path | None = None) -> None:
        if keep < 1:
            raise UsageError(
                f"{keep} snapshots cannot be kept", "keep at least one; two let an engine end reading the last"
            )
        self._root = root.absolute()
        self._keep, self._key, self._model_folder = keep, key, model_folder
        self._arenas: list[Arena] = []

    def allocate(self, nbytes: int) -> Arena:
        arena = private_arena(nbytes)
        self._arenas.append(arena)
        return arena

    def export(self, arena: Arena, draft: Manifest | None = None) -> Source:
        """Write the snapshot and return where its bytes lie. Blocks until they are on disk.

        Raises UsageError without a draft or for one of several owners, TransportError when the disk refuses.
        """
        if draft is None or len(draft.owners) != 1 or draft.owners[0].shards is not None:
            raise UsageError(
                "a snapshot needs the manifest of one owner that has all weights",
                "use weights.transport=nixl or shm where several ranks publish",
            )
        if draft.layout.total_bytes != arena.nbytes:
            raise UsageError(f"an arena of {arena.nbytes} bytes is no layout of {draft.layout.total_bytes}")
        head = make_head(draft.layout, {"rollmesh_version": str(draft.version), "root_digest": draft.root_digest})
        folder = self._root / snapshot_name(draft.version, draft.root_digest)
        source = FileSource(path=str(folder / MODEL_FILE), length=arena.nbytes, data_offset=len(head), host="")
        if not folder.exists():
            owner = msgspec.structs.replace(draft.owners[0], sources=[source])
            manifest = sign(msgspec.structs.replace(draft, owners=[owner], signature=b""), self._key)
            try:
                self._write(folder, head, arena, manifest)
                self._prune(folder)
            except OSError as error:
                raise TransportError(f"cannot write the snapshot {folder} ({error})", "is the disk full?") from error
        return source

    def close(self) -> None:
        """Free the arenas; the snapshots stay, for cold starts."""
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()

    def _write(self, folder: Path, head: bytes, arena: Arena, manifest: Manifest) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        writing = self._root / f".writing-{uuid.uuid4().hex[:12]}"
        writing.mkdir(mode=0o700)
        try:
            for path in self._model_files():
                shutil.copy(path, writing / path.name)
            _write_durably(writing / MODEL_FILE, head, arena.view)
            _write_durably(writing / MANIFEST_FILE, encode_manifest(manifest))
            _sync_folder(writing)
            writing.rename(folder)
            _sync_folder(self._root)
        except BaseException:
            shutil.rmtree(writing, ignore_errors=True)
            raise

    def _model_files(self) -> list[Path]:
        if self._model_folder is None:
            return []
        files = [path for path in self._model_folder.iterdir() if path.name.endswith(_MODEL_ENDINGS) and path.is_file()]
        return [path for path in files if not path.name.endswith(_INDEX)]

    def _prune(self, fresh: Path) -> None:
        old = [folder for folder in snapshot_folders(self._root) if folder != fresh]
        for folder in old[: max(0, len(old) + 1 - self._keep)]:
            # Renamed first: a reader never sees a folder that is deleted in part, also if this process dies meanwhile.
            doomed = folder.rename(self._root / f".writing-{uuid.uuid4().hex[:12]}")
            shutil.rmtree(doomed, ignore_errors=True)
        for left in self._root.glob(".writing-*"):
            # Left by a publisher that was killed; a folder has one publisher at a time.
            shutil.rmtree(left, ignore_errors=True)


class FileReader:
    """Reads ranges of safetensors files under `root`: a manifest may name no file outside it."""

    name = "file"

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._files: dict[str, tuple[tuple[int, int], FileIO]] = {}

    def can_read(self, source: Source) -> bool:
        if not isinstance(source, FileSource):
            return False
        path = Path(source.path).resolve()
        return path.is_relative_to(self.root) and path.is_file()

    def read(self, source: Source, offset: int, out: memoryview) -> None:
        if not isinstance(source, FileSource):
            raise TransportError(f"the file reader cannot read a {type(source).__name__}")
        check_range(source.length, offset, len(out))
        read_file(self._open(source), source.path, source.data_offset + offset, out)

    def read_many(self, source: Source, pieces: Iterable[tuple[int, memoryview]]) -> Iterator[int]:
        return read_in_order(self, source, pieces)

    def close(self) -> None:
        for _, file in self._files.values():
            file.close()
        self._files.clear()

    def _open(self, source: FileSource) -> FileIO:
        path = Path(source.path).resolve()
        if not path.is_relative_to(self.root):
            raise TransportError(
                f"{source.path} lies outside {self.root}, which weight files are read from",
                "set weights.file_root to a folder that holds both",
            )
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise TransportError(f"cannot open {source.path} ({error.strerror})", "was the snapshot pruned?") from error
        status = os.fstat(descriptor)
        whole = stat.S_ISREG(status.st_mode) and 0 <= source.data_offset <= status.st_size - source.length
        known = self._files.pop(source.path, None)
        if whole and known is not None and known[0] == (status.st_dev, status.st_ino):
            os.close(descriptor)
            self._files[source.path] = known
            return known[1]
        if known is not None:
            known[1].close()
        if not whole:
            os.close(descriptor)
            raise TransportError(
                f"{source.path} has {status.st_size} bytes, the source says {source.length} from {source.data_offset}"
            )
        while len(self._files) >= _OPEN_FILES:
            self._files.pop(next(iter(self._files)))[1].close()
        file = FileIO(descriptor, "r")
        self._files[source.path] = ((status.st_dev, status.st_ino), file)
        return file


def _write_durably(path: Path, *parts: bytes | memoryview) -> None:
    with path.open("xb", buffering=0) as file:
        for part in parts:
            left = memoryview(part)
            while left:
                left = left[file.write(left) :]
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
