"""Admission: how many groups may be open, so that tokens over K stay rare and no straggler stops the run.

Symbols: `batch` groups an optimizer step consumes; `v` the version an engine serves; `v0` the version the run started
from. Of the run's account: `opened` groups ever opened (their ordinals are 0 … opened − 1), `dropped` those that will
never be trained, `open` those that were opened and not closed, `oldest` the ordinal of the oldest that is open, `skipped`
those that skipped versions would have consumed (0 unless a restart skipped some: `services.policies.versions`).
A group may be opened when all four rules leave a place for it:

    staleness    opened − dropped + skipped  <  (v − v0 + K + 1) · batch                                (1)
    open groups  open                        <  (K + 1) · batch                                        (2)
    look-ahead   opened                      <  oldest + L · (K + 1) · batch   while any group is open  (3)
    bytes        Redis holds                 <  `run_store.max_bytes`                                  (4)

(1) The group with ordinal `n` (not counting dropped ones) is consumed, first in first out, by the step that starts from
version `v0 + ⌊n / batch⌋`. Started under `v`, its first token will then be `v0 + ⌊n / batch⌋ − v` steps old: ≤ K exactly
when (1) holds. Since `v − v0` steps have consumed `(v − v0) · batch` groups, at most `(K + 1) · batch` are neither
consumed nor dropped. K = 0 admits the next batch only when the engine serves the weights of the step before: exactly
synchronous. A skipped version consumes nothing: it counts as if its `batch` groups had been opened before all others.

(2) A straggler is not consumed, so it keeps its place under (1). Not so a group that the trainer has dropped, or
consumed, and that its server has not closed yet: (1) would let another in beside it for as long as it stays open.

Where the trainer takes `U` optimizer steps a batch, that is U · batch groups, sampled before the first of them, and no
version between is published. The last step's tokens are then at least U − 1 steps old, and (1) admits a whole batch
under the version before it only where K ≥ U − 1: with less the trainer would wait for ever. With K = U − 1 generating
and training take turns; with K ≥ 2 · U − 1 the next batch is sampled whole while one is trained.

Where a batch is passed over `E` times (`services.policies.training.batch_shape`), it is U/E · batch groups, and a group's
tokens are to be no older than K in its last step too. In place of a number of steps s, (1) to (3) then have f(s), the
minibatches that have had their last step after s: f(v − v0 + K + 1) · batch in (1), f(K + 1) · batch in (2) and (3). With
E = 1, f(s) = s.

(3) A batch does not wait for a straggler: without a bound the run would pass it for ever, and all that it has to say
would be too old. At the bound everybody waits for that one group. It ends, at the latest by the idle time or the deadline
of its sessions, and the wait with it. Ordinals of dropped groups count, so that a run which drops all it opens stops too.

(4) At its `maxmemory` Redis refuses every write: trajectories, journals, the account. Groups that are open still write,
so admission ends long before. What is trained is freed by a checkpoint alone, and the trainer makes one early from
half of the bound on (`StoreUse.filling`): a bound that holds three batches never stops a run for good.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from services.policies.training.batch_shape import ONE_STEP, BatchShape

LOOKAHEAD = 8
AUTO_SHARE = 0.6
"""Of Redis' `maxmemory`: (4) where the setting is `auto`."""
_EARLY_SHARE = 0.5


class Closed(StrEnum):
    """The rule that lets nobody in."""

    STALENESS = "staleness"
    OPEN_GROUPS = "open_groups"
    LOOKAHEAD = "lookahead"
    BYTES = "bytes"


@dataclass(frozen=True)
class Account:
    """A run's groups as the ledger counts them. `oldest` is `opened` where no group is open."""

    opened: int
    dropped: int
    open: int
    oldest: int
    skipped: int = 0


