"""Manifests from the wire: what is sound is read back as it was, and nothing else is believed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

pytest.importorskip("blake3")

from hypothesis import given
from hypothesis import strategies as st

from services.wire.errors import WireError
from tests.support.examples import examples
from weight_bus.errors import SignatureError
from weight_bus.manifest.layout import plan_buckets, plan_layout
from weight_bus.manifest.manifest import (
    Bucket,
    CollectiveSource,
    Delta,
    DeltaBucket,
    DeltaPart,
    FileSource,
    Manifest,
    NixlSource,
    Owner,
    Shard,
    ShmSource,
    Source,
    check_manifest,
    check_signature,
    decode_manifest,
    encode_manifest,
    sign,
)

HASH = "0123456789abcdef" * 4
SOURCES: list[Source] = [
    NixlSource(agent="a", metadata=b"\x00\xff", address=1 << 40, length=512, device=0),
    ShmSource(path="/dev/shm/x", length=512, host="h"),
    FileSource(path="/weights/a.safetensors", length=512, data_offset=88, host=""),
    CollectiveSource(host="10.0.0.1", port=1, epoch=3, backend="gloo", length=512),
]
LAYOUT = plan_layout({"a": (4, 10), "b": (3,), "empty": (0, 5)}, "float32")
"""`a`: bytes 0 to 160, `b`: 192 to 204, 256 in all."""


def buckets(total: int = 256, size: int = 100) -> list[Bucket]:
    return [Bucket(offset=offset, length=length, hash=HASH) for offset, length in plan_buckets(total, size)]


def shard(tensor: int, tensor_offset: int, offset: int, nbytes: int, run: int = 0, stride: int = 0) -> Shard:
    return Shard(tensor=tensor, tensor_offset=tensor_offset, offset=offset, nbytes=nbytes, run=run, stride=stride)


def owned(*owners: Owner, **fields: Any) -> Manifest:
    """A manifest of these owners, covered by buckets."""
    whole: dict[str, Any] = {"run_id": "r", "version": 3, "layout": LAYOUT, "buckets": buckets(), "root_digest": HASH}
    return Manifest(**(whole | {"owners": list(owners)} | fields))


def cut(owner: Owner, *shards: Shard) -> Owner:
    return msgspec.structs.replace(owner, shards=list(shards))


WHOLE = Owner(total_bytes=256, sources=SOURCES)
FIRST = Owner(total_bytes=192, sources=SOURCES[:1], shards=[shard(0, 0, 0, 80), shard(1, 0, 128, 12)])
SECOND = Owner(total_bytes=80, sources=SOURCES[1:2], shards=[shard(0, 80, 0, 80)])
IDLE = Owner(total_bytes=0, sources=[], shards=[])
LEFT = Owner(total_bytes=128, sources=SOURCES[:1], shards=[shard(0, 0, 0, 96, 24, 40), shard(1, 0, 96, 12)])
RIGHT = Owner(total_bytes=64, sources=SOURCES[1:2], shards=[shard(0, 24, 0, 64, 16, 40)])
"""Six columns of `a`'s ten, and the other four."""
PART = DeltaPart(
    total_bytes=50,
    sources=SOURCES[:1],
    buckets=[
        DeltaBucket(offset=0, length=20, hash=HASH, target_offset=0, target_length=64),
        DeltaBucket(offset=20, length=30, hash=HASH, target_offset=128, target_length=128),
    ],
)
DELTA = Delta(base_version=2, base_digest=HASH, parts=[PART])


@pytest.mark.parametrize(
    "manifest",
    [
        owned(WHOLE),
        owned(FIRST, SECOND),
        owned(IDLE, SECOND, IDLE, FIRST, IDLE),
        owned(RIGHT, LEFT),
        owned(
            cut(FIRST, shard(0, 0, 0, 96, 24, 40), shard(0, 24, 96, 32, 16, 40), shard(1, 0, 128, 12)),
            cut(SECOND, shard(0, 104, 0, 32, 16, 40)),
        ),
        owned(WHOLE, kind="delta", base_version=2, delta=DELTA),
    ],
)
def test_a_sound_manifest_comes_back_as_it_was(manifest: Manifest) -> None:
    assert decode_manifest(encode_manifest(manifest)) == manifest
    assert manifest.total_bytes == sum(owner.total_bytes for owner in manifest.owners)


def changed(manifest: Manifest, **fields: Any) -> Manifest:
    return msgspec.structs.replace(manifest, **fields)


