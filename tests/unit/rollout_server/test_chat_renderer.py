"""Prompts and their extension: what was sampled stays, id for id, and only what is new is rendered."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from rollout_server.chat.answers import NoChatTemplateError, TemplateError
from rollout_server.chat.detokenizer import TokenTable
from rollout_server.chat.renderer import ChatRenderer, choose_config, model_names
from rollout_server.chat.template import has_template
from services.wire.errors import UsageError
from tests.support.chat_policy import CHAT_TEMPLATE, END_OF_TEXT, TURN_END, build_chat_tokenizer, save_chat_policy
from tests.support.chat_templates import (
    ASKS_FOR_CALLS,
    CHANGES_WHAT_IS_BEFORE,
    CLOSES_BY_THE_NEXT,
    CLOSES_IN_TEXT,
    DROPS_REASONING,
)
from trainer.sft.tiny_model import build_tokenizer

DOCS = Path(__file__).parents[3] / "docs"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
TOKENIZER = build_chat_tokenizer()
END, OTHER_END = TOKENIZER.convert_tokens_to_ids([TURN_END, END_OF_TEXT])
QUESTION = {"role": "user", "content": "the weather?"}
ASKED = [{"role": "system", "content": "Be brief."}, QUESTION]


def renderer(template: str | None = CHAT_TEMPLATE, name: str = "auto", *, keep_reasoning: bool = True) -> ChatRenderer:
    tokenizer = build_chat_tokenizer()
    tokenizer.chat_template = template
    return ChatRenderer(tokenizer, Path("models/unknown"), name, keep_reasoning=keep_reasoning)


OWN, QWEN3 = renderer(), renderer(name="qwen3")
RENDERERS = {"auto": OWN, "qwen3": QWEN3}
families = pytest.mark.parametrize("family", RENDERERS)


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return ids


def decode(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids))


def by_template(messages: list[dict[str, Any]], tools: Any = None) -> str:
    """What the tokenizer itself makes of the messages."""
    return str(TOKENIZER.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True))


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_prompt_is_what_the_template_says(tools: Any) -> None:
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"x": 1}}}],
    }
    conversation = [*ASKED, called, {"role": "tool", "tool_call_id": "c", "content": "4"}, QUESTION]
    assert decode(OWN.render(conversation, tools)) == by_template(conversation, tools)
    assert OWN.render(conversation, tools) == encode(by_template(conversation, tools))


def test_the_template_of_the_docs_renders_tools_and_what_a_model_called() -> None:
    offered = renderer((DOCS / "examples" / "tools_chat_template.jinja").read_text())
    asked = offered.render(ASKED, TOOLS)
    assert json.dumps(TOOLS[0]) in decode(asked) and "Be brief." in decode(asked)
    answer = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"x": 1}}}],
    }
    replied = {"role": "tool", "tool_call_id": "c", "content": "4"}
    whole = decode(offered.render([*ASKED, called, replied], TOOLS))
    assert whole.startswith(decode(asked) + answer), "the next prompt goes on where the model stopped"
    assert whole.endswith("<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_a_template_is_seen_in_the_folder_without_its_tokenizer_being_loaded(tmp_path: Path) -> None:
    assert not has_template(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    assert not has_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert has_template(tmp_path)
    TOKENIZER.save_pretrained(tmp_path / "as now")
    assert has_template(tmp_path / "as now")


@families
def test_a_prompt_does_not_depend_on_how_the_client_spells_its_messages(family: str) -> None:
    spelled = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {**QUESTION, "refusal": None, "tool_calls": None},
    ]
    assert RENDERERS[family].render(spelled) == RENDERERS[family].render(ASKED)


@families
@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], TemplateError),
        ([{"role": "critic", "content": "x"}], TemplateError),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], TemplateError),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], TemplateError),
        ([{"content": "x"}], UsageError),
        ([{"role": "user", "content": "\ud800"}], UsageError),
        ([{"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}], UsageError),
    ],
)
def test_messages_that_cannot_be_rendered_are_refused(family: str, messages: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        RENDERERS[family].render(messages)


def test_what_the_template_itself_refuses_is_the_clients_error() -> None:
    refusing = renderer('{{ raise_exception("alternate, please") }}')
    with pytest.raises(TemplateError, match="alternate, please") as raised:
        refusing.render(ASKED)
    assert (raised.value.status, raised.value.code) == (400, "template")
    assert refusing.extend(encode("a"), encode("b"), [QUESTION]) is None


def test_a_folder_without_a_template_says_so_only_when_it_is_used_for_chat(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    silent = ChatRenderer.from_folder(tmp_path)
    stream = silent.text_stream()
    assert stream.feed(silent.table._tokenizer.encode("1+2$").ids) == "1+2"
    with pytest.raises(NoChatTemplateError, match="/v1/completions") as raised:
        silent.render(ASKED)
    assert (raised.value.status, raised.value.code) == (400, "no_chat_template")
    assert silent.extend([1], [2], [QUESTION]) is None


def test_a_saved_folder_renders_as_the_tokenizer_it_was_saved_from(tmp_path: Path) -> None:
    save_chat_policy(tmp_path)
    assert ChatRenderer.from_folder(tmp_path).render(ASKED, TOOLS) == OWN.render(ASKED, TOOLS)
    with pytest.raises(UsageError):
        ChatRenderer.from_folder(tmp_path / "nothing")


@families
def test_a_second_prompt_is_the_template_s_where_the_answer_was_canonical(family: str) -> None:
    prompt = RENDERERS[family].render(ASKED)
    extended = RENDERERS[family].extend(prompt, [*encode("fine"), END], [QUESTION])
    assert extended is not None
    assert decode(extended) == by_template([*ASKED, {"role": "assistant", "content": "fine"}, QUESTION])


new_messages = st.lists(
    st.builds(
        lambda role, text: {"role": role, "content": text, **({"tool_call_id": "c"} if role == "tool" else {})},
        st.sampled_from(["user", "tool", "system"]),
        st.text(alphabet="the waé\n", max_size=8),
    ),
    min_size=0,
    max_size=4,
)
ordinary = st.lists(st.integers(0, len(TOKENIZER) - 1).filter(lambda token: token not in (END, OTHER_END)), max_size=20)


@families
@given(ordinary, st.sampled_from([[], [END], [OTHER_END]]), new_messages, st.sampled_from([None, TOOLS]))
def test_an_extended_prompt_begins_with_what_was_sampled_and_adds_what_the_template_adds(
    family: str, sampled: list[int], stop: list[int], new: list[dict[str, Any]], tools: Any
) -> None:
    tested = RENDERERS[family]
    prompt = tested.render(ASKED, tools)
    extended = tested.extend(prompt, [*sampled, *stop], new, tools)
    assert extended is not None
    assert extended[: len(prompt) + len(sampled) + len(stop)] == [*prompt, *sampled, *stop]
    added = decode(extended[len(prompt) + len(sampled) + len(stop) :])
    whole = by_template([*ASKED, {"role": "assistant", "content": "MARK"}, *new], tools)
    expected = whole.partition("MARK")[2]
    # A reasoning that was cut off may be closed before the turn is.
    closed = set(stop) <= set(tested.stop_token_ids)
    assert added.removeprefix("</think>") == (expected.removeprefix(TURN_END) if stop and closed else expected)


@families
@given(st.lists(st.integers(0, len(TOKENIZER) - 1) | st.sampled_from([END, OTHER_END]), max_size=20), new_messages)
def test_a_prompt_extends_whatever_was_sampled_even_past_stop_tokens(
    family: str, sampled: list[int], new: list[Any]
) -> None:
    extended = RENDERERS[family].extend(encode("the weather"), sampled, new)
    assert extended is not None
    assert extended[: len(sampled) + len(encode("the weather"))] == [*encode("the weather"), *sampled]


def test_an_assistant_s_message_is_never_rendered_into_an_extension() -> None:
    for tested in RENDERERS.values():
        assert tested.extend(encode("a"), [END], [{"role": "assistant", "content": "x"}, QUESTION]) is None


def test_a_template_that_closes_a_turn_after_a_space_is_extended() -> None:
    tested = renderer(CLOSES_IN_TEXT)
    assert OTHER_END in tested.stop_token_ids
    prompt = tested.render([QUESTION])
    for sampled, added in (([*encode("fine"), OTHER_END], "[and?] "), (encode("fine"), " <|endoftext|>[and?] ")):
        extended = tested.extend(prompt, sampled, [{"role": "user", "content": "and?"}])
        assert extended is not None
        assert decode(extended) == decode([*prompt, *sampled]) + added
    assert tested.extend(prompt, encode("fine"), [{"role": "system", "content": "and?"}]) is None


def test_a_template_that_closes_a_turn_with_the_next_role_s_marker_is_extended(tmp_path: Path) -> None:
    tokenizer = build_chat_tokenizer()
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer.chat_template = CLOSES_BY_THE_NEXT
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {start}}}')
    tested = ChatRenderer(tokenizer, tmp_path, "auto", keep_reasoning=True)
    for sampled in (encode("fine"), [*encode("fine"), start]):
        extended = tested.extend(encode("a"), sampled, [QUESTION])
        assert extended is not None
        assert decode(extended) == "afine<|im_start|>user\nthe weather?<|im_start|>assistant\n"


def test_a_template_that_takes_tools_answers_only_after_calls_is_extended() -> None:
    answers = [{"role": "tool", "content": text, "tool_call_id": text} for text in ("4", "5")]
    extended = renderer(ASKS_FOR_CALLS).extend(encode("a"), [END], [*answers, QUESTION])
    assert extended is not None
    rest = "<|im_start|>tool:4<|im_end|><|im_start|>tool:5<|im_end|><|im_start|>user:the weather?<|im_end|>"
    assert decode(extended[2:]) == rest


def test_a_template_that_changes_what_is_before_cannot_be_extended() -> None:
    assert renderer(CHANGES_WHAT_IS_BEFORE).extend(encode("a"), [END], [QUESTION]) is None


def test_sampled_reasoning_is_kept_or_the_template_is_followed_as_asked() -> None:
    for keep, expected in (
        (True, "\n<|im_start|>user\nthe weather?<|im_end|>\n<|im_start|>assistant\n<think>\n"),
        (False, None),
    ):
        extended = renderer(DROPS_REASONING, keep_reasoning=keep).extend(
            encode("a"), [*encode("b</think>"), END], [QUESTION]
        )
        assert (None if extended is None else decode(extended[4:])) == expected
    sampled = [*encode("<think>b</think>c"), END]
    assert QWEN3.extend(encode("a"), sampled, [QUESTION]) is not None
    assert renderer(DROPS_REASONING, "qwen3", keep_reasoning=False).extend(encode("a"), sampled, [QUESTION]) is None


def test_text_that_looks_like_the_stand_in_answer_is_not_taken_for_it() -> None:
    sly = {"role": "user", "content": "rollmeshANSWERrollmesh"}
    extended = OWN.extend(encode("a"), [END], [sly])
    assert extended is None or "rollmeshANSWERrollmesh" in decode(extended)


def test_stop_tokens_are_the_tokenizer_s_the_folder_s_and_the_template_s(tmp_path: Path) -> None:
    tokenizer = build_chat_tokenizer()
    tokenizer.eos_token = END_OF_TEXT
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    tested = ChatRenderer(tokenizer, tmp_path, "auto", keep_reasoning=True)
    assert tested.stop_token_ids == (OTHER_END, 7, 8, END)
    assert tested.parse([], [*encode("a"), END, *encode("b")]).content == "a"


def test_an_unknown_renderer_is_refused_with_what_was_perhaps_meant() -> None:
    with pytest.raises(UsageError, match="qwen3"):
        renderer(name="qwen_3")
    with pytest.raises(UsageError, match="does not fit"):
        renderer(name="qwen3.5")


@pytest.mark.parametrize(
    ("folder", "chosen"),
    [
        ("Qwen/Qwen3-8B", "qwen3"),
        ("cache/models--Qwen--Qwen3.5-4B/snapshots/0123", "qwen3.5"),
        ("mine/Qwen3-8B", "default"),
    ],
)
def test_a_known_model_s_folder_gets_its_family_and_others_their_own_template(
    tmp_path: Path, folder: str, chosen: str
) -> None:
    table = TokenTable(TOKENIZER.backend_tokenizer)
    assert choose_config("auto", tmp_path / folder, CHAT_TEMPLATE, table).name == chosen
    assert choose_config("default", tmp_path / folder, CHAT_TEMPLATE, table).name == "default"
    assert "/".join((tmp_path / folder).parts[-2:]) in model_names(tmp_path / folder)


@pytest.mark.parametrize(
    ("tokenizer", "template", "parsers"),
    [
        (TOKENIZER, CHAT_TEMPLATE, ("qwen3", "think")),
        (TOKENIZER, "<function=", ("qwen3.5", "think")),
        (TOKENIZER, "<arg_key>", ("glm", "think")),
        (build_tokenizer(), "", (None, None)),
    ],
)
def test_parsers_are_those_whose_markers_the_vocabulary_has(
    tokenizer: PreTrainedTokenizerFast, template: str, parsers: tuple[str | None, str | None]
) -> None:
    config: Any = choose_config("auto", Path("x"), template, TokenTable(tokenizer.backend_tokenizer))
    assert (config.tool_parser, config.reasoning_parser) == parsers


def test_threads_may_share_a_renderer() -> None:
    def work(turn: int) -> tuple[list[int], list[int] | None, Any]:
        messages = [{"role": "user", "content": f"{turn} " + "the weather " * (turn % 7)}]
        prompt = OWN.render(messages)
        return (
            prompt,
            OWN.extend(prompt, [*encode("fine"), END], messages),
            OWN.parse(prompt, encode(f"a{turn}")).content,
        )

    alone = [work(turn) for turn in range(200)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(200))) == alone
