"""Versions across restarts that repeat steps with noise: none is used for two sets of bytes, no token is of the future."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.policies.staleness import staleness
from services.policies.versions import UNKNOWN, Announced, after_skips, highest, version_to_publish


def test_weights_keep_their_version_where_nobody_heard_of_it_or_of_these_bytes() -> None:
    assert version_to_publish(5, "a", None) == 5
    assert version_to_publish(5, "a", Announced(4, "b")) == 5
    assert version_to_publish(5, "a", Announced(5, "a")) == 5


def test_other_bytes_unknown_ones_and_older_versions_go_above_all_that_were_announced() -> None:
    assert version_to_publish(5, "a", Announced(5, "b")) == 6
    assert version_to_publish(5, UNKNOWN, Announced(5, UNKNOWN)) == 6
    assert version_to_publish(5, "a", Announced(7, "a")) == 8


def test_whole_batches_are_skipped() -> None:
    assert version_to_publish(6, "a", Announced(6, "b"), updates=3) == 9
    assert version_to_publish(6, "a", Announced(8, "b"), updates=3) == 9
    assert version_to_publish(6, "a", Announced(9, "b"), updates=3) == 12


def test_of_several_sources_the_newest_counts_and_its_digest_where_they_agree() -> None:
    assert highest(None, None) is None
    assert highest(Announced(3, "a"), None, Announced(2, "b")) == Announced(3, "a")
    assert highest(Announced(3, "a"), Announced(3, UNKNOWN)) == Announced(3, "a")
    assert highest(Announced(3, "a"), Announced(3, "b")) == Announced(3, UNKNOWN)


class Run:
    """A trainer's lives: the durable step log, and what bus and engines have seen of it."""

    def __init__(self) -> None:
        self.steps = 0
        self.skips: dict[int, int] = {}
        self.published: dict[int, str] = {0: "first"}

    @property
    def version(self) -> int:
        return self.steps + sum(to - since for since, to in self.skips.items())

    def step(self, digest: str, *, announced: bool) -> None:
        self.steps += 1
        if announced:
            self.publish(digest)

    def publish(self, digest: str) -> None:
        assert self.published.setdefault(self.version, digest) == digest, "a version has two sets of bytes"

    def restart(self, digest: str, *, log_lost: bool, bus_forgot: bool) -> None:
        """`digest`: of the repeated weights. What one of the sources has lost the other knows."""
        newest = max(self.published)
        logged = None if log_lost else Announced(newest, self.published[newest])
        heard = Announced(0) if bus_forgot and not log_lost else Announced(newest, self.published[newest])
        before = self.version
        to = version_to_publish(before, digest, highest(logged, heard))
        if to != before:
            self.skips[before] = to
        self.publish(digest)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.booleans()),
        st.tuples(st.just("restart"), st.booleans(), st.booleans(), st.booleans()),
    ),
    max_size=40,
)


@given(EVENTS)
def test_whatever_restarts_come_to_no_version_is_reused_and_steps_can_be_counted(events: list[tuple[str, ...]]) -> None:
    run, bytes_of = Run(), iter(range(1000))
    digest = "first"
    for kind, *how in events:
        if kind == "step":
            digest = str(next(bytes_of))
            run.step(digest, announced=bool(how[0]))
        else:
            same, log_lost, bus_forgot = how
            digest = digest if same else str(next(bytes_of))
            run.restart(digest, log_lost=bool(log_lost), bus_forgot=bool(bus_forgot))
        assert after_skips(run.version, run.skips) == run.version
        assert all(staleness(run.version, version) >= 0 for version in run.published)
    made, version = 0, after_skips(0, run.skips)
    while made < run.steps:
        made, version = made + 1, after_skips(version + 1, run.skips)
    assert version == run.version, "a later life that repeats all steps comes to the same version"
