"""The warm start: only trained parts are learned, its bar is asserted, and equal inputs are trained on once."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.wire.errors import UsageError
from services.wire.tasks.demonstrations import Demonstration, Question
from trainer.sft.accuracy import Sampled, is_right, sample_answers, sampled_accuracy
from trainer.sft.cache import default_cache_dir, deliver, is_delivered, keep, take_cached, warm_start_key
from trainer.sft.data import folder_digest, read_recipe
from trainer.sft.tiny_model import build_model, build_tokenizer, save_policy
from trainer.sft.train import Progress, WarmStartError, _Examples, warm_start

PHASE: dict[str, Any] = {
    "name": "only",
    "file": "only.jsonl",
    "steps": 40,
    "learning_rate": 3e-3,
    "warmup_steps": 5,
    "batch": 16,
    "betas": [0.9, 0.95],
    "weight_decay": 0.01,
    "stop_at_accuracy": None,
    "check_every": 10,
}
RECIPE: dict[str, Any] = {"task": "t", "seed": 1, "phases": [PHASE], "check": "check.jsonl"}


def demonstrations(folder: Path, **changes: object) -> Path:
    """`a=` is answered with `7`, `b=` with `8`; the marker before it is context."""
    folder.mkdir(parents=True)
    lines = [{"parts": [[f"{letter}=", False], [f"{digit}$", True]]} for letter, digit in (("a", 7), ("b", 8))] * 40
    (folder / "only.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    checks = [{"prompt": "a=", "answer": "7"}, {"prompt": "b=", "answer": "8"}] * 8
    (folder / "check.jsonl").write_text("".join(json.dumps(line) + "\n" for line in checks))
    (folder / "recipe.json").write_text(json.dumps({**RECIPE, "phases": [{**PHASE, **changes}]}))
    return folder


def sft(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services", "sft", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_phase_stops_once_its_bar_is_reached(tmp_path: Path) -> None:
    folder = demonstrations(tmp_path / "d", steps=200, stop_at_accuracy=0.95)
    seen: list[Progress] = []
    model = warm_start(folder, read_recipe(folder), 1, seen.append)
    assert seen[-1].step < 200
    assert seen[-1].accuracy is not None and seen[-1].accuracy >= 0.95
    assert all(progress.accuracy is not None and progress.accuracy < 0.95 for progress in seen[:-1])
    again = warm_start(folder, read_recipe(folder), 1, lambda _: None)
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in model.state_dict().items())


def test_a_bar_that_is_not_reached_is_an_error(tmp_path: Path) -> None:
    folder = demonstrations(tmp_path / "d", steps=2, stop_at_accuracy=0.95)
    with pytest.raises(WarmStartError, match=r"phase only reached 0\.\d+ after 2 steps, wanted 0.95"):
        warm_start(folder, read_recipe(folder), 1, lambda _: None)


def test_only_trained_parts_are_in_the_loss() -> None:
    tokenizer = build_tokenizer()
    parts = [[("ab", False), ("c$", True), ("H", False), ("d$", True)], [("ab", False), ("c$", True)]]
    from services.wire.tasks.demonstrations import Demonstration

    examples = _Examples(tokenizer, [Demonstration(each) for each in parts])
    ids, trained, first = examples.batch(0, 3)
    assert [tokenizer.decode(row) for row in ids.tolist()] == ["abc$Hd$", "abc$___", "abc$Hd$"]
    assert first == 2
    assert trained.tolist() == [[1, 1, 0, 1, 1], [1, 1, 0, 0, 0], [1, 1, 0, 1, 1]]


def test_an_answer_counts_when_it_ends_right_before_its_end_token() -> None:
    """A model that always says the same thing: `7$`, whatever was asked."""
    tokenizer = build_tokenizer()
    model = build_model(0, hidden_size=32, layers=1).eval()
    seven, end = tokenizer.encode("7$")
    table = torch.full((len(tokenizer), len(tokenizer)), -30.0)
    table[:, seven] = 0.0
    table[seven] = -30.0
    table[seven, end] = 0.0

    class Parrot(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, **_: object) -> Any:
            from transformers.modeling_outputs import CausalLMOutputWithPast

            return CausalLMOutputWithPast(logits=table[input_ids[:, -1:]], past_key_values=None)

    del model
    checks = [Question("1=", "7"), Question("12=", "7"), Question("3=", "8"), Question("4=", "27")]
    generator = torch.Generator().manual_seed(0)
    assert sampled_accuracy(Parrot(), tokenizer, checks, 4, generator) == 0.5  # type: ignore[arg-type]
    assert sampled_accuracy(Parrot(), tokenizer, checks, 4, None) == 0.5  # type: ignore[arg-type]
    [cut_off] = sample_answers(Parrot(), torch.tensor([[5]]), end, 1, generator)  # type: ignore[arg-type]
    assert not cut_off.ended and len(cut_off.said) == 1


def test_logprobs_are_those_of_the_tokens_sampled() -> None:
    model, generator = build_model(seed=2, hidden_size=32, layers=1).eval(), torch.Generator().manual_seed(0)
    answers = sample_answers(model, torch.tensor([[5, 6, 7]] * 32), 9, 40, generator)
    assert any(answer.ended for answer in answers) and not all(answer.ended for answer in answers)
    for answer in answers:
        assert (answer.tokens[-1] == 9) is answer.ended and 9 not in answer.said
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[5, 6, 7, *answer.tokens]])).logits[0, 2:-1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(answer.tokens)[:, None]).squeeze(-1)
        assert answer.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize(("text", "right"), [("3", True), ("<12>3", True), ("<12>33", False), ("13", False)])
def test_a_question_may_say_what_a_right_answer_looks_like(text: str, right: bool) -> None:
    tokenizer = build_tokenizer()
    tokens = tokenizer.encode(text + "$", add_special_tokens=False)
    strict, lax = Question("1=", "3", r"(?:<[0-4]+>)?3"), Question("1=", "3")
    assert is_right(tokenizer, strict, Sampled(tokens, [0.0] * len(tokens), ended=True)) is right
    assert is_right(tokenizer, lax, Sampled(tokens, [0.0] * len(tokens), ended=True))
    assert not is_right(tokenizer, strict, Sampled(tokens[:-1], [0.0] * (len(tokens) - 1), ended=False))


def test_the_key_follows_everything_that_goes_in(tmp_path: Path) -> None:
    folder = demonstrations(tmp_path / "d")
    first = folder_digest(folder, read_recipe(folder))
    (folder / "check.jsonl").write_text('{"prompt":"a=","answer":"7"}\n')
    second = folder_digest(folder, read_recipe(folder))
    assert len({warm_start_key(first, 1), warm_start_key(first, 2), warm_start_key(second, 1)}) == 3


def test_the_command_trains_once_and_needs_no_torch_the_second_time(tmp_path: Path) -> None:
    folder, cache = demonstrations(tmp_path / "d"), tmp_path / "cache"
    flags = ("--demonstrations", folder, "--seed", 3, "--cache-dir", cache, "--threads", 1, "--out")
    first = sft(*flags, tmp_path / "one")
    assert first.returncode == 0, first.stderr
    (tmp_path / "broken" / "torch").mkdir(parents=True)
    (tmp_path / "broken" / "torch" / "__init__.py").write_text("raise RuntimeError('torch was imported')")
    program = f"import sys; sys.path.insert(0, {str(tmp_path / 'broken')!r}); from services.cli import main; main()"
    command = [sys.executable, "-c", program, "sft", *map(str, flags), str(tmp_path / "two")]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 0, second.stderr
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (
        tmp_path / "two" / "model.safetensors"
    ).read_bytes()
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    prompt = AutoTokenizer.from_pretrained(tmp_path / "two")("a=", return_tensors="pt")["input_ids"]
    assert build_tokenizer().decode(policy(input_ids=prompt).logits[0, -1].argmax()) == "7"


def without_torch(tmp_path: Path, *flags: object) -> subprocess.Popen[str]:
    """`rollmesh sft` where importing torch is an error that says so."""
    (tmp_path / "broken" / "torch").mkdir(parents=True)
    (tmp_path / "broken" / "torch" / "__init__.py").write_text("raise RuntimeError('torch was imported')")
    program = f"import sys; sys.path.insert(0, {str(tmp_path / 'broken')!r}); from services.cli import main; main()"
    command = [sys.executable, "-c", program, "sft", *map(str, flags)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_what_is_needed_is_imported_before_the_demonstrations_are_there_where_nothing_is_cached(tmp_path: Path) -> None:
    flags = ("--cache-dir", tmp_path / "cache", "--out", tmp_path / "out", "--wait", 100)
    early = without_torch(tmp_path, "--demonstrations", tmp_path / "d", *flags)
    _, said = early.communicate(timeout=60)
    assert "torch was imported" in said


def test_a_cached_warm_start_waits_for_the_demonstrations_without_torch(tmp_path: Path) -> None:
    ready, cache, made = demonstrations(tmp_path / "ready"), tmp_path / "cache", tmp_path / "made"
    save_policy(build_model(0, hidden_size=32, layers=1), made)
    keep(cache, warm_start_key(folder_digest(ready, read_recipe(ready)), 1), made)
    flags = ("--cache-dir", cache, "--out", tmp_path / "out", "--wait", 100)
    waiting = without_torch(tmp_path, "--demonstrations", tmp_path / "d", *flags)
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(timeout=2.0)
    ready.rename(tmp_path / "d")
    _, said = waiting.communicate(timeout=60)
    assert waiting.returncode == 0, said
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_demonstrations_that_do_not_come_are_misuse_after_the_wait(tmp_path: Path) -> None:
    (tmp_path / "cache" / "other").mkdir(parents=True)
    flags = ("--cache-dir", tmp_path / "cache", "--out", tmp_path / "out")
    for wait in ((), ("--wait", 0.2)):
        done = sft("--demonstrations", tmp_path / "d", *flags, *wait)
        assert done.returncode == 2
        assert "cannot read" in done.stderr


def test_demonstrations_encoded_in_pieces_are_those_encoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build_tokenizer()
    lines = [Demonstration([(f"{number}=", False), (f"{number * 7}$", True)]) for number in range(23)]
    whole = _Examples(tokenizer, lines)
    monkeypatch.setattr("trainer.sft.train._ENCODED_AT_ONCE", 4)
    pieces = _Examples(tokenizer, lines)
    for start in (0, 5, 20, 46):
        for one, other in zip(whole.batch(start, 6), pieces.batch(start, 6), strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    longest = max(tokenizer([line.parts[1][0] for line in lines], add_special_tokens=False)["input_ids"], key=len)
    assert whole.longest_trained == len(longest)


def test_concurrent_runs_and_half_written_entries_break_nothing(tmp_path: Path) -> None:
    made, cache = tmp_path / "made", tmp_path / "cache"
    save_policy(build_model(0, hidden_size=32, layers=1), made)
    (cache / "key").mkdir(parents=True)
    assert not take_cached(cache, "key", tmp_path / "out")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: keep(cache, "key", made), range(8)))
        list(pool.map(lambda _: deliver(made, "key", tmp_path / "out"), range(8)))
    assert is_delivered(tmp_path / "out", "key")
    assert take_cached(cache, "key", tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "made", "other", "out"]
    assert [path.name for path in cache.iterdir()] == ["key"]
    with pytest.raises(UsageError, match="cannot write the model folder"):
        deliver(made, "another key", tmp_path / "out")


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("recipe.json", "{}", "is no recipe"),
        ("recipe.json", None, "cannot read"),
        ("recipe.json", json.dumps({**RECIPE, "phases": [{**PHASE, "steps": 0}]}), "phase only has steps, batch or"),
        ("only.jsonl", "", "holds no demonstration"),
        ("only.jsonl", '{"parts": 3}\n', "does not hold what a recipe names"),
        ("check.jsonl", None, "cannot read"),
    ],
)
def test_a_folder_that_cannot_be_followed_is_misuse(
    tmp_path: Path, file: str, content: str | None, complaint: str
) -> None:
    folder = demonstrations(tmp_path / "d")
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(UsageError, match=complaint):
        warm_start(folder, read_recipe(folder), 1, lambda _: None)


def test_a_file_that_the_recipe_names_and_is_missing_has_no_digest(tmp_path: Path) -> None:
    folder = demonstrations(tmp_path / "d")
    (folder / "only.jsonl").unlink()
    with pytest.raises(UsageError, match=r"cannot read .*only\.jsonl"):
        folder_digest(folder, read_recipe(folder))


@pytest.mark.parametrize(("system", "cache"), [("Linux", ".cache"), ("Darwin", "Library/Caches")])
def test_the_cache_lies_where_the_user_or_the_platform_keeps_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, cache: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_dir() == tmp_path / cache / "rollmesh" / "warm-start"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    assert default_cache_dir() == tmp_path / "mine" / "rollmesh" / "warm-start"


def test_a_cache_that_cannot_be_written_is_a_warning_and_no_entry(tmp_path: Path) -> None:
    made, cache = tmp_path / "made", tmp_path / "cache"
    made.mkdir()
    (made / "config.json").write_text("{}")
    cache.write_text("a file where the cache should be")
    with capture_logs() as logs:
        keep(cache, "key", made)
    assert [(line["log_level"], line["cache"]) for line in logs] == [("warning", str(cache))]
    assert not take_cached(cache, "key", tmp_path / "out")
    (made / "warm_start.key").mkdir()
    assert not is_delivered(made, "key")
