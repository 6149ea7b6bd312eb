"""The sandbox's pure parts: what is not sure on which machine, files that are shown, what a process takes, broken bytes."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rewards.sandbox.confinement import Means, not_sure
from services.rewards.sandbox.files import around, outermost, view_of
from services.rewards.sandbox.protocol import (
    Limits,
    Outcome,
    ProtocolError,
    call_decoder,
    order_decoder,
    outcome_decoder,
    read,
    started_decoder,
)
from services.rewards.sandbox.syscall_filter import NEWER, OLDER
from services.rewards.sandbox.usage import Taken, read_status
from tests.support.examples import examples

PATHS = st.lists(st.sampled_from("abc"), max_size=4).map(lambda parts: Path("/", *parts))
ALL = Means(filters=True, namespaces=True, landlock=0)


@pytest.mark.parametrize(
    ("means", "processes", "lacking"),
    [
        (ALL, True, []),
        (Means(filters=True, namespaces=False, landlock=1), False, []),
        (Means(filters=True, namespaces=False, landlock=7), True, ["processes"]),
        (Means(filters=True, namespaces=False, landlock=0), False, ["files"]),
        (Means(filters=False, namespaces=True, landlock=7), False, ["kernel interfaces"]),
        (Means(filters=False, namespaces=False, landlock=0), True, ["kernel interfaces", "files", "processes"]),
    ],
)
def test_what_a_machine_cannot_enforce_is_told(means: Means, processes: bool, lacking: list[str]) -> None:
    told = not_sure(Limits(time_s=1.0, memory_mib=64, network=False, processes=processes), means)
    assert len(told) == len(lacking)
    for line, begins in zip(told, lacking, strict=True):
        assert line.startswith(begins)


@given(st.lists(PATHS))
@examples(200)
def test_the_outermost_of_paths_hold_all_of_them_and_none_another(paths: list[Path]) -> None:
    kept = outermost(paths)
    for path in paths:
        assert sum(path == each or each in path.parents for each in kept) == 1


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("functions/mine.py", "functions/keys/agent.key", "functions/data/words", "home/secret", "data/words"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "functions/to_home").symlink_to(tmp_path / "home")
    (tmp_path / "named").symlink_to(tmp_path / "data")
    return tmp_path


def test_a_view_has_what_is_wanted_but_keys_and_whole_systems(tree: Path) -> None:
    functions, keys = tree / "functions", tree / "functions/keys"
    wanted = [
        functions,
        functions / "data",
        tree / "named",
        tree / "absent",
        keys / "agent.key",
        Path("/"),
        Path("/etc"),
    ]
    view = view_of(wanted, [keys, tree / "home/secret", tree / "no keys"])
    assert view.shown == (tree / "data", functions)
    assert view.links == {tree / "named": tree / "data"}
    assert view.hidden == (keys,)


def test_what_lies_around_keys_is_all_but_them(tree: Path) -> None:
    functions = tree / "functions"
    assert around(functions, []) == [functions]
    assert around(functions, [functions / "keys/agent.key"]) == [functions / "data", functions / "mine.py"]
    assert around(functions, [functions]) == []
    assert around(tree, [functions / "keys"]) == [
        tree / "data",
        functions / "data",
        functions / "mine.py",
        tree / "home",
    ]


def test_a_status_is_read_whatever_the_process_is_called() -> None:
    text = b"Name:\tThreads:\\n9\nThreads:\t3\nRssAnon:\t     20 kB\nRssFile:\t 9 kB\nRssShmem:\t 4 kB\n"
    assert read_status(text) == Taken(3, 24 << 10)
    assert read_status(b"Name:\tgone\nThreads:\t1\n") == Taken(1, 0)
    assert read_status(b"") == Taken(0, 0)


@pytest.mark.parametrize(
    ("header", "column"),
    [("x86_64-linux-gnu/asm/unistd_64.h", 0), ("asm-generic/unistd.h", 1)],
    ids=["x86-64", "ARM64"],
)
def test_the_filter_knows_system_calls_by_the_kernels_numbers(header: str, column: int) -> None:
    file = Path("/usr/include", header)
    if not file.exists():
        pytest.skip(f"no {file}")
    text = file.read_text()
    kernels = {name: int(at) for name, at in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    for name, numbers in OLDER.items():
        assert kernels.get(name) == numbers[column], name
    newest = max(kernels.values())
    for name, number in NEWER.items():
        assert kernels.get(name) == (number if number <= newest else None), name


MESSAGES = [
    b'{"type":"Value","value":1.5}',
    b'{"type":"Failed","cause":"raised","what":"w","said":"s"}',
    b'{"type":"Ready","held_by":"filters","not_confined":[]}',
    b'{"sample":{"task":"","prompt":null,"messages":[],"answer":"a","complete":true,"metadata":{"k":[1]}}}',
]


@pytest.mark.parametrize("decoder", [order_decoder, call_decoder, started_decoder, outcome_decoder])
@pytest.mark.parametrize(
    "broken",
    [
        b'{"type":"Failed","cause":"raised","what":"\xff"}',
        b'{"type":"Refused","why":"\xc3","remedy":"\xe2\x82"}',
        b'{"sample":{"task":"\xff","answer":"\xed\xa0\x80"}}',
        b'{"function":"\xff","more":' + b"[" * 100_000,
        b'{"more":' + b"[" * 50_000 + b"]" * 50_000 + b',"type":"Value","value":1}',
        b'{"type":"Value","value":1e999}',
        b"",
    ],
)
def test_broken_bytes_are_a_typed_error_to_every_decoder(decoder: Any, broken: bytes) -> None:
    with pytest.raises(ProtocolError):
        read(broken, decoder)


@given(st.sampled_from(MESSAGES), st.integers(0, 200), st.binary(max_size=4))
@examples(300)
def test_any_bytes_are_a_message_or_a_typed_error(message: bytes, at: int, put: bytes) -> None:
    changed = message[:at] + put + message[at + len(put) :]
    for decoder in (order_decoder, call_decoder, started_decoder, outcome_decoder):
        try:
            got: Any = read(changed, decoder)
        except ProtocolError:
            continue
        assert not hasattr(got, "value") or math.isfinite(got.value)
        assert isinstance(got, msgspec.Struct)


def test_an_outcome_is_read_as_it_was_written() -> None:
    outcome: Outcome = read(MESSAGES[0], outcome_decoder)
    assert msgspec.json.encode(outcome) == MESSAGES[0]
