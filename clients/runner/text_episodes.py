"""Playing one group: every sibling's episode from its first turn to its reward, all siblings of a turn in one call."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import structlog

from clients.environments.base import (
    Answer,
    Ended,
    Environment,
    Episode,
    Judging,
    NextTurn,
    Problem,
    describe,
    reads_token_ids,
)
from clients.rollout.client import RolloutClient
from clients.runner.failures import EnvironmentFailedError
from services.wire.errors import RollmeshError, WireError
from services.wire.reward_api import RewardFailedError
from services.wire.rollout_api import GroupOpened, SessionReward, TakeTurns, Turn

_log = structlog.get_logger()
NOTHING: Mapping[str, float] = MappingProxyType({})


class LastTurn(NamedTuple):
    """Of an episode that is shown: what was asked, the last answer, and what an agent did in between, as text."""

    asked: str
    answer: str
    between: str = ""


@dataclass(frozen=True)
class Played:
    """One episode. `tokens` are those the policy sampled, 0 where they were not asked for. `cut_off`: whether its last
    answer ended at the limit; None where that is not known. `lost`: why it has no reward of its own, where it has none.
    `last`: what it was asked last and answered, in an evaluation that is played in texts."""

    session_id: str
    ended: Ended
    tokens: int
    cut_off: bool | None = None
    lost: str = ""
    last: LastTurn | None = None

    def as_reward(self, noted: Mapping[str, float]) -> SessionReward:
        """`noted`: what is recorded beside the environment's own components."""
        parts = {**components(self.ended), **noted}
        return SessionReward(session_id=self.session_id, reward=self.ended.reward, components=parts)


def components(ended: Ended) -> dict[str, float]:
    """The named parts that are recorded beside the reward."""
    return {"success": float(ended.success), **ended.components}


async def play_group(
    client: RolloutClient,
    environment: Environment,
    group: GroupOpened,
    problems: Sequence[Problem],
    *,
    evaluating: bool = False,
) -> list[Played]:
    """Play `problems[i]` in session `i` until all episodes have ended; the caller finishes the group.

    `evaluating`: tokens are counted, last turns kept, and an episode without a reward counts as not solved, for nothing is
    trained on it. Raises EnvironmentFailedError when the environment's code raises, RewardFailedError where a reward is
    missing.
    """
    episodes: dict[str, Episode] = {}
    turns: list[Turn] = []
    for session, problem in zip(group.session_ids, problems, strict=True):
        episodes[session], text = _start(environment, problem)
        turns.append(Turn(session_id=session, text=text))
    told = reads_token_ids(environment)
    tokens = dict.fromkeys(episodes, 0)
    cut_off: dict[str, bool] = {}
    last: dict[str, LastTurn] = {}
    played: list[Played] = []
    judging: dict[str, Judging] = {}
    while turns:
        asked = TakeTurns(turns=turns, return_token_ids=evaluating or told)
        taken = await client.take_turns(group.group_id, asked, group.turn_within_s)
        if len(taken.results) != len(turns):
            raise WireError(f"{client.url} answered {len(taken.results)} turns of {len(turns)}")
        if evaluating:
            texts = {turn.session_id: turn.text or "" for turn in turns}
            last |= {each.session_id: LastTurn(texts[each.session_id], each.text) for each in taken.results}
        turns = []
        for result in taken.results:
            session = result.session_id
            tokens[session] += len(result.token_ids or ())
            cut_off[session] = result.finish_reason == "length"
            sampled = tuple(result.token_ids or ()) if told else ()
            reply = _respond(episodes[session], Answer(result.text, result.finish_reason == "stop", sampled))
            if isinstance(reply, Ended):
                played.append(Played(session, reply, tokens[session], cut_off[session], last=last.get(session)))
            elif isinstance(reply, Judging):
                judging[session] = reply
            else:
                turns.append(Turn(session_id=session, text=reply.text))
    judged = await _judge(judging, evaluating) if judging else {}
    return [
        *played,
        *(
            Played(session, ended, tokens[session], cut_off[session], last=last.get(session))
            for session, ended in judged.items()
        ),
    ]


async def _judge(judging: Mapping[str, Judging], evaluating: bool) -> dict[str, Ended]:
    """Concurrently, so that a reward model can batch them."""
    try:
        async with asyncio.TaskGroup() as tasks:
            ended = {
                session: tasks.create_task(_judge_one(each, evaluating=evaluating)) for session, each in judging.items()
            }
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    return {session: task.result() for session, task in ended.items()}


async def _judge_one(judging: Judging, *, evaluating: bool) -> Ended:
    try:
        return await judging.judge()
    except RewardFailedError as error:
        if not evaluating:
            raise
        _log.warning("episode without a reward in an evaluation, counted as not solved", why=str(error))
        return Ended(reward=0.0, success=False, components={"reward_failed": 1.0})
    except RollmeshError:
        raise
    except Exception as error:
        raise EnvironmentFailedError(f"an answer could not be judged: {describe(error)}") from error


def _start(environment: Environment, problem: Problem) -> tuple[Episode, str]:
    try:
        episode = environment.start(problem)
        return episode, episode.first_turn
    except Exception as error:
        raise EnvironmentFailedError(f"{environment.name} could not start an episode: {describe(error)}") from error


def _respond(episode: Episode, answer: Answer) -> NextTurn | Ended | Judging:
    try:
        return episode.respond(answer)
    except Exception as error:
        raise EnvironmentFailedError(f"an episode failed on the answer {answer.text!r}: {describe(error)}") from error
