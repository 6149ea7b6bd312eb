"""Answers as messages and as streams: one and the same, whatever tokens were sampled."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_server.chat.answer_stream import MOST_UNREAD, AnswerDelta, AnswerStream
from rollout_server.chat.answers import AnswerGrammar, ParsedAnswer
from rollout_server.chat.detokenizer import StopStrings, TokenTable
from rollout_server.chat.renderer import ChatRenderer
from tests.support.chat_policy import TURN_END, build_chat_tokenizer

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
OPENING, THINKING = "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"


def renderer(name: str) -> ChatRenderer:
    return ChatRenderer(build_chat_tokenizer(), Path("models/unknown"), name, keep_reasoning=True)


RENDERERS = {name: renderer(name) for name in ("auto", "qwen3")}
TOKENIZER = build_chat_tokenizer()
BYTES = {text: index for text, index in TOKENIZER.get_vocab().items() if len(text) == 1}
END = TOKENIZER.convert_tokens_to_ids(TURN_END)
families = pytest.mark.parametrize("family", RENDERERS)


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return ids


def spelled(text: str) -> list[int]:
    """The text in one token a byte: what no tokenizer would give."""
    return [BYTES[piece] for token in TOKENIZER.convert_ids_to_tokens(encode(text)) for piece in token]


def call(arguments: str = '{"x": 1}', name: str = "f") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def parse(family: str, text: str, tools: Any = TOOLS, prompt: str = OPENING) -> tuple[Any, Any, list[tuple[str, str]]]:
    answer = RENDERERS[family].parse(encode(prompt), encode(text), tools)
    return answer.content, answer.reasoning_content, [(one.name, one.arguments_json) for one in answer.tool_calls]


@families
@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        ("", "", None, []),
        ("It is.<|im_end|>", "It is.", None, []),
        ("It is", "It is", None, []),
        ("<think>\nHm é\n</think>\n\nIt is.<|im_end|>", "It is.", "Hm é", []),
        ("<think>\nHm and then", "", "Hm and then", []),
        (f"{call()}<|im_end|>", None, None, [("f", '{"x": 1}')]),
        (f"Yes.\n{call()}\n{call('{}', 'g')}<|im_end|>", "Yes.", None, [("f", '{"x": 1}'), ("g", "{}")]),
        (f"<think>\nHm\n</think>\n\n{call()}<|im_end|>", None, "Hm", [("f", '{"x": 1}')]),
        (f"<think>\nnot {call()} yet\n</think>\n\nNo.<|im_end|>", "No.", f"not {call()} yet", []),
        ("It is.<|im_end|>and what an engine may still generate", "It is.", None, []),
        ("a<|im_start|>b", "ab", None, []),
    ],
)
def test_an_answer_falls_into_reasoning_content_and_calls(
    family: str, text: str, content: str | None, reasoning: str | None, calls: list[tuple[str, str]]
) -> None:
    assert parse(family, text) == (content, reasoning, calls)


@families
def test_reasoning_that_the_prompt_opened_ends_where_the_answer_ends_it(family: str) -> None:
    assert parse(family, "Hm\n</think>\n\nYes.", prompt=THINKING) == ("Yes.", "Hm", [])
    assert parse(family, "Hm and", prompt=THINKING) == ("", "Hm and", [])


@families
@pytest.mark.parametrize(
    "broken",
    [
        "<tool_call>\n{not json}\n</tool_call>",
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"x": NaN}}\n</tool_call>',
        '<tool_call>\n{"name": "\\ud800", "arguments": {}}\n</tool_call>',
        '<tool_call>\n"f"\n</tool_call>',
        '<tool_call>\n{"name": "f", "argum',
    ],
)
def test_a_call_that_cannot_be_made_stays_visible(family: str, broken: str) -> None:
    assert parse(family, broken + "<|im_end|>") == (broken, None, [])
    assert parse(family, f"Yes.\n{call()}\n{broken}<|im_end|>") == (f"Yes.\n{broken}", None, [("f", '{"x": 1}')])


@families
def test_without_tools_a_call_is_text(family: str) -> None:
    assert parse(family, f"Yes.\n{call()}<|im_end|>", tools=None) == (f"Yes.\n{call()}", None, [])


@families
@pytest.mark.parametrize("body", ["[" * 50_000, '{"name": "f", "arguments": {"x": ' + "9" * 5_000 + "}}"])
def test_json_beyond_what_the_library_guards_against_is_text(family: str, body: str) -> None:
    content, reasoning, calls = parse(family, f"<tool_call>{body}</tool_call>")
    assert (reasoning, calls) == (None, [])
    assert body in content


@families
def test_arguments_are_always_a_json_object_that_utf8_can_carry(family: str) -> None:
    _, _, [(_, quoted)] = parse(family, call(r'"{\"x\": 1}"'))
    assert json.loads(quoted) == {"x": 1}
    _, _, [(_, escaped)] = parse(family, call(r'{"x": "\ud800"}'))
    escaped.encode()
    assert json.loads(escaped) == {"x": "\ud800"}


plain_text = st.lists(
    st.sampled_from(["the weather", " and", "é", ".\n", "}\n", "€", "\n\n", " ", "{", "<thi", "0"]), max_size=6
).map("".join)
arguments = st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=4) | st.none(), max_size=3)


@families
@given(plain_text, plain_text, st.lists(arguments, max_size=3), st.data())
def test_what_was_said_is_read_back_however_it_was_tokenised(
    family: str, reasoning: str, content: str, calls: list[dict[str, Any]], data: st.DataObject
) -> None:
    said = [call(json.dumps(one)) for one in calls]
    parts = [f"<think>\n{reasoning}\n</think>\n\n" if reasoning.strip() else "", content, "".join(said)]
    markers = r"<think>", "</think>", "<tool_call>", "</tool_call>"
    ids: list[int] = []
    for piece in _split("".join(parts), markers):
        ids += encode(piece) if piece in markers or data.draw(st.booleans()) else spelled(piece)
    answer = RENDERERS[family].parse(encode(OPENING), [*ids, END], TOOLS)
    assert (answer.content or "").strip() == content.strip()
    assert answer.reasoning_content == (reasoning.strip() or None)
    assert [json.loads(one.arguments_json) for one in answer.tool_calls] == calls


def _split(text: str, markers: Sequence[str]) -> list[str]:
    """The text in pieces: markers, and what is between them."""
    pieces = [text]
    for marker in markers:
        cut = [piece.split(marker) if piece not in markers else [piece] for piece in pieces]
        pieces = [one for parts in cut for one in [*itertools.chain(*((part, marker) for part in parts))][:-1]]
    return [piece for piece in pieces if piece]


PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "<|im_start|>"]
PIECES += ["\n", " ", "\n\n", "a", "{", "é", "the weather", '{"name": "f", "arguments": {}}']
SPACE_AFTER_TEXT = [[TOKENIZER.convert_tokens_to_ids(token)] for token in (".Ċ", "}Ċ")]
sampled = st.lists(
    st.sampled_from([*map(encode, PIECES), spelled("the weather é"), *SPACE_AFTER_TEXT])
    | st.lists(st.integers(0, len(TOKENIZER) + 2), max_size=3),
    max_size=12,
).map(lambda pieces: [token for piece in pieces for token in piece])


@families
@given(
    sampled,
    st.sampled_from([OPENING, THINKING]),
    st.sampled_from([TOOLS, None]),
    st.lists(st.integers(0, 60), max_size=8),
)
def test_the_deltas_add_up_to_the_answer_that_is_parsed_whole(
    family: str, ids: list[int], prompt: str, tools: Any, cuts: list[int]
) -> None:
    stream = RENDERERS[family].answer_stream(encode(prompt), tools)
    places = sorted({0, len(ids), *(place % (len(ids) + 1) for place in cuts)})
    deltas = [stream.feed(ids[start:end]) for start, end in itertools.pairwise(places)]
    rest, answer = stream.finish()
    whole = RENDERERS[family].parse(encode(prompt), ids, tools)
    content, reasoning, calls = added_up([*deltas, rest])
    assert content == (answer.content or "") == (whole.content or "")
    assert reasoning == (answer.reasoning_content or "") == (whole.reasoning_content or "")
    assert calls == called(answer) == called(whole)
    assert not any("<|im_" in delta.content + delta.reasoning_content for delta in deltas)
    assert not any("<tool_call>" in delta.content for delta in deltas)
    # Where nobody looks before the end, it is the same answer.
    unseen = RENDERERS[family].answer_stream(encode(prompt), tools, whole=True)
    assert not any([unseen.feed(ids[start:end]) for start, end in itertools.pairwise(places)])
    said, alike = unseen.finish()
    assert (alike.content, alike.reasoning_content, called(alike)) == (
        answer.content,
        answer.reasoning_content,
        called(answer),
    )
    assert added_up([said]) == (content, reasoning, calls)


@families
def test_a_long_answer_does_not_wait_for_its_end_to_be_read(family: str) -> None:
    ids = encode("<think>Hm</think>") + (encode("the weather and é ") * 400)[: 3 * MOST_UNREAD]
    stream = RENDERERS[family].answer_stream(encode(OPENING), TOOLS, whole=True)
    deltas = [stream.feed(ids[at : at + 64]) for at in range(0, len(ids), 64)]
    rest, answer = stream.finish()
    assert any(deltas[: MOST_UNREAD // 64 + 1]), "what has waited is read together"
    assert sum(map(bool, deltas)) > len(deltas) // 2, "and the rest as it comes"
    assert answer == RENDERERS[family].parse(encode(OPENING), ids, TOOLS)
    assert added_up([*deltas, rest])[:2] == (answer.content, answer.reasoning_content)
    assert stream.consumed == len(ids)


def added_up(deltas: Sequence[AnswerDelta]) -> tuple[str, str, list[tuple[str, str]]]:
    return (
        "".join(delta.content for delta in deltas),
        "".join(delta.reasoning_content for delta in deltas),
        [(one.name, one.arguments) for delta in deltas for one in delta.tool_calls],
    )


def called(answer: ParsedAnswer) -> list[tuple[str, str]]:
    return [(one.name, one.arguments_json) for one in answer.tool_calls]


@families
@given(sampled, st.sampled_from([OPENING, THINKING]))
def test_a_streamed_answer_is_what_the_familys_own_parser_reads(family: str, ids: list[int], prompt: str) -> None:
    tested = RENDERERS[family]
    ids = [token for token in ids if token not in tested.stop_token_ids]
    library = renderer_of_the_library(family)
    known = [token for token in ids if token not in tested.table.special]
    parsed = library.parse_response(known, tools=TOOLS, prompt_ids=encode(prompt))
    answer = tested.parse(encode(prompt), ids, TOOLS)
    assert (answer.reasoning_content or "") == (parsed.reasoning_content or "").strip()
    shown, expected = (answer.content or "").strip(), parsed.content.strip()
    assert shown.startswith(expected)
    if not parsed.tool_calls:
        assert shown == expected
    assert [one.name for one in answer.tool_calls] == [one.name for one in parsed.tool_calls if one.status == "ok"]


def renderer_of_the_library(family: str) -> Any:
    from renderers import DefaultRendererConfig, create_renderer
    from renderers.configs import config_from_name

    default = DefaultRendererConfig(tool_parser="qwen3", reasoning_parser="think")
    return create_renderer(TOKENIZER, default if family == "auto" else config_from_name(family))


@families
def test_text_is_passed_on_while_it_is_sampled(family: str) -> None:
    stream = RENDERERS[family].answer_stream(encode(OPENING), TOOLS)
    seen = []
    for token in encode(f"<think>\nHm and\n</think>\n\nYes. And\n{call()}<|im_end|>"):
        delta = stream.feed([token])
        seen += [("reasoning", delta.reasoning_content)] if delta.reasoning_content else []
        seen += [("content", delta.content)] if delta.content else []
    rest, answer = stream.finish()
    assert [text for kind, text in seen if kind == "reasoning"] == ["H", "m", " and"]
    assert "".join(text for kind, text in seen if kind == "content") == "Yes. And"
    assert len([text for kind, text in seen if kind == "content"]) > 3
    assert [(one.index, one.name) for one in rest.tool_calls] == [(0, "f")]
    assert rest.tool_calls[0].id == answer.tool_calls[0].id
    assert not rest.content and not rest.reasoning_content


@families
@given(sampled, st.lists(st.sampled_from(["the", "e a", "\n", "a\n", "é", "weather", "<"]), max_size=2))
def test_stop_strings_end_the_content_and_nothing_else(family: str, ids: list[int], stops: list[str]) -> None:
    tested = RENDERERS[family]
    stream = tested.answer_stream(encode(OPENING), TOOLS, stops)
    deltas = [stream.feed([token]) for token in ids]
    rest, answer = stream.finish()
    content, reasoning, calls = added_up([*deltas, rest])
    assert (content, reasoning, calls) == (answer.content or "", answer.reasoning_content or "", called(answer))
    if stream.stopped is None:
        assert answer == tested.parse(encode(OPENING), ids, TOOLS) or calls
        return
    watch = StopStrings(stops)
    assert watch.feed(content) == content or watch.stopped is None
    # One token less and the answer would have gone on, with the same beginning.
    again = tested.answer_stream(encode(OPENING), TOOLS, stops)
    again.feed(ids[: stream.consumed - 1])
    assert again.stopped is None
    again.feed(ids[stream.consumed - 1 :])
    again.finish()
    assert again.stopped == stream.stopped
    assert again.consumed == stream.consumed


@families
def test_an_answer_ends_before_its_stop_string(family: str) -> None:
    stream = RENDERERS[family].answer_stream(encode(OPENING), TOOLS, ["Obs:"])
    ids = encode("<think>\nObs: no\n</think>\n\nAct. Obs: x")
    shown = [stream.feed([token]).content for token in ids]
    rest, answer = stream.finish()
    assert (stream.stopped, answer.content, answer.reasoning_content) == ("Obs:", "Act. ", "Obs: no")
    assert "".join(shown) + rest.content == "Act. "
    assert TOKENIZER.decode(ids[: stream.consumed]).endswith("Act. Obs:")


@families
def test_a_long_answer_streams_in_linear_time(family: str) -> None:
    prompt, tested = encode(OPENING), RENDERERS[family]

    def seconds(ids: list[int]) -> float:
        stream, started = tested.answer_stream(prompt, TOOLS), time.process_time()
        for token in ids:
            stream.feed([token])
        stream.finish()
        return time.process_time() - started

    words_ = (encode("the weather and é ") * 400)[:2_000]
    assert min(seconds(words_) for _ in range(3)) < 0.05
    # An answer that is all markers asks the grammar no more often than one that is all words, for its length.
    markers = encode("<think>a</think>b<tool_call>c</tool_call>d") * 250
    assert min(seconds(markers) for _ in range(3)) < 0.2


def test_a_family_of_another_grammar_gives_everything_at_the_end_and_still_stops() -> None:
    grammar = AnswerGrammar(
        renderer_of_the_library("auto"), "of another grammar", TokenTable(TOKENIZER.backend_tokenizer), frozenset({END})
    )
    ids = encode("<think>Hm</think>Yes. And the weather")
    stream = AnswerStream(grammar, encode(OPENING), TOOLS)
    assert not stream.feed([*ids, END])
    assert stream.finish()[1] == ParsedAnswer("Yes. And the weather", "Hm")
    stream = AnswerStream(grammar, encode(OPENING), TOOLS, [" And"])
    stream.feed(ids)
    assert (stream.stopped, stream.finish()[1].content) == (" And", "Yes.")
    assert TOKENIZER.decode(ids[: stream.consumed]).endswith("Yes. And")
