"""Trajectories: what a rollout server writes to the stream and the trainer trains on.

    trajectory ── segment ── token_ids  t0 t1 t2 t3 t4 t5 t6 t7
                             loss_mask   0  0  0  1  1  0  1  1     1 = sampled by the policy
                             logprobs    0  0  0  l  l  0  l  l     behaviour logprobs, 0 where not sampled
                             version_spans        (3,2,v4) (6,2,v5)  position, length, policy version, …

A session whose calls branched has a segment for each way through its tree of prefixes. What two ways share was sampled once
and is trained once: in one of them its mask is 1, in the others it is context.

Invariants (`check_trajectory` holds them): the arrays of a segment have one length; every position whose mask is 1 lies in
exactly one span and no other position lies in any; spans are in order and name samplings that there are.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Literal

import msgspec
import numpy as np

from services.wire.errors import UNDECODABLE, WireError
from services.wire.packed import unpack_logprobs
from services.wire.sampling import KvPolicy, SamplingParams

TRAJECTORY_SCHEMA = 5

BreakReason = Literal["template", "compaction", "retokenization", "tools_changed", "truncated", "branch"]
"""Why a context does not extend what was captured before it.

`template`: the chat template cannot be extended here. `compaction`: the client rewrote the history. `retokenization`:
the same text in other tokens. `tools_changed`: other tools than those rendered. `truncated`: the client left the oldest
messages out. `branch`: a conversation of its own, or another way on from one that was captured.
"""


class VersionSpan(msgspec.Struct, array_like=True, frozen=True):
    """Sampled tokens `start … start + length − 1` (positions in the segment) were sampled by policy `version`.

    `sampling`: by which of the trajectory's `samplings` (its index); always 0 in what an engine answers.

    `kv`: the keys and values before these tokens, when they were sampled. With `recompute`, `version` itself computed
    all of them. Else they stayed as they were for the span before; for an answer's first span, all are of its version.
    (Those of a token are computed when the next one is sampled, by the version that generates it.) An engine under
    `keep` or `salt` stamps `recompute` where it had taken a request's memory back for a while, and where it carries on
    what another try began.
    """

    start: int
    length: int
    version: int
    sampling: int = 0
    kv: KvPolicy = "keep"

    def over(self, start: int, length: int) -> VersionSpan:
        """The same for other positions."""
        return VersionSpan(start, length, self.version, self.sampling, self.kv)

    def goes_on_as(self, later: VersionSpan) -> bool:
        """`later` begins where this ends and says nothing else."""
        mine, theirs = (self.version, self.sampling, self.kv), (later.version, later.sampling, later.kv)
        return mine == theirs and self.start + self.length == later.start


class RewardSpan(msgspec.Struct, array_like=True, frozen=True):
    """A reward for one call: its sampled tokens are `start … start + length − 1` of segment number `segment`."""

    segment: int
    start: int
    length: int
    reward: float
    components: dict[str, float] = {}


class CallTime(msgspec.Struct, array_like=True, frozen=True):
    """When a call was answered, Unix seconds: its sampled tokens begin at `start` of segment number `segment`."""

    segment: int
    start: int
    began_at: float
    ended_at: float


class ExpertChoices(msgspec.Struct, frozen=True, array_like=True):
    """Which experts each of `layers` layers chose, `top` each, for some tokens in a row, from number `begin` on: `[tokens,
    layers, top]`, numbers of `itemsize` bytes, little-endian (`services.wire.packed`)."""

    layers: int
    top: int
    itemsize: int
    packed: bytes
    begin: int = 0

    @property
    def token_bytes(self) -> int:
        return self.layers * self.top * self.itemsize

    @property
    def end(self) -> int:
        """The number of the token after the last."""
        return self.begin + len(self.packed) // self.token_bytes

    def part(self, begin: int, end: int) -> ExpertChoices:
        """Of tokens `begin … end − 1`, as far as they are among these."""
        first, after = (max(0, each - self.begin) * self.token_bytes for each in (begin, end))
        return ExpertChoices(self.layers, self.top, self.itemsize, self.packed[first:after], max(begin, self.begin))

    def then(self, later: ExpertChoices | None) -> ExpertChoices | None:
        """And those of later tokens, computed since; of tokens that were computed again, as they were first.

        None where tokens between are missing.
        """
        if later is None:
            return self
        if later.begin > self.end or later.token_bytes != self.token_bytes:
            return None
        more = later.part(self.end, later.end).packed
        return ExpertChoices(self.layers, self.top, self.itemsize, self.packed + more, self.begin)


class SegmentChoices(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an engine chose beside the tokens of a segment, for the trainer to compute with the same.

    Arrays are packed, little-endian. `kept_counts`: uint32, for each sampled token (where the mask is 1) how many tokens
    `top_k`, `top_p` and `min_p` left to sample from; 0 where none of them cut, or it is not known. `kept_ids`: uint32,
    their ids, those of one sampled token after the other. `experts`: for each token of the segment; those of one are the
    largest number that there is where they are not known. Empty, and None, where nothing is told of the segment.
    """

    kept_counts: bytes = b""
    kept_ids: bytes = b""
    experts: ExpertChoices | None = None


