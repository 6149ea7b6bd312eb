"""Rolling, quorum, held, cancelled and rolled back updates, step by step."""

from __future__ import annotations

import pytest

from services.policies.fleet.commit import Ask, CommitMachine
from services.policies.fleet.policy import FleetPolicy


def fleet(policy: FleetPolicy, *names: str, version: int = 0) -> CommitMachine:
    machine = CommitMachine(policy=policy)
    for name in names:
        machine.join(name, version)
    return machine


def answer(machine: CommitMachine, asks: list[Ask], **failures: str) -> list[Ask]:
    """Answer them all; what is asked next."""
    for ask in asks:
        machine.answer(ask, failures.get(ask.engine_id))
    return machine.take_asks()


def asked(asks: list[Ask]) -> list[tuple[str, str, int]]:
    return [(ask.engine_id, ask.phase, ask.version) for ask in asks]


def finish(machine: CommitMachine, **failures: str) -> None:
    asks = machine.take_asks()
    while asks:
        asks = answer(machine, asks, **failures)


def test_a_roll_flips_one_after_the_other() -> None:
    machine = fleet(FleetPolicy("rolling"), "a", "b", "c")
    update = machine.announce(1)
    flips = answer(machine, machine.take_asks())
    order = []
    while flips:
        assert len(flips) == 1
        order += asked(flips)
        flips = answer(machine, flips)
    assert order == [("a", "commit", 1), ("b", "commit", 1), ("c", "commit", 1)]
    assert update.state == "committed"


def test_a_failure_stops_the_roll_and_an_operator_lets_it_go_on() -> None:
    machine = fleet(FleetPolicy("rolling"), "a", "b", "c")
    update = machine.announce(1)
    flips = answer(machine, machine.take_asks())
    flips = answer(machine, flips)
    assert asked(flips) == [("b", "commit", 1)]
    assert answer(machine, flips, b="out of memory") == []
    assert (update.state, update.why) == ("failed", "the roll stopped at b: out of memory")
    assert machine.members == {"a": 1, "b": 0, "c": 0}
    machine.release(1)
    finish(machine)
    assert (update.state, update.why, set(machine.members.values())) == ("committed", None, {1})


def test_an_engine_that_dies_while_it_flips_stops_the_roll() -> None:
    machine = fleet(FleetPolicy("rolling"), "a", "b")
    update = machine.announce(1)
    assert len(answer(machine, machine.take_asks())) == 1
    machine.leave("a", "no heartbeat")
    assert machine.take_asks() == []
    assert (update.state, update.why) == ("failed", "the roll stopped at a: no heartbeat")
    assert machine.members == {"b": 0}


def test_a_quorum_flips_and_the_others_follow() -> None:
    machine = fleet(FleetPolicy("quorum", quorum=0.5), "a", "b", "c", "d")
    update = machine.announce(1)
    stages = machine.take_asks()
    assert answer(machine, stages[:1]) == []
    flips = answer(machine, stages[1:2])
    assert asked(flips) == [("a", "commit", 1), ("b", "commit", 1)]
    answer(machine, flips)
    assert update.state == "committed"
    assert asked(answer(machine, stages[2:3])) == [("c", "commit", 1)]


def test_without_the_quorum_nobody_flips() -> None:
    machine = fleet(FleetPolicy("quorum", quorum=1.0), "a", "b")
    update = machine.announce(1)
    assert answer(machine, machine.take_asks(), b="bad hash") == []
    assert (update.state, update.why) == ("failed", "the quorum is missed: 1 of 2 engines, 2 needed")
    machine.join("b", 0)
    finish(machine)
    assert (update.state, machine.members) == ("committed", {"a": 1, "b": 1})


@pytest.mark.parametrize(
    ("share", "live", "needed"), [(0.5, 4, 2), (0.5, 5, 3), (1 / 3, 3, 1), (0.1, 2, 1), (1.0, 7, 7)]
)
def test_the_quorum_of_a_fleet(share: float, live: int, needed: int) -> None:
    assert FleetPolicy("quorum", quorum=share).needed(live) == needed


