"""Replaying journal records: the same functions change a live session and rebuild one from its journal.

    live      record ─► journal ─► apply            taken over      journal ─► apply, apply, apply …

Pure: the caller gives the time.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import ValidationError

from rollout_server.chat.messages import DIGEST_BYTES
from rollout_server.journal import records
from rollout_server.sessions.capture import Node
from rollout_server.sessions.group import Group
from rollout_server.sessions.responses import RequestKey
from rollout_server.sessions.session import Reward, Said, Session, Terms
from services.wire.errors import WireError
from services.wire.rollout_api import SamplingLimits
from services.wire.sampling import SamplingParams
from services.wire.trajectory import ExpertChoices, VersionSpan


@dataclass(frozen=True)
class Now:
    """The same moment on both clocks, in seconds: Unix time, and the monotonic clock of this process."""

    unix: float
    monotonic: float

    def on_monotonic(self, unix: float) -> float:
        return self.monotonic - (self.unix - unix)


@dataclass(frozen=True)
class AnswerName:
    """An answer that may be asked for again."""

    session: Session
    call_id: str
    request_key: RequestKey


@dataclass
class Replayed:
    """A group as its journal tells it. `answers`: oldest first. `ended`: None while it is open."""

    group: Group
    answers: list[AnswerName] = field(default_factory=list)
    ended: records.GroupEnded | None = None


def replay(journal: Sequence[records.Record], now: Now) -> Replayed:
    """Raises WireError for records that contradict each other."""
    if not journal or not isinstance(journal[0], records.GroupBegan):
        raise WireError("a journal does not begin with its group")
    replayed = Replayed(_group(journal[0], now))
    group = replayed.group
    for record in journal[1:]:
        match record:
            case records.SessionBegan():
                group.sessions[record.session_id] = _session(group, record, now)
            case records.Answered():
                session = _find(group, record.session_id)
                apply_answer(session, record)
                replayed.answers.append(AnswerName(session, record.call_id, record.request_key))
            case records.TurnsAnswered():
                apply_turns(group, record)
            case records.Rewarded():
                apply_reward(_find(group, record.session_id), record)
            case records.SessionEnded():
                apply_end(_find(group, record.session_id), record)
            case records.GroupEnded():
                replayed.ended = record
            case records.GroupBegan():
                raise WireError(f"the journal of group {group.group_id} begins twice")
    return replayed


def apply_answer(session: Session, record: records.Answered) -> list[Node]:
    """Capture the samples of a call and remember what it said. A session that has ended meanwhile takes nothing."""
    if session.end is not None:
        return []
    nodes = [_add_node(session, node, record.sampling, record.times) for node in record.nodes]
    memory = session.memory
    memory.calls.setdefault(record.call_id, []).extend(nodes)
    if record.request_key.call is not None:
        memory.named.setdefault(record.request_key.call, []).extend(nodes)
    session.finish_reason = record.finish_reason
    digests = [record.digests[at : at + DIGEST_BYTES] for at in range(0, len(record.digests), DIGEST_BYTES)]
    for node, written in zip(nodes, record.nodes, strict=True):
        if written.said is not None:
            said = written.said
            memory.conversations.remember([*digests, said.digest], record.tools, node, reasoning=said.reasoning)
            memory.said[node] = Said(said.total, said.new)
        if written.text is not None:
            memory.texts.add_digest(*written.text, node)
    return nodes


def apply_turns(group: Group, record: records.TurnsAnswered) -> list[tuple[Session, Node]]:
    """Capture the turns of a call, each in its session. One that has ended meanwhile takes nothing."""
    taken = []
    for turn in record.turns:
        session = _find(group, turn.session_id)
        if session.end is None:
            node = _add_node(session, turn.node, turn.sampling or record.sampling, record.times)
            session.finish_reason = turn.finish_reason
            if record.call is not None:
                session.memory.named.setdefault(record.call, []).append(node)
            taken.append((session, node))
    return taken


def apply_reward(session: Session, record: records.Rewarded) -> None:
    """Give a reward, in place of an earlier one."""
    reward = Reward(record.value, record.components)
    if record.call_id is None:
        session.rewards.session = reward
    else:
        session.rewards.calls[record.call_id] = reward


def apply_end(session: Session, record: records.SessionEnded) -> None:
    if session.end is None:
        session.capture.leave_out([session.capture.nodes[number] for number in record.left_out])
        session.conclude(record.state, record.stream_id, record.segments)
        session.forget()


def node_record(
    parent: Node | None,
    prompt: Sequence[int],
    sampled: Sequence[int],
    logprobs: Sequence[float],
    spans: Sequence[VersionSpan],
    kept: list[bytes] | None = None,
    experts: ExpertChoices | None = None,
) -> records.NodeRecord:
    """A sample to be written down: without a reason, and without what a chat call remembers of it.

    `experts`: of all tokens from the beginning of its prompt, as an engine tells them.
    """
    if experts is not None:
        before = 0 if parent is None else parent.end
        end = before + len(prompt) + len(sampled) - 1
        known = experts.begin == 0 and experts.end >= end
        experts = experts.part(max(0, before - 1), end) if known else None
    return records.NodeRecord(
        parent=-1 if parent is None else parent.number,
        prompt=array("i", prompt).tobytes(),
        sampled=array("i", sampled).tobytes(),
        logprobs=array("f", logprobs).tobytes(),
        spans=list(spans),
        reason=None,
        kept=kept,
        experts=experts,
    )


def began(session: Session, now: Now) -> records.SessionBegan:
    terms = session.terms
    return records.SessionBegan(
        session_id=session.session_id,
        member=session.member,
        fingerprint=session.fingerprint,
        opened_at=now.unix - (now.monotonic - session.opened),
        task=terms.task,
        purpose=terms.purpose,
        limits=terms.packed_limits,
        idle_timeout_s=terms.idle_timeout_s,
        task_id=terms.task_id,
        deadline_s=terms.deadline_s,
        max_tokens=terms.max_tokens,
        metadata=dict(terms.metadata),
        trace=terms.trace,
    )


def group_began(group: Group) -> records.GroupBegan:
    return records.GroupBegan(
        group_id=group.group_id,
        ordinal=group.ordinal,
        size=group.size,
        task=group.task,
        purpose=group.purpose,
        idle_timeout_s=group.idle_timeout_s,
        sampling=group.sampling,
        opened_at=group.opened_at,
        runner=group.runner,
    )


def _group(record: records.GroupBegan, now: Now) -> Group:
    return Group(
        record.group_id,
        record.ordinal,
        record.size,
        record.task,
        record.purpose,
        record.idle_timeout_s,
        record.sampling,
        opened_at=record.opened_at,
        last_used=now.monotonic,
        taken_over=True,
        runner=record.runner,
    )


def _limits(record: records.SessionBegan) -> SamplingLimits:
    try:
        return SamplingLimits.model_validate_json(record.limits)
    except ValidationError as error:
        raise WireError(f"the journal's limits of session {record.session_id} cannot be read ({error})") from error


def _session(group: Group, record: records.SessionBegan, now: Now) -> Session:
    terms = Terms(
        task=record.task,
        purpose=record.purpose,
        sampling=_limits(record),
        idle_timeout_s=record.idle_timeout_s,
        task_id=record.task_id,
        deadline_s=record.deadline_s,
        max_tokens=record.max_tokens,
        metadata=record.metadata,
        trace=record.trace,
    )
    return Session(
        record.session_id,
        group.group_id,
        group.ordinal,
        record.member,
        terms,
        record.fingerprint,
        opened=now.on_monotonic(record.opened_at),
        last_used=now.monotonic,
        taken_over=True,
    )


def _find(group: Group, session_id: str) -> Session:
    session = group.sessions.get(session_id)
    if session is None:
        raise WireError(f"the journal of group {group.group_id} names session {session_id!r}, which was never opened")
    return session


def _add_node(
    session: Session, record: records.NodeRecord, sampling: SamplingParams, times: tuple[float, float] | None
) -> Node:
    capture = session.capture
    prompt, sampled, logprobs = array("i"), array("i"), array("f")
    prompt.frombytes(record.prompt)
    sampled.frombytes(record.sampled)
    logprobs.frombytes(record.logprobs)
    parent = None if record.parent < 0 else capture.nodes[record.parent]
    node = capture.record(
        parent, prompt, sampled, logprobs, record.spans, sampling, record.reason, record.kept, record.experts
    )
    node.times = times
    return node
