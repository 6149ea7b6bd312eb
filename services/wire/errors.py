"""Errors that say what happened, with which value, and how to mend it.

`RollmeshError` is what the command line turns into one line and an exit code, and what a service turns into a typed
HTTP answer. Anything else that escapes is a bug and keeps its traceback.
"""

from __future__ import annotations


class RollmeshError(Exception):
    """Something went wrong at run time. The command line exits with 1; a service answers `status`.

    `what` says what happened and with which value; `remedy` what the reader can do about it.
    """

    exit_code = 1
    status = 500
    code = "internal"

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{what}: {remedy}" if remedy else what)
        self.what = what
        self.remedy = remedy


class UsageError(RollmeshError):
    """The user asked for something that cannot be (an unknown key, a port in use): exit code 2, HTTP 422."""

    exit_code = 2
    status = 422
    code = "usage"


class DeadlineError(RollmeshError):
    """A named wait ran out of time."""

    status = 504
    code = "deadline"


class NotFoundError(RollmeshError):
    """No such group, session, engine or update."""

    status = 404
    code = "not_found"


class ConflictError(RollmeshError):
    """The call contradicts what already happened (a finished group, a reused version)."""

    status = 409
    code = "conflict"


class ConcludedError(RollmeshError):
    """The run has concluded: no new groups, no more trajectories."""

    status = 410
    code = "concluded"


class CapacityError(RollmeshError):
    """Admission is closed; try again after `retry_after_s`."""

    status = 429
    code = "capacity"

    def __init__(self, what: str, retry_after_s: float) -> None:
        super().__init__(what, f"try again in {retry_after_s:.2f} s")
        self.retry_after_s = retry_after_s


class NotReadyError(RollmeshError):
    """The service is starting, draining or has lost something it needs."""

    status = 503
    code = "not_ready"


class WireError(RollmeshError):
    """Bytes from another process are not what the schema says."""

    status = 400
    code = "wire"