class Segment(msgspec.Struct, frozen=True, omit_defaults=True):
    """One unbroken token prefix. Arrays are packed as `services.wire.packed` says."""

    token_ids: bytes
    loss_mask: bytes
    logprobs: bytes
    version_spans: list[VersionSpan]
    break_reason: BreakReason | None = None
    """Why this segment did not extend the one before it; None for the first."""
    choices: SegmentChoices | None = None
    """Travel beside the trajectory (`services.wire.choices`), never in its stream entry."""


class Trajectory(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The segments of one session with its reward: one entry of the stream."""

    schema: int = msgspec.field(default_factory=lambda: TRAJECTORY_SCHEMA)
    """A factory, so that it is written although it is the default."""
    run_id: str
    trajectory_id: str
    group_id: str
    group_ordinal: int
    """The group's place in the run's order of opening, from 0; environments choose their problem by it."""
    group_size: int
    member: int
    """Which sibling of the group this is, 0 … group_size − 1."""
    task: str
    segments: list[Segment]
    reward: float
    """The session's reward plus those of its calls."""
    reward_components: dict[str, float] = msgspec.field(default_factory=dict)
    reward_spans: list[RewardSpan] = msgspec.field(default_factory=list)
    """Where an environment rewarded single calls."""
    call_times: list[CallTime] = msgspec.field(default_factory=list)
    """To be looked at alone, and so not checked. Calls whose time is not known are left out; one alone is not told."""
    samplings: list[SamplingParams]
    """How tokens were sampled: spans name one of these by its index."""
    task_id: str = ""
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    tokenizer: str = ""
    """Digest of the vocabulary that its ids are of (`services.wire.trajectory`); empty where its writer has none."""
    server_id: str
    opened_at: float
    """Unix seconds."""
    finished_at: float
    finish_reason: str = "stop"
    unrendered_tools: bool = False
    """A call offered tools that the chat template leaves out (`rollout.unrendered_tools = "warn"`)."""
    trace: str = ""
    """`traceparent` of the call that opened its session, where that is recorded (`services.observability.tracing`)."""

    def sampled_tokens(self) -> int:
        """How many tokens of all segments were sampled by the policy."""
        return sum(span.length for segment in self.segments for span in segment.version_spans)


class NotFiniteError(WireError):
    """A logprob, a reward or a time of a trajectory is not a number, or infinite."""

    code = "not_finite"


class ContradictionError(WireError):
    """The parts of a trajectory contradict each other."""

    code = "contradiction"


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Trajectory)


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """Msgpack bytes of a trajectory."""
    return _encoder.encode(trajectory)


def decode_trajectory(payload: bytes) -> Trajectory:
    """Decode and check a stream entry. Raises WireError, naming what is wrong, for bytes no trainer should see.

    It is a NotFiniteError or a ContradictionError where the bytes could be read.
    """
    trajectory = parse_trajectory(payload)
    check_trajectory(trajectory)
    return trajectory


def parse_trajectory(payload: bytes) -> Trajectory:
    """Decode a stream entry that the caller checks. Raises WireError for bytes that cannot be read."""
    try:
        return _decoder.decode(payload)
    except UNDECODABLE as error:
        raise WireError(f"a stream entry of {len(payload)} bytes is no trajectory ({error})") from error


