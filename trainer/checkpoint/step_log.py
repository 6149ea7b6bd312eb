"""The step log: which entries of the stream each batch consumed, written before its steps, durable before its ack.

    header   {"schema", "run_id", "fingerprint"}
    record   {"version": v, "entries": ["1700000000000-0", …], "updates": U}        the U optimizer steps from version v

A step is deterministic, so weights + log + stream give every later version again, byte for byte. That is why a record is
durable before the version it leads to is announced: a restarted trainer takes the same batch and never publishes other
bytes under a version that engines have seen.

The last line may be torn by a crash; it is cut off when the log is opened. Any other broken line is an error.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import msgspec

from services.host.files import writing
from services.wire.errors import RollmeshError, UsageError

SCHEMA = 1


class Header(msgspec.Struct, frozen=True):
    schema: int
    run_id: str
    fingerprint: str
    """Of the settings that the bytes of a step depend on."""


class StepRecord(msgspec.Struct, frozen=True):
    version: int
    entries: list[str]
    updates: int = 1
    """Absent in logs of before there were several."""


class StepLogError(RollmeshError):
    """The log cannot be trusted."""

    code = "step_log"


_encoder = msgspec.json.Encoder()
_headers = msgspec.json.Decoder(Header)
_records = msgspec.json.Decoder(StepRecord)


class StepLog:
    """Appends to the log of one run. `records`: what it held when it was opened; who appends adds to it.

    Raises UsageError when the file belongs to another run or to other settings, StepLogError when it is broken.
    """

    def __init__(self, path: Path, run_id: str, fingerprint: str) -> None:
        self.path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self.records = self._recover(run_id, fingerprint)
        except BaseException:
            self.close()
            raise

    def append(self, record: StepRecord) -> None:
        """Write one record; durable when this returns. Raises UsageError when the disk takes no more."""
        with writing(self.path):
            self._write(_encoder.encode(record))

    def forget_before(self, version: int) -> None:
        """Drop records of batches before `version` from memory; the file keeps them."""
        del self.records[: sum(record.version < version for record in self.records)]

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _recover(self, run_id: str, fingerprint: str) -> list[StepRecord]:
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        os.ftruncate(self._descriptor, len(whole))
        os.lseek(self._descriptor, 0, os.SEEK_END)
        lines = whole.splitlines()
        if not lines:
            self._write(_encoder.encode(Header(SCHEMA, run_id, fingerprint)))
            return []
        try:
            header = _headers.decode(lines[0])
            records = [_records.decode(line) for line in lines[1:]]
        except msgspec.DecodeError as error:
            raise StepLogError(
                f"{self.path} is broken ({error})", "the run cannot be continued; start a new one"
            ) from error
        if (header.schema, header.run_id) != (SCHEMA, run_id):
            raise UsageError(f"{self.path.parent} holds run {header.run_id}", "choose another --run-dir")
        if header.fingerprint != fingerprint:
            raise UsageError(
                f"{self.path.parent} holds a run with other trainer settings: its steps could not be repeated",
                "continue it with its own config.toml, or choose another --run-dir",
            )
        for before, after in pairwise(records):
            if after.version != before.version + before.updates:
                raise StepLogError(f"{self.path}: version {after.version} follows {before.version}", "start a new run")
        return records

    def _write(self, line: bytes) -> None:
        os.write(self._descriptor, line + b"\n")
        os.fsync(self._descriptor)
