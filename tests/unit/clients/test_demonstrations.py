"""Demonstrations: well-formed, right, of the announced mixture, of train problems only, and the same for the same seed."""

from __future__ import annotations

import filecmp
import json
import re
from pathlib import Path

import pytest

from clients.environments.base import Answer, Ended, Problem, split_of
from clients.environments.registry import make_environment
from clients.environments.tasks.demonstrations import write_demonstrations
from clients.environments.tasks.guess_number import GuessNumberEpisode
from clients.environments.tasks.running_sums import RunningSums, running_sums
from services.wire.errors import UsageError

Parts = list[tuple[str, bool]]


def read_lines(path: Path) -> list[Parts]:
    return [[(text, trained) for text, trained in json.loads(line)["parts"]] for line in path.open(encoding="utf-8")]


@pytest.fixture(scope="module", params=["running-sums", "guess-number"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("demonstrations") / request.param
    write_demonstrations(request.param, 7, folder)
    return request.param, folder


def test_the_recipe_describes_its_files(written: tuple[str, Path]) -> None:
    task, folder = written
    recipe = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
    assert (recipe["task"], recipe["seed"]) == (task, 7)
    for phase in recipe["phases"]:
        assert len(read_lines(folder / phase["file"])) == phase["steps"] * phase["batch"]
    names = {"recipe.json", recipe["check"], *(phase["file"] for phase in recipe["phases"])}
    assert {path.name for path in folder.iterdir()} == names


def test_the_same_seed_writes_the_same_bytes(written: tuple[str, Path], tmp_path: Path) -> None:
    task, folder = written
    write_demonstrations(task, 7, tmp_path)
    names = [path.name for path in folder.iterdir()]
    assert filecmp.cmpfiles(folder, tmp_path, names, shallow=False) == (names, [], [])


def test_only_train_problems_are_demonstrated_and_only_the_policys_part_is_trained(written: tuple[str, Path]) -> None:
    _, folder = written
    for path in folder.glob("*.jsonl"):
        if path.name == "check.jsonl":
            continue
        for parts in read_lines(path):
            prompt, trained = parts[0]
            assert not trained
            assert split_of(prompt[:-1]) == "train"
            for text, trained in parts[1:]:
                assert text.endswith("$") is trained


def test_every_demonstrated_sum_is_right_and_the_mixture_is_as_announced(tmp_path: Path) -> None:
    write_demonstrations("running-sums", 3, tmp_path)
    think, mix = read_lines(tmp_path / "think.jsonl"), read_lines(tmp_path / "mix.jsonl")
    for parts in think + mix:
        (prompt, _), (answer, _) = parts
        problem = Problem("train", 0, prompt, running_sums(prompt[:-1])[-1])
        assert RunningSums().start(problem).respond(Answer(answer.removesuffix("$"), True)) == Ended(1.0, True)
    assert all("<" in parts[1][0] for parts in think)
    assert 0.07 < sum("<" in parts[1][0] for parts in mix) / len(mix) < 0.13
    for line in (tmp_path / "check.jsonl").open(encoding="utf-8"):
        check = json.loads(line)
        assert check["answer"] == running_sums(check["prompt"][:-1])[-1]


def test_problems_of_both_splits_are_those_of_a_run_with_what_they_accept(tmp_path: Path) -> None:
    write_demonstrations("running-sums", 3, tmp_path, problems=40, held_out=20)
    environment = RunningSums()
    for name, split, count in (("problems", "train", 40), ("held_out", "held_out", 20)):
        lines = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").open(encoding="utf-8")]
        problems = [environment.problem(split, index, 3) for index in range(count)]
        assert [line["prompt"] for line in lines] == [problem.prompt for problem in problems]
        for line, problem in zip(lines, problems, strict=True):
            for text in (f"{digit}{tail}" for digit in range(5) for tail in ("", "3")):
                for said in (text, f"<01>{text}", f"<>{text}", f"<01{text}"):
                    judged = environment.start(problem).respond(Answer(said, True))
                    assert isinstance(judged, Ended)
                    assert judged.success is (re.fullmatch(line["accepts"], said) is not None)
    with pytest.raises(UsageError, match="no one right answer"):
        write_demonstrations("guess-number", 3, tmp_path, problems=1)


def test_demonstrated_games_follow_the_rules(tmp_path: Path) -> None:
    write_demonstrations("guess-number", 3, tmp_path)
    games = read_lines(tmp_path / "mix.jsonl")[:2000]
    bisecting = 0
    for (prompt, _), *turns in games:
        guesses = [text.removesuffix("$") for text, trained in turns if trained]
        replies = [text for text, trained in turns if not trained]
        bisecting += guesses[0] == "16"
        assert any(plays(number, prompt, guesses, replies) for number in range(1, 32)), (prompt, turns)
    assert 0.17 < bisecting / len(games) < 0.23


def plays(hidden: int, prompt: str, guesses: list[str], replies: list[str]) -> bool:
    """Whether the game would have gone so with this number hidden."""
    episode = GuessNumberEpisode(Problem("train", 0, prompt, str(hidden)))
    said = [episode.respond(Answer(guess, True)) for guess in guesses]
    texts = [reply.text for reply in said if not isinstance(reply, Ended)]
    return isinstance(said[-1], Ended) and texts == replies


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write demonstrations"):
        write_demonstrations("running-sums", 1, tmp_path / "file" / "below")
    with pytest.raises(UsageError, match="no task"):
        write_demonstrations("running-sum", 1, tmp_path)
    with pytest.raises(UsageError, match="sums has no demonstrations"):
        write_demonstrations("sums", 1, tmp_path)
    assert make_environment("running-sums").name == "running-sums"
