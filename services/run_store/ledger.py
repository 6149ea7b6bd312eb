"""The ledger: a run's counters of groups and trajectories in Redis, changed atomically by the services that know.

| account         | counts       | raised by                                                       |
|-----------------|--------------|-----------------------------------------------------------------|
| opened_groups   | groups       | a rollout server, when admission lets a group in                |
| closed_groups   | groups       | a rollout server, when a group was finished, or expired         |
| dropped_groups  | groups       | whoever finds that an opened group will never be trained: a     |
|                 |              | rollout server, or the trainer once some of it is in the stream |
| skipped_groups  | groups       | the trainer, where a restart skipped versions: those that they  |
|                 |              | would have consumed, for admission alone                        |
| published       | trajectories | the stream, in one script with the append                       |
| trained         | trajectories | the trainer, in one script with the acknowledgement             |
| dropped{cause}  | trajectories | the trainer (published but never trained), by cause             |
| lengths{bucket} | sessions     | the stream, as `published`; a rollout server for one given up   |

`opened_groups == closed_groups + open groups` at any moment, whoever is killed; a group counts as dropped once, also where
a server and two incarnations of a trainer all find that it is. At the end of a run `published == trained + Σ dropped`.
That holds also where Redis has lost a part of it all: so the trainer compares the counters with its step log and the stream
(`services.run_store.account`), and corrects them.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec
from redis.asyncio import Redis

from services.policies.admission import LOOKAHEAD, AdmissionRules
from services.policies.length_stats import Lengths, bucket_of
from services.run_store.account import RunAccount
from services.run_store.admission_queue import AdmissionAccount, Asking, OpenGroupRecord, decode_open_group
from services.run_store.client import as_text
from services.run_store.keys import RunKeys
from services.run_store.scripts import BATCHES, CLOSE, COUNTS
from services.wire.errors import NotReadyError


class Accounts(msgspec.Struct, frozen=True, kw_only=True):
    opened_groups: int = 0
    closed_groups: int = 0
    dropped_groups: int = 0
    skipped_groups: int = 0
    published: int = 0
    trained: int = 0
    base_version: int = 0
    concluded: bool = False
    final_version: int | None = None
    dropped: dict[str, int] = msgspec.field(default_factory=dict)
    unaccounted: int = 0
    """Trajectories and groups by which the account was wrong when the trainer last compared it with its step log."""
    corrected: int = 0
    """By how many it was corrected in all."""

    def dropped_total(self) -> int:
        return sum(self.dropped.values())


KEPT_DROPPED = 16_384
"""Groups in a generation of those that count as dropped; two are kept, far more than can be open at a time."""

# ARGV: '1' where they count as dropped, KEPT_DROPPED, groups.
_CLOSE = (
    BATCHES
    + COUNTS
    + CLOSE
    + """
local groups = {}
for i = 3, #ARGV do groups[i - 2] = ARGV[i] end
return close(KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], ARGV[2], groups, ARGV[1] == '1')
"""
)

# ARGV: group, KEPT_DROPPED.
_DROP = (
    COUNTS
    + """
