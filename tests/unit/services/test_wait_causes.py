"""What is named as the cause of a wait, from what was seen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.policies.wait_causes import Cause, SeenGroup, SeenService, find_causes

NOW = 1000.0


def seen(name: str = "s0", **changes: object) -> SeenService:
    fields = {"name": name, "alive": True, "last_heard": NOW - 1.0, "probe": "ready"} | changes
    return SeenService(**fields)  # type: ignore[arg-type]


def group(ordinal: int, server: str = "s0", age_s: float = 5.0, finished: int = 0) -> SeenGroup:
    return SeenGroup(f"g{ordinal}", ordinal, server, NOW - age_s, finished)


def causes(
    services: list[SeenService],
    groups: list[SeenGroup] | None = None,
    *,
    waits: bool = True,
    asking: int = 0,
) -> list[Cause]:
    since = NOW - 3.0 if waits else None
    return find_causes(services, groups or [], trainer_waits_since=since, asking_groups=asking, now=NOW)


def test_a_run_that_goes_on_has_no_cause() -> None:
    assert causes([seen(), seen("s1", running=4, sampled=0, apart_s=3.0)], [group(1)], waits=False) == []


def test_a_silent_server_is_named_with_its_groups_before_anybody_waits() -> None:
    (cause,) = causes([seen(), seen("s1", probe="silent")], [group(3, "s1"), group(2), group(1, "s1")], waits=False)
    assert (cause.kind, cause.service, cause.sure) == ("silent", "s1", True)
    assert [each.ordinal for each in cause.groups] == [1, 3]
    assert cause.since == NOW - 1.0


def test_who_holds_up_most_comes_first_and_among_equals_who_was_heard_longest_ago() -> None:
    services = [seen("a", probe="silent"), seen("b", probe="refused", last_heard=0.0), seen("c", probe="silent")]
    found = causes(services, [group(1, "c")])
    assert [cause.service for cause in found] == ["c", "b", "a"]


def test_a_server_that_answers_while_redis_does_not_hear_of_it_is_told_from_a_dead_one() -> None:
    (cause,) = causes([seen(alive=False)])
    assert cause.kind == "unheard"
    (cause,) = causes([seen(alive=None)], [group(1)])  # It holds no lease, and so lets none run out.
    assert cause.kind == "open_group"


def test_what_a_service_says_of_itself_is_passed_on() -> None:
    (cause,) = causes([seen(probe="not_ready", reasons=("no bus", "no Redis"))])
    assert "no bus; no Redis" in cause.what


def test_an_engine_that_samples_nothing_is_likely_where_nothing_sure_is() -> None:
    stuck = seen("s1", running=3, sampled=0, apart_s=2.5)
    (cause,) = causes([seen(running=2, sampled=70, apart_s=2.5), stuck, seen("s2", running=2)], [group(1)])
    assert (cause.kind, cause.service, cause.sure) == ("draws_nothing", "s1", False)
    (cause,) = causes([seen(probe="silent"), stuck])
    assert cause.service == "s0"


def test_the_oldest_open_group_is_named_where_every_server_is_well() -> None:
    (cause,) = causes([seen(), seen("s1")], [group(9), group(4, "s1", age_s=40.0, finished=3), group(7, "s1")])
    assert (cause.kind, cause.service) == ("open_group", "s1")
    assert "group 4" in cause.what and "40 s" in cause.what and "3 of its siblings" in cause.what
    assert [each.ordinal for each in cause.groups] == [4, 7]


def test_what_the_server_does_meanwhile_explains_the_wait_for_its_group() -> None:
    (cause,) = causes([seen(running=8, sampled=412, apart_s=2.2)], [group(4)])
    assert cause.what.endswith("the engine generates 8 samples (412 tokens in 2.2 s)")
    (cause,) = causes([seen(sampled=0, apart_s=2.2)], [group(4)])
    assert cause.what.endswith("the environment, a tool or a reward is waited for")


def test_what_still_starts_is_said_and_is_no_fault() -> None:
    services = [seen(probe="not_ready", reasons=("loading",)), seen("s1", probe="refused")]
    for waits in (None, NOW - 3.0):
        found = find_causes(services[:1], [], trainer_waits_since=waits, asking_groups=0, now=NOW, starting=True)
        assert [(cause.kind, cause.sure) for cause in found] == [("starting", False)]
        assert "s0 is not ready yet: loading" in found[0].what
    found = find_causes(services, [], trainer_waits_since=None, asking_groups=0, now=NOW, starting=True)
    assert {(cause.kind, cause.sure) for cause in found} == {("starting", False), ("gone", True)}


def test_a_server_that_has_sampled_does_not_start_any_more() -> None:
    """Of a standing plane, where no trainer makes a step."""
    services = [seen(probe="not_ready", reasons=("the engine has failed",), worked=True)]
    (found,) = find_causes(services, [], trainer_waits_since=None, asking_groups=0, now=NOW, starting=True)
    assert (found.kind, found.sure) == ("not_ready", True)


def test_an_evaluation_before_training_is_no_fault_of_the_environment() -> None:
    found = find_causes(
        [seen(running=8, sampled=90)], [], trainer_waits_since=NOW - 3.0, asking_groups=0, now=NOW, starting=True
    )
    assert [cause.kind for cause in found] == ["evaluates"]
    assert "held-out problems are answered before training" in found[0].what


def test_nobody_plays_only_where_nobody_even_asks() -> None:
    (cause,) = causes([seen()])
    assert (cause.kind, cause.service) == ("nobody_plays", None)
    assert causes([seen()], asking=3) == []


services_seen = st.lists(
    st.builds(
        SeenService,
        name=st.sampled_from(["s0", "s1", "s2"]),
        alive=st.sampled_from([True, False, None]),
        last_heard=st.floats(0.0, NOW),
        probe=st.sampled_from(["ready", "not_ready", "silent", "refused"]),
        reasons=st.just(("why",)),
        running=st.integers(0, 2),
        sampled=st.sampled_from([None, 0, 5]),
    ),
    unique_by=lambda each: each.name,
)
groups_seen = st.lists(
    st.builds(
        SeenGroup,
        group_id=st.just("g"),
        ordinal=st.integers(0, 50),
        held_by=st.sampled_from(["s0", "s1", "elsewhere"]),
        opened_at=st.floats(0.0, NOW),
        finished=st.integers(0, 8),
    ),
    unique_by=lambda each: each.ordinal,
)


@given(services_seen, groups_seen, st.booleans(), st.integers(0, 2))
def test_whoever_does_not_answer_is_always_named_and_guesses_never_stand_beside_it(
    services: list[SeenService], groups: list[SeenGroup], waits: bool, asking: int
) -> None:
    found = causes(services, groups, waits=waits, asking=asking)
    dumb = {each.name for each in services if each.probe != "ready" or each.alive is False}
    assert {cause.service for cause in found if cause.sure} == dumb
    assert not dumb or all(cause.sure for cause in found)
    assert waits or all(cause.sure for cause in found)
    assert all(each.held_by == cause.service for cause in found for each in cause.groups)
