"""Journal records (msgpack): all that a server needs to take a group over, in the order in which it happened.

    GroupBegan ─ SessionBegan … ─ Answered | TurnsAnswered | Rewarded | SessionEnded … ─ GroupEnded

One record is one element of a Redis list, with a tag. Arrays are packed as `services.wire.packed` says. A
partial answer is a list of its own: the deltas of an answer that is not whole yet.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec

from rollout_server.engines.base import FinishReason
from rollout_server.sessions.responses import RequestKey
from rollout_server.sessions.session import DropCause
from services.wire.errors import UNDECODABLE, WireError
from services.wire.rollout_api import Purpose
from services.wire.sampling import SamplingParams
from services.wire.session_api import SessionState
from services.wire.trajectory import BreakReason, ExpertChoices, VersionSpan

JOURNAL_SCHEMA = 2


class GroupBegan(msgspec.Struct, frozen=True, kw_only=True, tag="group"):
    """`sampling`: of turns that name none; None where sessions are opened one by one. `opened_at`: Unix seconds."""

    schema: int = JOURNAL_SCHEMA
    group_id: str
    ordinal: int
    size: int
    task: str
    purpose: Purpose
    idle_timeout_s: float
    sampling: SamplingParams | None
    opened_at: float
    runner: str | None = None


class SessionBegan(msgspec.Struct, frozen=True, kw_only=True, tag="session", omit_defaults=True):
    """`limits`: `SamplingLimits` as JSON. `opened_at`: Unix seconds."""

    session_id: str
    member: int
    fingerprint: bytes
    opened_at: float
    task: str
    purpose: Purpose
    limits: bytes
    idle_timeout_s: float
    task_id: str = ""
    deadline_s: float | None = None
    max_tokens: int | None = None
    metadata: dict[str, str] = {}
    trace: str = ""


class SaidRecord(msgspec.Struct, frozen=True, array_like=True):
    """What chat remembers of one answer: its message's digests, and the new messages of its conversation as JSON."""

    digest: bytes
    reasoning: bytes | None
    total: int
    new: bytes


class NodeRecord(msgspec.Struct, frozen=True, array_like=True):
    """One sample. `parent`: number of the node that it extends, −1 for a root. `text`: digest and length in bytes of the
    whole text that a completions client saw. `kept`: as `engines.base.GenerationDelta` has it; `experts`:
    of the tokens from the parent's last on, but for the last of these."""

    parent: int
    prompt: bytes
    sampled: bytes
    logprobs: bytes
    spans: list[VersionSpan]
    reason: BreakReason | None
    said: SaidRecord | None = None
    text: tuple[bytes, int] | None = None
    kept: list[bytes] | None = None
    experts: ExpertChoices | None = None


class Answered(msgspec.Struct, frozen=True, kw_only=True, tag="answered", omit_defaults=True):
    """One call was answered. `digests`: of the messages of a chat call, joined; `tools`: digest of the tools it offered.
    `times`: when its generation began and ended, Unix seconds."""

    session_id: str
    call_id: str
    nodes: list[NodeRecord]
    sampling: SamplingParams
    finish_reason: FinishReason
    request_key: RequestKey = msgspec.field(name="marks")
    digests: bytes = b""
    tools: bytes = b""
    times: tuple[float, float] | None = None


class TurnRecord(msgspec.Struct, frozen=True, array_like=True):
    """`sampling`: where it was not that of the call."""

    session_id: str
    node: NodeRecord
    finish_reason: FinishReason
    sampling: SamplingParams | None = None


class TurnsAnswered(msgspec.Struct, frozen=True, kw_only=True, tag="turns"):
    """Turns of one call of the group API. `call`: its name, where it has one. `times`: as those of `Answered`."""

    call: str | None
    sampling: SamplingParams
    turns: list[TurnRecord]
    times: tuple[float, float] | None = None


class Rewarded(msgspec.Struct, frozen=True, kw_only=True, tag="reward", omit_defaults=True):
    """`call_id`: None rewards the session."""

    session_id: str
    value: float
    components: dict[str, float] = {}
    call_id: str | None = None


class SessionEnded(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """`ended_at`: Unix seconds. `left_out`: numbers of the nodes that are no part of the trajectory."""

    session_id: str
    state: SessionState
    stream_id: str | None
    segments: int
    ended_at: float
    left_out: list[int] = []


class GroupEnded(msgspec.Struct, frozen=True, kw_only=True, tag="closed"):
    """`stream_ids`: where every sibling was finished; otherwise `cause`."""

    stream_ids: dict[str, str] | None
    cause: DropCause | None


Record = GroupBegan | SessionBegan | Answered | TurnsAnswered | Rewarded | SessionEnded | GroupEnded


class PartialHead(msgspec.Struct, frozen=True, array_like=True, tag="head"):
    """Which answer is being generated: every try of it must say the same. `created`: Unix seconds."""

    call_id: str
    created: int


class PartialPart(msgspec.Struct, frozen=True, array_like=True, tag="part"):
    """A delta of sample `index` of prompt `prompt`. `number`: its place in the partial answer, from 1; one that came
    twice counts once."""

    number: int
    prompt: int
    index: int
    tokens: bytes
    logprobs: bytes
    spans: list[VersionSpan]
    finish_reason: FinishReason | None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    kept: list[bytes] | None = None
    experts: ExpertChoices | None = None


_encoder = msgspec.msgpack.Encoder()
_records = msgspec.msgpack.Decoder(Record)
_partials = msgspec.msgpack.Decoder(PartialHead | PartialPart)


def encode_record(record: Record | PartialHead | PartialPart) -> bytes:
    return _encoder.encode(record)


def encode_finished(session_ids: Sequence[str]) -> list[bytes]:
    """`GroupEnded` of a group whose sessions are all finished, cut where their stream ids go.

    Those are known only in the script that writes it, which puts each in as a text of msgpack.
    """
    gap = secrets.token_hex(8)
    whole = encode_record(GroupEnded(stream_ids=dict.fromkeys(session_ids, gap), cause=None))
    return whole.split(_encoder.encode(gap))


def decode_record(packed: bytes) -> Record:
    """Raises WireError for bytes that are no record of this schema."""
    try:
        record: Record = _records.decode(packed)
    except UNDECODABLE as error:
        raise WireError(f"a journal record of {len(packed)} bytes cannot be read ({error})") from error
    if isinstance(record, GroupBegan) and record.schema != JOURNAL_SCHEMA:
        raise WireError(f"a journal has schema {record.schema}, this process reads {JOURNAL_SCHEMA}")
    return record


def decode_partial(packed: bytes) -> PartialHead | PartialPart:
    """Raises WireError for bytes that are no part of a partial answer."""
    try:
        part: PartialHead | PartialPart = _partials.decode(packed)
    except UNDECODABLE as error:
        raise WireError(f"a part of a partial answer of {len(packed)} bytes cannot be read ({error})") from error
    return part
