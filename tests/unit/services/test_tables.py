"""Tables that a user's data comes in: the same rows whatever the kind of file, and errors that name the place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from services.wire.errors import UsageError
from services.wire.tasks.tables import columns_of, read_table

ROWS = [
    {"question": "2+2", "solution": "4", "tags": ["easy", "sum"]},
    {"question": "a\u2028b", "solution": "ü", "tags": []},
    {"question": "3·3", "solution": "9", "tags": ["product"]},
]
MESSAGES = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}], "n": 1}]


def write(rows: list[dict[str, object]], kind: str, folder: Path) -> Path:
    import datasets
    import pyarrow
    from pyarrow import parquet

    path = folder / f"rows{kind}"
    # As other programs write it: characters that are no ASCII as they are, an empty line at the end.
    text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows) + "\n"
    match kind:
        case ".jsonl":
            path.write_text(text, encoding="utf-8")
        case ".jsonl.gz":
            path.write_bytes(gzip.compress(text.encode()))
        case ".parquet":
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        case _:
            datasets.Dataset.from_list(rows).save_to_disk(path, num_shards=min(2, len(rows)))
    return path


@pytest.mark.parametrize("kind", [".jsonl", ".jsonl.gz", ".parquet", ""])
@pytest.mark.parametrize("rows", [ROWS, MESSAGES], ids=["rows", "messages"])
def test_every_kind_of_file_gives_the_same_rows(kind: str, rows: list[dict[str, object]], tmp_path: Path) -> None:
    assert read_table(write(rows, kind, tmp_path)) == rows


def test_columns_are_those_of_any_row() -> None:
    assert columns_of([{"a": 1}, {"b": 2, "a": 3}]) == ["a", "b"]


def test_a_folder_of_several_tables_names_them(tmp_path: Path) -> None:
    import datasets

    table = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(tmp_path / "both")
    with pytest.raises(UsageError) as refused:
        read_table(tmp_path / "both")
    assert str(tmp_path / "both" / "test") in refused.value.remedy
    assert read_table(tmp_path / "both" / "test") == [ROWS[1]]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.jsonl", b'{"a": 1}\n[1]\n', "line 2"),
        ("rows.jsonl", b'{"a": 1}\n{"a": \n', "line 2"),
        ("rows.jsonl", b'{"a": "\xff"}\n', "line 1"),
        ("rows.jsonl", b"\n\n", "no row"),
        ("rows.jsonl.gz", b"\x1f\x8b nothing", "gzip"),
        ("rows.parquet", b"PAR1 nothing", "no whole table"),
        ("rows.csv", b"a,b\n", "known by its name"),
    ],
)
def test_what_is_no_table_is_refused_by_its_place(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError) as refused:
        read_table(tmp_path / name)
    assert said in refused.value.what
    assert str(tmp_path / name) in refused.value.what


def test_a_missing_file_and_a_foreign_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_table(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="no state"):
        read_table(tmp_path)
