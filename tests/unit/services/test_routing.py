"""Where calls go: loads stay even within the slack, prefixes stay where they were, and one that leaves moves little."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.policies.routing import Candidate, HeartbeatDelta, block_keys, least_loaded, load, place, rendezvous
from tests.support.examples import examples

NAMES = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=8, unique=True)


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate]:
    return [Candidate(name, draw(st.integers(0, 300)), draw(st.integers(0, 256))) for name in draw(NAMES)]


@given(servers=candidates(), key=st.text(), homes=st.sets(st.sampled_from("abcdefghxyz")), slack=st.integers(0, 20))
def test_a_call_goes_to_one_of_the_candidates_and_a_home_is_never_far_above_its_share(
    servers: list[Candidate], key: str, homes: set[str], slack: int
) -> None:
    chosen = place(servers, key, homes, slack)
    assert chosen in servers
    idlest = min(load(each) for each in servers)
    share = idlest * max(chosen.capacity, 1) - 1
    assert chosen.busy <= share + slack or load(chosen) == idlest
    if not homes & {each.name for each in servers}:
        assert load(chosen) == idlest
    assert place(list(reversed(servers)), key, homes, slack) == chosen


@examples(200)
@given(
    names=NAMES,
    calls=st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=120),
    slack=st.integers(0, 12),
)
def test_loads_stay_within_the_slack_whatever_shares_a_prefix(
    names: list[str], calls: list[tuple[int, bool]], slack: int
) -> None:
    """A call of a prefix goes where the prefix is; the oldest ones end now and then."""
    busy = dict.fromkeys(names, 0)
    homes: dict[int, list[str]] = {}
    running: list[str] = []
    for number, (prefix, ends) in enumerate(calls):
        servers = [Candidate(name, busy[name], 64) for name in names]
        chosen = place(servers, str(number), homes.get(prefix, ()), slack).name
        assert busy[chosen] <= min(busy.values()) + slack
        homes.setdefault(prefix, []).append(chosen)
        busy[chosen] += 1
        running.append(chosen)
        if ends:
            busy[running.pop(0)] -= 1


@given(names=NAMES, prefix=st.text(), slack=st.integers(1, 12))
def test_a_prefix_stays_at_one_server_while_the_loads_allow(names: list[str], prefix: str, slack: int) -> None:
    busy = dict.fromkeys(names, 0)
    homes: list[str] = []
    for number in range(slack + 1):
        chosen = place([Candidate(name, busy[name], 64) for name in names], f"{prefix}{number}", homes, slack).name
        homes.append(chosen)
        busy[chosen] += 1
    assert len(set(homes)) == 1


def test_every_server_gets_work_and_a_bigger_one_gets_more() -> None:
    busy = {"small": 0, "small too": 0, "big": 0}
    capacity = {"small": 32, "small too": 32, "big": 128}
    for number in range(192):
        chosen = least_loaded([Candidate(name, busy[name], capacity[name]) for name in busy], str(number))
        busy[chosen.name] += 1
    assert busy == {"small": 32, "small too": 32, "big": 128}


def test_calls_one_after_the_other_do_not_all_go_to_the_first_server() -> None:
    idle = [Candidate(name, 0, 64) for name in "abcd"]
    counts = Counter(least_loaded(idle, f"call {number}").name for number in range(2000))
    assert set(counts) == set("abcd")
    assert min(counts.values()) > 400


@given(names=NAMES.filter(lambda names: len(names) > 1), gone=st.integers(0, 7))
def test_a_server_that_leaves_moves_its_own_keys_only(names: list[str], gone: int) -> None:
    left = names[gone % len(names)]
    rest = [name for name in names if name != left]
    for number in range(60):
        before = rendezvous(f"key {number}", names)
        after = rendezvous(f"key {number}", rest)
        assert after == before if before != left else after in rest


def test_keys_are_shared_evenly() -> None:
    counts = Counter(rendezvous(f"session {number}", "abc") for number in range(3000))
    assert min(counts.values()) > 850


@given(
    ids=st.lists(st.integers(0, 300_000), max_size=40),
    others=st.lists(st.integers(0, 300_000), max_size=40),
    block=st.integers(1, 5),
)
def test_prompts_share_as_many_keys_as_whole_blocks(ids: list[int], others: list[int], block: int) -> None:
    shared = next((at for at, pair in enumerate(zip(ids, others, strict=False)) if pair[0] != pair[1]), None)
    shared = min(len(ids), len(others)) if shared is None else shared
    keys, other_keys = block_keys(ids, block, 100), block_keys(others, block, 100)
    assert len(keys) == len(ids) // block
    same = [one == other for one, other in zip(keys, other_keys, strict=False)]
    assert same == [True] * (shared // block) + [False] * (len(same) - shared // block)


def test_only_so_many_blocks_are_looked_at() -> None:
    assert len(block_keys(range(1000), 4, 7)) == 7


def test_without_candidates_there_is_no_place() -> None:
    with pytest.raises(ValueError, match="empty"):
        place([], "key", (), 1)


@given(steps=st.lists(st.tuples(st.integers(0, 3), st.integers(-3, 3), st.none() | st.integers(0, 9)), max_size=40))
def test_a_delta_is_what_changed_after_the_heartbeat_however_late_that_is_read(
    steps: list[tuple[int, int, int | None]],
) -> None:
    """Each step: time that passes, a change, and how long ago the heartbeat was that is read then, if one is.

    A heartbeat is half a tick before: never at the time of a change, where it could be either before or after it.
    """
    calls, now, heartbeat = HeartbeatDelta(), 0, -1.0
    changes: list[tuple[int, int]] = []
    for passed, change, age in steps:
        now += passed
        calls.add(change, float(now))
        changes.append((now, change))
        if age is not None:
            heartbeat = max(heartbeat, now - age - 0.5)
            calls.rebase(heartbeat)
        assert calls.delta == sum(each for at, each in changes if at > heartbeat)
        assert calls.count == sum(each for _, each in changes)
