"""Groups and sessions: who may speak when, and what a late caller is told."""

from __future__ import annotations

import pytest

from rollout_server.groups import Group, GroupRegistry, new_group_id
from services.wire.errors import ConcludedError, ConflictError, NotFoundError, UsageError
from services.wire.sampling import SamplingParams


def open_group(group_id: str = "g") -> Group:
    return Group.open(group_id, 3, "sums", "train", SamplingParams(max_tokens=4), 2)


def registry_with(*groups: Group, keep_ended: int = 4096) -> GroupRegistry:
    registry = GroupRegistry(keep_ended=keep_ended, keep_ended_s=100.0)
    for group in groups:
        registry.add(group)
    return registry


def test_a_session_that_speaks_cannot_be_spoken_to_but_its_sibling_can() -> None:
    group = open_group()
    with group.reserved(["g.0"]):
        assert group.busy
        with pytest.raises(ConflictError, match=r"g\.0 is taking a turn"), group.reserved(["g.1", "g.0"]):
            pass
        with group.reserved(["g.1"]) as sessions:
            assert [session.member for session in sessions] == [1]
    assert not group.busy


def test_a_reservation_ends_however_its_block_ends() -> None:
    group = open_group()
    with pytest.raises(RuntimeError), group.reserved(["g.0", "g.1"]):
        raise RuntimeError
    assert not group.busy


def test_a_session_named_twice_or_of_another_group_reserves_nothing() -> None:
    group = open_group()
    with pytest.raises(UsageError), group.reserved(["g.0", "g.0"]):
        pass
    with pytest.raises(NotFoundError), group.reserved(["g.0", "h.1"]):
        pass
    assert not group.busy


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


def test_idle_means_unused_and_nothing_going_on() -> None:
    quiet, speaking = open_group("a"), open_group("b")
    quiet.last_used = speaking.last_used = 10.0
    registry = registry_with(quiet, speaking)
    with speaking.reserved(["b.0"]):
        assert registry.idle_since(9.0) == []
        assert registry.idle_since(11.0) == [quiet]


def test_answers_are_kept_for_a_bounded_number_and_time() -> None:
    groups = [open_group(f"g{i}") for i in range(4)]
    registry = registry_with(*groups, keep_ended=2)
    for group in groups:
        registry.finish(group, {})
    assert [registry.find_ended(f"g{i}") is not None for i in range(4)] == [False, False, True, True]
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
