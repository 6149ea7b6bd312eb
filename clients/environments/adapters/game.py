"""Adapter of one-player games with gymnasium's interface.

    class Dice:                                     # a game: reset to a seed, then step by step
        def reset(self, seed): self.number = random.Random(seed).randint(1, 6); return "Guess my die."
        def step(self, action): won = action.strip() == str(self.number); return Step("", float(won), True, won)

    environment = GameEnvironment("dice", Dice, max_turns=3)

The first observation opens the conversation; later ones are masked. Rewards of the steps add up. A game that is not over
after `max_turns` answers, or an answer that was cut off, ends the episode with what was earned so far, or with
`unfinished_reward` where that is given.

Held out: seeds. Each seed belongs to one split for good. Two seeds may deal the same game: where a game has few different
deals, success on held-out seeds says little about deals that were never seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from clients.environments.base import Answer, Ended, NextTurn, Problem, Split, problem_rng, split_of


@dataclass(frozen=True)
class Step:
    """What an action led to. `observation` is what the player sees next, and nobody after `done`."""

    observation: str
    reward: float = 0.0
    done: bool = False
    success: bool = False
    components: Mapping[str, float] = field(default_factory=dict, hash=False)


class Game(Protocol):
    """One playing of a game; used by one episode. Fast, no I/O."""

    def reset(self, seed: int) -> str:
        """Deal by `seed`; returns the first observation."""
        ...

    def step(self, action: str) -> Step: ...


class GameEnvironment:
    """An Environment around a game. `make_game` is called for every episode."""

    def __init__(
        self, name: str, make_game: Callable[[], Game], *, max_turns: int, unfinished_reward: float | None = None
    ) -> None:
        self.name = name
        self._make_game = make_game
        self._max_turns = max_turns
        self._unfinished_reward = unfinished_reward

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        numbers = problem_rng(self.name, split, index, seed)
        while True:
            dealt = numbers.randrange(1 << 31)
            if split_of(str(dealt)) == split:
                return Problem(split, index, prompt=str(dealt))

    def start(self, problem: Problem) -> GameEpisode:
        game = self._make_game()
        return GameEpisode(game, game.reset(int(problem.prompt)), self._max_turns, self._unfinished_reward)


@dataclass
class GameEpisode:
    game: Game
    first_turn: str
    max_turns: int
    unfinished_reward: float | None
    turns: int = 0
    earned: float = 0.0

    def respond(self, answer: Answer) -> NextTurn | Ended:
        self.turns += 1
        if not answer.complete:
            return self._unfinished("cut_off")
        step = self.game.step(answer.text)
        self.earned += step.reward
        if step.done:
            return Ended(self.earned, step.success, {**step.components, "turns": float(self.turns)})
        if self.turns >= self.max_turns:
            return self._unfinished("too_long")
        return NextTurn(step.observation)

    def _unfinished(self, why: str) -> Ended:
        reward = self.earned if self.unfinished_reward is None else self.unfinished_reward
        return Ended(reward, success=False, components={why: 1.0, "turns": float(self.turns)})
