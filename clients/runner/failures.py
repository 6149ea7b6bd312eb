"""Failures of the environment runner: why groups were lost, which problems are retried, when the run aborts.

    group lost ──► its problem is played again in another group, up to `retries` times ──► given up, counted by cause
                                        └── too many lost in a row with none played ──► TooManyLostError

Failed problems are retried because they are not a random sample: leaving them out would bias the training. The new group
has its own ordinal, whose problem is skipped instead.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from clients.rollout.transport import ServerUnreachableError
from services.wire.errors import ContextLengthError, NotReadyError, RollmeshError
from services.wire.reward_api import RewardFailedError

Cause = Literal["environment", "timeout", "reward", "session", "server"]
"""`environment`: its code or its agent raised. `reward`: there was none. `session`: the server ended it. `server`: it was
unreachable, or not ready."""

LEAST_LOST_IN_A_ROW = 64
"""A run is aborted after so many lost groups in a row, or twice those in play: one incident may fail all of them."""


class GroupLostError(RollmeshError):
    """A group was lost. Its open sessions have been aborted, as far as the server could be reached."""

    code = "group_lost"

    def __init__(self, cause: Cause, why: str) -> None:
        super().__init__(why)
        self.cause = cause


class TooManyLostError(RollmeshError):
    """The environment fails repeatedly, so the run has failed: started again, it would fail as it did (exit code 3)."""

    exit_code = 3
    code = "environment_failed"


class EnvironmentFailedError(RollmeshError):
    """The code of an environment or an agent raised something."""

    code = "environment_failed"


@dataclass
class GroupFailures:
    """Counts of lost groups. `retries`: how often one problem is played again. `in_play`: groups at once."""

    retries: int
    in_play: int = 1
    by_cause: Counter[Cause] = field(default_factory=Counter)
    retried: int = 0
    given_up: int = 0
    _in_a_row: int = 0

    def played(self) -> None:
        """A group was completed."""
        self._in_a_row = 0

    def lost(self, cause: Cause, why: str, attempt: int) -> bool:
        """Count a loss; True when the problem is to be played again. `attempt`: how often it was played before, from 0.

        Raises TooManyLostError. A server that cannot be reached does not count towards it: the pool waits that out.
        """
        self.by_cause[cause] += 1
        if cause != "server":
            self._in_a_row += 1
        if self._in_a_row >= max(LEAST_LOST_IN_A_ROW, 2 * self.in_play):
            what = f"the last {self._in_a_row} groups were lost and none was played"
            # A line, for `rollmesh up` quotes the last one of the log.
            raise TooManyLostError(what, f"fix the environment; the last error was: {' '.join(why.split())}")
        again = attempt < self.retries
        if again:
            self.retried += 1
        else:
            self.given_up += 1
        return again


def cause_of(error: Exception) -> Cause:
    """The cause for an error that ended an episode or a group."""
    match error:
        case TimeoutError():
            return "timeout"
        case RewardFailedError():
            return "reward"
        case EnvironmentFailedError() | ContextLengthError() | ValueError():
            # A ValueError: a reward or a component is no finite number.
            return "environment"
        case ServerUnreachableError() | NotReadyError():
            return "server"
        case _:
            return "session"