def offering(base_version: int = 2, parts: int = 1, **fields: Any) -> Manifest:
    delta = Delta(base_version=base_version, base_digest=HASH, parts=[msgspec.structs.replace(PART, **fields)] * parts)
    return owned(WHOLE, kind="delta", base_version=delta.base_version, delta=delta)


def aimed(*targets: tuple[int, int]) -> list[DeltaBucket]:
    return [
        DeltaBucket(offset=25 * i, length=25, hash=HASH, target_offset=at, target_length=length)
        for i, (at, length) in enumerate(targets)
    ]


UNSOUND = [
    (changed(owned(WHOLE), schema=1), "has schema 1"),
    (changed(owned(WHOLE), version=-1), "negative"),
    (changed(owned(WHOLE), owners=[]), "nobody owns"),
    (owned(WHOLE, WHOLE), "owner 0 holds the whole layout, and there are 2"),
    (owned(msgspec.structs.replace(WHOLE, total_bytes=128)), "128 bytes for a layout of 256"),
    (changed(owned(WHOLE), layout=msgspec.structs.replace(LAYOUT, total_bytes=200)), "tensor b lies outside"),
    (changed(owned(WHOLE), buckets=buckets(256)[1:]), "starts at 100, expected 0"),
    (changed(owned(WHOLE), buckets=buckets(256)[:-1]), "cover 200 of 256"),
    (changed(owned(WHOLE), buckets=buckets(300)), "100 bytes from 200 leaves the layout"),
    (changed(owned(WHOLE), buckets=buckets(300, 64)), "44 bytes from 256 leaves the layout"),
    (changed(owned(FIRST, SECOND), buckets=buckets(256)[::-1]), "starts at 200, expected 0"),
    (changed(owned(WHOLE), buckets=[Bucket(offset=0, length=256, hash="0" * 63)]), "no hash of 32 bytes"),
    (changed(owned(WHOLE), buckets=[Bucket(offset=0, length=256, hash="G" * 64)]), "no hash of 32 bytes"),
    (owned(FIRST), "shards of a hold 80 of 160"),
    (owned(FIRST, SECOND, SECOND), "shards of a hold 240 of 160"),
    (owned(FIRST, cut(SECOND, shard(0, 40, 0, 80))), "of a have some of the bytes 0 to 160 twice"),
    (owned(FIRST, cut(SECOND, shard(0, 84, 0, 76), shard(0, 0, 76, 4))), "of a have some of the bytes 0 to 160 twice"),
    (owned(LEFT), "shards of a hold 96 of 160"),
    (owned(LEFT, cut(RIGHT, shard(0, 20, 0, 64, 16, 40))), "of a have some of the bytes 0 to 40 twice"),
    (owned(LEFT, cut(RIGHT, shard(0, 64, 0, 64, 16, 40))), "of a lack, or have twice, some of the bytes 0 to 40"),
    (owned(LEFT, cut(RIGHT, shard(0, 24, 0, 64, 16, 32))), "of a are ranges of different strides"),
    (owned(LEFT, cut(RIGHT, shard(0, 96, 0, 64))), "of a are ranges of different strides"),
    (owned(LEFT, cut(RIGHT, shard(0, 28, 0, 64, 16, 40))), "of a are ranges of different strides"),
    (owned(cut(LEFT, shard(0, 0, 0, 96, 24, 64), shard(1, 0, 96, 12)), RIGHT), "have a stride of 64"),
    (owned(LEFT, cut(RIGHT, shard(0, 24, 0, 60, 16, 40))), "60 bytes of a are no runs of 16, 40 apart"),
    (owned(LEFT, cut(RIGHT, shard(0, 24, 0, 64, 16, 15))), "64 bytes of a are no runs of 16, 15 apart"),
    (owned(LEFT, cut(RIGHT, shard(0, 24, 0, 64, -16, 40))), "64 bytes of a are no runs of -16, 40 apart"),
    (owned(FIRST, cut(SECOND, shard(0, 80, 0, 81))), "81 bytes from 80 are no shard of a"),
    (owned(FIRST, cut(SECOND, shard(0, 80, 0, 0))), "0 bytes from 80 are no shard"),
    (owned(FIRST, cut(SECOND, shard(3, 0, 0, 4))), "a shard of tensor 3, of 3"),
    (owned(FIRST, cut(SECOND, shard(-1, 80, 0, 80))), "a shard of tensor -1"),
    (owned(FIRST, cut(SECOND, shard(0, 80, 1, 80))), "shards end at 81 in an arena of 80"),
    (owned(FIRST, cut(SECOND, shard(0, 80, -4, 80))), "at -4 overlaps"),
    (owned(cut(FIRST, shard(0, 0, 0, 80), shard(1, 0, 64, 12)), SECOND), "shard of b at 64 overlaps what ends at 80"),
    (owned(WHOLE, base_version=2), "contradict the delta"),
    (owned(WHOLE, kind="delta", base_version=2), "contradict the delta"),
    (changed(offering(), base_version=1), "contradict the delta"),
    (changed(offering(), kind="dense"), "contradict the delta"),
    (offering(base_version=3), "from version 3, which is not older"),
    (offering(parts=2), "a delta of 2 parts for 1 owners"),
    (offering(total_bytes=51), "delta buckets cover 50 of 51"),
    (offering(buckets=aimed((0, 64), (32, 64))), "targets 32, where 64 is already reached"),
    (offering(buckets=aimed((0, 64), (128, 129))), "targets byte 257 of an arena of 256"),
    (offering(buckets=aimed((-1, 64), (64, 64))), "targets -1"),
    (offering(buckets=[*aimed((0, 64)), *aimed((64, 64))]), "starts at 0, expected 25"),
]


