"""Strided shards: whatever range of the layout or of an arena is asked for, its bytes come to their places, once each."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

pytest.importorskip("blake3")

from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from weight_bus.manifest.layout import Layout, plan_layout
from weight_bus.manifest.manifest import Shard
from weight_bus.manifest.shard_map import ShardMap, merged, scatter
from weight_bus.manifest.tiling import Runs, why_not_exact

Cuts = tuple[list[int], list[int]]


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, int], list[Runs]]:
    """A matrix of bytes in rows and columns, and rectangles that hold each byte once."""
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    found: list[Runs] = []

    def divide(top: int, bottom: int, left: int, right: int, depth: int) -> None:
        across = draw(st.booleans())
        low, high = (top, bottom) if across else (left, right)
        if depth == 0 or high - low < 2:
            whole = left == 0 and right == columns
            run = (bottom - top) * columns if whole else right - left
            found.append((top * columns + left, run, run if whole else columns, 1 if whole else bottom - top))
            return
        middle = draw(st.integers(low + 1, high - 1))
        for start, stop in ((low, middle), (middle, high)):
            divide(*((start, stop, left, right) if across else (top, bottom, start, stop)), depth - 1)

    divide(0, rows, 0, columns, draw(st.integers(0, 3)))
    return (rows, columns), draw(st.permutations(found))


@examples(200)
@given(tilings(), st.data())
def test_what_holds_every_byte_once_is_known_from_what_does_not(
    tiling: tuple[tuple[int, int], list[Runs]], data: st.DataObject
) -> None:
    (rows, columns), held = tiling
    assert why_not_exact(rows * columns, held) is None
    number = data.draw(st.integers(0, len(held) - 1))
    start, run, stride, count = held[number]
    moved = data.draw(st.integers(1, rows * columns))
    assert why_not_exact(rows * columns, [*held[:number], *held[number + 1 :]]) is not None
    assert why_not_exact(rows * columns, [*held, held[number]]) is not None
    assert why_not_exact(rows * columns, [*held[:number], (start + moved, run, stride, count), *held[number + 1 :]])


def test_many_rectangles_take_no_longer_than_they_are_many() -> None:
    """Half of them high and narrow, half of them one row each: looking at all rows of all would be 4e8 looks."""
    many = 20_000
    high = [(column, 1, 2 * many, many) for column in range(many)]
    wide = [(row * 2 * many + many, many, 2 * many, 1) for row in range(many)]
    assert why_not_exact(2 * many * many, [*high, *wide]) is None
    assert "twice" in str(why_not_exact(2 * many * many, [*high, *wide[:-1], wide[0]]))


LAYOUT = plan_layout({"a": (6, 10), "b": (3,), "c": (2, 4, 5)}, "float32")


def owners_of(layout: Layout) -> tuple[bytes, list[tuple[list[Shard], bytes]]]:
    """The layout's bytes, and two owners: columns of `a`, all of `b`, parts of the middle dimension of `c`."""
    canonical = bytearray(layout.total_bytes)
    owners = []
    numbers = np.arange(prod((6, 10)), dtype=np.float32)
    tensors = {
        "a": numbers.reshape(6, 10),
        "b": np.array([7, 8, 9], np.float32),
        "c": -numbers[:40].reshape(2, 4, 5),
    }
    for entry in layout.tensors:
        canonical[entry.offset : entry.offset + entry.nbytes] = tensors[entry.name].tobytes()
    for first in (True, False):
        a = tensors["a"][:, :7] if first else tensors["a"][:, 7:]
        c = tensors["c"][:, 3:] if first else tensors["c"][:, :3]
        shards = [
            Shard(tensor=2, tensor_offset=60 if first else 0, offset=0, nbytes=c.nbytes, run=c[0].nbytes, stride=80),
            Shard(tensor=0, tensor_offset=0 if first else 28, offset=128, nbytes=a.nbytes, run=a[0].nbytes, stride=40),
        ]
        data = bytearray(128 + a.nbytes + 20)
        data[: c.nbytes], data[128 : 128 + a.nbytes] = c.tobytes(), a.tobytes()
        if first:
            shards.append(Shard(tensor=1, tensor_offset=0, offset=128 + a.nbytes, nbytes=12))
            data[128 + a.nbytes : 128 + a.nbytes + 12] = tensors["b"].tobytes()
        owners.append((shards, bytes(data)))
    return bytes(canonical), owners


@examples(200)
@given(st.integers(0, LAYOUT.total_bytes), st.integers(0, LAYOUT.total_bytes), st.integers(1, 300))
def test_a_range_of_the_layout_is_put_together_from_few_ranges_of_arenas(start: int, stop: int, most: int) -> None:
    start, stop = min(start, stop), max(start, stop)
    canonical, owners = owners_of(LAYOUT)
    found = np.zeros(LAYOUT.total_bytes, np.uint8)
    for shards, arena in owners:
        held = ShardMap(LAYOUT, shards)
        pieces = [part for piece in held.within(start, stop - start) for part in piece.split(most)]
        for low, high, own in merged(pieces, 1 << 20):
            assert 0 <= low < high <= len(arena)
            for piece in own:
                entry = LAYOUT.tensors[piece.tensor]
                tensor = found[entry.offset : entry.offset + entry.nbytes]
                scatter(piece, np.frombuffer(arena[low:high], np.uint8), low, tensor, 0)
    assert bytes(found[start:stop]) == canonical[start:stop]
    assert not found[:start].any() and not found[stop:].any()


@examples(200)
@given(st.integers(0, 400), st.integers(0, 400))
def test_a_range_of_an_arena_is_known_by_its_bytes_places(start: int, stop: int) -> None:
    start, stop = min(start, stop), max(start, stop)
    canonical, owners = owners_of(LAYOUT)
    for shards, arena in owners:
        held = sum(shard.nbytes for shard in shards if shard.offset < stop and shard.offset + shard.nbytes > start)
        pieces = ShardMap(LAYOUT, shards).in_arena(start, stop - start)
        assert sum(piece.nbytes for piece in pieces) <= min(held, stop - start)
        for piece in pieces:
            entry = LAYOUT.tensors[piece.tensor]
            for number in range(piece.count):
                at = entry.offset + piece.tensor_offset + number * piece.stride
                mine = piece.arena + number * piece.run
                assert start <= mine and mine + piece.run <= stop
                assert canonical[at : at + piece.run] == arena[mine : mine + piece.run]
    whole = ShardMap(LAYOUT, None)
    assert whole.in_arena(start, stop - start) == whole.within(start, stop - start)


def test_runs_are_never_put_outside_their_target() -> None:
    _, owners = owners_of(LAYOUT)
    (piece, *_) = ShardMap(LAYOUT, owners[0][0]).within(0, 240)
    source = np.frombuffer(owners[0][1], np.uint8)
    with pytest.raises(ValueError, match="lies outside the 100 bytes"):
        scatter(piece, source, 0, np.zeros(100, np.uint8), 0)
