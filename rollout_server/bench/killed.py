"""What killing servers under talking agents gave. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec


class Kill(msgspec.Struct, frozen=True):
    """One kill. Seconds from it: `streamed`, to the next chunk; `whole`, to the end of answers that are not streamed."""

    server_id: str
    streamed: list[float]
    whole: list[float]


@dataclass
class Killed:
    """All kills. `answers`: that agents got in the whole time, none of them an error."""

    kills: list[Kill] = field(default_factory=list)
    answers: int = 0

    @property
    def streamed_s(self) -> list[float]:
        return [seconds for kill in self.kills for seconds in kill.streamed]

    @property
    def whole_s(self) -> list[float]:
        return [seconds for kill in self.kills for seconds in kill.whole]
