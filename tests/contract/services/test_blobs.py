"""Blobs on a real Valkey end with their trajectories: dropped, trimmed, or never published."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest
from redis.asyncio import Redis

from services.run_store.blobs import BlobStore
from services.run_store.client import connect
from services.run_store.keys import RunKeys
from services.run_store.publishing import TrajectoryWriter
from services.run_store.stream import StreamEntry, TrajectoryReader
from services.wire.choices import BlobError, attach
from services.wire.packed import pack_kept
from services.wire.trajectory import ExpertChoices, SegmentChoices, Trajectory, decode_trajectory
from tests.support.until import until
from tests.unit.services.test_wire import a_trajectory

CHOICES = SegmentChoices(
    kept_counts=pack_kept([2, 1]), kept_ids=pack_kept([5, 6, 7]), experts=ExpertChoices(1, 2, 1, bytes(range(8)))
)


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


def with_choices(name: str) -> Trajectory:
    one = a_trajectory(trajectory_id=name)
    return msgspec.structs.replace(one, segments=[msgspec.structs.replace(one.segments[0], choices=CHOICES)])


async def blobs(redis: Redis, run_id: str) -> dict[str, int]:
    """Every blob of the run by its trajectory, and how many milliseconds it has left; −1 for good."""
    prefix = RunKeys(run_id).blob("")
    found = [key.decode() async for key in redis.scan_iter(match=prefix.replace("{", "\\{") + "*")]
    return {key.removeprefix(prefix).split(":")[0]: await redis.pttl(key) for key in found}


async def published(redis: Redis, run_id: str, *names: str) -> tuple[TrajectoryReader, list[StreamEntry]]:
    await TrajectoryWriter(redis, run_id).publish([with_choices(name) for name in names])
    reader = TrajectoryReader(redis, run_id)
    await reader.open()
    return reader, await reader.with_blobs(await reader.read(100, 1))


async def test_choices_come_back_and_are_in_no_stream_entry(redis: Redis, run_id: str) -> None:
    reader, (entry,) = await published(redis, run_id, "a")
    bare = decode_trajectory(entry.payload)
    assert bare == a_trajectory(trajectory_id="a")
    assert attach(bare, entry.ref, entry.blob) == with_choices("a")
    (again,) = await reader.fetch([entry.stream_id])
    assert again == entry


async def test_a_blob_ends_when_its_entry_is_dropped_and_when_it_is_trimmed(redis: Redis, run_id: str) -> None:
    reader, entries = await published(redis, run_id, "dropped", "letter", "trained", "kept")
    assert await blobs(redis, run_id) == dict.fromkeys(("dropped", "letter", "trained", "kept"), -1)
    dropped, letter, trained, kept = (entry.stream_id for entry in entries)
    await reader.acknowledge_dropped("equal_rewards", [dropped])
    await reader.acknowledge_dropped("sampling", {letter: "why"})
    await reader.acknowledge_trained([trained])
    assert await blobs(redis, run_id) == {"trained": -1, "kept": -1}
    await reader.trim_before(kept)
    assert await blobs(redis, run_id) == {"kept": -1}
    assert await redis.hkeys(RunKeys(run_id).blobs) == [kept.encode()]


async def test_a_blob_that_no_entry_refers_to_expires(redis: Redis, run_id: str) -> None:
    """The server died between the two."""
    store = BlobStore(redis, run_id, written_s=1)
    await store.write({"orphan:0": b"bytes"})
    left = await blobs(redis, run_id)
    assert 0 < left["orphan"] <= 1000

    async def gone() -> bool:
        return not await blobs(redis, run_id)

    await until(gone)


async def test_publishing_again_does_not_make_a_blob_expire(redis: Redis, run_id: str) -> None:
    await published(redis, run_id, "a")
    await TrajectoryWriter(redis, run_id).publish([with_choices("a")])
    assert await blobs(redis, run_id) == {"a": -1}


async def test_a_blob_that_is_too_large_missing_or_changed_is_refused_with_the_reason(
    redis: Redis, run_id: str
) -> None:
    await TrajectoryWriter(redis, run_id, blob_bytes=10).publish([with_choices("large")])
    _, entries = await published(redis, run_id, "lost", "changed")
    large, lost, changed = entries
    one = decode_trajectory(lost.payload)
    with pytest.raises(BlobError, match="more than rollout"):
        attach(one, large.ref, large.blob)
    with pytest.raises(BlobError, match="are not in the blob store"):
        attach(one, lost.ref, None)
    with pytest.raises(BlobError, match="are other bytes than were written"):
        attach(one, changed.ref, (changed.blob or b"")[:-1])
    with pytest.raises(BlobError, match="segments of trajectory changed"):
        attach(one, changed.ref, changed.blob)
