"""What a fleet prefilled for groups of siblings, and what it might have. Pure."""

from __future__ import annotations

import msgspec


class Prefilled(msgspec.Struct, frozen=True):
    """Tokens. `computed`: prefilled in all servers; `optimum`: the fewest that would do; `asked`: of all prompts."""

    computed: int
    optimum: int
    asked: int

    @property
    def ratio(self) -> float:
        return round(self.computed / self.optimum, 4)