@pytest.mark.parametrize("name", ["barrier", "rolling", "quorum"])
def test_a_held_update_waits_for_the_operator(name: str) -> None:
    machine = fleet(FleetPolicy(name), "a", "b")  # type: ignore[arg-type]
    finish(machine)
    update = machine.announce(1, hold=True)
    assert answer(machine, machine.take_asks()) == []
    assert (update.state, machine.members, machine.goal) == ("held", {"a": 0, "b": 0}, None)
    machine.release(1)
    finish(machine)
    assert (update.state, machine.members, machine.goal) == ("committed", {"a": 1, "b": 1}, 1)


def test_a_cancelled_version_is_not_offered_again_unless_asked() -> None:
    machine = fleet(FleetPolicy(), "a")
    machine.announce(1)
    finish(machine)
    held = machine.announce(2, hold=True)
    finish(machine)
    machine.cancel(2)
    machine.join("late", 0)
    finish(machine)
    assert (held.state, machine.members, set(machine.withdrawn)) == ("cancelled", {"a": 1, "late": 1}, {2})
    again = machine.release(2)
    finish(machine)
    assert (again.state, machine.members, set(machine.withdrawn)) == ("committed", {"a": 2, "late": 2}, set())


def test_cancelling_a_stopped_roll_is_a_rollback() -> None:
    machine = fleet(FleetPolicy("rolling"), "a", "b", version=4)
    update = machine.announce(5)
    flips = answer(machine, machine.take_asks())
    answer(machine, answer(machine, flips), b="broken")
    with pytest.raises(ValueError, match="only be rolled back"):
        machine.cancel(5)
    back = machine.rollback()
    assert asked(machine.take_asks()) == [("a", "rollback", 4)]
    assert (back.version, update.state) == (4, "rolled_back")


def test_decided_flips_cannot_be_cancelled() -> None:
    machine = fleet(FleetPolicy(), "a")
    machine.announce(1)
    flips = answer(machine, machine.take_asks())
    with pytest.raises(ValueError, match="under way"):
        machine.cancel(1)
    answer(machine, flips)
    with pytest.raises(ValueError, match="only be rolled back"):
        machine.cancel(1)


def test_one_step_back_is_kept_and_a_newer_version_follows() -> None:
    machine = fleet(FleetPolicy(), "a")
    for version in (1, 2):
        machine.announce(version)
        finish(machine)
    back = machine.rollback()
    finish(machine)
    assert (back.version, back.state, machine.members) == (1, "committed", {"a": 1})
    with pytest.raises(ValueError, match="one step is kept"):
        machine.rollback()
    with pytest.raises(ValueError, match="not newer than 2"):
        machine.announce(2)
    machine.announce(3)
    finish(machine)
    assert machine.members == {"a": 3}


def test_a_heartbeat_from_before_the_rollback_changes_nothing() -> None:
    machine = fleet(FleetPolicy(), "a")
    for version in (1, 2):
        machine.announce(version)
        finish(machine)
    machine.rollback()
    finish(machine)
    machine.join("a", 2)
    assert machine.take_asks() == []
    machine.join("a", 2)
    assert asked(machine.take_asks()) == [("a", "rollback", 1)]


def test_an_engine_that_cannot_go_back_says_why() -> None:
    machine = fleet(FleetPolicy(), "a", "b")
    for version in (1, 2):
        machine.announce(version)
        finish(machine)
    back = machine.rollback()
    finish(machine, b="version 1 is gone")
    assert (back.progress["b"].state, back.progress["b"].why) == ("failed", "version 1 is gone")
    assert machine.members == {"a": 1, "b": 2}


def test_nothing_to_roll_back_to_is_said() -> None:
    machine = fleet(FleetPolicy(), "a")
    with pytest.raises(ValueError, match="no version was announced"):
        machine.rollback()
    with pytest.raises(ValueError, match="older than one that is served"):
        machine.rollback(0)
    machine.join("b", 1)
    machine.announce(1)
    finish(machine, a="no")
    with pytest.raises(ValueError, match="say which one"):
        machine.rollback()
    assert machine.rollback(0).version == 0


