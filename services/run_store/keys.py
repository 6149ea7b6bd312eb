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
    def dead(self) -> str:
        """Stream of the newest dead letters."""
        return self._key("dead")

    @property
    def lengths(self) -> str:
        """Hash: bucket of lengths → sessions that sampled so many tokens; `total` → tokens of all of them."""
        return self._key("lengths")

    @property
    def open_groups(self) -> str:
        """Hash: group id → who holds it and since when."""
        return self._key("open-groups")

    @property
    def published_groups(self) -> str:
        """Hash: open group → how many of its trajectories are in the stream."""
        return self._key("published-groups")

    @property
    def dropped_groups(self) -> str:
        """Set: groups that count as dropped, so that none does twice."""
        return self._key("dropped-groups")

    @property
    def admission_queue(self) -> str:
        """Sorted set: groups that wait for admission, by when they were asked for."""
        return self._key("admission-queue")

    @property
    def admission_leases(self) -> str:
        """Sorted set: the same groups, by when their servers must have asked again."""
        return self._key("admission-leases")

    @property
    def session_secret(self) -> str:
        """What the run's session keys are made with."""
        return self._key("session-secret")

    @property
    def waits(self) -> str:
        """Hash: component → what it is waiting for, since when."""
        return self._key("waits")

    @property
    def trainer_status(self) -> str:
        """What the trainer tells of its last steps."""
        return self._key("trainer-report")

    @property
    def services(self) -> str:
        """Hash: service → its record, alive or not."""
        return self._key("services")

    @property
    def service_heartbeats(self) -> str:
        """Sorted set: the same services, by when they were last announced (milliseconds, by the clock of Redis)."""
        return self._key("service-heartbeats")

    @property
    def owners(self) -> str:
        """Hash: open group → the incarnation of the server that holds it; empty where one has let go of it."""
        return self._key("owners")

    def group_of(self, session_id: str) -> str:
        """The group of a session."""
        return self._key(f"group-of:{session_id}")

    def journal(self, group_id: str) -> str:
        """List: what happened in a group, to be read by whoever takes over it."""
        return self._key(f"journal:{group_id}")

    def partial(self, session_id: str, call: str) -> str:
        """List: what was sampled so far for an answer that is not whole."""
        return self._key(f"draft:{session_id}:{call}")

    def answer(self, group_id: str, call: str) -> str:
        """An answer's bytes, for as long as it may be asked for again."""
        return self._key(f"answer:{group_id}:{call}")
