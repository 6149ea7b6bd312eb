"""Examples as tokens: what is learned, and that a conversation is the one that a rollout server would have held."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_server.chat.renderer import ChatRenderer
from rollout_server.chat.tokenizer import Renderer
from services.wire.errors import UsageError
from tests.support.chat_policy import CHAT_TEMPLATE, TURN_END, build_chat_tokenizer
from tests.support.chat_templates import (
    ASKS_FOR_CALLS,
    CHANGES_WHAT_IS_BEFORE,
    CLOSES_BY_THE_NEXT,
    CLOSES_IN_TEXT,
    CLOSES_THE_LAST_OTHERWISE,
    DROPS_REASONING,
    ENDS_IN_TEXT,
)
from trainer.sft.columns import Chat, Example, Examples, PromptAnswer, TokenExample
from trainer.sft.encoding import EncodedRow, ExampleEncoder
from trainer.sft.tiny_model import build_tokenizer

TOKENIZER = build_chat_tokenizer()
END = TOKENIZER.convert_tokens_to_ids(TURN_END)
NOWHERE = Path("models/unknown")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
USER, THANKS = {"role": "user", "content": "the weather?"}, {"role": "user", "content": "and\nthe city?"}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def encoder(template: str | None = CHAT_TEMPLATE, folder: Path = NOWHERE) -> ExampleEncoder:
    tokenizer = build_chat_tokenizer()
    tokenizer.chat_template = template
    return ExampleEncoder(tokenizer, folder, len(tokenizer))


def encoded(example: Example, by: ExampleEncoder | None = None) -> list[EncodedRow]:
    kind = {Chat: "chat", PromptAnswer: "prompt-answer", TokenExample: "tokens"}[type(example)]
    [rows] = (by or encoder()).encode(Examples(kind, [example], ["data.jsonl, row 1"]))  # type: ignore[arg-type]
    return rows


def learned_texts(row: EncodedRow) -> list[str]:
    """The unbroken learned stretches of a row, as text."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.learned.astype(np.int8), [0]])))
    return [str(TOKENIZER.decode(row.token_ids[a:b])) for a, b in edges.reshape(-1, 2)]


def held(
    messages: list[dict[str, Any]],
    sampled: list[list[int]],
    template: str | None,
    tools: Any = None,
    folder: Path = NOWHERE,
) -> list[tuple[list[int], list[bool]]]:
    """The segments of this conversation on a rollout server whose model samples these tokens: ids, and which it sampled."""
    tokenizer = build_chat_tokenizer()
    tokenizer.chat_template = template
    server = ChatRenderer(tokenizer, folder, "auto", keep_reasoning=True)
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    segments: list[tuple[list[int], list[bool]]] = []
    for place, index in enumerate(answers):
        extended = None
        if segments:
            ids, mask = segments[-1]
            before = len(ids) - len(sampled[place - 1])
            new = messages[answers[place - 1] + 1 : index]
            extended = server.extend(ids[:before], ids[before:], new, tools)
        if extended is None:
            prompt = server.render(messages[:index], tools)
            segments.append((prompt, [False] * len(prompt)))
        else:
            segments[-1] = (extended, [*mask, *[False] * (len(extended) - len(mask))])
        ids, mask = segments[-1]
        segments[-1] = ([*ids, *sampled[place]], [*mask, *[True] * len(sampled[place])])
    return segments


def tokens(*texts: str) -> list[int]:
    return [token for text in texts for token in TOKENIZER.encode(text, add_special_tokens=False)]


def assert_as_held(rows: list[EncodedRow], segments: list[tuple[list[int], list[bool]]]) -> None:
    assert [(row.token_ids.tolist(), row.learned.tolist()) for row in rows] == segments


words = st.text(alphabet="the waé\n<", min_size=1, max_size=12)
turns = st.lists(
    st.tuples(st.lists(st.sampled_from(["user", "system", "tool"]), min_size=1, max_size=2), words), max_size=4
)


@given(turns.filter(len), st.data(), st.sampled_from([None, TOOLS]))
def test_a_conversation_has_the_tokens_that_a_rollout_server_gives_it(
    conversation: list[tuple[list[str], str]], data: st.DataObject, tools: Any
) -> None:
    messages: list[dict[str, Any]] = []
    for roles, answer in conversation:
        messages += [{"role": role, "content": data.draw(words)} for role in roles]
        messages.append(said(answer))
    sampled = [[*tokens(answer), END] for _, answer in conversation]
    assert_as_held(encoded(Chat(messages, tools)), held(messages, sampled, CHAT_TEMPLATE, tools))


def test_every_answer_is_learned_with_its_end_and_nothing_else() -> None:
    chat = Chat([{"role": "system", "content": "Be brief."}, USER, said("fine"), THANKS, said("the number"), USER])
    [row] = encoded(chat)
    assert learned_texts(row) == [f"fine{TURN_END}", f"the number{TURN_END}"]
    assert row.token_ids[-1] == END


@pytest.mark.parametrize(
    ("template", "spoken"),
    [
        (CLOSES_IN_TEXT, [("fine", " <|endoftext|>"), ("Paris", " <|endoftext|>")]),
        (DROPS_REASONING, [("\n</think>\n\nfine", TURN_END), ("\n</think>\n\nParis", TURN_END)]),
        (CLOSES_THE_LAST_OTHERWISE, [("fine", "<|endoftext|>"), ("Paris", "<|endoftext|>")]),
        (ENDS_IN_TEXT, [("fine", TURN_END), ("Paris", TURN_END)]),
    ],
)
def test_other_templates_are_followed_as_a_rollout_server_follows_them(
    template: str, spoken: list[tuple[str, str]]
) -> None:
    messages = [USER, said("fine"), THANKS, said("Paris")]
    segments = held(messages, [tokens(*parts) for parts in spoken], template)
    assert_as_held(encoded(Chat(messages), encoder(template)), segments)
    assert len(segments) == (2 if template == CLOSES_THE_LAST_OTHERWISE else 1)