def test_a_machine_that_begins_in_the_middle_can_be_told_where_to_go_back_to() -> None:
    """The bus was killed while it rolled the fleet back: one engine is there, the other is not."""
    machine = CommitMachine()
    machine.join("a", 4)
    machine.join("b", 5)
    back = machine.rollback(4)
    assert asked(machine.take_asks()) == [("b", "rollback", 4)]
    assert (back.version, back.withdraws, list(machine.withdrawn)) == (4, 5, [5])
    with pytest.raises(ValueError, match="not newer than 5"):
        machine.announce(5)


def test_a_policy_that_no_fleet_can_follow_is_refused() -> None:
    with pytest.raises(ValueError, match="no fleet policy 'all'; known: barrier"):
        FleetPolicy("all")  # type: ignore[arg-type]
    for share in (0.0, -0.5, 1.1, float("nan")):
        with pytest.raises(ValueError, match="a quorum is a share above 0 and up to 1"):
            FleetPolicy("quorum", quorum=share)
    with pytest.raises(ValueError, match="at least one engine at once, got 0"):
        FleetPolicy("rolling", at_once=0)


def test_a_roll_decides_for_no_engine_together_with_others() -> None:
    assert not FleetPolicy("rolling").decides(["prepared", "prepared"])
    assert FleetPolicy("barrier").decides(["prepared", "prepared"])
    assert not FleetPolicy("barrier").decides(["committed", "failed"])


@pytest.mark.parametrize("policy", [FleetPolicy(), FleetPolicy("quorum", quorum=1.0), FleetPolicy("rolling")])
def test_a_final_version_that_failed_is_committed_by_nobody_who_comes_later(policy: FleetPolicy) -> None:
    machine = fleet(policy, "a", "b")
    machine.announce(1)
    finish(machine)
    failed = machine.announce(2, final=True)
    finish(machine, a="no file root", b="no file root")
    assert failed.state == "failed"
    for _ in range(3):
        for name in ("a", "b"):
            machine.join(name, 1)
            finish(machine)
    machine.join("late", 0)
    finish(machine)
    assert (failed.state, machine.goal) == ("failed", 1)
    assert machine.members == {"a": 1, "b": 1, "late": 1}, "who comes later is brought to where the fleet is"


def test_a_final_version_without_any_engine_stays_failed() -> None:
    machine = fleet(FleetPolicy())
    failed = machine.announce(1, final=True)
    assert (failed.state, machine.goal) == ("failed", None)
    machine.join("late", 0)
    finish(machine)
    assert (failed.state, machine.members) == ("failed", {"late": 0})


def test_a_final_version_that_failed_goes_live_when_it_is_asked_for_again() -> None:
    machine = fleet(FleetPolicy(), "a")
    machine.announce(1, final=True)
    finish(machine, a="no file root")
    again = machine.release(1)
    finish(machine)
    assert (again.state, again.final, machine.members) == ("committed", True, {"a": 1})


def test_a_final_roll_that_stopped_half_way_asks_nobody_until_the_operator_decides() -> None:
    machine = fleet(FleetPolicy("rolling"), "a", "b")
    update = machine.announce(1, final=True)
    flips = answer(machine, machine.take_asks())
    assert asked(answer(machine, flips)) == [("b", "commit", 1)]
    machine.leave("b", "gone")
    for name, version in (("a", 1), ("b", 0), ("late", 0)):
        machine.join(name, version)
        assert machine.take_asks() == []
    assert (update.state, machine.members) == ("failed", {"a": 1, "b": 0, "late": 0})
    machine.release(1)
    finish(machine)
    assert (update.state, set(machine.members.values())) == ("committed", {1})


def test_a_newer_version_follows_one_that_failed_for_good() -> None:
    machine = fleet(FleetPolicy(), "a")
    machine.announce(1, final=True)
    finish(machine, a="no")
    machine.announce(2)
    finish(machine)
    assert machine.members == {"a": 2}
    with pytest.raises(ValueError, match="past"):
        machine.release(1)
