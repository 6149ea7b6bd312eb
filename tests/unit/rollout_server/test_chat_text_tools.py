"""Tool calls that a model spells in ordinary tokens, and templates that know no tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from rollout_server.chat.answers import TemplateError
from rollout_server.chat.renderer import ChatRenderer, ToolRules
from rollout_server.chat.text_tools import TextFormat, read_calls
from services.wire.errors import UsageError
from tests.support.chat_policy import CHAT_TEMPLATE, MARKERS, build_chat_tokenizer

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
ASKED = [{"role": "user", "content": "the weather?"}]
WITH_SYSTEM = [{"role": "system", "content": "Be brief."}, *ASKED]
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
XML = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"


def plain_tokenizer(template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """The chat policy's vocabulary in which no tag is a token of its own, as SmolLM2's."""
    backend = json.loads(build_chat_tokenizer().backend_tokenizer.to_str())
    backend["added_tokens"] = [each for each in backend["added_tokens"] if each["content"] not in MARKERS]
    from tokenizers import Tokenizer

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(backend)), eos_token="<|im_end|>", chat_template=template
    )


def renderer(parser: TextFormat | None = None, template: str = CHAT_TEMPLATE, *, refuse: bool = True) -> ChatRenderer:
    rules = ToolRules(parser, refuse=refuse)
    return ChatRenderer(plain_tokenizer(template), Path("models/unknown"), "auto", keep_reasoning=True, tools=rules)


HERMES, XML_READER, NONE = renderer("hermes"), renderer("xml"), renderer()


def streamed(tested: ChatRenderer, text: str, tools: Any = TOOLS) -> tuple[list[str], Any]:
    """What a client sees of a streamed answer, piece by piece, and the whole answer."""
    stream = tested.answer_stream(tested.render(ASKED), tools)
    pieces = [stream.feed([token]).content for token in tested._encode(text)]
    rest, answer = stream.finish()
    return [piece for piece in [*pieces, rest.content] if piece], answer


def test_without_a_parser_spelled_calls_are_text() -> None:
    pieces, answer = streamed(NONE, CALL)
    assert ("".join(pieces), answer.content, answer.tool_calls) == (CALL, CALL, ())


@pytest.mark.parametrize(("tested", "call"), [(HERMES, CALL), (XML_READER, XML)], ids=["hermes", "xml"])
def test_spelled_calls_are_read_and_no_part_of_them_is_shown(tested: ChatRenderer, call: str) -> None:
    pieces, answer = streamed(tested, f"Let me see.\n{call}\n{call}")
    assert ("".join(pieces), answer.content) == ("Let me see.", "Let me see.")
    assert len(pieces) > 3, "text is passed on while it is sampled"
    assert [(each.name, each.arguments_json) for each in answer.tool_calls] == [("f", '{"x": 1}')] * 2
    assert streamed(tested, call, None)[1].content == call, "without tools a call is text"


def test_a_list_of_calls_is_read_as_smollm2_writes_them() -> None:
    calls = json.dumps([{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}])
    _, answer = streamed(HERMES, f"<tool_call>{calls}</tool_call>")
    assert [each.name for each in answer.tool_calls] == ["f", "g"]
    assert answer.content is None


@pytest.mark.parametrize(
    "broken",
    [
        "<tool_call>{not json}</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "argum',
        '<tool_call>[{"name": "f"}, 5]</tool_call>',
        "<tool_call></tool_call>",
    ],
)
def test_a_spelled_call_that_cannot_be_made_stays_visible(broken: str) -> None:
    assert streamed(HERMES, broken)[1].content == broken
    content = streamed(HERMES, f"Yes.\n{CALL}\n{broken}")[1]
    assert (content.content, [each.name for each in content.tool_calls]) == (f"Yes.\n{broken}", ["f"])


def test_what_only_looks_like_a_call_at_first_is_content() -> None:
    text = "a < b, <tool> and <tool_cal"
    pieces, answer = streamed(HERMES, text)
    assert ("".join(pieces), answer.content) == (text, text)


def test_a_stop_string_ends_the_content_and_not_a_call() -> None:
    stream = HERMES.answer_stream(HERMES.render(ASKED), TOOLS, ["END"])
    seen = stream.feed(HERMES._encode("so <END"))
    rest, answer = stream.finish()
    assert (seen.content + rest.content, answer.content, stream.stopped) == ("so <", "so <", "END")
    stream = HERMES.answer_stream(HERMES.render(ASKED), TOOLS, ["name"])
    stream.feed(HERMES._encode(CALL))
    assert [each.name for each in stream.finish()[1].tool_calls] == ["f"]
    assert stream.stopped is None


parts = st.lists(
    st.sampled_from(
        [CALL, XML, "<tool_call>", "</tool_call>", "<tool", "_call>", "text ", "\n", "<think>", "</think>", "é"]
    ),
    max_size=6,
)


@given(parts, st.randoms(use_true_random=False))
def test_the_pieces_of_a_stream_add_up_to_the_answer_however_it_is_cut(texts: list[str], chance: Any) -> None:
    ids = HERMES._encode("".join(texts))
    answers = []
    for _ in range(2):
        stream, at, seen = HERMES.answer_stream(HERMES.render(ASKED), TOOLS, new_call_id=lambda: "c"), 0, ""
        while at < len(ids):
            take = chance.randint(1, 5)
            seen += stream.feed(ids[at : at + take]).content
            at += take
        rest, answer = stream.finish()
        assert seen + rest.content == (answer.content or "")
        answers.append(answer)
    assert answers[0] == answers[1]


@given(st.text(), st.sampled_from(["hermes", "xml"]))
def test_any_text_is_read(text: str, form: TextFormat) -> None:
    content, attempts = read_calls(f"{text}<tool_call>{text}", form)
    assert text.startswith(content)
    assert attempts


def test_a_text_parser_beside_a_family_that_reads_calls_itself_is_refused() -> None:
    with pytest.raises(UsageError, match="tool_parser"):
        ChatRenderer(
            build_chat_tokenizer(), Path("m"), "qwen3", keep_reasoning=True, tools=ToolRules("hermes", refuse=True)
        )


def test_where_the_tags_are_tokens_the_setting_finds_calls_by_them() -> None:
    tested = ChatRenderer(build_chat_tokenizer(), Path("m"), "auto", keep_reasoning=True, tools=ToolRules("xml"))
    assert [each.arguments_json for each in streamed(tested, XML)[1].tool_calls] == ['{"x": 1}']


def test_a_template_that_knows_tools_takes_them() -> None:
    for messages in (ASKED, WITH_SYSTEM):
        HERMES.check_tools(messages)


def test_a_template_that_knows_none_refuses_them_or_warns_once(capsys: pytest.CaptureFixture[str]) -> None:
    blind = CHAT_TEMPLATE.replace("tools", "nothing")
    with pytest.raises(TemplateError, match="does not render `tools`") as refused:
        renderer("hermes", blind).check_tools(ASKED)
    assert refused.value.status == 400
    warned = renderer("hermes", blind, refuse=False)
    for _ in range(3):
        warned.check_tools(ASKED)
    assert capsys.readouterr().out.count("does not render `tools`") == 1


def test_a_template_that_knows_tools_in_a_system_message_alone_refuses_them_elsewhere() -> None:
    only = '{% if messages[0].role == "system" %}{{ tools }}{% endif %}{{ messages[-1].content }}'
    tested = renderer("hermes", only)
    tested.check_tools(WITH_SYSTEM)
    with pytest.raises(TemplateError):
        tested.check_tools(ASKED)


def test_calls_that_nobody_reads_are_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    tested = renderer()
    for _ in range(2):
        tested.check_tools(ASKED)
    assert capsys.readouterr().out.count("rollout.tool_parser") == 1
