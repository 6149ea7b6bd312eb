"""Hashes of the layout's buckets, whose bytes lie in the arenas of several ranks.

    rank 0   arena ──► own pieces ─┐        each bucket is hashed by one rank, the others send it what they hold of it
    rank 1   arena ──► pieces ─────┴─► bucket, as in the layout ─► blake3

So a version's digest is that of its bytes, whoever owns them: the one that a single rank would publish, and that engines
compute from what they serve. Each rank needs memory for two buckets: what arrives, and what is hashed. A bucket goes to
the rank that needs the fewest bytes for it, counting what it was sent already; in a round each rank hashes one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import torch

from weight_bus.manifest.layout import plan_buckets
from weight_bus.manifest.manifest import Bucket, Layout, Shard
from weight_bus.manifest.shard_map import ShardMap, ShardPiece, merged, scatter
from weight_bus.manifest.tensors import flat_bytes
from weight_bus.publisher.ranks import Ranks


@dataclass(frozen=True)
class _Range:
    """Bytes `start` to `stop` of a rank's arena, and the pieces in them."""

    rank: int
    start: int
    stop: int
    pieces: list[ShardPiece]


@dataclass(frozen=True)
class _Job:
    """One bucket, the rank that hashes it, and the ranges that it is made of."""

    number: int
    offset: int
    length: int
    rank: int
    ranges: list[_Range]


class BucketHashes:
    """Of versions with these owners' shards. All ranks make it, and use it, alike."""

    def __init__(self, layout: Layout, owners: list[list[Shard]], bucket_bytes: int, ranks: Ranks) -> None:
        self._layout, self._ranks = layout, ranks
        maps = [ShardMap(layout, shards) for shards in owners]
        queues: list[list[_Job]] = [[] for _ in owners]
        arrived = [0] * len(owners)
        for number, (offset, length) in enumerate(plan_buckets(layout.total_bytes, bucket_bytes)):
            ranges = [
                _Range(rank, *found)
                for rank, own in enumerate(maps)
                for found in merged(own.within(offset, length), length)
            ]
            foreign = [
                sum(each.stop - each.start for each in ranges if each.rank != rank) for rank in range(len(owners))
            ]
            chosen = min(range(len(owners)), key=lambda rank: arrived[rank] + foreign[rank])
            arrived[chosen] += foreign[chosen]
            queues[chosen].append(_Job(number, offset, length, chosen, ranges))
        self._rounds = [[job for job in jobs if job is not None] for jobs in zip_longest(*queues)]
        own = [job for job in queues[ranks.rank]]
        foreign_bytes = [sum(each.stop - each.start for each in job.ranges if each.rank != ranks.rank) for job in own]
        self._arriving = torch.empty(max(foreign_bytes, default=0), dtype=torch.uint8)
        self._bucket = np.zeros(max((job.length for job in own), default=0), np.uint8)

    @property
    def held_bytes(self) -> int:
        """Memory of this rank beside its arenas."""
        return self._arriving.nbytes + self._bucket.nbytes

    def of(self, arena: Callable[[int, int], memoryview], hash_of: Callable[[memoryview], str]) -> dict[int, Bucket]:
        """The buckets that this rank hashes, by number, of what lies in the ranks' arenas; `arena` gives this one's bytes
        from one place to another.

        Raises TransportError when a rank does not answer.
        """
        rank, found = self._ranks.rank, dict[int, Bucket]()
        for jobs in self._rounds:
            sent = [
                (job.rank, flat_bytes(arena(each.start, each.stop)))
                for job in jobs
                for each in job.ranges
                if each.rank == rank and job.rank != rank
            ]
            own = next((job for job in jobs if job.rank == rank), None)
            expected, used = [], 0
            for each in own.ranges if own is not None else ():
                if each.rank != rank:
                    length = each.stop - each.start
                    expected.append((each, self._arriving[used : used + length]))
                    used += length
            self._ranks.pass_on(sent, [(each.rank, data) for each, data in expected])
            if own is not None:
                here = [each for each in own.ranges if each.rank == rank]
                parts = [*expected, *((each, flat_bytes(arena(each.start, each.stop))) for each in here)]
                bucket = self._put_together(own, parts)
                found[own.number] = Bucket(offset=own.offset, length=own.length, hash=hash_of(bucket))
        return found

    def _put_together(self, job: _Job, parts: list[tuple[_Range, torch.Tensor]]) -> memoryview:
        """The bucket's bytes, as they lie in the layout."""
        bucket = self._bucket[: job.length]
        bucket[:] = 0
        for each, data in parts:
            source = data.numpy()
            for piece in each.pieces:
                # Where the tensor begins, from the bucket's first byte: before it where that is in another bucket.
                begin = self._layout.tensors[piece.tensor].offset - job.offset
                if begin >= 0:
                    scatter(piece, source, each.start, bucket[begin:], 0)
                else:
                    scatter(piece, source, each.start, bucket, -begin)
        return bucket.data
