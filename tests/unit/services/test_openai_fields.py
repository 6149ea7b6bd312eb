"""Every field of an OpenAI call is served, without effect, or refused by name: none is ignored that changes anything."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from services.wire import openai_api
from services.wire.openai_api import ChatCall, CompletionCall, Sampled

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
TEXT: dict[str, Any] = {"prompt": "x"}
CALLS: dict[type[Sampled], dict[str, Any]] = {ChatCall: CHAT, CompletionCall: TEXT}
calls = pytest.mark.parametrize("kind", CALLS)

ASKED: dict[str, Any] = {
    "add_generation_prompt": False,
    "add_special_tokens": True,
    "allowed_token_ids": [5],
    "bad_words": ["no"],
    "best_of": 4,
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"enable_thinking": False},
    "continue_final_message": True,
    "documents": [{"title": "a", "text": "b"}],
    "echo": True,
    "guided_choice": ["a", "b"],
    "guided_json": {},
    "guided_regex": "a+",
    "guided_of_another_version": "x",
    "include_stop_str_in_output": True,
    "logit_bias": {"5": 1.0},
    "logits_processors": ["x"],
    "prompt_logprobs": 0,
    "repetition_detection": {"max_pattern_size": 3},
    "response_format": {"type": "json_object"},
    "skip_special_tokens": False,
    "structured_outputs": {"choice": ["a"]},
    "suffix": "end",
    "thinking_token_budget": 10,
    "truncate_prompt_tokens": 10,
    "use_beam_search": True,
    "watermarking": True,
}
SAME: dict[str, list[Any]] = {
    "add_generation_prompt": [True],
    "add_special_tokens": [False],
    "bad_words": [[]],
    "best_of": [1],
    "chat_template_kwargs": [{}],
    "continue_final_message": [False],
    "echo": [False],
    "length_penalty": [1.0, 2.0],
    "response_format": [{"type": "text"}],
    "skip_special_tokens": [True],
    "suffix": [""],
    "use_beam_search": [False],
    "user": ["somebody"],
    "quantum": [{"entangled": True}],
}


def fields_of(path: str, name: str) -> set[str]:
    """The fields of a request class of the installed vLLM, read from its source: importing it costs ten seconds."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    source = Path(found.origin).parent / "entrypoints" / "openai" / path / "protocol.py"
    (request,) = [
        node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name
    ]
    return {
        node.target.id
        for node in request.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_")
    }


@pytest.mark.parametrize(
    ("path", "name", "call"),
    [("chat_completion", "ChatCompletionRequest", ChatCall), ("completion", "CompletionRequest", CompletionCall)],
)
def test_every_field_of_the_installed_vllm_is_decided_upon(path: str, name: str, call: type[Sampled]) -> None:
    fields = fields_of(path, name)
    assert len(fields) > 40
    decided = {*call.model_fields, *openai_api.IGNORED, *openai_api.REFUSED}
    assert fields - decided == set(), "say in services/wire/openai_api.py what becomes of them"


def test_no_field_is_decided_upon_twice() -> None:
    ignored, refused = set(openai_api.IGNORED), set(openai_api.REFUSED)
    for call in CALLS:
        assert not ignored & refused and not (ignored | refused) & set(call.model_fields)


@calls
@pytest.mark.parametrize("name", ASKED)
def test_what_would_change_prompt_sampling_or_answer_is_refused_by_name(kind: type[Sampled], name: str) -> None:
    if (kind, name) in {(ChatCall, "best_of"), (CompletionCall, "prompt_logprobs")}:
        return
    assert kind.model_validate(CALLS[kind] | {name: ASKED[name]}).unsupported() == [name]


@calls
@pytest.mark.parametrize("name", [*SAME, *ASKED])
def test_what_means_the_same_as_nothing_is_taken(kind: type[Sampled], name: str) -> None:
    for value in [None, *SAME.get(name, [])]:
        assert kind.model_validate(CALLS[kind] | {name: value}).unsupported() == []


def test_zero_is_not_false() -> None:
    assert openai_api.refused({"watermarking": 0, "echo": False, "seed": 0}) == ["watermarking"]


def test_all_that_is_refused_is_named() -> None:
    call = CompletionCall.model_validate(TEXT | {"n": 2, "best_of": 3, "echo": True, "bad_words": ["x"]})
    assert set(call.unsupported()) == {"best_of", "echo", "bad_words"}
    assert CompletionCall.model_validate(TEXT | {"n": 2, "best_of": 2}).unsupported() == []
    assert ChatCall.model_validate(CHAT | {"tool_choice": "required"}).unsupported() == ["tool_choice"]
