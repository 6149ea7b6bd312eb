"""One session: a conversation between an agent and the policy, captured token for token.

    open ──finish──► finished      its trajectory is in the stream (`train`) or forgotten (`evaluate`)
      ├──abort─────► aborted       the agent gave it up
      ├──no call for idle_timeout_s | the deadline──► expired
      └──the run concluded | shutdown──► dropped

An answer is captured whole or not at all; it is part of the trajectory if an agent got it, or a part of it. What changes
a session is written in its group's journal first, and applied by `journal.replay`, so that any server can take it over.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import msgspec

from rollout_server.chat.conversations import Conversations
from rollout_server.engines.base import FinishReason
from rollout_server.sessions.capture import Capture, Node, PrefixIndex
from rollout_server.sessions.responses import Answers
from services.wire.errors import (
    ConflictError,
    RollmeshError,
    SessionConcludedError,
    SessionExpiredError,
)
from services.wire.rollout_api import Purpose, SamplingLimits
from services.wire.sampling import sibling_seed
from services.wire.session_api import SessionState


@dataclass(frozen=True, slots=True)
class Said:
    """A chat answer with the messages that came before it and are new: `new`, a JSON list. `total` messages in all."""

    total: int
    new: bytes


@dataclass
class CompletionMemory:
    """What a session keeps of its calls beside the captured tokens, to continue conversations and answer retries.

    Made when it is first used, where most sessions have no use for it: `conversations`, `texts`, `answers`.

    `texts`: captured nodes by the whole text that a completions client saw. `calls`: an answer's id → its nodes.
    `named`: a gateway's name of a call → the nodes of its answer. `unseen`: nodes that this server gave to nobody; what was
    given by a server that had the session before, it does not know.
    """

    said: dict[Node, Said] = field(default_factory=dict)
    calls: dict[str, list[Node]] = field(default_factory=dict)
    named: dict[str, list[Node]] = field(default_factory=dict)
    unseen: set[Node] = field(default_factory=set)

    @cached_property
    def conversations(self) -> Conversations[Node]:
        return Conversations()

    @cached_property
    def texts(self) -> PrefixIndex[Node]:
        return PrefixIndex()

    @cached_property
    def answers(self) -> Answers:
        return Answers()

    @property
    def has_answers(self) -> bool:
        """Whether any call ever asked for one."""
        return "answers" in self.__dict__

    def cancel_answers(self, why: RollmeshError) -> None:
        """Those that are being generated."""
        if self.has_answers:
            self.answers.cancel_all(why)

    def rename(self, call: str, name: str) -> None:
        """The answer to `call` is given to the call `name` from now on."""
        if call != name and call in self.named:
            self.named.setdefault(name, []).extend(self.named.pop(call))

    def sampled_anew(self, call: str | None) -> None:
        """This call is answered once more because the answer that it had cannot be given again: nobody has seen that."""
        if call is not None:
            self.unseen.update(self.named.pop(call, ()))


@dataclass(frozen=True, slots=True)
class Reward:
    value: float
    components: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Rewards:
    """The rewards of a session: its own, and those of single calls, by call id. A reward given again replaces the earlier.

    session's reward + Σ rewards of calls = the trajectory's reward; named components are added up the same way
    """

    session: Reward | None = None
    calls: dict[str, Reward] = field(default_factory=dict)

    @property
    def given(self) -> bool:
        return self.session is not None or bool(self.calls)

    @property
    def total(self) -> float:
        if self.session is not None and not self.calls:
            return self.session.value
        return sum(reward.value for reward in self._all())

    @property
    def components(self) -> dict[str, float]:
        if self.session is not None and not self.calls:
            return dict(self.session.components)
        total: dict[str, float] = {}
        for reward in self._all():
            for name, value in reward.components.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def _all(self) -> list[Reward]:
        return [*([] if self.session is None else [self.session]), *self.calls.values()]


DropCause = Literal["idle", "aborted", "run_concluded", "shutdown", "runner_gone"]


@dataclass(frozen=True)
class Terms:
    """The settings a session was opened with; siblings may share them. `sampling` wins over what calls ask for.

    `trace`: the context of the call that opened them, where it is recorded; also after another server has taken over them.
    """

    task: str
    purpose: Purpose
    sampling: SamplingLimits
    idle_timeout_s: float
    task_id: str = ""
    deadline_s: float | None = None
    max_tokens: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    trace: str = ""

    def of_sibling(self, member: int) -> Terms:
        """These for one of several: with a seed of its own, where they have one."""
        seed = sibling_seed(self.sampling.seed, member)
        if seed == self.sampling.seed:
            return self
        return replace(self, sampling=self.sampling.model_copy(update={"seed": seed}))

    @cached_property
    def packed_limits(self) -> bytes:
        """`sampling` as it is written down: once for all siblings that share them."""
        return self.sampling.model_dump_json(exclude_none=True).encode()


class SessionEnd(msgspec.Struct, frozen=True):
    """What is kept of a session that has ended. `ended_at` on the monotonic clock."""

    session_id: str
    group_id: str
    ordinal: int
    member: int
    state: SessionState
    reward: float | None
    stream_id: str | None
    answers: int
    sampled: int
    segments: int
    metadata: Mapping[str, str]
    ended_at: float
    finish_reason: str = "stop"

    def refuse(self) -> RollmeshError:
        """The error for a call in it."""
        if self.state == "expired":
            return SessionExpiredError(
                f"session {self.session_id} has expired", "open another one; heartbeats keep one alive"
            )
        return SessionConcludedError(f"session {self.session_id} was {self.state}", "open another one")


@dataclass(slots=True, eq=False)
class Session:
    """Sibling `member` (from 0) of a group. `opened` and `last_used` are on the monotonic clock.

    `fingerprint`: of the body it was opened with, so that the same call again is known for one.
    """

    session_id: str
    group_id: str
    ordinal: int
    member: int
    terms: Terms
    fingerprint: bytes = b""
    opened: float = field(default_factory=time.monotonic)
    last_used: float = field(default_factory=time.monotonic)
    capture: Capture = field(default_factory=Capture)
    rewards: Rewards = field(default_factory=Rewards)
    memory: CompletionMemory = field(default_factory=CompletionMemory)
    taking_turn: bool = False
    calls_in_flight: int = 0
    tokens_reserved: int = 0
    """Tokens that calls in flight may still generate: what they leave of the budget is for others."""
    finish_reason: FinishReason = "stop"
    unrendered_tools: bool = False
    taken_over: bool = False
    """It was another server's, or an earlier life's: what calls it may repeat is in the journal."""
    end: SessionEnd | None = None
    ending: bool = False
    """Somebody is ending it, and nothing new may begin."""

    @property
    def busy(self) -> bool:
        """Whether an answer is being generated, or the session is being ended."""
        return self.taking_turn or self.calls_in_flight > 0 or self.ending

    @property
    def state(self) -> SessionState:
        return "open" if self.end is None else self.end.state

    def check_open(self) -> None:
        """Raise SessionConcludedError or SessionExpiredError unless it takes calls."""
        if self.end is not None:
            raise self.end.refuse()
        if self.ending:
            raise SessionConcludedError(f"session {self.session_id} is being ended", "open another one")
        if self.seconds_left() <= 0.0:
            raise SessionExpiredError(f"the deadline of session {self.session_id} has passed", "open another one")

    def leave_out(self, undelivered: Collection[str]) -> None:
        """Answers that no agent got are no part of the trajectory: those to the calls `undelivered`, by a gateway's names,
        and those that this server gave to nobody. Who rewards an answer by its id has seen it."""
        memory = self.memory
        if not memory.unseen and not undelivered:
            self.capture.leave_out(())
            return
        unseen = memory.unseen.union(*(memory.named.get(call, ()) for call in undelivered))
        rewarded = (memory.calls.get(call_id, ()) for call_id in self.rewards.calls)
        self.capture.leave_out(unseen.difference(*rewarded))

    def seconds_left(self) -> float:
        """Until its deadline; infinite without one."""
        limit = self.terms.deadline_s
        return float("inf") if limit is None else self.opened + limit - time.monotonic()

    def expires_in_s(self) -> float:
        """Until it expires, if no call comes or runs."""
        idle = float("inf") if self.busy else self.last_used + self.terms.idle_timeout_s - time.monotonic()
        return max(0.0, min(idle, self.seconds_left()))

    def tokens_left(self) -> int | None:
        """Tokens that a further call may generate; None where there is no bound."""
        spent = self.capture.sampled + self.tokens_reserved
        return None if self.terms.max_tokens is None else max(0, self.terms.max_tokens - spent)

    @contextmanager
    def reserving(self, tokens: int) -> Iterator[None]:
        """A call may generate so many tokens in the block."""
        self.tokens_reserved += tokens
        try:
            yield
        finally:
            self.tokens_reserved -= tokens

    @contextmanager
    def calling(self) -> Iterator[None]:
        """A call of the agent runs during the block; several may run at once: sub-agents branch."""
        self.check_open()
        self.calls_in_flight += 1
        try:
            yield
        finally:
            self.calls_in_flight -= 1
            self.last_used = time.monotonic()

    @contextmanager
    def being_ended(self) -> Iterator[None]:
        """The session is ended in the block; where that fails it stays open. Raises ConflictError while a call runs."""
        self.check_may_end()
        self.ending = True
        try:
            yield
        finally:
            self.ending = False

    def check_may_end(self) -> None:
        if self.end is not None:
            raise self.end.refuse()
        if self.busy:
            what = "is being ended" if self.ending else "has a call in flight"
            raise ConflictError(f"session {self.session_id} {what}", "wait for its answer")

    def conclude(self, state: SessionState, stream_id: str | None = None, segments: int = 0) -> SessionEnd:
        """The end. Its trajectory, of so many segments, may be in the stream."""
        capture = self.capture
        self.end = SessionEnd(
            session_id=self.session_id,
            group_id=self.group_id,
            ordinal=self.ordinal,
            member=self.member,
            state=state,
            reward=self.rewards.total if self.rewards.given else None,
            stream_id=stream_id,
            answers=capture.answers,
            sampled=capture.trained,
            segments=segments,
            metadata=self.terms.metadata,
            ended_at=time.monotonic(),
            finish_reason=self.finish_reason,
        )
        if self.memory.has_answers:
            self.memory.cancel_answers(self.end.refuse())
        return self.end

    def forget(self) -> None:
        """Drop what was captured. For a session that has ended in a group that stays open, perhaps for long."""
        self.capture, self.memory, self.rewards = Capture(), CompletionMemory(), Rewards()

    def touch(self) -> None:
        self.last_used = time.monotonic()