local dropped = counts(KEYS[2], KEYS[3], ARGV[1], ARGV[2])
if dropped == 1 then redis.call('HINCRBY', KEYS[1], 'dropped_groups', 1) end
return dropped
"""
)


class ClosingListener(Protocol):
    def __call__(self, open_for_s: Sequence[float], *, dropped: bool) -> None:
        """Groups were closed that had been open for so many seconds. Must not block."""


class Ledger:
    """One run's accounts. Every method is one round trip. `kept_dropped`: KEPT_DROPPED."""

    def __init__(self, redis: Redis, run_id: str, *, kept_dropped: int = KEPT_DROPPED) -> None:
        self._redis = redis
        self._keys = RunKeys(run_id)
        self._kept_dropped = kept_dropped
        self.admission = AdmissionAccount(redis, run_id)
        self.account = RunAccount(redis, run_id)
        self._close = redis.register_script(_CLOSE)
        self._drop = redis.register_script(_DROP)
        self._listeners: list[ClosingListener] = []

    def on_closing(self, listener: ClosingListener) -> None:
        """Tell `listener` of the groups that are closed through this object; others' closings it does not hear of."""
        self._listeners.append(listener)

    async def open_group(
        self,
        group_id: str,
        server_id: str,
        *,
        engine_version: int,
        base_version: int,
        k: int,
        batch: int,
        lookahead: int = LOOKAHEAD,
    ) -> int:
        """Open a group if admission allows it now; returns its ordinal, or ADMISSION_CLOSED or another of those."""
        rules = AdmissionRules(base_version=base_version, k=k, batch=batch, lookahead=lookahead)
        asking = [Asking(group_id, time.time())]
        admitted = await self.admission.admit(asking, server_id, rules=rules, engine_version=engine_version)
        return admitted.answers[0].ordinal

    async def close_group(self, group_id: str, *, dropped: bool = False) -> bool:
        """Take a group off the open account (once).

        `dropped`: it was not finished in good order. It counts as dropped unless something of it is in the stream: then the
        trainer finds that its siblings never come, and drops it.
        """
        return await self.close_groups([group_id], dropped=dropped) == 1

    async def close_groups(self, group_ids: Sequence[str], *, dropped: bool = False) -> int:
        """`close_group` for several in one round trip; returns how many were open."""
        keys = [self._keys.accounts, self._keys.open_groups, self._keys.published_groups, self._keys.dropped_groups]
        keys.append(self._keys.earlier_dropped_groups)
        opened_at = await self._close(keys=keys, args=["1" if dropped else "0", self._kept_dropped, *group_ids])
        self.were_closed([float(each) for each in opened_at], dropped=dropped)
        return len(opened_at)

    def were_closed(self, opened_at: Sequence[float], *, dropped: bool) -> None:
        """Tell the listeners of groups that the stream's script closed (`services.run_store.publishing`)."""
        if opened_at:
            now = time.time()
            open_for_s = [max(0.0, now - each) for each in opened_at]
            for listener in self._listeners:
                listener(open_for_s, dropped=dropped)

    async def still_open(self, group_ids: Sequence[str]) -> set[str]:
        """Those of the groups of which more may come."""
        if not group_ids:
            return set()
        records = await self._redis.hmget(self._keys.open_groups, list(group_ids))
        return {group_id for group_id, record in zip(group_ids, records, strict=True) if record is not None}

    async def session_secret(self) -> bytes:
        """What the run's session keys are made with; the first server to ask makes it."""
        await self._redis.set(self._keys.session_secret, secrets.token_bytes(32), nx=True)
        secret = await self._redis.get(self._keys.session_secret)
        if not isinstance(secret, bytes):
            raise NotReadyError(f"run {self._keys.run_id} has lost its session secret", "see whether Redis evicts keys")
        return secret

    async def stream_id_of(self, trajectory_id: str) -> str | None:
        """The entry of a trajectory that was published, by any server and in any earlier incarnation of it.

        None for one so long ago that its id is forgotten (KEPT_IDS).
        """
        ids = await asyncio.gather(
            self._redis.hget(self._keys.stream_ids, trajectory_id),
            self._redis.hget(self._keys.earlier_stream_ids, trajectory_id),
        )
        return next((as_text(found) for found in ids if found is not None), None)

    async def drop_group(self, group_id: str) -> bool:
        """Count a group of the stream that will never be trained, so that admission makes up for it: once only."""
        keys = [self._keys.accounts, self._keys.dropped_groups, self._keys.earlier_dropped_groups]
        return bool(await self._drop(keys=keys, args=[group_id, self._kept_dropped]))

    async def count_given_up(self, sampled_tokens: int) -> None:
        """A session sampled so many tokens and will not be published: its length counts among those that were sampled."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hincrby(self._keys.lengths, str(bucket_of(sampled_tokens)), 1)
            pipe.hincrby(self._keys.lengths, "total", sampled_tokens)
            await pipe.execute()

    async def lengths(self) -> Lengths:
        """How many tokens sessions sampled: of those that were published, and of those that were given up."""
        found = await self._redis.hgetall(self._keys.lengths)
        counts = {as_text(name): int(count) for name, count in found.items()}
        total = counts.pop("total", 0)
        return Lengths({int(bucket): count for bucket, count in counts.items()}, total)

    async def begin(self, base_version: int) -> int:
        """Set the version that the run starts from, once; returns the one in force."""
        await self._redis.hsetnx(self._keys.accounts, "base_version", str(base_version))
        return (await self.accounts()).base_version

    async def skip_groups(self, groups: int) -> None:
        """The versions that restarts have skipped so far would have consumed so many groups; may be said twice."""
        await self._redis.hset(self._keys.accounts, "skipped_groups", str(groups))

    async def conclude(self, final_version: int) -> None:
        """No new groups and no more trajectories from here on."""
        await self._redis.hset(self._keys.accounts, mapping={"concluded": 1, "final_version": final_version})

    async def accounts(self) -> Accounts:
        counters, dropped = await self._snapshot()
        final = counters.get("final_version")
        return Accounts(
            opened_groups=int(counters.get("opened_groups", 0)),
            closed_groups=int(counters.get("closed_groups", 0)),
            dropped_groups=int(counters.get("dropped_groups", 0)),
            skipped_groups=int(counters.get("skipped_groups", 0)),
            published=int(counters.get("published", 0)),
            trained=int(counters.get("trained", 0)),
            base_version=int(counters.get("base_version", 0)),
            concluded=counters.get("concluded") == "1",
            final_version=None if final is None else int(final),
            unaccounted=int(counters.get("unaccounted", 0)),
            corrected=int(counters.get("corrected", 0)),
            dropped={cause: int(count) for cause, count in dropped.items()},
        )

    async def _snapshot(self) -> tuple[dict[str, str], dict[str, str]]:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hgetall(self._keys.accounts)
            pipe.hgetall(self._keys.dropped)
            counters, dropped = await pipe.execute()
        return _text(counters), _text(dropped)

    async def open_groups(self) -> dict[str, OpenGroupRecord]:
        """Groups that were opened and neither finished nor expired."""
        found = await self._redis.hgetall(self._keys.open_groups)
        return {as_text(group_id): decode_open_group(packed) for group_id, packed in found.items()}


def _text(mapping: dict[bytes, bytes]) -> dict[str, str]:
    return {as_text(key): as_text(value) for key, value in mapping.items()}
