"""A Slurm of one machine: it writes down command lines and runs the commands here; nodes are addresses of loopback.

    srun FLAGS… COMMAND…              a line in $FAKE_SLURM_LOG, then COMMAND once a node, with its output in --output
    squeue …                          the steps that run: ID NAME
    scancel --signal=TERM ID…         the signal to the steps' tasks
    scontrol show hostnames LIST

With $FAKE_SLURM_DRY a stand-in for COMMAND is run: it listens where COMMAND would, or ends at once.

As the real one, srun kills its tasks at once where it is itself told to end, or where one fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Step:
    """One `srun`: its flags (`--nodes=1` → nodes: 1) and what it ran."""

    flags: dict[str, str]
    command: list[str]


def install(folder: Path) -> None:
    """Write the programs into a folder for PATH."""
    folder.mkdir()
    for name in ("srun", "squeue", "scancel", "scontrol"):
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {Path(__file__).absolute()} {name} "$@"\n')
        program.chmod(0o755)


def steps(log: Path) -> list[Step]:
    """All that were run so far."""
    return [Step(*json.loads(line)) for line in log.read_text().splitlines()] if log.exists() else []


def _srun(words: list[str]) -> int:
    flags: dict[str, str] = {}
    while words and words[0].startswith("--"):
        name, _, value = words.pop(0).removeprefix("--").partition("=")
        flags[name] = value
    with Path(os.environ["FAKE_SLURM_LOG"]).open("a") as log:
        log.write(json.dumps([flags, words]) + "\n")
    if os.environ.get("FAKE_SLURM_DRY"):
        words = [sys.executable, "-S", str(Path(__file__).absolute()), "stand-in", *words]
    with Path(flags["output"]).open("ab") as output:
        tasks = [
            subprocess.Popen(words, stdout=output, stderr=output, env={**os.environ, "SLURM_NODEID": str(node)})
            for node in range(int(flags["nodes"]))
        ]

    def kill() -> None:
        for task in tasks:
            task.kill()

    signal.signal(signal.SIGTERM, lambda *_: kill())
    running = [_running() / str(task.pid) for task in tasks]
    for file in running:
        file.write_text(flags["job-name"])
    try:
        codes = [task.poll() for task in tasks]
        while None in codes:
            if any(codes):
                kill()
            time.sleep(0.05)
            codes = [task.poll() for task in tasks]
    finally:
        for file in running:
            file.unlink()
    failed = next((code for code in codes if code), 0)
    return failed if failed >= 0 else 128 - failed


def _stand_in(words: list[str]) -> None:
    if "--port" not in words:
        return
    host, port = (words[words.index(flag) + 1] for flag in ("--host", "--port"))
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    with socket.create_server((host, int(port))):
        ending.wait()


def _running() -> Path:
    """A file for each step that runs, called by its task's process id."""
    folder = Path(os.environ["FAKE_SLURM_LOG"] + ".running")
    folder.mkdir(exist_ok=True)
    return folder


def _scancel(words: list[str]) -> None:
    assert words.pop(0) == "--signal=TERM"
    for step in words:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(step.rpartition(".")[2]), signal.SIGTERM)


def main(program: str, words: list[str]) -> int:
    """Returns the exit code."""
    if program == "srun":
        return _srun(words)
    if program == "stand-in":
        _stand_in(words)
    elif program == "scancel":
        _scancel(words)
    elif program == "squeue":
        for each in _running().iterdir():
            with contextlib.suppress(FileNotFoundError):
                sys.stdout.write(f"{os.environ['SLURM_JOB_ID']}.{each.name} {each.read_text()}\n")
    else:
        sys.stdout.write("\n".join(os.environ["SLURM_JOB_NODELIST"].split(",")) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
