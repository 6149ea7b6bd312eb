"""What `rollmesh sft --data` reads: columns, settings, which examples are held out, and in which order the rest comes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.environments.base import split_of
from services.config.load import known_keys
from services.policies.training.model_defaults import ModelFacts
from services.wire.errors import UsageError
from services.wire.tasks.tables import read_table
from trainer.sft.columns import Chat, Example, Examples, PromptAnswer, TokenExample, read_examples
from trainer.sft.selection import Order, held_out, place_of, steps_of
from trainer.sft.sft_settings import DataSettings, SftSettings, fit_sft, load_sft_settings

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "sft.md"
FILE = Path("d.jsonl")
MESSAGES = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}]


@pytest.mark.parametrize(
    ("row", "settings", "kind", "example"),
    [
        ({"messages": MESSAGES, "id": 1}, {}, "chat", Chat(MESSAGES)),
        ({"messages": MESSAGES, "tools": None}, {}, "chat", Chat(MESSAGES)),
        ({"messages": MESSAGES, "tools": '[{"type": "function"}]'}, {}, "chat", Chat(MESSAGES, [{"type": "function"}])),
        ({"dialog": MESSAGES, "prompt": "a", "answer": "b"}, {"messages": "dialog"}, "chat", Chat(MESSAGES)),
        ({"prompt": "a", "answer": "b"}, {}, "prompt-answer", PromptAnswer("a", "b")),
        ({"q": "a", "answer": "b"}, {"prompt": "q"}, "prompt-answer", PromptAnswer("a", "b")),
        ({"tokens": [1, 2], "mask": [0, True]}, {}, "tokens", TokenExample([1, 2], [False, True])),
        (
            {"messages": MESSAGES, "prompt": "a", "answer": "b"},
            {"kind": "prompt-answer"},
            "prompt-answer",
            PromptAnswer("a", "b"),
        ),
    ],
)
def test_the_columns_say_what_an_example_is(
    row: dict[str, object], settings: dict[str, object], kind: str, example: Example
) -> None:
    found = read_examples(FILE, [row], DataSettings.model_validate(settings))
    assert (found.kind, list(found.each), list(found.names)) == (kind, [example], ["d.jsonl, row 1"])


@pytest.mark.parametrize(
    ("row", "settings", "complaint"),
    [
        (
            {"text": "x", "id": 1},
            {},
            r"has the columns 'text', 'id', which make no example .*: name yours: data.messages",
        ),
        ({"prompt": "a"}, {}, "which make no example"),
        ({"messages": MESSAGES, "prompt": "a", "answer": "b"}, {}, r"may be chat or prompt-answer: set data.kind=chat"),
        ({"a": "x"}, {"prompt": "q", "answer": "a"}, r"has no column 'q' \(data.prompt\): its columns are 'a'"),
        ({"a": "x"}, {"kind": "tokens"}, r"no column 'tokens' \(data.tokens\) and no 'mask' \(data.mask\)"),
        ({"a": "x"}, {"prompt": "a", "messages": "a"}, r"columns of chat and of prompt-answer are named"),
        ({"prompt": ["a"], "answer": "b"}, {}, r"row 1: column 'prompt' does not hold text .*Expected `str`"),
        ({"prompt": "a", "answer": None}, {}, r"row 1 has no 'answer'"),
        ({"messages": "hi"}, {}, r"row 1: column 'messages' does not hold a list of messages"),
        ({"messages": MESSAGES, "tools": "{"}, {}, r"row 1: column 'tools' is no JSON"),
        ({"tokens": [1], "mask": [1, 0]}, {}, r"row 1: 1 tokens in 'tokens', 2 values in 'mask'"),
        ({"tokens": [1, 2], "mask": [1, 2]}, {}, r"row 1: 'mask' holds something else than 0 and 1"),
        ({"tokens": ["a"], "mask": [1]}, {}, r"row 1: column 'tokens' does not hold a list of token ids"),
    ],
)
def test_columns_that_make_no_example_are_refused_by_name(
    row: dict[str, object], settings: dict[str, object], complaint: str
) -> None:
    with pytest.raises(UsageError, match=complaint):
        read_examples(FILE, [row], DataSettings.model_validate(settings))


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (
            ["trainer.learning_rat=1"],
            "unknown key 'trainer.learning_rat': the nearest known key is 'trainer.learning_rate'",
        ),
        (["trainer.loss.kl=0.1"], "unknown key 'trainer.loss'"),
        (["data.kind=chats"], "data.kind = 'chats' cannot be: did you mean 'chat'"),
        (["steps=3", "epochs=2"], "steps and epochs both say"),
        (
            ["data.held_out=0", "evaluation.keep_best=true"],
            "evaluation.keep_best would have no effect with data.held_out=0",
        ),
        (["trainer.schedule.floor=0.1"], "no effect under schedule.kind=constant"),
        (["trainer.lora.dropout=0.1"], "trainer.lora.dropout"),
    ],
)
def test_settings_that_cannot_be_are_refused(overrides: list[str], complaint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(complaint)):
        load_sft_settings(None, overrides)


def test_settings_come_from_a_file_the_command_line_and_the_model(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("epochs = 2\n[trainer]\nwarmup_steps = 3\n")
    settings, origins = load_sft_settings(file, ["trainer.betas=[0.9, 0.95]"])
    fitted, changed = fit_sft(settings, ModelFacts(8_000_000_000, 4096), cores=8, gpu=True)
    assert (fitted.epochs, fitted.trainer.warmup_steps, fitted.trainer.betas) == (2, 3, (0.9, 0.95))
    assert fitted.trainer.learning_rate == pytest.approx(5.2e-6)
    assert (fitted.model.dtype, fitted.trainer.threads) == ("bfloat16", 8)
    assert changed.keys() == {"trainer.learning_rate", "model.dtype", "trainer.threads"}
    assert (origins["epochs"], origins["trainer.betas"], origins["seed"]) == ("mine.toml", "command line", "default")
    given, _ = load_sft_settings(None, ["trainer.learning_rate=1e-3", "trainer.threads=2"])
    assert fit_sft(given, ModelFacts(8_000_000_000), cores=8, gpu=False) == (given, {})
    small, _ = fit_sft(load_sft_settings(None, [])[0], ModelFacts(100_000), cores=8, gpu=False)
    assert (small.trainer.learning_rate, small.trainer.threads) == (5e-4, 1)


def test_every_setting_is_documented_and_no_other() -> None:
    text = DOCUMENT.read_text(encoding="utf-8").partition("## Training")[2].partition("\n## ")[0]
    table = re.findall(r"^\| `([a-z_.0-9]+)` \|", text, flags=re.MULTILINE)
    of_runs = [key for key in known_keys(SftSettings) if key.startswith("trainer.")]
    assert sorted(table) == sorted(set(known_keys(SftSettings)) - set(of_runs))
    assert set(of_runs) <= set(known_keys())


def test_documented_command_lines_are_understood() -> None:
    lines = re.findall(r"^\$ rollmesh sft (.*)$", DOCUMENT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(lines) > 3
    for line in lines:
        load_sft_settings(None, [word for word in shlex.split(line) if "=" in word])


def written_by(script: str, rows: int, folder: Path) -> Examples:
    """What a script of the docs' examples writes."""
    made = subprocess.run(
        [sys.executable, ROOT / "docs/examples" / script, str(rows)], capture_output=True, check=True, timeout=60
    )
    (folder / "rows.jsonl").write_bytes(made.stdout)
    return read_examples(FILE, read_table(folder / "rows.jsonl"), DataSettings())


