"""The step log: which entries of the stream each batch consumed, written before its steps, durable before its ack.

    header    {"schema", "run_id", "fingerprint"}
    settings  {"kind": "settings", "version": v, "fixed", "tunables"}     in force for batches from version v on
    record    {"version": v, "entries": ["1700000000000-0", …], "updates": U}        the U optimizer steps from version v
    attempt   {"kind": "attempt", "version": v, "micro_batch_tokens"}      another life of the trainer tries that batch
    ended     {"kind": "ended", "version": v, "why", "counts"}             a life ended in that batch
    outcome   {"kind": "outcome", "version": v, "made": n, …}              n of its steps were made, and why not the others

A step is deterministic, so weights + log + stream give every later version again, byte for byte. That is why a record is
durable before the version it leads to is announced, and why its outcome is written before that: a restarted trainer takes
the same batch and never publishes other bytes under a version that engines have seen. A record without an outcome, at the
end of the log, is of a batch that was announced by nobody: it may be made otherwise, or not at all.

The last line may be torn by a crash; it is cut off when the log is opened. Any other broken line is an error.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from services.host.files import sync, writing
from services.wire.errors import RollmeshError, UsageError

SCHEMA = 1


class Header(msgspec.Struct, frozen=True):
    schema: int
    run_id: str
    fingerprint: str
    """Of all settings that the bytes of a step depend on, as the run began."""


class StepRecord(msgspec.Struct, frozen=True):
    version: int
    entries: list[str]
    updates: int = 1
    """Absent in logs of before there were several."""


class Tunables(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the trainer that the bytes of a step depend on, and that may change between two batches of a run."""

    micro_batch_tokens: int
    learning_rate: float
    warmup_steps: int
    clip_grad_norm: float
    schedule: dict[str, str | float] = {}
    """`trainer.schedule` by its names; empty in logs of before there was one: a constant rate."""
    steps: int | None = None
    """Of the run, where the schedule depends on them."""


class SettingsRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="settings"):
    """`tunables` hold from the batch at `version` on. `fixed`: fingerprint of the settings that may not change."""

    version: int
    fixed: str
    tunables: Tunables


class Attempt(msgspec.Struct, frozen=True, tag_field="kind", tag="attempt"):
    """Written before another life tries the batch from `version`, with passes of so many tokens."""

    version: int
    micro_batch_tokens: int


class Ended(msgspec.Struct, frozen=True, tag_field="kind", tag="ended"):
    """A life ended in the batch from `version`. `counts`: the batch is to blame, as far as is known."""

    version: int
    why: str
    counts: bool


class Outcome(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="outcome"):
    """Of the batch from `version`: `made` of its steps were made, in passes of `micro_batch_tokens`.

    `dropped`: entries that were not trained, for `cause` (of `services.policies.batching.DropCause`) and `why`.
    """

    version: int
    made: int
    micro_batch_tokens: int
    cause: str = ""
    why: str = ""
    dropped: list[str] = []


Line = SettingsRecord | Attempt | Ended | Outcome


@dataclass(frozen=True)
class Terms:
    """The settings that the bytes of a step depend on. `fixed`: fingerprint of those that may not change in a run;
    `whole`: of all, as logs of before there were `tunables` know it."""

    fixed: str
    whole: str
    tunables: Tunables


class StepLogError(RollmeshError):
    """The log cannot be trusted."""

    code = "step_log"


class _Kind(msgspec.Struct):
    kind: str | None = None


_encoder = msgspec.json.Encoder()
_headers = msgspec.json.Decoder(Header)
_kinds = msgspec.json.Decoder(_Kind)
_records = msgspec.json.Decoder(StepRecord)
_lines = msgspec.json.Decoder(Line)


