"""`rollmesh doctor` and the preflight of `up` with real parts: each planted fault is named, and what is well is not."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from services.cli import ROLLMESH
from services.doctor import installation, planned
from services.host import run_folder
from services.policies.diagnosis.machine import HostLoad, Transport
from services.policies.training.health import signs
from services.security.keys import NO_PLACES, make_keys
from services.wire.errors import DeadlineError
from tests.conftest import running_valkey
from tests.support.mesh_command import run_command
from tests.support.step_lines import step_metrics

TASKS = """
import itertools, time
from clients.environments.base import Ended, Problem, problem_rng, split_of

COUNTED = itertools.count()

class Task:
    def __init__(self, fault):
        self.name, self.fault = "own", fault

    def problem(self, split, index, seed):
        if self.fault == "nondeterministic":
            return Problem(split, index, prompt=f"{next(COUNTED)}=")
        if self.fault == "slow" and index == 3:
            time.sleep(0.3)
        if self.fault == "splits-overlap":
            return Problem(split, index, prompt=f"{index}=", solution="1")
        numbers = problem_rng("own", split, index, seed)
        while split_of(word := str(numbers.randrange(1 << 30))) != split:
            pass
        asked = "First OF " if self.fault == "characters" else ""
        return Problem(split, index, prompt=f"{asked}{word}=", solution=word[0])

    def start(self, problem):
        return Episode(self.fault, problem)

class Episode:
    def __init__(self, fault, problem):
        self.fault, self.problem, self.first_turn = fault, problem, problem.prompt

    def respond(self, answer):
        if self.fault == "fails":
            return Ended(float(answer.text), success=True)
        if self.fault == "equal-rewards":
            return Ended(0.5, success=False)
        return Ended(float(answer.text == self.problem.solution), success=True)
"""


@pytest.fixture(autouse=True)
def _logging_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that run in this process would set logging up for it, onto a stream that ends with the test."""
    monkeypatch.setattr("services.cli.configure_logging", lambda *_, **__: None)


def doctor(*arguments: str) -> list[dict[str, Any]]:
    """What it finds, by the real command."""
    done = run_command(["doctor", "--json", *arguments], deadline_s=120.0)
    found: list[dict[str, Any]] = json.loads(done.out)
    assert done.code == (1 if any(each["severity"] == "error" for each in found) else 0), done.err
    for each in found:
        assert each["cause"] and each["evidence"] and each["remedy"]
    return found


def ids(found: list[dict[str, Any]]) -> list[str]:
    return [each["id"] for each in found]


