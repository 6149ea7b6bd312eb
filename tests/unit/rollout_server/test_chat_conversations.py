"""Which call a request continues: held against plain comparison of lists, and against stories of agents."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_server.chat.conversations import Conversations, Match
from rollout_server.chat.messages import message_digest, reasoning_digest, tools_digest

Said = dict[str, Any]
TOOLS = [{"type": "function", "function": {"name": "search"}}]
OTHER_TOOLS = [{"type": "function", "function": {"name": "fetch"}}]


def said(text: str) -> Said:
    """`S…` is the system's, `U…` the user's, `T…` a tool's, everything else the policy's."""
    role = {"S": "system", "U": "user", "T": "tool"}.get(text[0], "assistant")
    return {"role": role, "content": text}


def talk(*texts: str) -> list[Said]:
    return [said(text) for text in texts]


def remember(
    known: Conversations[str], node: str, *texts: str, tools: Any = None, reasoning: str | None = None
) -> None:
    answer = {"role": "assistant", "content": texts[-1], "reasoning_content": reasoning}
    digests = [message_digest(message) for message in [*talk(*texts[:-1]), answer]]
    known.remember(digests, tools_digest(tools), node, reasoning=reasoning_digest(answer))


def after(*conversations: Sequence[str]) -> Conversations[str]:
    """Conversations whose nodes are their own texts."""
    known: Conversations[str] = Conversations()
    for texts in conversations:
        remember(known, " ".join(texts), *texts)
    return known


FIRST, SECOND = ("S", "U1", "a1"), ("S", "U1", "a1", "U2", "a2")


def test_nothing_remembered_is_no_reason() -> None:
    known: Conversations[str] = Conversations()
    assert known.match(talk("S", "U1"), None) == Match(None, 0, None)


def test_a_request_continues_the_longest_conversation_it_extends() -> None:
    known = after(FIRST, SECOND)
    assert known.match(talk(*SECOND, "T3", "U3"), None) == Match("S U1 a1 U2 a2", 5, None)
    assert known.match(talk(*FIRST, "U9"), None) == Match("S U1 a1", 3, None)


def test_a_request_that_ends_with_an_answer_has_nothing_new() -> None:
    assert after(FIRST).match(talk(*FIRST), None) == Match("S U1 a1", 3, None)


def test_of_equal_conversations_the_first_remembered_is_continued() -> None:
    known: Conversations[str] = Conversations()
    remember(known, "first", *FIRST)
    remember(known, "second", *FIRST)
    assert known.match(talk(*FIRST, "U2"), None).node == "first"
    remember(known, "third", *FIRST)
    assert known.match(talk(*FIRST, "U2"), None).node == "first"


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (talk("S", "U1", "b1", "U2"), "compaction"),  # an answer was edited, or comes from elsewhere
        (talk("S", "U1", "a1", "U2", "b2", "U3"), "compaction"),
        (talk("S", "U1", "U: what happened so far"), "compaction"),
        (talk("S", "U: so far", "a2", "U3"), "compaction"),  # a summary, then what is remembered
        (talk("S2", "U1", "a1", "U2"), "compaction"),
        (talk("S", "U2", "a2", "U3"), "truncated"),
        (talk("S", "a1", "U2", "a2", "U3"), "truncated"),
        (talk("U1", "a1", "U2", "a2", "U3"), "truncated"),  # the system message fell
        (talk("S", "U1"), "branch"),  # asked again
        (talk("S", "U7"), "branch"),
        (talk("S7", "U7"), "branch"),
        (talk("S7", "U7", "b7", "U8"), "branch"),
        (talk("S"), "branch"),
        ([], "branch"),
    ],
)
def test_what_continues_nothing_says_why(request_: list[Said], reason: str) -> None:
    assert after(FIRST, SECOND).match(request_, None) == Match(None, 0, reason)


def test_other_tools_break_a_conversation_that_would_match() -> None:
    known: Conversations[str] = Conversations()
    remember(known, "plain", *FIRST)
    assert known.match(talk(*FIRST, "U2"), TOOLS) == Match(None, 0, "tools_changed")
    remember(known, "with tools", *FIRST, tools=TOOLS)
    assert known.match(talk(*FIRST, "U2"), TOOLS).node == "with tools"
    assert known.match(talk(*FIRST, "U2"), None).node == "plain"
    assert known.match(talk(*FIRST, "U2"), OTHER_TOOLS).reason == "tools_changed"


def test_reasoning_counts_only_where_the_client_sends_it() -> None:
    known: Conversations[str] = Conversations()
    remember(known, "quick", *FIRST, reasoning="easy")
    remember(known, "slow", *FIRST, reasoning="hard")
    for reasoning, node in ((None, "quick"), ("easy\n", "quick"), ("hard", "slow"), ("rewritten", None)):
        request = [*talk("S", "U1"), {**said("a1"), "reasoning_content": reasoning}, said("U2")]
        assert known.match(request, None).node == node
    remember(known, "next", *SECOND)
    request = [*talk("S", "U1"), {**said("a1"), "reasoning_content": "rewritten"}, *talk("U2", "a2", "U3")]
    assert known.match(request, None) == Match(None, 0, "compaction")
    assert known.match(talk(*SECOND, "U3"), None).node == "next"


texts = st.sampled_from(["S", "U1", "U2", "T1", "a1", "a2"])
conversations = st.lists(texts, max_size=5).map(lambda said: [*said, "a1"]) | st.lists(texts, max_size=5).map(
    lambda said: [*said, "a2"]
)
tool_choices = st.sampled_from([None, TOOLS])


def by_comparison(
    known: Sequence[tuple[list[str], Any, int]], asked: list[str], tools: Any
) -> tuple[int | None, int, str | None]:
    """`match` again, by comparing whole lists."""
    if not known:
        return None, 0, None
    answers = [index for index, text in enumerate(asked) if text[0] == "a"]
    until = answers[-1] + 1 if answers else 0
    alike = [(tools_then, node) for texts_then, tools_then, node in known if until and texts_then == asked[:until]]
    for tools_then, node in alike:
        if tools_then == tools:
            return node, until, None
    if alike:
        return None, 0, "tools_changed"
    lead = next((index for index, text in enumerate(asked) if text != "S"), len(asked))
    kept = asked[lead:until]
    stories = [texts_then for texts_then, _, _ in known]
    if kept and any(len(story) > until and story[-len(kept) :] == kept for story in stories):
        return None, 0, "truncated"
    if asked and any(story[: len(asked)] == asked for story in stories):
        return None, 0, "branch"
    shares = any(asked and story[: lead + 1] == asked[: lead + 1] for story in stories)
    given = {story[-1] for story in stories}
    return None, 0, "compaction" if shares or given & set(asked[:until]) else "branch"


@given(st.lists(st.tuples(conversations, tool_choices), max_size=8), st.lists(texts, max_size=8), tool_choices)
def test_a_match_is_what_comparing_whole_lists_finds(
    known: list[tuple[list[str], Any]], asked: list[str], tools: Any
) -> None:
    index: Conversations[int] = Conversations()
    numbered = [(said_then, tools_then, node) for node, (said_then, tools_then) in enumerate(known)]
    for said_then, tools_then, node in numbered:
        index.remember([message_digest(message) for message in talk(*said_then)], tools_digest(tools_then), node)
    found = index.match(talk(*asked), tools)
    assert (found.node, found.new_from, found.reason) == by_comparison(numbered, asked, tools)


@given(st.lists(conversations, min_size=1, max_size=6), st.data())
def test_the_order_of_remembering_does_not_change_what_a_conversation_continues(
    known: list[list[str]], data: st.DataObject
) -> None:
    once = list({" ".join(story): story for story in known}.values())
    shuffled = data.draw(st.permutations(once))
    for story in once:
        asked = talk(*story, "U2")
        assert after(*shuffled).match(asked, None) == after(*once).match(asked, None)


def test_a_long_session_costs_bytes_by_its_messages_not_by_their_square() -> None:
    digests = [message_digest(said(f"{role}{turn}")) for turn in range(400) for role in "Ua"]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        known: Conversations[int] = Conversations()
        for turn in range(400):
            known.remember(digests[: 2 * turn + 2], tools_digest(None), turn)
        after_it, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after_it - before < 400 * 600
    assert known.match(talk("U0", "a0", "U1", "a1", "U9"), None).node == 1
