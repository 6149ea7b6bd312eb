"""Any schedule, any fleet policy: one question at a time, no flip before its time, and every update settles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.policies.fleet.commit import Ask, CommitMachine, Update
from services.policies.fleet.policy import FleetPolicy
from tests.support.examples import examples

POLICIES = [
    FleetPolicy("barrier"),
    FleetPolicy("rolling", at_once=1),
    FleetPolicy("rolling", at_once=2),
    FleetPolicy("quorum", quorum=0.5),
    FleetPolicy("quorum", quorum=1.0),
]


class Engine:
    """An engine as it is: what it serves, what it can go back to, what lies whole in its shadow."""

    def __init__(self) -> None:
        self.serves = 0
        self.before: int | None = None
        self.staged: int | None = None

    def obey(self, ask: Ask) -> str | None:
        """Why it cannot do what it was asked, or None once it has."""
        if ask.phase == "stage":
            if ask.version <= self.serves:
                return f"{ask.version} is not newer than {self.serves}"
            self.before, self.staged = None, ask.version
        elif ask.phase == "commit":
            if self.staged != ask.version:
                return "nothing is staged"
            self.serves, self.before, self.staged = ask.version, self.serves, None
        elif self.serves != ask.version:
            if self.before != ask.version:
                return "that version is gone"
            self.serves, self.before = ask.version, None
        return None


class World:
    """The machine, engines, and questions on their way: what the machine cannot see."""

    def __init__(self, policy: FleetPolicy) -> None:
        self.policy = policy
        self.machine = CommitMachine(attempts=2, policy=policy)
        self.engines: dict[str, Engine] = {}
        self.asks: list[tuple[Ask, Engine]] = []
        self.ghosts: list[tuple[Ask, Engine]] = []
        """Questions of a bus that was killed: engines still do them, and nobody hears the answer."""
        self.newest = 0
        self.updates: list[Update] = []
        self.overtaken: set[Ask] = set()
        self.flipping: set[int] = set()
        self.told_failed: set[int] = set()
        """Pushed versions that failed, since an operator last asked for anything."""
        self.born = 0

    def announce(self, hold: bool = False, final: bool = False) -> None:
        self.newest += 1
        self.updates.append(self.machine.announce(self.newest, hold=hold, final=final))

    def be_reborn(self, announced: bool) -> None:
        """The bus is killed, and another one begins that knows nothing; engines tell it at their heartbeats."""
        self.machine = CommitMachine(attempts=2, policy=self.policy)
        self.ghosts += self.asks
        self.asks, self.updates, self.flipping = [], [], set()
        self.told_failed.clear()
        if announced and self.newest:
            self.updates.append(self.machine.announce(self.newest))

    def join(self) -> None:
        self.born += 1
        self.engines[f"e{self.born}"] = Engine()
        self.machine.join(f"e{self.born}", 0)

    def pump(self) -> None:
        for ask in self.machine.take_asks():
            engine = self.engines[ask.engine_id]
            for open_ask, asked in self.asks:
                if asked is engine and open_ask not in self.overtaken:
                    assert open_ask.phase == ask.phase == "stage", f"{ask} while {open_ask} is open"
                    assert open_ask.version < ask.version
                    self.overtaken.add(open_ask)
            if ask.phase == "commit":
                self._judge(ask)
            assert ask.phase == "rollback" or ask.version not in self.told_failed, f"{ask}, which has failed"
            self.asks.append((ask, engine))
        # A version that was asked for again is another update, and the earlier one stays failed.
        newest = {update.version: update for update in self.updates}
        self.told_failed |= {each.version for each in newest.values() if each.final and each.state == "failed"}

    def _judge(self, ask: Ask) -> None:
        update = self.machine.current
        assert update is not None and not update.hold
        assert ask.version not in self.machine.withdrawn
        states = [update.progress[name].state for name in self.machine.members]
        if self.policy.name == "rolling" and not update.restores:
            assert states.count("committing") <= self.policy.at_once
        elif ask.version not in self.flipping and not update.restores:
            if self.policy.name == "barrier":
                assert not {"pending", "staging"} & set(states), "somebody is still on the way"
            else:
                there = sum(state in ("prepared", "committing", "committed") for state in states)
                assert there >= self.policy.quorum * len(states) - 1e-9
        self.flipping.add(ask.version)

    def haunt(self) -> None:
        ask, engine = self.ghosts.pop(0)
        engine.obey(ask)

    def carry_out(self, index: int, failure: str | None) -> None:
        ask, engine = self.asks.pop(index)
        alive = self.engines.get(ask.engine_id) is engine
        why = failure or ("superseded" if ask in self.overtaken else engine.obey(ask))
        self.machine.answer(ask, why if alive else "connection refused")

    def settle(self) -> None:
        while self.ghosts:
            self.haunt()
        self.pump()
        for _ in range(1000):
            if not self.asks:
                return
            self.carry_out(0, None)
            self.pump()
        raise AssertionError("the questions never end")

    def beat(self) -> None:
        for name, engine in list(self.engines.items()):
            self.machine.join(name, engine.serves)

    def operate(self, move: str, pick: int) -> None:
        """What operators do; the machine may refuse."""
        self.told_failed.clear()
        try:
            if move == "release":
                self.updates.append(self.machine.release(max(0, (self.machine.highest or 0) - pick % 2)))
            elif move == "cancel":
                self.machine.cancel(max(0, (self.machine.highest or 0) - pick % 2))
            else:
                self.updates.append(self.machine.rollback())
        except ValueError:
            return


MOVES = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *["announce", "announce", "hold", "join", "join", "restart", "crash", "leave", "fail", "again"],
                *["push", "push", "fail"],
                *["beat"] * 4,
                *["answer"] * 6,
                *["release", "cancel", "rollback", "reborn", "ghost"],
            ]
        ),
        st.integers(0, 10**6),
    ),
    min_size=25,
    max_size=80,
)


def play(world: World, move: str, pick: int) -> None:
    machine, names = world.machine, sorted(world.engines)
    name = names[pick % len(names)] if names else None
    if move in ("announce", "hold", "push"):
        world.announce(hold=move == "hold", final=move == "push")
    elif move == "join" and len(names) < 4:
        world.join()
    elif move == "beat" and name:
        machine.join(name, world.engines[name].serves)
    elif move == "restart" and name:
        world.engines[name] = Engine()
        machine.join(name, 0, restarted=True)
    elif move == "crash" and name:
        # Back at the same address before the lease is over: only heartbeats tell.
        world.engines[name] = Engine()
    elif move == "leave" and name:
        del world.engines[name]
        machine.leave(name, "gone")
    elif move in ("answer", "fail") and world.asks:
        world.carry_out(pick % len(world.asks), "broken" if move == "fail" else None)
    elif move == "reborn" and pick % 3 == 0:
        world.be_reborn(announced=pick % 2 == 0)
    elif move == "ghost" and world.ghosts:
        world.haunt()
    elif move == "again":
        world.told_failed.clear()
        machine.offer_again()
    elif move in ("release", "cancel", "rollback"):
        world.operate(move, pick)


@examples(300)
@given(policy=st.sampled_from(POLICIES), moves=MOVES)
def test_under_any_schedule_every_update_settles_and_everybody_arrives(
    policy: FleetPolicy, moves: list[tuple[str, int]]
) -> None:
    world = World(policy)
    for move, pick in moves:
        play(world, move, pick)
        world.pump()
        assert set(world.machine.members) <= set(world.engines)
    world.settle()
    for update in world.updates:
        assert update.settled or (update.state == "held" and update is world.machine.latest), update
    for _ in range(4):
        world.beat()
        world.settle()
    current = world.machine.current
    if current is not None:
        for name, engine in world.engines.items():
            if current.progress[name].state == "committed":
                assert engine.serves == current.version
            else:
                assert current.state == "held" or current.progress[name].why or current.why
    # Whatever went wrong before, everybody arrives at the next version that nothing goes wrong with.
    world.announce()
    for _ in range(3):
        world.settle()
        world.beat()
    assert {engine.serves for engine in world.engines.values()} <= {world.updates[-1].version}
    assert world.updates[-1].state == ("committed" if world.engines else "failed")


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: f"{policy.name}-{policy.at_once}-{policy.quorum}")
def test_a_rollback_takes_every_engine_back_and_also_those_that_come_again(policy: FleetPolicy) -> None:
    world = World(policy)
    for _ in range(3):
        world.join()
    world.announce()
    world.settle()
    world.announce()
    world.settle()
    assert {engine.serves for engine in world.engines.values()} == {2}
    away = world.engines.pop("e2")
    world.machine.leave("e2", "lease lapsed")
    back = world.machine.rollback()
    world.settle()
    assert (back.version, back.state, world.updates[1].state) == (1, "committed", "rolled_back")
    assert {engine.serves for engine in world.engines.values()} == {1}
    world.engines["e2"] = away
    world.machine.join("e2", away.serves)
    world.settle()
    assert away.serves == 1
    assert world.updates[1].progress["e2"].state == "rolled_back"