class StepLog:
    """Appends to the log of one run. `append`, `write`, `sync` are for one thread, all else for the training thread.

    Raises UsageError when the file belongs to another run or to other settings, StepLogError when it is broken.
    """

    def __init__(self, path: Path, run_id: str, terms: Terms) -> None:
        self.path = path
        self.records: list[StepRecord] = []
        """Batches of which steps were made, or are to be; who appends adds to it."""
        self.outcomes: dict[int, Outcome] = {}
        """Of `records`, by version. None is written where a log of before has none."""
        self.drops: list[Outcome] = []
        """Outcomes with entries that were dropped, since the beginning of the run."""
        self.lives = 0
        """In how many lives of the trainer the last batch was begun, and why it is to blame for their end."""
        self.last_end = ""
        """How the last of these lives ended, where it could say so."""
        self._settings: list[SettingsRecord] = []
        self._proven = True
        self._end = 0
        """Bytes of whole lines in the file."""
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            with writing(path):
                self._recover(run_id, terms)
                sync(path.parent)
        except BaseException:
            self.close()
            raise

    @property
    def unproven(self) -> StepRecord | None:
        """The last batch, where nothing says that it was made: then nobody has heard of the version that it leads to."""
        return None if self._proven or not self.records else self.records[-1]

    @property
    def next_version(self) -> int:
        """The version from which the next batch begins, the unproven one included."""
        if self.unproven is not None:
            return self.unproven.version
        return self._end_of(self.records[-1]) if self.records else 0

    def tunables_at(self, version: int) -> Tunables:
        """Those in force for the batch from `version`."""
        return next(each for each in reversed(self._settings) if each.version <= version).tunables

    def append(self, record: StepRecord) -> None:
        """Write one record; durable when this returns. Raises UsageError when the disk takes no more."""
        with writing(self.path):
            self._write(_encoder.encode(record))
            self._sync()

    def write(self, line: Attempt | Ended | Outcome, *, durable: bool = True) -> None:
        """Write what became of a record. Raises UsageError when the disk takes no more.

        What is not `durable` outlives this process, but not a power cut: `sync` makes it so.
        """
        with writing(self.path):
            self._write(_encoder.encode(line))
            if durable:
                self._sync()

    def sync(self) -> None:
        """Make durable what was written before. Raises UsageError when the disk fails."""
        with writing(self.path):
            self._sync()

    def conclude(self, outcome: Outcome) -> None:
        """Take up the outcome of the last batch: one of which no step was made is no longer in `records`."""
        self._proven, self.lives, self.last_end = True, 0, ""
        if outcome.dropped:
            self.drops.append(outcome)
        if outcome.made:
            self.outcomes[outcome.version] = outcome
        else:
            self.records.pop()

    def trained_entries(self) -> list[str]:
        """Entries whose gradient the log leads to."""
        dropped = {entry for outcome in self.drops for entry in outcome.dropped}
        return [entry for record in self.records for entry in record.entries if entry not in dropped]

    def forget_before(self, version: int) -> None:
        """Drop records of batches before `version` from memory; the file keeps them."""
        del self.records[: sum(record.version < version for record in self.records)]
        # A copy: the training thread may add one meanwhile.
        for old in list(self.outcomes):
            if old < version:
                del self.outcomes[old]

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _recover(self, run_id: str, terms: Terms) -> None:
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        self._end = len(whole)
        self._cut_off()
        lines = whole.splitlines()
        if not lines:
            self._write(_encoder.encode(Header(SCHEMA, run_id, terms.whole)))
        else:
            self._read(lines, run_id, terms)
        self._take_settings(terms)
        self._sync()

    def _read(self, lines: Sequence[bytes], run_id: str, terms: Terms) -> None:
        try:
            header = _headers.decode(lines[0])
            found = [_lines.decode(line) if _kinds.decode(line).kind else _records.decode(line) for line in lines[1:]]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StepLogError(
                f"{self.path} is broken ({error})", "the run cannot be continued; start a new one"
            ) from error
        if (header.schema, header.run_id) != (SCHEMA, run_id):
            raise UsageError(f"{self.path.parent} holds run {header.run_id}", "choose another --run-dir")
        began_with = next((line.fixed for line in found if isinstance(line, SettingsRecord)), None)
        if (header.fingerprint, None) != (terms.whole, began_with) and began_with != terms.fixed:
            raise UsageError(
                f"{self.path.parent} holds a run with other trainer settings: its steps could not be repeated",
                "continue it with its own config.toml (what may change in a run: docs/the-loop.md), or choose "
                "another --run-dir",
            )
        for line in found:
            self._play(line)

    def _play(self, line: StepRecord | Line) -> None:
        match line:
            case SettingsRecord():
                self._settings.append(line)
            case StepRecord():
                expected = self._end_of(self.records[-1]) if self.records else line.version
                if line.version != expected:
                    raise StepLogError(
                        f"{self.path}: version {line.version} follows {self.records[-1].version}", "start a new run"
                    )
                self.records.append(line)
                # Logs of before say nothing of outcomes: there the last batch may have been announced.
                self._proven, self.lives, self.last_end = not self._settings, 1, ""
            case _ if not self.records or line.version != self.records[-1].version:
                raise StepLogError(f"{self.path}: {line} is of no batch that it holds", "start a new run")
            case Attempt():
                self.lives += 1
                self.last_end = ""
            case Ended():
                self.lives -= not line.counts
                self.last_end = line.why
            case Outcome():
                self.conclude(line)

    def _take_settings(self, terms: Terms) -> None:
        """Have the present tunables hold from the next batch on, where they are others than before."""
        # A log of before holds batches of these very settings.
        version = self.next_version if self._settings else 0
        if not self._settings or self._settings[-1].tunables != terms.tunables:
            record = SettingsRecord(version, terms.fixed, terms.tunables)
            self._write(_encoder.encode(record))
            self._settings.append(record)

    def _end_of(self, record: StepRecord) -> int:
        outcome = self.outcomes.get(record.version)
        return record.version + (record.updates if outcome is None else outcome.made)

    def _write(self, line: bytes) -> None:
        left = memoryview(line + b"\n")
        length = len(left)
        try:
            while left:
                written = os.write(self._descriptor, left)
                if not written:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                left = left[written:]
        except OSError:
            # Half a line in the middle of the log would break it for good.
            with suppress(OSError):
                self._cut_off()
            raise
        self._end += length

    def _cut_off(self) -> None:
        os.ftruncate(self._descriptor, self._end)
        os.lseek(self._descriptor, self._end, os.SEEK_SET)

    def _sync(self) -> None:
        os.fsync(self._descriptor)
