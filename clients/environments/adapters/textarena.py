"""One-player games of TextArena: `textarena:GuessTheNumber-v0?max_turns=5`.

Options are those of the game's class; `turns` bounds the policy's answers whatever the game allows (default 30). The
policy sees the game's prompt, then what the game says after each of its answers, not its own words again. The reward is the
game's, `success` a reward of 1 or more.

TextArena seeds Python's global random numbers when a game is dealt and draws from them while it is played: equal seeds deal
equal games, but what a game draws later may differ between siblings. Some games fetch word lists from the network when they
are imported: they are refused unless the option `downloads=true` allows it.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clients.environments.adapters.game import GameEnvironment, Step
from clients.environments.adapters.options import no_such, values
from services.wire.errors import UsageError

TURNS = 30
_WON = 1.0 - 1e-6
_VARIANTS = ("-raw", "-train")
_FETCHES = re.compile(r"\bnltk\.download\(|\bEnglishDictionary\(")


def textarena_environment(game_id: str, options: Mapping[str, str]) -> GameEnvironment:
    """Raises UsageError for a game that the library does not have, has not for one player, or cannot make."""
    import textarena
    from textarena.envs.registration import ENV_REGISTRY

    name = f"textarena:{game_id}"
    if game_id not in ENV_REGISTRY:
        raise no_such("textarena", game_id, [known for known in ENV_REGISTRY if not known.endswith(_VARIANTS)])
    settings = values(options)
    turns = settings.pop("turns", TURNS)
    if not isinstance(turns, int) or turns < 1:
        raise UsageError(f"{name}: turns = {turns!r} cannot be", "give a whole number above 0")
    if settings.pop("downloads", False) is not True and _fetches(ENV_REGISTRY[game_id].entry_point):
        raise UsageError(f"{name} fetches word lists from the network", "allow it with ?downloads=true")

    def make() -> TextArenaGame:
        # The raw game: its wrappers would repeat the whole history in every observation.
        return TextArenaGame(textarena.make(game_id if game_id.endswith("-raw") else f"{game_id}-raw", **settings))

    try:
        make().reset(0)
    except AssertionError as error:
        raise UsageError(f"{name} is no game for one player ({error})", "choose another game") from error
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        raise UsageError(f"{name} cannot be made ({type(error).__name__}: {said})", "correct its options") from error
    return GameEnvironment(name, make, max_turns=turns)


def _fetches(entry_point: object) -> bool:
    """Whether importing or making the game asks the network, judged by its source: importing it would do it already."""
    if not isinstance(entry_point, str):
        return False
    found = importlib.util.find_spec(entry_point.partition(":")[0])
    if found is None or found.origin is None:
        return False
    return _FETCHES.search(Path(found.origin).read_text(encoding="utf-8")) is not None


class TextArenaGame:
    """One playing of a TextArena game as a `clients.environments.adapters.game.Game`."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def reset(self, seed: int) -> str:
        self._env.reset(num_players=1, seed=seed)
        return self._new_observation()

    def step(self, action: str) -> Step:
        done, _ = self._env.step(action=_bracketed(action))
        if not done:
            return Step(self._new_observation())
        rewards, info = self._env.close()
        reward = float((rewards or {}).get(0, 0.0))
        invalid = float(bool(info.get(0, {}).get("invalid_move", False)))
        return Step("", reward, done=True, success=reward >= _WON, components={"invalid_move": invalid})

    def _new_observation(self) -> str:
        """What the game has said since the last time, without the player's own words."""
        from textarena import ObservationType

        _, observations = self._env.get_observation()
        said = [text for _, text, kind in observations if kind != ObservationType.PLAYER_ACTION]
        return "\n".join(said) + "\n"


def _bracketed(action: str) -> str:
    """Most games read a move in brackets; the library's own wrapper adds missing ones in the same way."""
    action = action.strip()
    return action if "[" in action or "]" in action else f"[{action}]"
