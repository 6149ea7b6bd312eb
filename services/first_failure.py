"""What a group of tasks that ran at once failed of: the first of their errors, not a group of errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from services.wire.errors import RollmeshError


@contextmanager
def first_failure() -> Iterator[None]:
    """Around a task group: where its tasks raised RollmeshErrors and nothing else, raises the first, however nested.

    Not by `except*`: before Python 3.11.4 what that raises comes out as a group again.
    """
    try:
        yield
    except BaseExceptionGroup as failures:
        known, others = failures.split(RollmeshError)
        if known is None or others is not None:
            raise
        raise _first(known) from None


def _first(failures: BaseExceptionGroup[RollmeshError]) -> RollmeshError:
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