def check_trajectory(trajectory: Trajectory) -> None:
    """Raise WireError unless the invariants in the module's docstring hold."""
    if trajectory.schema != TRAJECTORY_SCHEMA:
        what = f"has schema {trajectory.schema}, this process reads {TRAJECTORY_SCHEMA}"
        raise WireError(f"trajectory {trajectory.trajectory_id} {what}")
    _check_numbers(trajectory)
    for index, segment in enumerate(trajectory.segments):
        try:
            _check_segment(segment, len(trajectory.samplings))
        except WireError as error:
            raise type(error)(f"trajectory {trajectory.trajectory_id}, segment {index}: {error.what}") from error
    lengths = [len(segment.loss_mask) for segment in trajectory.segments]
    for number, span in enumerate(trajectory.reward_spans):
        length = lengths[span.segment] if 0 <= span.segment < len(lengths) else 0
        if span.start < 0 or span.length <= 0 or span.start + span.length > length:
            place = f"{span.length} tokens from {span.start} of segment {span.segment}"
            what = f"the reward of call {number} is for {place}, where there are {length}"
            raise ContradictionError(f"trajectory {trajectory.trajectory_id}: {what}")


def _check_numbers(trajectory: Trajectory) -> None:
    own = (trajectory.reward, trajectory.opened_at, trajectory.finished_at)
    components, calls = trajectory.reward_components, [span.reward for span in trajectory.reward_spans]
    if all(map(math.isfinite, own)) and all(map(math.isfinite, components.values())) and all(map(math.isfinite, calls)):
        return
    named = dict(zip(("reward", "opened_at", "finished_at"), own, strict=True))
    named |= {f"component {key!r}": value for key, value in components.items()}
    named |= {f"reward of call {number}": reward for number, reward in enumerate(calls)}
    what, number = next((what, number) for what, number in named.items() if not math.isfinite(number))
    raise NotFiniteError(f"trajectory {trajectory.trajectory_id} has the {what} {number}")


def _check_segment(segment: Segment, samplings: int) -> None:
    # Most segments are short, and an operation of numpy on so few elements takes as long as ten of Python's on bytes.
    (tokens, cut), (count, cut_too) = divmod(len(segment.token_ids), 4), divmod(len(segment.logprobs), 4)
    mask = segment.loss_mask
    if cut or cut_too:
        raise ContradictionError("an array ends in the middle of an element")
    if not tokens == len(mask) == count:
        raise ContradictionError(f"{tokens} tokens, {len(mask)} mask elements, {count} logprobs")
    logprobs = unpack_logprobs(segment.logprobs)
    # In float64 no sum of finite float32 overflows.
    if not math.isfinite(np.add.reduce(logprobs, dtype=np.float64)):
        place = int(np.isfinite(logprobs).argmin())
        raise NotFiniteError(f"the logprob of token {place} is {logprobs[place]}, not finite")
    covered = bytearray(tokens)
    previous_end = 0
    for span in segment.version_spans:
        end = span.start + span.length
        if span.start < previous_end or span.length <= 0 or end > tokens:
            raise ContradictionError(f"version span {_fields(span)} does not fit {tokens} tokens in order")
        if not 0 <= span.sampling < samplings:
            raise ContradictionError(f"version span {_fields(span)} names sampling {span.sampling} of {samplings}")
        if span.version < 0:
            raise ContradictionError(f"version span {_fields(span)} is of no version")
        covered[span.start : end] = b"\x01" * span.length
        previous_end = end
    if covered != mask:
        raise ContradictionError(f"the version spans cover {sum(covered)} tokens, the mask {sum(mask)}")


def _fields(span: VersionSpan) -> tuple[int, int, int]:
    return span.start, span.length, span.version


def vocabulary_digest(vocabulary: Mapping[str, int]) -> str:
    """Names a vocabulary: two processes with the same digest mean the same by a token id.

    32 hexadecimal digits, of all tokens with their ids (added ones included), in whatever order they are given.

    Not of the file: a tokenizer that is saved again by another version of its library is the same vocabulary.
    """
    digest = hashlib.blake2b(digest_size=16)
    for token, number in sorted(vocabulary.items(), key=lambda item: (item[1], item[0])):
        written = token.encode("utf-8", "surrogatepass")
        digest.update(b"%d %d " % (number, len(written)) + written)
    return digest.hexdigest()
