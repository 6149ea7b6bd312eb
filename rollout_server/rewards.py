"""The rewards of one session: its own, and those of single calls. Pure.

    session's reward + Σ rewards of calls = the trajectory's reward; named components are added up the same way

Giving a reward again replaces it, so a repeated request changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Reward:
    value: float
    components: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Rewards:
    """`calls`: by the id of the call."""

    session: Reward | None = None
    calls: dict[str, Reward] = field(default_factory=dict)

    @property
    def given(self) -> bool:
        return self.session is not None or bool(self.calls)

    @property
    def total(self) -> float:
        return sum(reward.value for reward in self._all())

    @property
    def components(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for reward in self._all():
            for name, value in reward.components.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def _all(self) -> list[Reward]:
        return [*([] if self.session is None else [self.session]), *self.calls.values()]
