"""Names of a run's keys in Redis. One hash tag a run, so that scripts over several keys work in a cluster."""

from __future__ import annotations


class RunKeys:
    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.stream = self._key("trajectories")
        """Stream of encoded trajectories."""
        self.stream_ids = self._key("stream-ids")
        """Hash: trajectory id → stream id, so that a repeated publish answers the first id."""
        self.earlier_stream_ids = self._key("earlier-stream-ids")
        """The generation of `stream_ids` before: what is older is forgotten (`services.run_store.publishing`)."""
        self.accounts = self._key("accounts")
        """Hash of the ledger's counters."""
        self.dropped = self._key("dropped")
        """Hash: cause → dropped trajectories."""
        self.blobs = self._key("blobs")
        """Hash: stream id → name of the blob that its entry refers to (`services.run_store.blobs`)."""
        self.dead = self._key("dead")
        """Stream of the newest dead letters."""
        self.lengths = self._key("lengths")
        """Hash: bucket of lengths → sessions that sampled so many tokens; `total` → tokens of all of them."""
        self.open_groups = self._key("open-groups")
        """Hash: group id → who holds it and since when."""
        self.published_groups = self._key("published-groups")
        """Hash: open group → how many of its trajectories are in the stream."""
        self.dropped_groups = self._key("dropped-groups")
        """Set: groups that count as dropped, so that none does twice."""
        self.earlier_dropped_groups = self._key("earlier-dropped-groups")
        """The generation of `dropped_groups` before: what is older is forgotten (`services.run_store.ledger`)."""
        self.admission_queue = self._key("admission-queue")
        """Sorted set: groups that wait for admission, by when they were asked for."""
        self.admission_leases = self._key("admission-leases")
        """Sorted set: the same groups, by when their servers must have asked again."""
        self.session_secret = self._key("session-secret")
        """What the run's session keys are made with."""
        self.waits = self._key("waits")
        """Hash: component → what it is waiting for, since when."""
        self.trainer_status = self._key("trainer-report")
        """What the trainer tells of its last steps."""
        self.evaluations = self._key("evaluations")
        """Hash: version → its evaluation on held-out problems."""
        self.services = self._key("services")
        """Hash: service → its record, alive or not."""
        self.service_heartbeats = self._key("service-heartbeats")
        """Sorted set: the same services, by when they were last announced (milliseconds, by the clock of Redis)."""
        self.runners = self._key("runners")
        """Hash: environment runner → its incarnation, and whether that has left."""
        self.runner_heartbeats = self._key("runner-heartbeats")
        """Sorted set: the same runners, by when they were last heard of (milliseconds, by the clock of Redis)."""
        self.owners = self._key("owners")
        """Hash: open group → the incarnation of the server that holds it; empty where one has let go of it."""

    def _key(self, name: str) -> str:
        return f"rollmesh:{{{self.run_id}}}:{name}"

    def group_of(self, session_id: str) -> str:
        """The group of a session whose id does not say it (`services.run_store.session_groups`)."""
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

    def blob(self, name: str) -> str:
        """A blob's bytes."""
        return self._key(f"blob:{name}")

    def undelivered(self, group_id: str) -> str:
        """Set: names of a group's calls that a gateway gave up before the agent got anything of their answers."""
        return self._key(f"undelivered:{group_id}")
