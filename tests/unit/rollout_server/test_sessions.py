"""Groups and sessions: who may speak when, and what a late caller is told."""

from __future__ import annotations

import pytest

from rollout_server.sessions.group import Group, GroupRegistry, new_group_id
from rollout_server.sessions.session import Terms
from services.wire.errors import (
    ConcludedError,
    ConflictError,
    NotFoundError,
    SessionConcludedError,
    SessionExpiredError,
    UsageError,
)
from services.wire.rollout_api import SamplingLimits
from services.wire.sampling import SamplingParams


def terms(**changes: object) -> Terms:
    plain = {"task": "sums", "purpose": "train", "sampling": SamplingLimits(), "idle_timeout_s": 60.0}
    return Terms(**(plain | changes))  # type: ignore[arg-type]


def open_group(group_id: str = "g", **changes: object) -> Group:
    group = Group(group_id, 3, 2, "sums", "train", 60.0, SamplingParams(max_tokens=4))
    group.fill(terms(**changes))
    return group


def registry_with(*groups: Group, keep_ended: int = 4096) -> GroupRegistry:
    registry = GroupRegistry(keep_ended=keep_ended, keep_ended_s=100.0)
    for group in groups:
        registry.add(group)
    return registry


def test_a_session_that_speaks_cannot_be_spoken_to_but_its_sibling_can() -> None:
    group = open_group()
    with group.reserved(["g.0"]):
        assert group.taking_turns
        with pytest.raises(ConflictError, match=r"g\.0 is taking a turn"), group.reserved(["g.1", "g.0"]):
            pass
        with group.reserved(["g.1"]) as sessions:
            assert [session.member for session in sessions] == [1]
    assert not group.taking_turns


def test_a_reservation_ends_however_its_block_ends() -> None:
    group = open_group()
    with pytest.raises(RuntimeError), group.reserved(["g.0", "g.1"]):
        raise RuntimeError
    assert not group.taking_turns


def test_a_session_named_twice_or_of_another_group_reserves_nothing() -> None:
    group = open_group()
    with pytest.raises(UsageError), group.reserved(["g.0", "g.0"]):
        pass
    with pytest.raises(NotFoundError), group.reserved(["g.0", "h.1"]):
        pass
    assert not group.taking_turns


async def test_a_group_that_is_being_ended_takes_no_turn() -> None:
    group = open_group()
    async with group.closing:
        with pytest.raises(ConflictError, match="being ended"), group.reserved(["g.0"]):
            pass


def test_late_calls_learn_how_a_group_ended() -> None:
    finished, idle, concluded = open_group("a"), open_group("b"), open_group("c")
    registry = registry_with(finished, idle, concluded)
    registry.finish(finished, {"a.0": "1-0", "a.1": "2-0"})
    registry.drop(idle, "idle")
    registry.drop(concluded, "run_concluded")
    assert len(registry) == 0
    ended = registry.find_ended("a")
    assert ended is not None
    assert ended.answer("a") == {"a.0": "1-0", "a.1": "2-0"}
    for group_id, kind in {"a": ConflictError, "b": ConflictError, "c": ConcludedError, "d": NotFoundError}.items():
        with pytest.raises(kind):
            registry.find_open(group_id)
    kinds = {
        "a.0": SessionConcludedError,
        "b.1": SessionExpiredError,
        "c.0": SessionConcludedError,
        "d.0": NotFoundError,
    }
    for name, session_kind in kinds.items():
        with pytest.raises(session_kind):
            registry.find_session(name)


def test_a_sibling_joins_while_there_is_room_and_the_group_is_complete_when_all_have_ended() -> None:
    group = Group("g", 0, 2, "sums", "train", 60.0)
    first = group.next_session("one", terms(), b"")
    group.add(first)
    first.conclude("finished", "1-0")
    assert not group.complete
    second = group.next_session("two", terms(), b"")
    group.add(second)
    with pytest.raises(ConflictError, match="all its 2 sessions"):
        group.next_session("three", terms(), b"")
    assert [session.member for session in group.live] == [1]
    second.conclude("aborted")
    assert group.complete


def test_calls_may_overlap_but_nothing_begins_in_a_session_that_is_being_ended() -> None:
    (session, _) = open_group().sessions.values()
    with session.calling(), session.calling():
        assert session.calls_in_flight == 2
        with pytest.raises(ConflictError, match="in flight"), session.being_ended():
            pass
    with session.being_ended():
        with pytest.raises(SessionConcludedError), session.calling():
            pass
    with session.calling():
        pass


def test_a_session_expires_when_idle_or_at_its_deadline_and_not_while_it_is_called() -> None:
    (idle, other) = open_group(idle_timeout_s=10.0).sessions.values()
    assert 9.0 < idle.expires_in_s() <= 10.0
    idle.last_used -= 11.0
    assert idle.expires_in_s() == 0.0
    with idle.calling():
        assert idle.expires_in_s() == float("inf")
    assert idle.expires_in_s() > 9.0
    (late, _) = open_group(deadline_s=5.0).sessions.values()
    late.opened -= 6.0
    assert late.expires_in_s() == 0.0
    with pytest.raises(SessionExpiredError):
        late.check_open()
    assert other.expires_in_s() > 9.0


def test_what_calls_in_flight_may_still_sampling_is_not_to_be_had_by_others() -> None:
    (session, _) = open_group(max_tokens=10).sessions.values()
    with session.reserving(7):
        assert session.tokens_left() == 3
    assert session.tokens_left() == 10


def test_answers_are_kept_for_a_bounded_number_and_time() -> None:
    groups = [open_group(f"g{i}") for i in range(4)]
    registry = registry_with(*groups, keep_ended=2)
    for group in groups:
        registry.finish(group, {})
    assert [registry.find_ended(f"g{i}") is not None for i in range(4)] == [False, False, True, True]
    assert [registry.get_session(f"g{i}.0") is not None for i in range(4)] == [False, False, True, True]
    kept = registry.find_ended("g2")
    assert kept is not None
    registry.forget_ended(kept.ended_at + 99.0)
    assert registry.find_ended("g2") is not None
    registry.forget_ended(kept.ended_at + 101.0)
    assert registry.find_ended("g2") is None
    assert registry.find_ended("g3") is None


def test_group_ids_cannot_be_guessed() -> None:
    ids = {new_group_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(group_id) == 2 + 32 for group_id in ids)
