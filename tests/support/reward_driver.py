"""A process that calls reward workers as some user: `python -m tests.support.reward_driver USER CONTAINED`.

Reads lines `{"worker", "answer", "metadata"}` and answers each with its outcome, or with `{"refused"}` where the worker
does not start. CONTAINED=1: the kernel refuses new namespaces, as in a container of Docker's or Kubernetes'.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

from services.rewards.sandbox import kernel
from services.rewards.sandbox.protocol import Failed, Files, Limits, Sample
from services.rewards.sandbox.worker_handle import WorkerProcess
from services.wire.errors import UsageError

WORKERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "processes": {"processes": True},
    "network": {"network": True},
    "short": {"time_s": 3.0},
    "unsure": {"processes": True},
}
MEMORY_MIB = 256


def refuse_namespaces() -> None:
    number = {"x86_64": 272, "aarch64": 97}[os.uname().machine]
    load, equal, leave = 0x20, 0x15, 0x06
    program = [
        struct.pack("=HBBI", load, 0, 0, 0),
        struct.pack("=HBBI", equal, 0, 1, number),
        struct.pack("=HBBI", leave, 0, 0, 0x00050000 | errno.EPERM),
        struct.pack("=HBBI", leave, 0, 0, 0x7FFF0000),
    ]
    kernel.install_filter(b"".join(program))


async def main() -> None:
    folder = Path.cwd()
    files = Files(folder=str(folder), readable=[str(folder.parent / "shared")], hidden=[str(folder / "keys")])
    started: dict[str, WorkerProcess] = {}
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)
            kind = asked["worker"]
            try:
                if kind not in started:
                    given = {"time_s": 10.0, "memory_mib": MEMORY_MIB, "network": False, "processes": False}
                    limits = Limits(**{**given, **WORKERS[kind]})
                    started[kind] = await WorkerProcess.start(
                        "reward_escapes:judge", limits, files, must_hold=kind != "unsure"
                    )
                answer = await call(started[kind], asked)
            except UsageError as error:
                answer = {"refused": str(error)}
            print(json.dumps(answer), flush=True)  # noqa: T201
    finally:
        for worker in started.values():
            await worker.close()


async def call(worker: WorkerProcess, asked: dict[str, Any]) -> dict[str, Any]:
    given = {"task": "", "prompt": "p", "messages": None, "complete": True}
    outcome = await worker.call(Sample(answer=asked["answer"], metadata=asked["metadata"], **given))
    held = {"held_by": worker.held_by, "not_confined": worker.not_confined}
    if isinstance(outcome, Failed):
        return {"cause": str(outcome.cause), "what": outcome.what, **held}
    return {"value": outcome.value, **held}


if __name__ == "__main__":
    if sys.argv[1] == "contained":
        refuse_namespaces()
    asyncio.run(main())
