"""Packed arrays and trajectories: what goes in comes out, and what must not pass is refused by name."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.wire.errors import WireError
from services.wire.packed import (
    pack_logprobs,
    pack_mask,
    pack_tokens,
    unpack_logprobs,
    unpack_mask,
    unpack_tokens,
)
from services.wire.sampling import SamplingParams
from services.wire.trajectory import Segment, Trajectory, VersionSpan, decode_trajectory, encode_trajectory


def a_trajectory(**changes: object) -> Trajectory:
    segment = Segment(
        token_ids=pack_tokens([5, 6, 7, 8]),
        loss_mask=pack_mask([0, 1, 1, 0]),
        logprobs=pack_logprobs([0.0, -0.5, -1.5, 0.0]),
        version_spans=[VersionSpan(1, 1, 3), VersionSpan(2, 1, 4)],
    )
    trajectory = Trajectory(
        run_id="r",
        trajectory_id="t",
        group_id="g",
        group_ordinal=0,
        group_size=2,
        member=1,
        task="running-sums",
        segments=[segment],
        reward=1.0,
        samplings=[SamplingParams(max_tokens=4)],
        server_id="s0",
        opened_at=1.0,
        finished_at=2.0,
    )
    return msgspec.structs.replace(trajectory, **changes)


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_token_ids_travel_as_little_endian_int32(ids: list[int]) -> None:
    packed = pack_tokens(ids)
    assert packed == b"".join(i.to_bytes(4, "little") for i in ids)
    assert unpack_tokens(packed).tolist() == ids


@given(st.lists(st.floats(-(2.0**100), 0, width=32)))
def test_logprobs_travel_as_float32(values: list[float]) -> None:
    assert unpack_logprobs(pack_logprobs(values)).tolist() == values


@given(st.lists(st.integers(0, 1)))
def test_masks_travel_as_bytes(mask: list[int]) -> None:
    assert pack_mask(mask) == bytes(mask)
    assert unpack_mask(pack_mask(mask)).tolist() == mask


def test_a_token_id_beyond_int32_is_refused() -> None:
    with pytest.raises(OverflowError):
        pack_tokens([2**31])


def test_a_trajectory_survives_the_wire() -> None:
    trajectory = a_trajectory()
    assert decode_trajectory(encode_trajectory(trajectory)) == trajectory
    assert trajectory.sampled_tokens() == 2


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"schema": 99}, "schema 99"),
        ({"reward": float("nan")}, "reward nan"),
    ],
)
def test_a_bad_trajectory_is_named(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        decode_trajectory(encode_trajectory(a_trajectory(**changes)))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"loss_mask": pack_mask([0, 1, 1])}, "3 mask elements"),
        ({"logprobs": pack_logprobs([0.0, float("-inf"), 0.0, 0.0])}, "not finite"),
        ({"version_spans": [VersionSpan(1, 1, 3)]}, "cover 1 tokens, the mask 2"),
        ({"version_spans": [VersionSpan(2, 1, 3), VersionSpan(1, 1, 4)]}, "does not fit"),
        ({"version_spans": [VersionSpan(1, 9, 3)]}, "does not fit"),
        ({"version_spans": [VersionSpan(0, 1, 3), VersionSpan(1, 1, 3)]}, "cover 2 tokens, the mask 2"),
    ],
)
def test_a_bad_segment_is_named(changes: dict[str, object], complaint: str) -> None:
    segment = msgspec.structs.replace(a_trajectory().segments[0], **changes)
    payload = encode_trajectory(a_trajectory(segments=[segment]))
    with pytest.raises(WireError, match=complaint):
        decode_trajectory(payload)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_never_a_trajectory(payload: bytes) -> None:
    with pytest.raises(WireError):
        decode_trajectory(payload)


def test_no_list_of_numbers_on_the_wire() -> None:
    """1,000 tokens must cost about 9 bytes each (id, mask, logprob), not a msgpack list's worth."""
    n = 1000
    segment = Segment(
        token_ids=pack_tokens(np.arange(n, dtype=np.int32)),
        loss_mask=pack_mask([1] * n),
        logprobs=pack_logprobs([-0.1] * n),
        version_spans=[VersionSpan(0, n, 1)],
    )
    assert len(encode_trajectory(a_trajectory(segments=[segment]))) < 9 * n + 400
