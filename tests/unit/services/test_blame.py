"""Which calls are to blame for lost servers: those that had just come, each time; no call ends more than a few servers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.policies.blame import (
    LARGE_BYTES,
    MOST_LEASES,
    MOST_LOSSES,
    SETTLED_S,
    Blame,
    Loss,
    is_suspect,
    quarantine_s,
)

TIMES = st.floats(0.0, 1e6)
LOSSES: st.SearchStrategy[list[Loss | None]] = st.lists(st.sampled_from(["lease", "connection", None]))


@given(sent=TIMES, heard=TIMES)
def test_a_call_that_a_server_has_lived_with_is_no_suspect(sent: float, heard: float) -> None:
    assert is_suspect(sent, heard) == (sent + SETTLED_S > heard) or abs(sent + SETTLED_S - heard) < 1e-6
    assert is_suspect(sent, sent) and is_suspect(sent, 0.0)
    assert not is_suspect(sent, sent + SETTLED_S + 1.0)


@given(losses=LOSSES)
def test_no_call_goes_on_after_it_has_ended_a_few_servers(losses: list[Loss | None]) -> None:
    blame, lost = Blame(), 0
    for loss in losses:
        if not blame.may_go_on:
            break
        blame = blame.after(loss)
        lost += loss is not None
        assert lost <= MOST_LOSSES and blame.leases <= MOST_LEASES
    leases, connections = losses.count("lease"), losses.count("connection")
    if leases < MOST_LEASES and leases + connections < MOST_LOSSES:
        assert blame.may_go_on, "one server that is lost, by whatever, must not fail a call"


@given(loss=st.sampled_from(["lease", "connection", None]), size=st.integers(0, 1 << 30))
def test_a_large_call_waits_until_the_others_have_settled(loss: Loss | None, size: int) -> None:
    waits = quarantine_s(loss, size)
    assert (waits > 0) == (loss == "lease" and size >= LARGE_BYTES)
    # Who was sent on at once is no suspect when the large one comes: a heartbeat was heard after it had settled.
    assert not waits or not is_suspect(0.0, waits - 1.0)
