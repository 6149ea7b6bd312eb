"""Playing one group: every sibling's episode from its first turn to its reward, all siblings of a turn in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clients.environment import Answer, Ended, Environment, Episode, NextTurn, Problem
from clients.losses import EnvironmentFailedError, describe
from clients.rollout import RolloutClient
from services.wire.errors import WireError
from services.wire.rollout_api import GroupOpened, SessionReward, TakeTurns, Turn


@dataclass(frozen=True)
class Played:
    """One episode. `tokens` are those the policy sampled, 0 where they were not asked for."""

    session_id: str
    ended: Ended
    tokens: int

    def as_reward(self) -> SessionReward:
        return SessionReward(session_id=self.session_id, reward=self.ended.reward, components=components(self.ended))


def components(ended: Ended) -> dict[str, float]:
    """The named parts that are recorded beside the reward."""
    return {"success": float(ended.success), **ended.components}


async def play_group(
    client: RolloutClient,
    environment: Environment,
    group: GroupOpened,
    problems: Sequence[Problem],
    *,
    count_tokens: bool = False,
) -> list[Played]:
    """Play `problems[i]` in session `i` until all episodes have ended; the caller finishes the group.

    Raises EnvironmentFailedError when the environment's code raises.
    """
    episodes: dict[str, Episode] = {}
    turns: list[Turn] = []
    for session, problem in zip(group.session_ids, problems, strict=True):
        episodes[session], text = _start(environment, problem)
        turns.append(Turn(session_id=session, text=text))
    tokens = dict.fromkeys(episodes, 0)
    played: list[Played] = []
    while turns:
        taken = await client.take_turns(group.group_id, TakeTurns(turns=turns, return_token_ids=count_tokens))
        if len(taken.results) != len(turns):
            raise WireError(f"{client.url} answered {len(taken.results)} turns of {len(turns)}")
        turns = []
        for result in taken.results:
            session = result.session_id
            tokens[session] += len(result.token_ids or ())
            reply = _respond(episodes[session], Answer(text=result.text, complete=result.finish_reason == "stop"))
            if isinstance(reply, Ended):
                played.append(Played(session, reply, tokens[session]))
            else:
                turns.append(Turn(session_id=session, text=reply.text))
    return played


def _start(environment: Environment, problem: Problem) -> tuple[Episode, str]:
    try:
        episode = environment.start(problem)
        return episode, episode.first_turn
    except Exception as error:
        raise EnvironmentFailedError(f"{environment.name} could not start an episode: {describe(error)}") from error


def _respond(episode: Episode, answer: Answer) -> NextTurn | Ended:
    try:
        return episode.respond(answer)
    except Exception as error:
        raise EnvironmentFailedError(f"an episode failed on the answer {answer.text!r}: {describe(error)}") from error