@pytest.mark.parametrize(("manifest", "said"), UNSOUND, ids=[said for _, said in UNSOUND])
def test_an_unsound_manifest_is_refused_with_the_reason(manifest: Manifest, said: str) -> None:
    with pytest.raises(WireError, match=said):
        decode_manifest(encode_manifest(manifest))


SMALL = st.integers(-3, 300)


def bytes_of(one: Shard) -> Iterator[int]:
    run, stride, count = one.runs
    for number in range(count):
        yield from range(one.tensor_offset + number * stride, one.tensor_offset + number * stride + run)


@examples(200)
@given(
    st.lists(
        st.tuples(
            SMALL,
            st.none()
            | st.lists(st.tuples(st.integers(-1, 3), SMALL, SMALL, SMALL, st.just(0) | SMALL, SMALL), max_size=4),
        ),
        max_size=3,
    ),
    st.lists(st.tuples(SMALL, SMALL), max_size=6),
)
def test_whatever_shards_are_believed_hold_every_byte_exactly_once(
    sampled: list[tuple[int, list[tuple[int, int, int, int, int, int]] | None]], cover: list[tuple[int, int]]
) -> None:
    owners = [
        Owner(total_bytes=total, sources=[], shards=None if shards is None else [shard(*one) for one in shards])
        for total, shards in sampled
    ]
    for found in (buckets(), [Bucket(offset=at, length=n, hash=HASH) for at, n in cover]):
        manifest = owned(*owners, buckets=found)
        try:
            check_manifest(manifest)
        except WireError:
            continue
        if owners[0].shards is None:
            assert len(owners) == 1 and owners[0].total_bytes == LAYOUT.total_bytes
            continue
        held = sorted((one.tensor, byte) for owner in owners for one in owner.shards or () for byte in bytes_of(one))
        assert held == [(number, byte) for number, entry in enumerate(LAYOUT.tensors) for byte in range(entry.nbytes)]


@examples(200)
@given(st.data())
def test_bytes_that_were_tampered_with_are_refused_or_another_sound_manifest(data: st.DataObject) -> None:
    payload = bytearray(encode_manifest(sign(offering(), "k" * 16)))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode_manifest(bytes(payload))
    except WireError:
        return
    check_manifest(found)
    if found != sign(offering(), "k" * 16):
        with pytest.raises(SignatureError):
            check_signature(found, "k" * 16)


def test_only_the_runs_key_makes_its_signature() -> None:
    manifest = owned(WHOLE)
    signed = decode_manifest(encode_manifest(sign(manifest, "the key of the run")))
    check_signature(signed, "the key of the run")
    check_signature(signed, None)
    check_signature(manifest, None)
    assert sign(manifest, None) == manifest
    for wrong, said in [
        (manifest, "is not signed"),
        (sign(manifest, "another key"), "bears a wrong signature"),
        (changed(signed, version=4), "bears a wrong signature"),
        (changed(signed, owners=[msgspec.structs.replace(WHOLE, sources=SOURCES[:1])]), "bears a wrong signature"),
    ]:
        with pytest.raises(SignatureError, match=said):
            check_signature(wrong, "the key of the run")
