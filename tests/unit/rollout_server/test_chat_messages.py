"""Which messages say the same: spelling does not count, what was said does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_server.chat.messages import NO_TOOLS, message_digest, reasoning_digest, tools_digest
from services.wire.errors import UsageError

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def calling(arguments: Any, call_id: str = "c1", name: str = "f") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def test_content_is_the_same_as_string_and_as_parts() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert message_digest(user("Hello")) == message_digest(user(parts)) == message_digest(user(["Hello"]))


def test_no_content_is_the_same_in_all_its_spellings() -> None:
    empty: list[Any] = [None, "", [], [{"type": "text", "text": ""}]]
    assert len({message_digest(user(content)) for content in empty}) == 1
    assert message_digest({"role": "user"}) == message_digest(user(""))


def test_fields_that_clients_add_do_not_count() -> None:
    added = {
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
        "reasoning": "x",
    }
    said = {"role": "assistant", "content": "yes"}
    assert message_digest({**said, **added}) == message_digest(said)


@pytest.mark.parametrize(
    "other",
    [
        {"role": "user", "content": "Hello!"},
        {"role": "system", "content": "Hello"},
        {"role": "user", "content": "Hello", "name": "Ann"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hello"}, {"type": "image_url", "image_url": {"url": "x"}}],
        },
    ],
)
def test_what_was_said_counts(other: dict[str, Any]) -> None:
    assert message_digest(other) != message_digest(user("Hello"))


def test_images_are_told_apart() -> None:
    first, second = ([{"type": "image_url", "image_url": {"url": url}}] for url in ("a", "b"))
    assert message_digest(user(first)) != message_digest(user(second))


@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_arguments_are_compared_as_json_values(arguments: dict[str, Any]) -> None:
    turned = dict(reversed(arguments.items()))
    spellings = [json.dumps(arguments), json.dumps(turned, indent=3), json.dumps(turned, ensure_ascii=False)]
    assert len({message_digest(calling(spelling)) for spelling in spellings}) == 1


def test_arguments_that_are_no_json_are_compared_as_text() -> None:
    assert message_digest(calling('{"a": 1')) == message_digest(calling('{"a": 1'))
    assert message_digest(calling('{"a": 1')) != message_digest(calling('{"a":1'))
    assert message_digest(calling("[" * 100_000)) != message_digest(calling("[" * 99_999))


def test_calls_differ_by_id_name_and_arguments() -> None:
    calls = [
        calling("{}"),
        calling("{}", call_id="c2"),
        calling("{}", name="g"),
        calling('{"a": 1}'),
        calling('{"a": "1"}'),
    ]
    assert len({message_digest(call) for call in calls}) == len(calls)


def test_a_tool_answer_belongs_to_its_call() -> None:
    first, second = ({"role": "tool", "content": "4", "tool_call_id": call_id} for call_id in ("c1", "c2"))
    assert message_digest(first) != message_digest(second)


def test_reasoning_is_digested_apart_and_only_where_it_was_sent() -> None:
    said = {"role": "assistant", "content": "yes"}
    assert reasoning_digest(said) is None
    assert reasoning_digest({**said, "reasoning_content": " "}) is None
    assert reasoning_digest({**said, "reasoning_content": "Hm.\n"}) == reasoning_digest({**said, "reasoning": "Hm."})
    assert reasoning_digest({**said, "reasoning_content": "Hm."}) != reasoning_digest(
        {**said, "reasoning_content": "Ha."}
    )


def test_tools_differ_by_order_and_not_by_the_order_of_keys() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]
    turned = [dict(reversed(tool.items())) for tool in tools]
    assert tools_digest(tools) == tools_digest(turned) != tools_digest(tools[::-1])
    assert tools_digest(None) == tools_digest([]) == NO_TOOLS


@pytest.mark.parametrize(
    "message",
    [
        user("a\ud800b"),
        user([{"type": "text", "text": "\udfff"}]),
        calling('{"a": "\ud800"}'),
        calling({"a": "\ud800"}),
        {"role": "user", "content": "x", "name": "\ud800"},
        {"role": "\ud800", "content": "x"},
    ],
)
def test_text_that_is_no_unicode_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="lone surrogate"):
        message_digest(message)


def test_an_escaped_surrogate_in_arguments_is_json_and_no_error() -> None:
    assert message_digest(calling('{"a": "\\ud800"}')) != message_digest(calling('{"a": "\\ud801"}'))


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"role": None, "content": "x"},
        user(5),
        user([{"type": "text", "text": 5}]),
        user([{"type": "text"}]),
        {"role": "assistant", "tool_calls": [5]},
        {"role": "assistant", "tool_calls": [{"id": "c"}]},
        {"role": "assistant", "tool_calls": 5},
        {"role": "user", "content": [{"type": "image_url", "x": {1, 2}}]},
    ],
)
def test_what_is_no_message_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        message_digest(message)
