"""What a benchmark says of tasks that ran at once and failed."""

from __future__ import annotations

from services.wire.errors import RollmeshError


def first_failure(failures: BaseExceptionGroup[RollmeshError]) -> RollmeshError:
    """The first of what a group of tasks raised, however nested."""
    first = failures.exceptions[0]
    return first_failure(first) if isinstance(first, BaseExceptionGroup) else first
