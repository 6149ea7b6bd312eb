"""The adapters: problems follow from the seed, splits stay apart, rewards are the library's, turns are bounded."""

from __future__ import annotations

import importlib
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.environments.adapters.game import GameEnvironment, Step
from clients.environments.base import Answer, Ended, NextTurn, Split, describe, split_of
from clients.environments.registry import make_task
from clients.runner.failures import LEAST_LOST_IN_A_ROW, GroupFailures, TooManyLostError
from services.wire.errors import UsageError
from tests.support.examples import examples


class Dice:
    """Guess a die; a wrong guess costs a tenth."""

    def reset(self, seed: int) -> str:
        self.number = random.Random(seed).randint(1, 6)
        return "Guess my die."

    def step(self, action: str) -> Step:
        won = action.strip() == str(self.number)
        return Step("wrong", 1.0 if won else -0.1, done=won, success=won)


def test_rewards_of_a_game_add_up_until_it_is_done() -> None:
    environment = GameEnvironment("dice", Dice, max_turns=10)
    problem = environment.problem("train", 3, 1)
    episode = environment.start(problem)
    assert episode.first_turn == "Guess my die."
    replies = [episode.respond(Answer(str(guess), True)) for guess in range(1, number_of(problem.prompt) + 1)]
    assert replies[:-1] == [NextTurn("wrong")] * (len(replies) - 1)
    ended = replies[-1]
    assert isinstance(ended, Ended) and ended.success
    assert ended.reward == pytest.approx(1.0 - 0.1 * (len(replies) - 1))
    assert ended.components["turns"] == len(replies)


def number_of(seed: str) -> int:
    return random.Random(int(seed)).randint(1, 6)


@pytest.mark.parametrize(("unfinished", "reward"), [(None, -0.2), (-1.0, -1.0)])
def test_a_game_without_an_end_is_ended(unfinished: float | None, reward: float) -> None:
    environment = GameEnvironment("dice", Dice, max_turns=2, unfinished_reward=unfinished)
    episode = environment.start(environment.problem("train", 0, 1))
    assert isinstance(episode.respond(Answer("0", True)), NextTurn)
    ended = episode.respond(Answer("0", True))
    assert isinstance(ended, Ended) and not ended.success
    assert ended.reward == pytest.approx(reward)
    assert ended.components["too_long"] == 1.0
    episode = environment.start(environment.problem("train", 0, 1))
    cut = episode.respond(Answer("0", complete=False))
    assert isinstance(cut, Ended) and cut.components["cut_off"] == 1.0


@given(index=st.integers(0, 10**9), seed=st.integers(0, 2**32))
@examples(100)
def test_a_games_seeds_belong_to_one_split_for_good(index: int, seed: int) -> None:
    environment = GameEnvironment("dice", Dice, max_turns=2)
    splits: tuple[Split, Split] = ("train", "held_out")
    for split in splits:
        problem = environment.problem(split, index, seed)
        assert problem == environment.problem(split, index, seed)
        assert split_of(problem.prompt) == split


SUMS = "reasoning-gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1&allow_negation=false"


def test_questions_of_the_splits_never_meet_and_follow_from_the_seed() -> None:
    pytest.importorskip("reasoning_gym")
    environment = make_task(SUMS).environment
    train = {environment.problem("train", index, seed).prompt for index in range(150) for seed in (1, 2)}
    held_out = {environment.problem("held_out", index, seed).prompt for index in range(50) for seed in (1, 2)}
    assert not train & held_out
    assert len(train) > 50
    again = make_task(SUMS).environment
    assert [again.problem("train", index, 4) for index in range(20)] == [
        environment.problem("train", index, 4) for index in range(20)
    ]


def test_answers_are_scored_by_the_library_with_tags_or_without() -> None:
    pytest.importorskip("reasoning_gym")
    environment = make_task(SUMS).environment
    problem = environment.problem("train", 0, 1)

    def reward(said: str, complete: bool = True) -> Ended:
        ended = environment.start(problem).respond(Answer(said, complete))  # type: ignore[union-attr]
        assert isinstance(ended, Ended)
        return ended

    numbers = [int(number) for number in re.findall(r"\d+", problem.prompt)]
    right = str(numbers[0] + numbers[1] if "+" in problem.prompt else numbers[0] - numbers[1])
    assert right == problem.solution
    assert reward(f" {right}\n") == Ended(1.0, True)
    assert reward(f"<answer>0</answer> no: <answer>{right}</answer> indeed") == Ended(1.0, True)
    assert reward("none") == Ended(0.0, False)
    assert 0.0 < reward(f"{right} or so").reward < 1.0
    assert reward(right, complete=False) == Ended(0.0, False)