def test_a_turn_that_the_next_one_s_marker_closes_is_learned_with_it(tmp_path: Path) -> None:
    start = TOKENIZER.convert_tokens_to_ids("<|im_start|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [start]}))
    messages = [USER, said("fine"), THANKS, said("Paris")]
    sampled = [[*tokens(answer), start] for answer in ("fine", "Paris")]
    rows = encoded(Chat(messages), encoder(CLOSES_BY_THE_NEXT, tmp_path))
    assert_as_held(rows, held(messages, sampled, CLOSES_BY_THE_NEXT, folder=tmp_path))


@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x": 1}'])
def test_calls_of_tools_are_answers_too(arguments: object) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "content": "4", "tool_call_id": "c"}, said("4 it is")]
    first = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    sampled = [[*tokens(first), END], [*tokens("4 it is"), END]]
    assert_as_held(encoded(Chat(messages, TOOLS)), held(messages, sampled, CHAT_TEMPLATE, TOOLS))
    rows = encoded(Chat(messages), encoder(ASKS_FOR_CALLS))
    assert len(rows) == 1 and len(learned_texts(rows[0])) == 2


def test_reasoning_is_learned_where_the_template_renders_it() -> None:
    answer = {"role": "assistant", "content": "4", "reasoning": "2 and 2"}
    [row] = encoded(Chat([USER, answer, THANKS, answer]))
    assert learned_texts(row) == [f"<think>\n2 and 2\n</think>\n\n4{TURN_END}"] * 2


def test_an_assistant_that_speaks_first_is_context() -> None:
    assert encoded(Chat([said("Hello!")])) == []
    assert encoded(Chat([USER])) == []
    [row] = encoded(Chat([said("Hello!"), USER, said("fine")]))
    assert learned_texts(row) == [f"fine{TURN_END}"]


def test_a_prompt_and_an_answer_are_a_chat_where_the_folder_has_a_template() -> None:
    [chat], [pair] = encoded(Chat([USER, said("fine")])), encoded(PromptAnswer("the weather?", "fine"))
    assert np.array_equal(chat.token_ids, pair.token_ids) and np.array_equal(chat.learned, pair.learned)


def test_a_prompt_and_an_answer_are_plain_text_with_an_end_where_it_has_none(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    plain = ExampleEncoder(tokenizer, tmp_path, len(tokenizer))
    [row] = encoded(PromptAnswer("1+2=", "3"), plain)
    server = Renderer.from_folder(tmp_path).encoder
    assert row.token_ids.tolist() == [*server.encode("1+2="), *server.encode("3"), tokenizer.eos_token_id]
    assert row.learned.tolist() == [False] * 4 + [True] * 2
    with pytest.raises(UsageError, match="no chat template"):
        encoded(Chat([USER, said("fine")]), plain)


def test_given_tokens_are_taken_as_they_are_up_to_the_last_learned_one() -> None:
    [row] = encoded(TokenExample([5, 9, 2, 7], [True, False, True, False]))
    assert (row.token_ids.tolist(), row.learned.tolist()) == ([5, 9, 2], [False, False, True])
    assert encoded(TokenExample([5, 9], [True, False])) == []
    with pytest.raises(UsageError, match=r"row 1: 99999 is no token of the model"):
        encoded(TokenExample([5, 99999], [False, True]))


@pytest.mark.parametrize(
    ("chat", "template", "complaint"),
    [
        (Chat([{"role": "critic", "content": "x"}, said("y")]), CHAT_TEMPLATE, "message 0 has the role 'critic'"),
        (Chat([{"from": "human", "value": "x"}]), CHAT_TEMPLATE, "message 0 has the role None"),
        (Chat([{"role": "user", "content": [{"type": "image_url"}]}, said("y")]), CHAT_TEMPLATE, "else than text"),
        (Chat([USER, {**said(""), "tool_calls": [{"id": "c"}]}]), CHAT_TEMPLATE, "without a function"),
        (Chat([USER, said("x")]), '{{ raise_exception("alternate") }}', "refuses these messages .alternate"),
        (Chat([USER, said("x")]), CHANGES_WHAT_IS_BEFORE, "opens an answer with '1user"),
        (Chat([USER, said("x")], TOOLS), DROPS_REASONING, "does not render tools"),
    ],
)
def test_conversations_that_cannot_be_learned_are_refused_by_row(chat: Chat, template: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=rf"data\.jsonl, row 1: .*{complaint}"):
        encoded(chat, encoder(template))


def test_texts_of_many_examples_are_encoded_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.sft.encoding._AT_ONCE", 3)
    examples = [PromptAnswer(f"{number} the", "fine " * (number % 3 + 1)) for number in range(8)]
    every = encoder().encode(Examples("prompt-answer", examples, [""] * 8))
    for rows, example in zip(every, examples, strict=True):
        [alone], [row] = encoded(example), rows
        assert np.array_equal(alone.token_ids, row.token_ids) and np.array_equal(alone.learned, row.learned)
