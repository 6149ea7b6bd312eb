"""Tables that a user's data comes in: rows of named columns, whatever the kind of file.

    questions.jsonl, .ndjson, .jsonl.gz     an object a line
    questions.parquet                       needs pyarrow
    folder/                                 what `save_to_disk` of the `datasets` library wrote; needs pyarrow

A whole table is read into memory, in the order of the file.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from services.wire.errors import UsageError
from services.wire.extras import install

if TYPE_CHECKING:
    import pyarrow

Row = dict[str, object]
ShapeT = TypeVar("ShapeT")

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_STATE, _SPLITS = "state.json", "dataset_dict.json"


class _ArrowFile(msgspec.Struct):
    filename: str


class _State(msgspec.Struct):
    """`state.json` of a folder that `datasets` wrote."""

    data_files: list[_ArrowFile] = msgspec.field(name="_data_files")


class _Splits(msgspec.Struct):
    splits: list[str]


def read_table(path: Path) -> list[Row]:
    """The rows of a table; columns that a row lacks are missing, or None where the file says so.

    Raises UsageError, with file and line, for what is no table, has no row, or needs a library that is not there.
    """
    path = path.expanduser()
    try:
        if path.is_dir():
            rows = _arrow_rows(path, _tables_of_folder(path))
        elif path.suffix == ".parquet":
            rows = _arrow_rows(path, [path])
        elif path.suffix in JSON_SUFFIXES or path.name.endswith(tuple(f"{suffix}.gz" for suffix in JSON_SUFFIXES)):
            rows = _json_rows(path)
        else:
            raise UsageError(
                f"{path} is no kind of table that is known by its name",
                "known: .jsonl, .jsonl.gz, .parquet, and a folder of the datasets library",
            )
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror or error})", "check the path") from error
    if not rows:
        raise UsageError(f"{path} has no row", "name a file that has some")
    return rows


def columns_of(rows: Iterable[Row]) -> list[str]:
    """The names of all columns, in the order in which they first appear."""
    return list(dict.fromkeys(column for row in rows for column in row))


def _json_rows(path: Path) -> list[Row]:
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise UsageError(f"{path} is no whole gzip file ({error})", "write it anew") from error
    decoder = msgspec.json.Decoder(dict[str, Any])
    rows: list[Row] = []
    # Only line feeds part lines: JSON text may hold other characters that Python takes for the end of one.
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            raise UsageError(f"{path}, line {number}: {error}", "write one JSON object a line") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"{path}, line {number} is no UTF-8 text ({error.reason})", "write it anew") from error
    return rows


def _tables_of_folder(folder: Path) -> list[Path]:
    if (folder / _SPLITS).exists():
        splits = _decoded(folder / _SPLITS, _Splits).splits
        raise UsageError(
            f"{folder} holds several tables", f"name one of them: {', '.join(str(folder / name) for name in splits)}"
        )
    if not (folder / _STATE).exists():
        raise UsageError(f"{folder} has no {_STATE}", "name a folder that `save_to_disk` of the datasets library wrote")
    return [folder / Path(file.filename).name for file in _decoded(folder / _STATE, _State).data_files]


def _decoded(path: Path, shape: type[ShapeT]) -> ShapeT:
    try:
        return msgspec.json.decode(path.read_bytes(), type=shape)
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} is not what the datasets library writes ({error})", "save the data anew") from error


def _arrow_rows(path: Path, files: Sequence[Path]) -> list[Row]:
    try:
        import pyarrow
    except ModuleNotFoundError as error:
        raise UsageError(f"reading {path} needs pyarrow, which is not installed", install("data")) from error
    rows: list[Row] = []
    for file in files:
        try:
            rows.extend(_arrow_table(file).to_pylist())
        except pyarrow.ArrowInvalid as error:
            raise UsageError(f"{file} is no whole table ({error})", "write it anew") from error
    return rows


def _arrow_table(file: Path) -> pyarrow.Table:
    if file.suffix == ".parquet":
        from pyarrow import parquet

        # One file, as it is: a folder named like `split=a` above it adds no column.
        return parquet.ParquetFile(file).read()
    from pyarrow import ipc

    with file.open("rb") as source:
        return ipc.open_stream(source).read_all()
