"""A Slurm of one machine: `srun` writes down its command line and runs the command here, nodes are addresses of loopback.

srun FLAGS… COMMAND…     a line in $FAKE_SLURM_LOG, then COMMAND with its output in --output, as srun has it
scontrol show hostnames LIST
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Step:
    """One `srun`: its flags (`--nodes=1` → nodes: 1) and what it ran."""

    flags: dict[str, str]
    command: list[str]


def install(folder: Path) -> None:
    """Write both programs into a folder for PATH."""
    folder.mkdir()
    for name in ("srun", "scontrol"):
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {Path(__file__).absolute()} {name} "$@"\n')
        program.chmod(0o755)


def steps(log: Path) -> list[Step]:
    """All that were run so far."""
    return [Step(*json.loads(line)) for line in log.read_text().splitlines()] if log.exists() else []


def _srun(words: list[str]) -> None:
    flags: dict[str, str] = {}
    while words and words[0].startswith("--"):
        name, _, value = words.pop(0).removeprefix("--").partition("=")
        flags[name] = value
    with Path(os.environ["FAKE_SLURM_LOG"]).open("a") as log:
        log.write(json.dumps([flags, words]) + "\n")
    output = os.open(flags["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # In this process's place: a signal to srun reaches its task, as with the real one.
    os.execvp(words[0], words)


if __name__ == "__main__":
    if sys.argv[1] == "srun":
        _srun(sys.argv[2:])
    sys.stdout.write("\n".join(os.environ["SLURM_JOB_NODELIST"].split(",")) + "\n")
