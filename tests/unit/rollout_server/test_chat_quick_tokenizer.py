"""The tokenizer that the kept library is given answers as the folder's own does."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("torch")

from rollout_server.chat.tokenizer import LONG_TEXT, QuickTokenizer, Renderer
from services.wire.errors import UsageError
from tests.support.chat_policy import MARKERS, TURN_END, build_chat_tokenizer

TOKENIZER = build_chat_tokenizer()
QUICK = QuickTokenizer(TOKENIZER)


@pytest.mark.parametrize("text", ["", "<|im_start|>assistant\n", "The answer é <think>", "the weather " * 50])
def test_text_becomes_the_same_tokens_each_time(text: str) -> None:
    for _ in range(2):
        assert QUICK.encode(text, add_special_tokens=False) == TOKENIZER.encode(text, add_special_tokens=False)


def test_what_is_remembered_cannot_be_changed_by_who_gets_it() -> None:
    QUICK.encode("user\n", add_special_tokens=False).clear()
    assert QUICK.encode("user\n", add_special_tokens=False) == TOKENIZER.encode("user\n", add_special_tokens=False)


@pytest.mark.parametrize("skip_special", [False, True])
def test_tokens_become_the_same_text(skip_special: bool) -> None:
    rng = random.Random(1)
    for length in (0, 1, 5, 200):
        ids = [rng.randrange(len(TOKENIZER)) for _ in range(length)]
        assert QUICK.decode(ids, skip_special_tokens=skip_special) == TOKENIZER.decode(
            ids, skip_special_tokens=skip_special
        )


@pytest.mark.parametrize("token", [*MARKERS, TURN_END, "a", "no such token"])
def test_a_tokens_id_is_the_same(token: str) -> None:
    assert QUICK.convert_tokens_to_ids(token) == TOKENIZER.convert_tokens_to_ids(token)
    assert QUICK.convert_tokens_to_ids([token]) == TOKENIZER.convert_tokens_to_ids([token])


def test_whatever_else_is_asked_is_asked_of_the_folders_own() -> None:
    assert (QUICK.eos_token_id, QUICK.all_special_tokens) == (TOKENIZER.eos_token_id, TOKENIZER.all_special_tokens)
    assert (QUICK.chat_template, len(QUICK)) == (TOKENIZER.chat_template, len(TOKENIZER))
    assert QUICK("the", add_special_tokens=False)["input_ids"] == TOKENIZER.encode("the", add_special_tokens=False)


def test_options_and_other_arguments_are_the_folders_owns_business() -> None:
    text = "the weather in the city"
    assert QUICK.encode(text) == TOKENIZER.encode(text)
    cut = QUICK.encode(text, add_special_tokens=False, truncation=True, max_length=3)
    assert cut == TOKENIZER.encode(text, add_special_tokens=False)[:3]
    [first, *_] = TOKENIZER.encode(text, add_special_tokens=False)
    assert QUICK.decode(first) == TOKENIZER.decode([first])
    assert QUICK.decode((first,)) == TOKENIZER.decode([first])


async def test_a_long_text_becomes_the_same_tokens_off_the_event_loop(tmp_path: Path) -> None:
    TOKENIZER.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    renderer = Renderer.from_folder(tmp_path)
    text = "the weather\n" * (LONG_TEXT // 12 + 1)
    assert len(text) > LONG_TEXT
    assert await renderer.encode(text) == TOKENIZER.encode(text, add_special_tokens=False)


def test_a_folder_without_a_tokenizer_that_can_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"tokenizer\.json is missing"):
        Renderer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(UsageError, match=r"tokenizer\.json is no tokenizer \("):
        Renderer.from_folder(tmp_path)
