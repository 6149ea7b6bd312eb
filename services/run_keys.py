"""Names of a run's keys in Redis. One hash tag a run, so that scripts over several keys work in a cluster."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunKeys:
    run_id: str

    def _key(self, name: str) -> str:
        return f"rollmesh:{{{self.run_id}}}:{name}"

    @property
    def stream(self) -> str:
        """Stream of encoded trajectories."""
        return self._key("trajectories")

    @property
    def stream_ids(self) -> str:
        """Hash: trajectory id → stream id, so that a repeated publish answers the first id."""
        return self._key("stream-ids")

    @property
    def accounts(self) -> str:
        """Hash of the ledger's counters."""
        return self._key("accounts")

    @property
    def dropped(self) -> str:
        """Hash: cause → dropped trajectories."""
        return self._key("dropped")

    @property
    def open_groups(self) -> str:
        """Hash: group id → who holds it and since when."""
        return self._key("open-groups")

    @property
    def published_groups(self) -> str:
        """Hash: open group → how many of its trajectories are in the stream."""
        return self._key("published-groups")

    @property
    def session_secret(self) -> str:
        """What the run's session keys are made with."""
        return self._key("session-secret")

    @property
    def waits(self) -> str:
        """Hash: component → what it is waiting for, since when."""
        return self._key("waits")
