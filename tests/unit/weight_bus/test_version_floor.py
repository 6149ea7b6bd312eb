"""The order of versions over restarts of the bus: nothing older is taken, nothing absurd; what is written stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.wire.errors import ConflictError, UsageError
from weight_bus.coordinator.version_floor import FURTHEST_AHEAD, Announced, Known, VersionFloor, why_out_of_order

versions = st.one_of(st.none(), st.integers(0, 50))
announced = st.builds(
    Announced, run_id=st.just("r"), version=st.integers(0, 50), root_digest=st.sampled_from(["a", "b"])
)


@given(st.integers(0, 60), st.sampled_from(["a", "b"]), st.one_of(st.none(), announced), versions, versions)
def test_a_bus_never_goes_back(
    version: int, digest: str, before: Announced | None, highest: int | None, served: int | None
) -> None:
    known = Known(before, highest, served)
    refused = why_out_of_order(version, digest, known)
    if before is not None:
        assert refused or version > before.version or (version == before.version and digest == before.root_digest)
    if highest is None and served is not None:
        assert refused or version >= served
    if version > known.newest:
        assert refused is None, "what is newer than all is taken"


@given(st.integers(0, 50), st.integers(1, 1 << 60))
def test_no_version_is_absurdly_far_ahead(newest: int, ahead: int) -> None:
    refused = why_out_of_order(newest + ahead, "a", Known(highest=newest))
    assert (refused is not None) == (ahead > FURTHEST_AHEAD)


async def test_what_was_announced_is_known_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "bus.json"
    floor = VersionFloor("r", path)
    floor.check(1, "a", None, ())
    await floor.keep(7, "seven")
    await floor.keep(6, "late")
    again = VersionFloor("r", path)
    for version, digest in ((6, "six"), (7, "others"), (0, "a")):
        with pytest.raises(ConflictError, match=str(path)):
            again.check(version, digest, None, ())
    for version, digest in ((7, "seven"), (8, "eight")):
        again.check(version, digest, None, ())
    assert again.known(None, ()).newest == 7


async def test_without_a_file_nothing_is_kept() -> None:
    floor = VersionFloor("r")
    await floor.keep(7, "seven")
    VersionFloor("r").check(1, "a", None, ())


async def test_a_file_of_another_run_or_of_nobody_ends_the_start(tmp_path: Path) -> None:
    path = tmp_path / "bus.json"
    await VersionFloor("another", path).keep(1, "one")
    with pytest.raises(UsageError, match="another"):
        VersionFloor("r", path)
    for broken in (b"", b"{", b"\xff", b"[" * 100_000):
        path.write_bytes(broken)
        with pytest.raises(UsageError, match="cannot be read"):
            VersionFloor("r", path)


async def test_a_disk_that_fails_ends_nothing(tmp_path: Path) -> None:
    floor = VersionFloor("r", tmp_path / "missing" / "bus.json")
    await floor.keep(1, "one")
    (tmp_path / "missing").mkdir()
    await floor.keep(2, "two")
    assert VersionFloor("r", tmp_path / "missing" / "bus.json").known(None, ()).newest == 2
