"""Playing one group: every sibling's episode from its first turn to its reward, all siblings of a turn in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clients.environment import Answer, Ended, Environment, Problem
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
        components = {"success": float(self.ended.success)}
        return SessionReward(session_id=self.session_id, reward=self.ended.reward, components=components)


async def play_group(
    client: RolloutClient,
    environment: Environment,
    group: GroupOpened,
    problems: Sequence[Problem],
    *,
    count_tokens: bool = False,
) -> list[Played]:
    """Play `problems[i]` in session `i` until all episodes have ended; the caller finishes the group."""
    episodes = {
        session: environment.start(problem) for session, problem in zip(group.session_ids, problems, strict=True)
    }
    turns = [Turn(session_id=session, text=episode.first_turn) for session, episode in episodes.items()]
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
            reply = episodes[session].respond(Answer(text=result.text, complete=result.finish_reason == "stop"))
            if isinstance(reply, Ended):
                played.append(Played(session, reply, tokens[session]))
            else:
                turns.append(Turn(session_id=session, text=reply.text))
    return played
