"""How many groups of a step are kept to be read: a share of them, and no more than a share of a core pays for.

Long steps afford all their groups; where a step takes a few milliseconds, as with a toy, some steps keep one group and some
none. The allowance of a pause is not saved up for more than a minute.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SAVED_S = 60.0
_FIRST_S = 0.005
"""Seconds of a core, before the run has earned any."""
_SMOOTHED = 0.2


@dataclass
class RecordingBudget:
    """`share`: of the groups that is kept at most, 0 … 1; `cpu_share`: of a core, 1 for as much as it takes.

    `began`: seconds, by the clock of `choose`.
    """

    share: float
    cpu_share: float
    began: float
    _at: float = field(init=False)
    _allowed_s: float = _FIRST_S
    _cost_s: float | None = None
    """Of a group, smoothed; None before the first."""
    _owed: float = 0.0
    """Groups that `share` grants and that no step was large enough for."""

    def __post_init__(self) -> None:
        self._at = self.began

    def choose(self, groups: int, now: float) -> list[int]:
        """Which of a step's `groups` are kept: spread evenly over them."""
        self._allowed_s = min(
            self._allowed_s + (now - self._at) * self.cpu_share, max(_FIRST_S, SAVED_S * self.cpu_share)
        )
        self._at = now
        self._owed += groups * self.share
        wanted = min(groups, int(self._owed + 1e-9))
        self._owed = min(self._owed - wanted, 1.0)
        if self.cpu_share < 1.0:
            cost = self._cost_s
            affordable = self._allowed_s / cost if cost else 1.0
            # One that costs more than there is is paid by the steps that come after it.
            wanted = min(wanted, max(1, int(affordable))) if self._allowed_s > 0.0 else 0
        return [(2 * place + 1) * groups // (2 * wanted) for place in range(wanted)]

    def spent(self, groups: int, cost_s: float) -> None:
        """Keeping so many groups took `cost_s` seconds of a core."""
        self._allowed_s -= cost_s
        if groups:
            each = cost_s / groups
            self._cost_s = each if self._cost_s is None else self._cost_s + _SMOOTHED * (each - self._cost_s)