@pytest.mark.parametrize("dataset", ["chain_sum", "word_ladder", "acre", "letter_counting", "gsm_symbolic"])
def test_data_sets_of_all_kinds_give_problems_without_end(dataset: str) -> None:
    pytest.importorskip("reasoning_gym")
    environment = make_task(f"reasoning-gym:{dataset}?size=50").environment
    for index in (0, 10**6):
        problem = environment.problem("held_out", index, 3)
        ended = environment.start(problem).respond(Answer(problem.solution, True))  # type: ignore[union-attr]
        assert isinstance(ended, Ended) and ended.reward > 0.99


def test_a_textarena_game_is_won_by_who_listens() -> None:
    pytest.importorskip("textarena")
    environment = make_task("textarena:GuessTheNumber-v0").environment
    won = 0
    for index in range(8):
        episode = environment.start(environment.problem("train", index, 1))  # type: ignore[union-attr]
        assert "Guess The Number" in episode.first_turn
        low, high = 1, 20
        for _ in range(6):
            guess = (low + high) // 2
            reply = episode.respond(Answer(str(guess), True))
            if isinstance(reply, Ended):
                assert reply.success and reply.reward == 1.0
                won += 1
                break
            assert str(guess) not in reply.text, "the policy's own words are not said to it again"
            low, high = (low, guess - 1) if "lower" in reply.text else (guess + 1, high)
    assert won == 8


def test_siblings_of_a_textarena_game_are_dealt_the_same() -> None:
    pytest.importorskip("textarena")
    environment = make_task("textarena:GuessTheNumber-v0?max_turns=1").environment
    problem = environment.problem("train", 5, 2)
    rewards = set()
    for _ in range(3):
        episode = environment.start(problem)  # type: ignore[union-attr]
        ended = next(
            reply for reply in (episode.respond(Answer("7", True)) for _ in range(3)) if isinstance(reply, Ended)
        )
        rewards.add(ended.reward)
    assert len(rewards) == 1


def test_turns_of_a_textarena_game_are_bounded_by_option() -> None:
    pytest.importorskip("textarena")
    environment = make_task("textarena:GuessTheNumber-v0?turns=2").environment
    episode = environment.start(environment.problem("train", 0, 1))  # type: ignore[union-attr]
    replies = list(islice((episode.respond(Answer("21", True)) for _ in range(2)), 2))
    assert isinstance(replies[-1], Ended)
    with pytest.raises(UsageError, match="turns = 0 cannot be"):
        make_task("textarena:GuessTheNumber-v0?turns=0")


def test_losses_give_a_problem_up_after_its_retries_and_stop_when_nothing_works() -> None:
    losses = GroupFailures(retries=2)
    assert [losses.lost("environment", "x", attempt) for attempt in range(3)] == [True, True, False]
    assert (losses.retried, losses.given_up, losses.by_cause["environment"]) == (2, 1, 3)
    losses.played()
    for _ in range(LEAST_LOST_IN_A_ROW - 1):
        losses.lost("timeout", "x", 2)
    for _ in range(100):
        losses.lost("server", "gone", 2)
    with pytest.raises(TooManyLostError, match="the last error was: nothing moves"):
        losses.lost("timeout", "nothing moves", 2)
    many = GroupFailures(retries=0, in_play=500)
    for _ in range(500):
        many.lost("session", "one accident takes all that are in play", 0)


def test_what_was_raised_is_told_with_the_line_of_the_authors_code_and_not_of_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "lib" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "their_client.py").write_text("def call(then):\n    return then()\n")
    (tmp_path / "their_agent.py").write_text(
        "import json\nimport their_client\n\ndef play(then):\n    return their_client.call(then)\n\n"
        "def read():\n    return json.loads('no')\n"
    )
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.syspath_prepend(str(tmp_path))
    agent, client = (importlib.import_module(name) for name in ("their_agent", "their_client"))

    def told(work: Callable[[], object]) -> str:
        with pytest.raises(ValueError, match="Expecting value") as raised:
            work()
        # Without the frame of this test, whose file is no library's either.
        traceback = raised.value.__traceback__
        assert traceback is not None
        return describe(raised.value.with_traceback(traceback.tb_next)).rpartition(" ")[2]

    reads = partial(json.loads, "no")
    assert told(agent.read) == "(their_agent.py:8)", "Python's json raised"
    assert told(partial(agent.play, reads)) == "(their_agent.py:5)"
    assert told(partial(client.call, reads)).startswith("(decoder.py:"), "where all are libraries"
    assert describe(ValueError("never raised")) == "ValueError: never raised"


def test_clients_and_all_their_modules_import_neither_torch_nor_vllm_nor_a_library_of_environments() -> None:
    program = (
        "import importlib, pkgutil, sys, clients\n"
        "for module in pkgutil.walk_packages(clients.__path__, 'clients.'): importlib.import_module(module.name)\n"
        "heavy = {'torch', 'vllm', 'transformers', 'openai', 'reasoning_gym', 'textarena', 'verifiers', 'nltk'}\n"
        "found = heavy & set(sys.modules)\n"
        "sys.exit(f'imported {found}' if found else 0)\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 0, answer.stderr
