"""Bytes of others that cannot be read are typed errors: other types, no UTF-8, nesting beyond the interpreter's stack."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_server.engines.http.client import engine_error, stream_error
from rollout_server.engines.http.wire import read_chunk
from rollout_server.journal.records import decode_partial, decode_record
from services.config.rewards import ModelScoring
from services.gateway.request import read_body
from services.gateway.upstream import error_detail
from services.rewards.model_component import decode_batch
from services.wire.errors import RollmeshError, WireError
from services.wire.trajectory import decode_trajectory
from weight_bus.manifest.manifest import decode_manifest

MSGPACK: list[Callable[[bytes], Any]] = [decode_record, decode_partial, decode_trajectory, decode_manifest]
JSON: list[Callable[[bytes], Any]] = [
    read_chunk,
    lambda raw: decode_batch(ModelScoring(url="http://x"), raw, 1),
]
NO_TEXT = b"\x81\xa4type\xa2\xff\xfe", b"\x81\xa2\xff\xfe\x01", b"\x82\xa6run_id\xa1\xff\xa7version\x01"
DEEP = b"\x81\xa1a" * 100_000, b"\x81\xa1a" + b"\x91" * 100_000


@pytest.mark.parametrize("payload", [*NO_TEXT, *DEEP, b""])
@pytest.mark.parametrize("decode", MSGPACK)
def test_msgpack_that_cannot_be_read(decode: Callable[[bytes], Any], payload: bytes) -> None:
    with pytest.raises(WireError):
        decode(payload)


@pytest.mark.parametrize(
    "payload",
    [
        b'{"choices": "\xff"}',
        b'{"choices": [{"index": 0, "finish_reason": "\xff"}], "data": [{"index": "\xff"}]}',
        b'{"x":' * 100_000,
        b'{"x": ' + b"[" * 100_000,
    ],
)
@pytest.mark.parametrize("decode", JSON)
def test_json_that_cannot_be_read(decode: Callable[[bytes], Any], payload: bytes) -> None:
    with pytest.raises(WireError):
        decode(payload)


@pytest.mark.parametrize("payload", [b'{"error": "\xff"}', b'{"error":' * 100_000, b'{"x": ' + b"[" * 100_000, b"\xff"])
def test_an_error_that_cannot_be_read_is_an_error_all_the_same(payload: bytes) -> None:
    assert isinstance(engine_error("POST http://e/x", 500, None, payload), RollmeshError)
    assert isinstance(stream_error("POST http://e/x", payload), RollmeshError)
    assert error_detail(payload).code == ""


@given(st.binary(max_size=64))
def test_any_bytes_are_read_or_refused(payload: bytes) -> None:
    for decode in (*MSGPACK, *JSON):
        with suppress(WireError):
            decode(payload)
    engine_error("POST http://e/x", 500, None, payload)
    error_detail(payload)


class _Named(msgspec.Struct):
    name: str = ""


def test_a_gateway_reads_a_body_or_leaves_it_to_the_server_and_refuses_what_nobody_reads() -> None:
    decoder = msgspec.json.Decoder(_Named)
    found = read_body(decoder.decode, b'{"name": "a", "x": [1]}')
    assert found is not None and found.name == "a"
    for left in (b"", b"{", b"[]", b'{"name": 1}', b'{"name": "\xff"}'):
        assert read_body(decoder.decode, left) is None
    with pytest.raises(WireError, match="nested too deeply"):
        read_body(decoder.decode, b'{"x":' + b"[" * 100_000)
