"""Which Python `./dev` makes its environments of."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.choose_python import choose, pythons, seconds_of


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"first": 1.0, "other": 0.7}, "other"),
        ({"first": 1.0, "other": 0.95}, "first"),
        ({"first": 1.0, "other": 2.0}, "first"),
        ({"other": 2.0, "third": 1.0}, "third"),
        ({}, "first"),
    ],
    ids=["clearly faster", "no faster than by chance", "slower", "the first cannot be used", "none was timed"],
)
def test_another_python_is_taken_where_it_is_clearly_faster(seconds: dict[str, float], chosen: str) -> None:
    assert choose("first", seconds) == chosen


def test_each_python_of_the_path_is_looked_at_once(tmp_path: Path) -> None:
    one, two, nothing = tmp_path / "one", tmp_path / "two", tmp_path / "nothing"
    for folder in (one, two, nothing):
        folder.mkdir()
    for python in (one / "python3.12", two / "python3.11", two / "python3"):
        python.write_text("#!/bin/sh\nexit 1\n")
        python.chmod(0o755)
    (one / "python3").symlink_to(one / "python3.12")
    (one / "python3.11").write_text("not to be executed")
    path = os.pathsep.join(map(str, (nothing, one, two)))
    assert list(pythons(path)) == [str(each) for each in (two / "python3.11", one / "python3.12", two / "python3")]


def test_a_python_says_how_long_it_took_or_cannot_be_used(tmp_path: Path) -> None:
    python = tmp_path / "python3.11"
    for script, seconds in (("echo 0.5", 0.5), ("echo fast", None), ("exit 1", None)):
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        assert seconds_of(str(python)) == seconds
    assert seconds_of(str(tmp_path / "python3.12")) is None
