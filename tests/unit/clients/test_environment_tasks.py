"""The built-in environments: problems follow from the seed, the splits never meet, rewards say what the docstrings say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.environments.base import Answer, Ended, Environment, NextTurn, Problem, different, split_of
from clients.environments.registry import make_environment
from clients.environments.tasks.guess_number import HIGHEST, LOWEST, TURNS, GuessNumber, GuessNumberEpisode
from clients.environments.tasks.running_sums import RunningSums, running_sums
from services.wire.errors import UsageError
from services.wire.tasks.name import DEMONSTRATED
from tests.support.examples import examples

indices = st.integers(min_value=0, max_value=10**9)
seeds = st.integers(min_value=0, max_value=2**32)


def end_of(environment: Environment, problem: Problem, *answers: str, complete: bool = True) -> Ended:
    episode = environment.start(problem)
    for said in answers:
        reply = episode.respond(Answer(said, complete))
        if isinstance(reply, Ended):
            return reply
    raise AssertionError(f"the episode goes on after {answers}")


@pytest.mark.parametrize("task", DEMONSTRATED)
@given(index=indices, seed=seeds)
@examples(200)
def test_splits_never_share_a_prompt_whatever_the_seed(task: str, index: int, seed: int) -> None:
    environment = make_environment(task)
    train, held_out = environment.problem("train", index, seed), environment.problem("held_out", index, seed)
    assert train == environment.problem("train", index, seed)
    # Which split a prompt belongs to depends on the prompt alone, so no seed can move it across.
    assert split_of(train.prompt[:-1]) == "train"
    assert split_of(held_out.prompt[:-1]) == "held_out"
    assert environment.start(train).first_turn == train.prompt


@pytest.mark.parametrize("task", DEMONSTRATED)
def test_problems_differ_between_indices_and_seeds(task: str) -> None:
    environment = make_environment(task)
    first = [environment.problem("held_out", index, 1) for index in range(256)]
    other = [environment.problem("held_out", index, 2) for index in range(256)]
    assert len({problem.prompt for problem in first}) > 200
    assert len({problem.prompt for problem in first} & {problem.prompt for problem in other}) < 60


def test_an_unknown_task_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'guess-number'"):
        make_environment("gess-number")


@given(st.text(alphabet="01234", min_size=8, max_size=8))
def test_running_sums_are_the_sums_of_the_prefixes(digits: str) -> None:
    expected = "".join(str(sum(map(int, digits[: end + 1])) % 5) for end in range(8))
    assert running_sums(digits) == expected


@given(index=indices, seed=seeds, said=st.text(alphabet="01234<>$5a ", max_size=14))
def test_the_digit_counts_with_or_without_a_scratchpad(index: int, seed: int, said: str) -> None:
    sums = RunningSums()
    problem = sums.problem("held_out", index, seed)
    assert end_of(sums, problem, problem.solution) == Ended(reward=1.0, success=True)
    assert end_of(sums, problem, f"<{running_sums(problem.prompt[:-1])}>{problem.solution}").success
    wrong = str((int(problem.solution) + 1) % 5)
    assert end_of(sums, problem, wrong) == Ended(reward=0.0, success=False)
    assert not end_of(sums, problem, f"<01234012>{wrong}").success
    # An answer that was cut off never counts, nor does anything but `digit` or `<digits>digit`.
    assert not end_of(sums, problem, problem.solution, complete=False).success
    if end_of(sums, problem, said).success:
        scratchpad, _, digit = said.rpartition(">")
        assert digit == problem.solution
        assert not scratchpad or (scratchpad[0] == "<" and set(scratchpad[1:]) <= set("01234"))


@given(index=indices, seed=seeds)
def test_bisection_always_finds_the_number_and_replies_are_true(index: int, seed: int) -> None:
    game = GuessNumber()
    problem = game.problem("train", index, seed)
    episode, low, high = game.start(problem), LOWEST, HIGHEST
    for _ in range(TURNS):
        guess = (low + high) // 2
        reply = episode.respond(Answer(str(guess), complete=True))
        if isinstance(reply, Ended):
            assert reply == Ended(reward=1.0, success=True)
            assert guess == int(problem.solution)
            return
        assert reply.text == ("H" if int(problem.solution) > guess else "L")
        low, high = (guess + 1, high) if reply.text == "H" else (low, guess - 1)
    raise AssertionError("five turns of bisection did not find it")


def test_a_game_ends_after_five_wrong_guesses_or_a_malformed_one() -> None:
    problem = Problem(split="train", index=0, prompt="abc:", solution="20")
    episode = GuessNumberEpisode(problem)
    replies = [episode.respond(Answer(str(guess), complete=True)) for guess in range(1, 6)]
    assert replies == [NextTurn("H")] * 4 + [Ended(reward=0.0, success=False)]
    for malformed in ("", "0", "32", "020", "2 0", "20H", "x"):
        assert GuessNumberEpisode(problem).respond(Answer(malformed, complete=True)) == Ended(0.0, False)
    assert GuessNumberEpisode(problem).respond(Answer("20", complete=False)) == Ended(0.0, False)


def test_the_opening_says_nothing_about_the_number() -> None:
    """The same opening hides different numbers in different games, in either split."""
    hidden: dict[str, set[str]] = {}
    for index in range(30_000):
        problem = GuessNumber().problem("held_out", index, 3)
        hidden.setdefault(problem.prompt, set()).add(problem.solution)
    assert min(len(numbers) for prompt, numbers in hidden.items()) > 1
    assert set().union(*hidden.values()) == {str(number) for number in range(LOWEST, HIGHEST + 1)}


def test_problems_that_ask_the_same_are_counted_once_where_texts_tell_them_apart() -> None:
    asked = [Problem("held_out", index, prompt=f"{index % 3}+1") for index in range(9)]
    assert different(asked) == 3
    one_text = [replace(problem, prompt="guess") for problem in asked]
    assert different(one_text) is None, "what differs is not in the text"
    assert different([replace(problem, details=problem.index) for problem in one_text]) == 9
    assert different([replace(problem, details=object()) for problem in asked]) is None
