"""What the routes of rollouts answer: structs, and how they are made of what is kept. Pure; all are bounded.

NaN is null in JSON: a token that was not sampled has no logprob.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from services.dashboard.rollouts.calls import called_tools, role_of
from services.run_store.rollouts.record import KeptRollout
from services.run_store.rollouts.search import Extent, Found, Page
from services.run_store.rollouts.tokens import Break, Turn, break_before, segment_tokens, texts_of, turns_of
from services.wire.packed import Int32Array, unpack_tokens
from services.wire.trajectory import BreakReason

MOST_TOKENS = 2048
"""In one answer."""
MOST_TURNS = 400
_MOST_SEGMENTS = 200
_SHOWN_TURN = 160
"""Tokens of a turn that its beginning is made of."""
_ROUND_A_BREAK = 6
"""Tokens on each side of a break."""
_LONGEST = 4000
"""Characters of one fact that an environment or an agent wrote."""
_MOST_FACTS = 100
_CHARACTER = 8
"""Tokens that one character may take, and some."""


class RolloutPage(msgspec.Struct, frozen=True, kw_only=True):
    """`extent`: None where nothing is kept."""

    extent: Extent | None
    page: Page


class ShownTurn(msgspec.Struct, frozen=True, kw_only=True):
    """`text`: how it begins. `role`: who speaks, where the text says so; `tools`: that it calls."""

    turn: Turn
    text: str
    role: str
    tools: list[str]


class ShownBreak(msgspec.Struct, frozen=True, kw_only=True):
    """`here`, `there`: texts of some tokens round the first that differs, in the segment and in the one before; number
    `place` of each is that one. `why`: the cause in words."""

    found: Break
    why: str
    place: int
    here: list[str]
    there: list[str]


class ShownSegment(msgspec.Struct, frozen=True, kw_only=True):
    """`turns`: the first of them, `of_turns` in all."""

    tokens: int
    sampled: int
    trained: int
    turns: list[ShownTurn]
    of_turns: int
    broke: ShownBreak | None


class ShownRollout(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout, without its tokens. `version`: the policy that the step started from; times: Unix seconds."""

    id: int
    step: int
    version: int
    k: int
    trained: bool
    trajectory: str
    group: str
    ordinal: int
    group_size: int
    member: int
    task: str
    task_id: str
    reward: float
    components: dict[str, float]
    finish_reason: str
    server: str
    opened_at: float
    finished_at: float
    metadata: dict[str, str]
    samplings: list[str]
    trace: str
    segments: list[ShownSegment]
    of_segments: int
    siblings: list[Found]


