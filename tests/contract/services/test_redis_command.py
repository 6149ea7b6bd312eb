"""`rollmesh redis`: the Redis of a mesh that is started part by part, seen by its clients."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from services.security.keys import key_file, make_keys
from tests.conftest import free_port, wait_for_port
from tests.support.mesh_command import COMMAND, run_command


@contextmanager
def running(data: Path, port: int, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [*COMMAND, "redis", "--data-dir", str(data), "--port", str(port), *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_for_port(port, process)
        yield process
    finally:
        process.kill()
        process.wait(timeout=10)


def test_it_asks_for_the_password_and_keeps_what_it_was_told(tmp_path: Path) -> None:
    keys, data, port = tmp_path / "keys", tmp_path / "data", free_port()
    make_keys(keys)
    password = key_file(keys, "redis").read_text().strip()
    with running(data, port, "--keys-dir", str(keys)) as process:
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=port).ping()
        assert redis.Redis(port=port, password=password).set("told", "once")
        process.kill()
        process.wait(timeout=10)
    with running(data, port, "--keys-dir", str(keys)):
        assert redis.Redis(port=port, password=password).get("told") == b"once"
    assert password not in "".join(file.read_text(errors="replace") for file in data.rglob("*") if file.is_file())


def test_sigterm_ends_it_in_good_order(tmp_path: Path) -> None:
    with running(tmp_path, free_port()) as process:
        process.terminate()
        assert process.wait(timeout=10) == 0


def test_without_a_password_it_stays_on_loopback(tmp_path: Path) -> None:
    done = run_command(["redis", "--data-dir", str(tmp_path), "--port", str(free_port()), "--host", "0.0.0.0"])
    assert done.code == 2
    assert "no redis key" in done.err and "--keys-dir" in done.err
