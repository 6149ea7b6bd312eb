"""The barrier policy: nobody flips before everybody can, and every update settles, whatever the schedule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.policies.fleet.commit import Ask, CommitMachine, Update
from tests.support.examples import examples


def drain(machine: CommitMachine, failures: dict[str, str] | None = None) -> list[Ask]:
    """Answer every ask at once until there are none; returns them in order."""
    seen: list[Ask] = []
    while asks := machine.take_asks():
        for ask in asks:
            seen.append(ask)
            machine.answer(ask, (failures or {}).get(ask.engine_id))
    return seen


def steps(asks: list[Ask]) -> list[tuple[str, str, int]]:
    return [(ask.engine_id, ask.phase, ask.version) for ask in asks]


def test_two_engines_stage_then_flip_together() -> None:
    machine = CommitMachine()
    machine.join("a", 0)
    machine.join("b", 0)
    update = machine.announce(1)
    first, second = machine.take_asks()
    assert steps([first, second]) == [("a", "stage", 1), ("b", "stage", 1)]
    machine.answer(first)
    assert machine.take_asks() == []
    machine.answer(second)
    assert steps(machine.take_asks()) == [("a", "commit", 1), ("b", "commit", 1)]
    assert update.state == "prepared"


def test_an_update_that_no_engine_serves_says_so() -> None:
    machine = CommitMachine()
    update = machine.announce(1)
    drain(machine)
    assert update.state == "failed"
    assert update.why is not None and "no engine serves it" in update.why
    machine.join("a", 0)
    drain(machine)
    assert (update.state, update.why) == ("committed", None)
    machine.join("b", 0)
    broken = machine.announce(2)
    drain(machine, {"a": "bad hash", "b": "bad hash"})
    assert (broken.state, broken.why) == ("failed", "bad hash")


def test_a_withdrawn_version_is_offered_again_once_everybody_is_back() -> None:
    machine = CommitMachine()
    machine.join("a", 0)
    machine.announce(1)
    drain(machine)
    machine.rollback()
    with pytest.raises(ValueError, match="wait for it, or cancel it"):
        machine.release(1)
    drain(machine)
    assert machine.members == {"a": 0}
    machine.release(1)
    drain(machine)
    assert machine.members == {"a": 1}


def test_an_engine_that_fails_holds_up_nobody_and_says_why() -> None:
    machine = CommitMachine()
    machine.join("a", 0)
    machine.join("b", 0)
    update = machine.announce(1)
    drain(machine, {"b": "bad hash"})
    assert update.state == "committed"
    assert (update.progress["b"].state, update.progress["b"].why) == ("failed", "bad hash")
    assert machine.members == {"a": 1, "b": 0}


def test_a_failed_engine_is_tried_again_at_its_heartbeats_but_not_for_ever() -> None:
    machine = CommitMachine(attempts=3)
    machine.join("a", 0)
    machine.announce(1)
    tries = 0
    for _ in range(6):
        tries += len(drain(machine, {"a": "no route"}))
        machine.join("a", 0)
    assert tries == 3
    machine.offer_again()
    drain(machine)
    assert machine.members == {"a": 1}


def test_a_newer_version_supersedes_one_that_is_still_staging() -> None:
    machine = CommitMachine()
    machine.join("a", 0)
    first = machine.announce(1)
    (late,) = machine.take_asks()
    second = machine.announce(2)
    assert first.state == "superseded"
    assert machine.answer(late) is False
    assert steps(drain(machine)) == [("a", "stage", 2), ("a", "commit", 2)]
    assert second.state == "committed"


def test_flips_that_were_decided_are_finished_before_a_newer_version() -> None:
    machine = CommitMachine()
    machine.join("a", 0)
    machine.join("b", 0)
    first = machine.announce(1)
    for ask in machine.take_asks():
        machine.answer(ask)
    commits = machine.take_asks()
    machine.answer(commits[0])
    second, third = machine.announce(2), machine.announce(3)
    assert machine.take_asks() == []
    assert (first.state, second.state, third.state) == ("prepared", "superseded", "staging")
    machine.answer(commits[1])
    drain(machine)
    assert (first.state, third.state, machine.members) == ("committed", "committed", {"a": 3, "b": 3})


def test_a_lapsed_lease_ends_the_wait() -> None:
    machine = CommitMachine()
    machine.join("a", 0)
    machine.join("gone", 0)
    update = machine.announce(1)
    asks = machine.take_asks()
    machine.answer(asks[0])
    machine.leave("gone", "lease lapsed")
    assert steps(drain(machine)) == [("a", "commit", 1)]
    assert update.state == "committed"
    assert update.progress["gone"].why == "lease lapsed"


def test_a_late_joiner_catches_up_by_itself() -> None:
    machine = CommitMachine()
    machine.join("a", 0)
    update = machine.announce(1)
    drain(machine)
    machine.join("late", 0)
    assert steps(drain(machine)) == [("late", "stage", 1), ("late", "commit", 1)]
    assert update.state == "committed"


def test_without_engines_an_update_fails_at_once_and_commits_when_one_comes() -> None:
    machine = CommitMachine()
    update = machine.announce(4)
    assert (update.state, update.settled) == ("failed", True)
    machine.join("a", 0)
    drain(machine)
    assert update.state == "committed"


def test_an_engine_that_serves_the_version_already_is_asked_nothing() -> None:
    machine = CommitMachine()
    machine.join("a", 7)
    update = machine.announce(7)
    assert machine.take_asks() == []
    assert update.state == "committed"


def test_one_stale_heartbeat_is_a_race_and_two_are_a_restart() -> None:
    machine = CommitMachine()
    machine.join("a", 0)
    machine.announce(1)
    drain(machine)
    machine.join("a", 0)
    assert machine.take_asks() == []
    machine.join("a", 1)
    machine.join("a", 0)
    assert machine.take_asks() == []
    machine.join("a", 0)
    assert steps(drain(machine)) == [("a", "stage", 1), ("a", "commit", 1)]


def test_a_lost_answer_to_a_commit_is_made_good_by_the_heartbeat() -> None:
    machine = CommitMachine()
    machine.join("a", 0)
    update = machine.announce(1)
    machine.answer(machine.take_asks()[0])
    machine.answer(machine.take_asks()[0], "time-out")
    assert update.state == "failed"
    machine.join("a", 1)
    assert (update.state, machine.take_asks()) == ("committed", [])


def test_a_restarted_engine_starts_over_and_the_answer_of_its_old_self_is_ignored() -> None:
    machine = CommitMachine()
    machine.join("a", 0)
    machine.announce(1)
    (old,) = machine.take_asks()
    machine.join("a", 0, restarted=True)
    (new,) = machine.take_asks()
    assert machine.answer(old, "connection reset") is False
    assert machine.answer(new) is True
    assert steps(drain(machine)) == [("a", "commit", 1)]


def test_an_engine_that_left_the_barrier_and_came_back_does_not_hold_it_up() -> None:
    machine = CommitMachine()
    machine.join("a", 0)
    machine.join("b", 0)
    update = machine.announce(1)
    for ask in machine.take_asks():
        machine.answer(ask)
    commit_a, _ = machine.take_asks()
    machine.leave("b", "lease lapsed")
    machine.join("b", 0)
    machine.answer(commit_a)
    assert update.state == "committed"


def test_versions_only_grow() -> None:
    machine = CommitMachine()
    machine.announce(3)
    with pytest.raises(ValueError, match="3 is not newer than 3"):
        machine.announce(3)


class World:
    """Engines as they are, and asks on their way: what the machine cannot see."""

    def __init__(self) -> None:
        self.machine = CommitMachine(attempts=2)
        self.live: dict[str, int] = {}
        self.staged: dict[str, int] = {}
        self.asks: list[Ask] = []
        self.updates: list[Update] = []
        self.first_commits: set[int] = set()

    def pump(self) -> None:
        for ask in self.machine.take_asks():
            assert ask.engine_id in self.live, "a dead engine was asked"
            if ask.phase == "commit" and ask.version not in self.first_commits:
                self.first_commits.add(ask.version)
                update = next(update for update in self.updates if update.version == ask.version)
                waiting = [
                    name
                    for name in self.live
                    if update.progress[name].state not in ("prepared", "failed", "committing")
                ]
                assert not waiting, f"{ask} although {waiting} are not prepared"
            self.asks.append(ask)
        current = [(ask.engine_id, ask.serial) for ask in self.asks]
        assert len(current) == len(set(current))

    def carry_out(self, index: int, failure: str | None) -> None:
        ask = self.asks.pop(index)
        alive = ask.engine_id in self.live
        if failure is None and alive and ask.phase == "stage":
            if ask.version <= self.live[ask.engine_id]:
                failure = "not newer"
            else:
                self.staged[ask.engine_id] = ask.version
        elif failure is None and alive:
            if self.staged.get(ask.engine_id) != ask.version:
                failure = "nothing staged"
            else:
                self.live[ask.engine_id] = self.staged.pop(ask.engine_id)
        self.machine.answer(ask, failure if alive else "connection refused")


MOVES = st.lists(
    st.tuples(
        st.sampled_from(
            ["announce", "join", "beat", "restart", "leave", "answer", "answer", "answer", "fail", "again"]
        ),
        st.integers(0, 10**6),
    ),
    max_size=60,
)


@examples(400)
@given(moves=MOVES)
def test_under_any_schedule_nobody_flips_before_all_can_and_everything_settles(moves: list[tuple[str, int]]) -> None:
    world = World()
    machine = world.machine
    joined = 0
    for move, pick in moves:
        names = sorted(world.live)
        name = names[pick % len(names)] if names else None
        if move == "announce":
            world.updates.append(machine.announce(len(world.updates) + 1))
        elif move == "join" and len(names) < 4:
            joined += 1
            world.live[f"e{joined}"] = 0
            machine.join(f"e{joined}", 0)
        elif move == "beat" and name:
            machine.join(name, world.live[name])
        elif move == "restart" and name:
            world.live[name] = 0
            world.staged.pop(name, None)
            machine.join(name, 0, restarted=True)
        elif move == "leave" and name:
            del world.live[name]
            world.staged.pop(name, None)
            machine.leave(name, "gone")
        elif move in ("answer", "fail") and world.asks:
            world.carry_out(pick % len(world.asks), "broken" if move == "fail" else None)
        elif move == "again":
            machine.offer_again()
        world.pump()
    while world.asks:
        world.carry_out(0, None)
        world.pump()
    assert all(update.settled for update in world.updates)
    for _ in range(4):
        for name, version in world.live.items():
            machine.join(name, version)
        machine.offer_again()
        world.pump()
        while world.asks:
            world.carry_out(0, None)
            world.pump()
    if world.updates:
        assert set(world.live.values()) <= {len(world.updates)}, "a live engine was left behind"
        assert world.updates[-1].state == ("committed" if world.live else world.updates[-1].state)
