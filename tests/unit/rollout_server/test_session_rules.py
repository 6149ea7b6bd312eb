"""The small rules of a session: keys, rewards, whose sampling holds, prefixes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_server.completions.sampling import choose_sampling, within
from rollout_server.sessions.capture import PrefixIndex
from rollout_server.sessions.session import Reward, Rewards
from services.security.keys import SessionKeys, read_key
from services.wire.errors import UsageError
from services.wire.openai_api import ChatCall
from services.wire.rollout_api import SamplingLimits

names = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._:-]{0,127}\Z")
MESSAGE = {"role": "user", "content": "hello"}


@given(names, st.binary(min_size=32, max_size=32), st.text(max_size=8))
def test_a_key_opens_its_session_and_nothing_else_does(name: str, secret: bytes, more: str) -> None:
    keys = SessionKeys(secret)
    key = keys.issue(name)
    assert keys.session_of(key) == name
    assert SessionKeys(secret[::-1] + b"!").session_of(key) is None
    for forged in (key[:-1], key + "0", key.removeprefix("rs-"), f"rs-{more}", key.replace(name, name + "x"), "rs-"):
        assert keys.session_of(forged) is None


def test_rewards_add_up_by_name_and_the_last_word_holds() -> None:
    rewards = Rewards()
    assert not rewards.given
    rewards.calls["a"] = Reward(1.0, {"x": 1.0})
    rewards.calls["a"] = Reward(2.0, {"x": 2.0})
    rewards.session = Reward(0.5, {"x": 0.5, "y": 1.0})
    assert (rewards.given, rewards.total, rewards.components) == (True, 2.5, {"x": 2.5, "y": 1.0})


def test_the_sessions_word_holds_over_the_calls_and_the_smaller_limit_of_both() -> None:
    limits = SamplingLimits(temperature=1.0, max_tokens=50, stop_token_ids=[7])
    call = ChatCall(messages=[MESSAGE], temperature=0.1, top_p=0.5, stop_token_ids=[9])  # type: ignore[list-item]
    chosen = choose_sampling(limits, call, 80, [3], 2048)
    assert (chosen.temperature, chosen.top_p, chosen.max_tokens) == (1.0, 0.5, 50)
    assert chosen.stop_token_ids == (7, 3)
    assert choose_sampling(limits, call, 20, [3], 2048).max_tokens == 20
    assert choose_sampling(SamplingLimits(), call, None, [3], 2048).max_tokens == 2048
    assert choose_sampling(SamplingLimits(), call, None, [3, 9], 2048).stop_token_ids == (9, 3)


def test_a_cut_limit_cuts_the_least_number_of_tokens_too() -> None:
    sampling = choose_sampling(SamplingLimits(min_tokens=10, max_tokens=20), ChatCall(messages=[MESSAGE]), None, (), 99)  # type: ignore[list-item]
    cut = within(sampling, 5)
    assert (cut.max_tokens, cut.min_tokens) == (5, 5)
    assert within(sampling, 20) is sampling


@given(st.lists(st.binary(max_size=6), max_size=20), st.binary(max_size=12))
def test_the_longest_remembered_prefix_is_found(remembered: list[bytes], asked: bytes) -> None:
    index: PrefixIndex[int] = PrefixIndex()
    for number, sequence in enumerate(remembered):
        index.add(sequence, number)
    fitting = [sequence for sequence in remembered if asked.startswith(sequence)]
    found = index.longest(asked)
    if not fitting:
        assert found is None
        return
    best = max(fitting, key=len)
    assert found == (remembered.index(best), len(best))  # of equal ones the first


@pytest.mark.parametrize("content", [b"", b"short", b"two words of some length", b"\xff" * 20])
def test_a_file_without_a_usable_key_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(UsageError):
        read_key(tmp_path / "key")
    with pytest.raises(UsageError):
        read_key(tmp_path / "nowhere")


def test_a_key_is_read_without_the_line_break(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("0123456789abcdef\n")
    assert read_key(tmp_path / "key") == "0123456789abcdef"