def test_the_example_writes_chats(tmp_path: Path) -> None:
    found = written_by("sum_chats.py", 7, tmp_path)
    assert (found.kind, len(found.each)) == ("chat", 7)
    for chat in found.each:
        assert isinstance(chat, Chat)
        assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2
        first, second = (re.findall(r"\d+", message["content"]) for message in chat.messages[1::2])
        assert int(first[0]) + int(first[1]) == int(first[2]) == int(second[0])


def test_the_example_of_tools_calls_the_agents_tool_of_cities_that_training_does_not_ask_about(tmp_path: Path) -> None:
    pytest.importorskip("agents")
    found = written_by("weather_chats.py", 30, tmp_path)
    assert (found.kind, len(found.each)) == ("chat", 30)
    agent = (ROOT / "docs/examples/sdk_agent.py").read_text(encoding="utf-8")
    for chat in found.each:
        assert isinstance(chat, Chat)
        assert [each["role"] for each in chat.messages] == ["system", "user", "assistant", "tool", "assistant"]
        city = chat.messages[1]["content"].removeprefix("How warm is it in ").removesuffix("?")
        call, given = chat.messages[2]["tool_calls"][0]["function"], chat.messages[3]["content"]
        assert (call["name"], call["arguments"]) == ("weather_of", json.dumps({"city": city}))
        assert f'"{city}"' not in agent and given.endswith(f" degrees in {city}")
        assert chat.messages[4]["content"] == given.removesuffix(f" in {city}") + "."
        assert chat.tools[0]["function"]["parameters"]["required"] == ["city"]