class TokenWindow(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens from `start` on of a segment of `total`. Columns: see `services.run_store.rollouts.tokens.SegmentTokens`."""

    segment: int
    start: int
    total: int
    texts: list[str]
    ids: list[int]
    sampled: list[int]
    trained: list[int]
    version: list[int]
    logprob: list[float | None]
    current: list[float | None]
    ratio: list[float | None]
    advantage: list[float | None]


WHY: Mapping[BreakReason | None, str] = {
    None: "no reason was noted",
    "template": "the chat template cannot be extended here",
    "compaction": "the client rewrote the history",
    "retokenization": "the same text in other tokens",
    "tools_changed": "other tools than those that were rendered",
    "truncated": "the client left the oldest messages out",
    "branch": "a conversation of its own, or another way on from an earlier one",
}


def wanted_tokens(kept: KeptRollout) -> list[int]:
    """Tokens whose text `shown_rollout` needs."""
    segments = kept.trajectory.segments[:_MOST_SEGMENTS]
    ids = [unpack_tokens(segment.token_ids) for segment in segments]
    return distinct(np.concatenate([np.zeros(0, dtype=np.int32), *ids]))


def distinct(ids: Int32Array) -> list[int]:
    found: list[int] = np.unique(ids).tolist()
    return found


def shown_rollout(
    number: int, kept: KeptRollout, siblings: Sequence[Found], pieces: Mapping[int, bytes]
) -> ShownRollout:
    """Rollout `number`; `pieces`: what its tokens stand for."""
    one, left = kept.trajectory, MOST_TURNS
    segments = []
    for index in range(min(len(one.segments), _MOST_SEGMENTS)):
        shown = _segment(kept, index, pieces, left)
        left -= len(shown.turns)
        segments.append(shown)
    return ShownRollout(
        id=number,
        step=kept.step,
        version=kept.version,
        k=kept.k,
        trained=kept.trained,
        trajectory=_short(one.trajectory_id),
        group=_short(one.group_id),
        ordinal=one.group_ordinal,
        group_size=one.group_size,
        member=one.member,
        task=_short(one.task),
        task_id=_short(one.task_id),
        reward=one.reward,
        components={_short(name): value for name, value in [*one.reward_components.items()][:_MOST_FACTS]},
        finish_reason=_short(one.finish_reason),
        server=_short(one.server_id),
        opened_at=one.opened_at,
        finished_at=one.finished_at,
        metadata={_short(name): _short(value) for name, value in [*one.metadata.items()][:_MOST_FACTS]},
        samplings=[_short(msgspec.json.encode(each).decode()) for each in one.samplings[:_MOST_FACTS]],
        trace=_short(one.trace),
        segments=segments,
        of_segments=len(one.segments),
        siblings=[*siblings],
    )


def _segment(kept: KeptRollout, index: int, pieces: Mapping[int, bytes], most_turns: int) -> ShownSegment:
    tokens, broke = segment_tokens(kept, index), break_before(kept, index)
    turns = turns_of(kept, index, 0 if broke is None else broke.at)
    return ShownSegment(
        tokens=len(tokens.ids),
        sampled=int(tokens.sampled.sum()),
        trained=int(tokens.trained.sum()),
        turns=[_turn(turn, tokens.ids, pieces) for turn in turns[:most_turns]],
        of_turns=len(turns),
        broke=None if broke is None else _break(broke, kept, pieces),
    )


def _turn(turn: Turn, ids: Int32Array, pieces: Mapping[int, bytes]) -> ShownTurn:
    own = ids[turn.start : turn.start + turn.length]
    text = "".join(texts_of(own[:_SHOWN_TURN], pieces))
    whole = text if len(own) <= _SHOWN_TURN or not turn.sampled else "".join(texts_of(own[:MOST_TOKENS], pieces))
    # A template opens the next turn at the end of what it renders.
    role = "assistant" if turn.sampled else role_of(text)
    return ShownTurn(turn=turn, text=_short(text), role=role, tools=called_tools(whole) if turn.sampled else [])


def _break(broke: Break, kept: KeptRollout, pieces: Mapping[int, bytes]) -> ShownBreak:
    begin = max(0, broke.at - _ROUND_A_BREAK)
    here, there = (
        texts_of(unpack_tokens(kept.trajectory.segments[each].token_ids)[begin : broke.at + _ROUND_A_BREAK], pieces)
        for each in (broke.segment, broke.before)
    )
    return ShownBreak(found=broke, why=WHY[broke.reason], place=broke.at - begin, here=here, there=there)


def window_of(kept: KeptRollout, segment: int, start: int, count: int) -> tuple[Int32Array, int, int]:
    """The tokens whose texts make those of a window, and how many of them stand before it and are in it."""
    ids = unpack_tokens(kept.trajectory.segments[segment].token_ids)
    begin = max(0, start - _CHARACTER)
    end = min(len(ids), start + count)
    return ids[begin : end + _CHARACTER], start - begin, max(0, end - start)


def token_window(kept: KeptRollout, segment: int, start: int, count: int, pieces: Mapping[int, bytes]) -> TokenWindow:
    """Tokens `start … start + count − 1` of a segment, as far as there are. Raises IndexError where there is no segment."""
    columns = segment_tokens(kept, segment)
    near, before, there = window_of(kept, segment, start, count)
    own = slice(start, start + there)

    def column(values: npt.NDArray[np.float32]) -> list[float | None]:
        told: list[float | None] = values[own].astype(np.float64).tolist()
        return told

    return TokenWindow(
        segment=segment,
        start=start,
        total=len(columns.ids),
        texts=texts_of(near, pieces)[before : before + there],
        ids=columns.ids[own].tolist(),
        sampled=columns.sampled[own].tolist(),
        trained=columns.trained[own].tolist(),
        version=columns.version[own].tolist(),
        logprob=column(columns.logprob),
        current=column(columns.current),
        ratio=column(columns.ratio),
        advantage=column(columns.advantage),
    )


def _short(text: str) -> str:
    left = len(text) - _LONGEST
    return text if left <= 0 else f"{text[:_LONGEST]}… ({left} more characters)"
