"""Curriculum by measured success: problems that were always or never solved rest, and come back. Pure.

    pass 0    every problem is played once, in the order of the pass
    played    all siblings right ──► streak + 1     none right ──► streak − 1     some right ──► 0, and no rest is due
              the streak is `agreeing` long ──► it rests for 1, 2, 4 … `longest_rest` passes
    pass p    those that do not rest; where they are fewer than `least_share` of all, those whose rest ends first too

A group whose siblings are all right or all wrong has nothing to say to an estimator that compares siblings. The policy
changes, so a rest ends; a problem that comes back and does the same once more rests twice as long. What is left out of a
pass is decided when it begins: results that come in meanwhile count from the next on. So the order follows from the order
of draws and results alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True)
class CurriculumRules:
    """`agreeing`: times in a row that a problem must be solved always, or never. `longest_rest`: in passes.

    `least_share`: of all problems, so many are in each pass.
    """

    agreeing: int = 1
    longest_rest: int = 8
    least_share: float = 0.1


class Record(msgspec.Struct, array_like=True):
    """What is known of one problem.

    `streak`: how often in a row it was solved by all (above 0) or by none (below). `rests`: rests in a row. `until`: the
    first pass that it is played in again.
    """

    streak: int = 0
    rests: int = 0
    until: int = 0


class CurriculumState(msgspec.Struct):
    """Everything that a restart needs. `playing`: the problems of pass `passed`, of which `place` were drawn.

    `solved`: of those that it leaves out, how many were always solved. `records`: of those that were played, by number.
    """

    passed: int
    place: int
    playing: list[int]
    solved: int
    records: dict[int, Record]


@dataclass(frozen=True)
class PassPlan:
    """What a pass leaves out. `solved`, `unsolved`: why."""

    passed: int
    playing: tuple[int, ...]
    solved: int
    unsolved: int

    @property
    def share_skipped(self) -> float:
        """Of all problems."""
        skipped = self.solved + self.unsolved
        return skipped / (skipped + len(self.playing))


def plan_pass(passed: int, order: Sequence[int], records: Mapping[int, Record], rules: CurriculumRules) -> PassPlan:
    """The pass behind `passed` others. `order`: all problems, in the order of this pass; at least one."""
    nothing = Record()
    until = {number: records.get(number, nothing).until for number in order}
    resting = [number for number in order if until[number] > passed]
    short = max(1, math.ceil(rules.least_share * len(order))) - (len(order) - len(resting))
    # Sorted is stable: of equal rests those go first that come first in the pass.
    back = set(sorted(resting, key=until.__getitem__)[: max(0, short)])
    skipped = [number for number in resting if number not in back]
    left_out = set(skipped)
    solved = sum(records[number].streak > 0 for number in skipped)
    playing = tuple(number for number in order if number not in left_out)
    return PassPlan(passed, playing, solved, len(skipped) - solved)


def judged(record: Record, solved: int, of: int, passed: int, rules: CurriculumRules) -> Record:
    """The record after the problem was played in pass `passed`, and `solved` of `of` siblings were right."""
    if 0 < solved < of:
        return Record(0, 0, passed)
    sign = 1 if solved else -1
    same = record.streak * sign > 0
    streak, rests = (record.streak + sign, record.rests) if same else (sign, 0)
    if abs(streak) < rules.agreeing:
        return Record(streak, rests, passed)
    rest = min(rules.longest_rest, 1 << min(rests, 30))
    return Record(streak, rests + 1, passed + 1 + rest)


class Curriculum:
    """Draws the problems 0 … `count` − 1 of one task. `order`: all of them, in the order of a pass by its number.

    Raises ValueError for a `state` of another number of problems.
    """

    def __init__(
        self,
        count: int,
        rules: CurriculumRules,
        order: Callable[[int], Sequence[int]],
        state: CurriculumState | None = None,
    ) -> None:
        if count < 1:
            raise ValueError("there is no problem to play")
        self._rules, self._order = rules, order
        self._records: dict[int, Record] = {} if state is None else dict(state.records)
        self._place = 0 if state is None else state.place
        if state is None:
            self.plan = plan_pass(0, order(0), self._records, rules)
            return
        known = {*state.playing, *state.records}
        if not state.playing or min(known) < 0 or max(known) >= count:
            raise ValueError(f"the state is not of {count} problems")
        unsolved = count - len(state.playing) - state.solved
        self.plan = PassPlan(state.passed, tuple(state.playing), state.solved, unsolved)

    def draw(self) -> int:
        """The next problem; where the pass is over, the first of the next one, whose `plan` is in force then."""
        if self._place >= len(self.plan.playing):
            passed = self.plan.passed + 1
            self.plan, self._place = plan_pass(passed, self._order(passed), self._records, self._rules), 0
        self._place += 1
        return self.plan.playing[self._place - 1]

    def played(self, number: int, solved: int, of: int) -> None:
        """A group of the problem came to its end."""
        before = self._records.get(number, Record())
        self._records[number] = judged(before, solved, of, self.plan.passed, self._rules)

    def state(self) -> CurriculumState:
        """A copy, which later draws and results leave alone."""
        return CurriculumState(
            self.plan.passed, self._place, list(self.plan.playing), self.plan.solved, dict(self._records)
        )