def test_the_example_of_letters_writes_their_form_alone(tmp_path: Path) -> None:
    found = written_by("earlier.py", 200, tmp_path)
    assert (found.kind, len(found.each)) == ("prompt-answer", 200)
    right = 0
    for row in found.each:
        assert isinstance(row, PromptAnswer)
        assert row.answer in row.prompt.split() and split_of(row.prompt) == "train"
        right += row.answer == min(row.prompt.split())
    assert 60 < right < 140, "a random one of the two"


texts = st.text(alphabet="ab", max_size=2)
pairs = st.lists(st.builds(PromptAnswer, texts, texts), min_size=1, max_size=8)


@given(pairs, pairs, st.floats(0.05, 0.9))
def test_an_example_is_on_one_side_whatever_else_the_data_holds(
    some: list[Example], others: list[Example], share: float
) -> None:
    places = [place_of(example) for example in some]
    alone, together = held_out(places, share), held_out([*places, *map(place_of, others)], share)
    # All but the one that is held out so that there is any.
    assert all(one or not both for one, both in zip(alone, together, strict=False))
    if any(place < share for place in places):
        assert together[: len(alone)] == alone
    assert held_out(list(reversed(places)), share) == list(reversed(alone))
    by_example: dict[Example, set[bool]] = {}
    for example, out in zip(some, alone, strict=True):
        by_example.setdefault(example, set()).add(out)
    assert all(len(sides) == 1 for sides in by_example.values())
    assert any(alone) and not any(held_out(places, 0.0))


def test_about_the_share_is_held_out() -> None:
    places = [place_of(PromptAnswer(str(number), "x")) for number in range(4000)]
    assert sum(held_out(places, 0.05)) == pytest.approx(200, abs=50)
    assert place_of(Chat(MESSAGES)) != place_of(Chat(MESSAGES, [{"type": "function"}]))


@given(st.integers(1, 40), st.integers(1, 20), st.integers(1, 4), st.integers(0, 3))
def test_each_example_is_trained_on_once_an_epoch(examples: int, size: int, epochs: int, seed: int) -> None:
    order = Order(examples, size, seed, examples * epochs)
    steps = steps_of(examples, size, epochs)
    batches = [order.batch(step) for step in range(steps)]
    assert all(len(batch) == size for batch in batches[:-1]) and 0 < len(batches[-1]) <= size
    flat = [place for batch in batches for place in batch]
    for epoch in range(epochs):
        assert sorted(flat[epoch * examples : (epoch + 1) * examples]) == list(range(examples))
    again = Order(examples, size, seed)
    assert [again.batch(step) for step in range(steps - 1)] == batches[:-1]
    assert len(again.batch(steps)) == size
    assert order.epoch(0) == 1 and order.epoch(steps - 1) <= epochs
