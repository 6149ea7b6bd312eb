"""Starting the ranks of one machine: a trainer that nobody started as a rank starts the others, which end with it.

    rollmesh train ─► settings ask for n ranks, no torchrun ─► the same command n − 1 times, with torchrun's variables

Imports no torch: the others begin to import it as early as this process does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

LOOPBACK = "127.0.0.1"
PARENT = "ROLLMESH_RANK_PARENT"
"""Its process id, for those that it started."""
_PR_SET_PDEATHSIG = 1
_END_WITHIN_S = 30.0


@dataclass(frozen=True)
class Started:
    """`environ`: torchrun's variables for this process, which is rank 0; `others`: by rank, from 1."""

    environ: Mapping[str, str]
    others: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def close(self) -> None:
        """Wait for the others, which were told to end; kill those that do not."""
        for process in self.others:
            try:
                process.wait(_END_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def ranks_started(environ: Mapping[str, str] = os.environ) -> int | None:
    """How many ranks torchrun, or whoever sets its variables, has started; None where nobody has."""
    return int(environ["WORLD_SIZE"]) if "WORLD_SIZE" in environ and "RANK" in environ else None


def start_others(ranks: int) -> Started:
    """Start this process's command `ranks` − 1 times more, on this machine. For a process without threads."""
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    others = [
        subprocess.Popen(
            # -P: the folder that the user stands in must not shadow our packages.
            [sys.executable, "-P", "-m", "services", *sys.argv[1:]],
            stdin=subprocess.DEVNULL,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), PARENT: str(os.getpid())},
        )
        for rank in range(1, ranks)
    ]
    return Started({**os.environ, **shared, "RANK": "0", "LOCAL_RANK": "0"}, others)


def end_with_parent(environ: Mapping[str, str] = os.environ) -> None:
    """Be killed when the process that started this rank ends, however it does; nothing where `start_others` did not."""
    if PARENT not in environ or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(environ[PARENT]):
        # It ended before.
        os.kill(os.getpid(), signal.SIGKILL)
