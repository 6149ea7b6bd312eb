"""HTTP bodies of the leases of environment runners: who plays the groups that name a runner, and whether it lives.

    POST /runners ──► POST /runners/heartbeat, several times a lease ──► POST /runners/leave

A runner has a name, unique in the run, and an incarnation, new in each process. Its groups are given up when it leaves,
when it falls silent for a lease, and when another incarnation joins under its name.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints

from services.wire.rollout_api import Body


class Runner(Body):
    """What each call says: who it is from."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    incarnation: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]{8,64}$")]

    @property
    def runner_id(self) -> str:
        """How groups name it."""
        return f"{self.name}/{self.incarnation}"


class RunnerLease(Body):
    """The answer to joining and to heartbeats."""

    lease_s: float
    """Seconds for which the runner may be silent."""
