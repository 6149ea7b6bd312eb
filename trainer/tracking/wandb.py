"""Weights & Biases, offline by default: `wandb sync` sends a run's folders to the server, as one run.

A process that goes on with a run opens it under the same id. Which steps were written is read from the library's own files,
which are in the format of LevelDB's log (https://github.com/google/leveldb/blob/main/doc/log_format.md).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from trainer.tracking.base import Figures, TrackedRun

_BLOCK = 1 << 15
_HEADER = struct.Struct("<IHB")
_PREAMBLE = 7
_LAST_PIECES = (1, 4)


class WeightsAndBiases:
    def __init__(self, run: TrackedRun, mode: Literal["offline", "online"]) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        run.folder.mkdir(parents=True, exist_ok=True)
        self._held = _steps(run.folder)
        quiet = wandb.Settings(console="off", disable_git=True, save_code=False, x_disable_stats=True)
        self._run = wandb.init(
            project=run.project,
            id=run.run_id,
            name=run.name,
            dir=str(run.folder),
            mode=mode,
            resume="allow",
            config=dict(run.settings),
            settings=quiet,
        )

    def held(self) -> set[int]:
        return self._held

    def log(self, figures: Sequence[Figures]) -> None:
        for each in figures:
            text = {"samples": each.samples} if each.samples else {}
            self._run.log({**each.values, **text, "_timestamp": each.at}, step=each.step)

    def finish(self, summary: Mapping[str, float]) -> None:
        self._run.summary.update({f"summary/{name}": value for name, value in summary.items()})

    def close(self) -> None:
        self._run.finish()


def _steps(folder: Path) -> set[int]:
    from wandb.proto.wandb_internal_pb2 import Record

    found = set()
    # The folder of the newest run is there a second time, under the name `latest-run`.
    for file in folder.glob("wandb/*run-*/*.wandb"):
        for content in _records(file.read_bytes()):
            record = Record()
            record.ParseFromString(content)
            if record.HasField("history"):
                found.add(int(record.history.step.num))
    return found


def _records(log: bytes) -> Iterator[bytes]:
    """Whole records; a torn last one is left out."""
    at, whole = _PREAMBLE, b""
    while at + _HEADER.size <= len(log):
        left = _BLOCK - at % _BLOCK
        _, length, kind = _HEADER.unpack_from(log, at)
        if left < _HEADER.size or kind == 0:
            at += left
            continue
        end = at + _HEADER.size + length
        if end > len(log):
            return
        whole += log[at + _HEADER.size : end]
        at = end
        if kind in _LAST_PIECES:
            yield whole
            whole = b""