@dataclass(frozen=True)
class StoreUse:
    """Bytes that Redis holds, of all runs, and from how many on no group is admitted."""

    used: int
    most: int

    @property
    def full(self) -> bool:
        """Whether (4) lets nobody in."""
        return self.used >= self.most

    @property
    def filling(self) -> bool:
        """Whether the trainer is to free what it has trained before its next checkpoint is due."""
        return self.used >= self.most * _EARLY_SHARE

    def __str__(self) -> str:
        return f"{self.used / (1 << 20):,.0f} of {self.most / (1 << 20):,.0f} MiB"


def store_use(used: int, maxmemory: int, setting: int | Literal["auto", "off"]) -> StoreUse | None:
    """(4) for `run_store.max_bytes`; None where nothing bounds it. `maxmemory`: Redis', 0 for none."""
    most = round(maxmemory * AUTO_SHARE) if setting == "auto" else 0 if setting == "off" else setting
    return StoreUse(used, most) if most else None


@dataclass(frozen=True)
class AdmissionRules:
    """What a run's groups are admitted by. Raises ValueError for bounds that would admit nothing."""

    base_version: int
    k: int
    batch: int
    lookahead: int = LOOKAHEAD
    """`L`: in multiples of (K + 1) · batch groups."""
    shape: BatchShape = ONE_STEP

    def __post_init__(self) -> None:
        if self.k < 0 or self.batch < 1 or self.lookahead < 1 or self.most_open < 1:
            raise ValueError(
                f"K must be ≥ 0 and let a group into its last epoch, batch and look-ahead ≥ 1, got K={self.k}, "
                f"batch={self.batch}, look-ahead={self.lookahead}, {self.shape}"
            )

    @property
    def most_open(self) -> int:
        """The right-hand side of (2)."""
        return self.shape.finished(self.k + 1) * self.batch

    @property
    def window(self) -> int:
        """How far, in groups, an ordinal may lie ahead of the oldest open one: the second term of (3)."""
        return self.lookahead * self.most_open

    def limit(self, engine_version: int) -> int:
        """The right-hand side of (1): how many groups (less dropped, and with skipped ones) may have been opened in all."""
        if engine_version < self.base_version:
            raise ValueError(
                f"an engine at version {engine_version} is older than the run's first version {self.base_version}"
            )
        return self.shape.finished(engine_version - self.base_version + self.k + 1) * self.batch

    def steps_for(self, groups: int) -> int:
        """How many optimizer steps it takes until (1) lets so many more groups in."""
        return math.ceil(groups / self.batch) * self.shape.epochs


def most_updates(k: int) -> int:
    """The most optimizer steps that a batch can be trained in under K."""
    return k + 1


@dataclass(frozen=True)
class Places:
    """How many groups each rule would still let in; negative where the account is over it. `full`: (4) lets none in."""

    staleness: int
    open_groups: int
    lookahead: int
    full: bool = False

    @property
    def free(self) -> int:
        least = min(self.staleness, self.open_groups, self.lookahead)
        return min(least, 0) if self.full else least

    @property
    def closed_by(self) -> Closed:
        """The rule that leaves the fewest; (4) before all, where it lets nobody in."""
        if self.full:
            return Closed.BYTES
        if self.free == self.staleness:
            return Closed.STALENESS
        return Closed.OPEN_GROUPS if self.free == self.open_groups else Closed.LOOKAHEAD

    def admit(self, ahead: int) -> bool:
        """Whether one may enter before whom `ahead` others wait: each of them is owed a place first."""
        return ahead < self.free


def places(account: Account, rules: AdmissionRules, engine_version: int, store: StoreUse | None = None) -> Places:
    """What the four rules leave, for a server whose engine serves `engine_version`. `store`: None where (4) is off."""
    return Places(
        staleness=rules.limit(engine_version) - (account.opened - account.dropped + account.skipped),
        open_groups=rules.most_open - account.open,
        lookahead=account.oldest + rules.window - account.opened,
        full=store is not None and store.full,
    )
