"""The lines of the step log, as JSON: what each says, and which formats are read.

    header       {"schema", "run_id", "fingerprint"}
    settings     {"kind": "settings", "version": v, "fixed", "tunables"}     in force for batches from version v on
    environment  {"kind": "environment", "version": v, "model", "parts"}     what computes batches from version v on
    record       {"version": v, "entries": ["1700000000000-0", …], "updates": U}     the U optimizer steps from version v
    attempt      {"kind": "attempt", "version": v, "micro_batch_tokens"}     another life of the trainer tries that batch
    ended        {"kind": "ended", "version": v, "why", "counts"}            a life ended in that batch
    outcome      {"kind": "outcome", "version": v, "made": n, …}             n of its steps were made; why not the others
    announced    {"kind": "announced", "version": v, "digest"}               whoever asks the bus may have heard of v
    skip         {"kind": "skip", "version": v, "to": w}                     from v on the run goes on as w

Format 1 had no environment, announced and skip. Its logs are read; what is appended to them is of format 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from services.wire.errors import UsageError

SCHEMA = 2
_READABLE = (1, SCHEMA)


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


class EnvironmentRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="environment"):
    """What computes batches from `version` on (`trainer.checkpoint.environment`)."""

    version: int
    model: str
    parts: dict[str, str]


class AnnouncedRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="announced"):
    """Written before `version` is announced: the root digest of its bytes."""

    version: int
    digest: str


class Skip(msgspec.Struct, frozen=True, tag_field="kind", tag="skip"):
    """The weights of `version`, as they were repeated, are those of `to`; the versions between are nobody's."""

    version: int
    to: int


Line = SettingsRecord | EnvironmentRecord | Attempt | Ended | Outcome | AnnouncedRecord | Skip


class _Kind(msgspec.Struct):
    kind: str | None = None


_encoder = msgspec.json.Encoder()
_headers = msgspec.json.Decoder(Header)
_kinds = msgspec.json.Decoder(_Kind)
_records = msgspec.json.Decoder(StepRecord)
_lines = msgspec.json.Decoder(Line)


def encode_line(line: Header | StepRecord | Line) -> bytes:
    """Without its end."""
    return _encoder.encode(line)


def decode_header(line: bytes) -> Header:
    """Raises MsgspecError or UnicodeDecodeError for what is no header, UsageError for one of an unknown format."""
    header = _headers.decode(line)
    if header.schema not in _READABLE:
        raise UsageError(
            f"the step log of run {header.run_id} is of format {header.schema}, this rollmesh reads "
            f"{' and '.join(map(str, _READABLE))}",
            "end the run with the rollmesh that began it, or choose another --run-dir",
        )
    return header


def decode_lines(lines: Sequence[bytes]) -> list[StepRecord | Line]:
    """Those after the header. Raises MsgspecError or UnicodeDecodeError."""
    return [_lines.decode(line) if _kinds.decode(line).kind else _records.decode(line) for line in lines]