def checked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What the preflight of `up` refuses."""
    assert ROLLMESH.run(["up", "--check", *arguments]) == 2
    refused: dict[str, Any] = json.loads(capsys.readouterr().out)
    return refused


@pytest.mark.parametrize("task", ["running-sums", "guess-number"])
def test_nothing_is_found_where_a_built_in_task_is_planned(task: str) -> None:
    assert doctor("--task", task) == []


@pytest.mark.parametrize("fault", ["fails", "nondeterministic", "equal-rewards", "slow", "splits-overlap", "none"])
def test_a_fault_of_an_environment_is_named_before_anything_starts(
    fault: str, tmp_path: Path, tiny_policy: Path
) -> None:
    (tmp_path / "own.py").write_text(TASKS)
    found = doctor("--task", f"python:{tmp_path / 'own.py'}:Task?fault={fault}", f"model.path={tiny_policy}")
    assert ids(found) == ([] if fault == "none" else [f"environment-{fault}"])
    assert not (tmp_path / "runs").exists()


def test_prompts_that_the_tokenizer_cannot_write_down_are_told_of(tmp_path: Path, tiny_policy: Path) -> None:
    (tmp_path / "own.py").write_text(TASKS)
    (found,) = doctor("--task", f"python:{tmp_path / 'own.py'}:Task?fault=characters", f"model.path={tiny_policy}")
    assert (found["id"], found["severity"]) == ("unknown-characters", "warning")
    assert "no token for F O: each becomes" in found["evidence"]


@pytest.mark.parametrize("load", [9.0, 0.5])
async def test_what_does_not_end_is_an_error_of_its_own_unless_the_machine_is_busy(
    load: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hangs(command: tuple[str, ...], what: str, given: bytes = b"", **_: object) -> bytes:
        raise DeadlineError(f"{what} in 40 s")

    for module in (planned, installation):
        monkeypatch.setattr(module, "ask", hangs)
    monkeypatch.setattr(installation, "read_load", lambda: HostLoad(load, 2))
    found = await planned.examine_plan(planned.Planned(None, [], NO_PLACES))
    assert [each.id for each in found] == (["not-tried"] * 3 if load > 3 else ["environment-fails", "nixl-unusable"])
    assert all(" in 40 s" in each.evidence for each in found)


async def test_a_transport_that_fails_once_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [Transport("nixl", why="a connection was given up"), Transport("nixl", 2e9, 1 << 26)]
    said = [msgspec.json.encode(each) for each in answers]

    async def ask(*_: object, **__: object) -> bytes:
        return said.pop(0)

    monkeypatch.setattr(installation, "ask", ask)
    assert await installation.try_transport("nixl") == []
    said[:] = [msgspec.json.encode(answers[0])] * 2
    assert [each.id for each in await installation.try_transport("nixl")] == ["nixl-unusable"]


@pytest.mark.parametrize("chosen", ["", "&dialect=text"], ids=["nobody", "text"])
def test_plain_text_is_told_of_where_nobody_chose_it_and_the_model_chats(
    chosen: str, tmp_path: Path, chat_policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(TASKS)
    planned = ["--task", f"python:{tmp_path / 'own.py'}:Task?fault=none{chosen}", f"model.path={chat_policy}"]
    assert ids(doctor(*planned)) == ([] if chosen else ["dialect"])
    capsys.readouterr()
    assert ROLLMESH.run(["up", "--check", *planned]) == 0
    said = capsys.readouterr()
    assert said.out == "", "a program reads it"
    *warned, well = said.err.splitlines()
    assert well.startswith("the run can start: python:")
    assert [line.rpartition(": ")[2] for line in warned] == (
        [] if chosen else ["add ?dialect=chat, or ?dialect=text if it is meant"]
    )


def test_a_model_without_tokenizer_or_larger_than_memory_is_refused(
    tmp_path: Path, tiny_policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_policy, folder)
    (folder / "tokenizer.json").unlink()
    assert checked(capsys, f"model.path={folder}")["id"] == "tokenizer"
    assert ids(doctor(f"model.path={folder}")) == ["tokenizer"], "once"
    shutil.copy(tiny_policy / "tokenizer.json", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 120}
    (folder / "config.json").write_text(json.dumps(config))
    refused = checked(capsys, f"model.path={folder}")
    assert refused["id"] == "memory"
    assert "GiB of memory at the least" in refused["cause"]


def test_a_port_in_use_a_full_disk_and_missing_keys_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert checked(capsys, f"telemetry.trainer_port={port}")["id"] == "port-in-use"
        assert ids(doctor(f"telemetry.trainer_port={port}")) == ["port-in-use"]
    make_keys(tmp_path / "keys")
    (tmp_path / "keys" / "peer.key").unlink()
    refused = checked(capsys, "--keys-dir", str(tmp_path / "keys"))
    assert (refused["id"], "peer.key" in refused["cause"]) == ("keys", True)
    monkeypatch.setattr(run_folder, "free_bytes", lambda path: 9 << 20)
    refused = checked(capsys, "--run-dir", str(tmp_path / "run"))
    assert (refused["id"], "9 MiB left" in refused["cause"]) == ("disk", True)


def test_a_redis_that_evicts_or_keeps_nothing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running_valkey(tmp_path) as plan:
        redis = Redis.from_url(plan.url)

        async def configure(**settings: str) -> None:
            for name, value in settings.items():
                await redis.config_set(name, value)
            await redis.aclose()

        asyncio.run(configure(**{"maxmemory-policy": "allkeys-lru", "appendonly": "no"}))
        assert checked(capsys, "--redis-url", plan.url)["id"] == "redis-evicts"
        assert ids(doctor("--redis-url", plan.url, "seed=1")) == ["redis-evicts", "redis-persistence"]
        asyncio.run(configure(**{"maxmemory-policy": "noeviction", "appendonly": "yes"}))
        assert doctor("--redis-url", plan.url, "seed=1") == []
    assert checked(capsys, "--redis-url", plan.url)["id"] == "redis-unreachable"


@contextmanager
def old_redis() -> Iterator[str]:
    """Speaks just enough of the protocol to say that it is version 5."""
    info = b"redis_version:5.0.7\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\n"

    def answer(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            words: list[bytes] = []
            while line := lines.readline():
                if line.startswith(b"*"):
                    words, wanted = [], int(line[1:])
                    continue
                if line.startswith(b"$"):
                    continue
                words.append(line.strip().upper())
                if len(words) == wanted:
                    replies = {b"PING": b"+PONG\r\n", b"TIME": f"*2\r\n:{int(time.time())}\r\n:0\r\n".encode()}
                    replies[b"INFO"] = b"$%d\r\n%s\r\n" % (len(info), info)
                    connection.sendall(replies.get(words[0], b"-ERR unknown command `%s`, with args\r\n" % words[0]))

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
        listener.shutdown(socket.SHUT_RDWR)


def test_a_redis_that_is_too_old_is_refused_by_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with old_redis() as url:
        refused = checked(capsys, "--redis-url", url)
    assert refused["id"] == "redis-too-old"
    assert "HELLO" in refused["cause"], "redis-py begins with it, and Redis 6.0 was the first to know it"


def test_a_transport_that_cannot_connect_is_named_and_its_bandwidth_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("nixl_cu12")
    done = run_command(["transports", "--transport", "nixl", "--json"])
    assert json.loads(done.out.splitlines()[-1])["bytes_per_s"] > 0, done.err
    monkeypatch.setenv("UCX_TLS", "posix")
    assert ids(doctor("seed=1")) == ["nixl-unusable"]
    assert run_command(["transports", "--transport", "shm"]).code == 0


# Of a run's folder.


def folder_of(root: Path, lines: list[bytes], log: str = "") -> Path:
    (root / "logs").mkdir(parents=True)
    (root / "config.toml").write_text("steps = 20\n")
    (root / "run-id").write_text("r\n")
    (root / "summary.json").write_text("{}")
    (root / "metrics.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    (root / "logs" / "trainer.log").write_text(log)
    return root


def test_a_runs_folder_tells_of_its_sicknesses(tmp_path: Path) -> None:
    well = [step_metrics(step, success=0.5, logprob_gap_mean=1e-6) for step in range(1, 21)]
    gap = step_metrics(21, success=0.5, logprob_gap_mean=0.4)
    gap = msgspec.convert(msgspec.to_builtins(gap) | {"warnings": signs(None, gap, 1.0)}, type(gap))
    encoded = [msgspec.json.encode(line) for line in well]
    assert doctor(str(folder_of(tmp_path / "well", encoded))) == []
    folder = folder_of(tmp_path / "ill", [*encoded, msgspec.json.encode(gap)], "RuntimeError: CUDA out of memory\n")
    (folder / "summary.json").unlink()
    assert ids(doctor(str(folder))) == ["logprob-gap", "out-of-memory", "run-failed"]


def test_a_planes_folder_is_looked_at_and_what_was_looked_at_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path / "plane", [])
    for name in ("run-id", "summary.json"):
        (folder / name).unlink()
    assert ROLLMESH.run(["doctor", str(folder)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("nothing is wrong, as far as can be seen, with the rollout plane in ")
    assert said.endswith("which has ended: its files alone")
    (folder / "logs" / "s0.log").write_text("RuntimeError: CUDA out of memory\n")
    assert ids(doctor(str(folder))) == ["out-of-memory"]


def test_the_table_has_cause_evidence_and_remedy_in_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folder = folder_of(tmp_path / "run", [], "RuntimeError: CUDA out of memory\n")
    assert ROLLMESH.run(["doctor", str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("error     out-of-memory: trainer ran out of memory")
    assert [line.split()[0] for line in lines if not line.startswith(" ")][:2] == ["error", "evidence"]
    assert "docs/runbook.md#out-of-memory" in "".join(lines)
