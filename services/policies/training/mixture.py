"""Which task a group plays, where a run has several: a pure function of the run's seed and the group's ordinal.

    weights 3, 1 ──► parts (3, 1) ──► blocks of 4 groups, each with 3 of the first task and 1 of the second

Ordinals count all groups that a run ever opened, so a runner that starts again goes on in the same order, and several
runners share it. Within a block each task's groups are spread by stratified sampling: the j-th of its n groups stands at a
random place in the j-th of n equal parts of the block.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from services.wire.rollout_api import LARGEST_MIXTURE


@dataclass(frozen=True)
class Draw:
    """`task`: its place among the tasks. `place`: how many groups of that task have smaller ordinals."""

    task: int
    place: int


def parts_of(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in the proportions of `weights`, read as decimal numbers.

    Raises ValueError for a weight that is not above 0, and where a block would have more than `LARGEST_MIXTURE` groups.
    """
    if not all(weight > 0 and math.isfinite(weight) for weight in weights):
        raise ValueError(f"weights must be above 0, not {list(weights)}")
    exact = [Fraction(repr(float(weight))) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * common) for weight in exact]
    divisor = math.gcd(*whole)
    parts = tuple(each // divisor for each in whole)
    if sum(parts) > LARGEST_MIXTURE:
        raise ValueError(
            f"weights {list(weights)} hold only over blocks of {sum(parts)} groups, {LARGEST_MIXTURE} is the most: "
            "write them with fewer digits"
        )
    return parts


def draw(parts: tuple[int, ...], seed: int, ordinal: int) -> Draw:
    """The task of the group with this ordinal. Raises ValueError for a negative ordinal."""
    if ordinal < 0:
        raise ValueError(f"no group has the ordinal {ordinal}")
    if len(parts) == 1:  # a block of it may be one group: its order costs as much to draw as its problem
        return Draw(0, ordinal)
    block, at = divmod(ordinal, sum(parts))
    order = _order(parts, seed, block)
    task = order[at]
    return Draw(task, block * parts[task] + order[:at].count(task))


@lru_cache(maxsize=64)
def _order(parts: tuple[int, ...], seed: int, block: int) -> tuple[int, ...]:
    drawn = random.Random(f"mixture/{seed}/{block}")
    places = [((number + drawn.random()) / count, task) for task, count in enumerate(parts) for number in range(count)]
    return tuple(task for _, task in sorted(places))
