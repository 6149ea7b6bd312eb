"""Playing one group of an agent environment: every sibling's agent at once, each in its own session.

    together (training)   all agents end ──► the group is finished in one call, its trajectories are written
                          one raises, runs out of time, or its session is gone ──► all are cancelled, all sessions aborted
    apart (evaluation)    each session is finished when its agent ends, or aborted, whatever its siblings do
    cancelled             every agent cancelled, every open session aborted

In training one failed sibling fails the group: its problem is played again as a whole, and trajectories that a part of it
had written would be trained in addition. Heartbeats keep sessions alive while agents do not call the policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import structlog

from clients.environments.base import AgentEndpoint, AgentEnvironment, Ended, Problem, describe
from clients.rollout.client import RolloutClient
from clients.rollout.transport import ServerUnreachableError
from clients.runner.failures import Cause, EnvironmentFailedError, cause_of
from clients.runner.text_episodes import NOTHING, LastTurn, Played, components
from services.wire.errors import NotFoundError, NotReadyError, RollmeshError
from services.wire.reward_api import RewardFailedError
from services.wire.rollout_api import FinishGroup, GroupOpened, OpenGroup, SamplingBody
from services.wire.session_api import FinishSession

_log = structlog.get_logger()
ABORT_S = 2.0
"""Longest time that aborting may take: a runner that ends must end."""
_MISSED_BEATS = 3
_CANCEL_S = 1.0


@dataclass(frozen=True)
class Lost:
    """An episode without a reward; its session is aborted, or gone."""

    session_id: str
    cause: Cause
    why: str


@dataclass(frozen=True)
class EpisodeLimits:
    """`timeout_s`: an episode's time. `heartbeat_s`: the longest silence of a session whose agent is busy elsewhere."""

    timeout_s: float
    heartbeat_s: float = 10.0

    def describe(self, error: Exception) -> str:
        """Why an episode was lost."""
        return f"no end after {self.timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)


async def play_together(
    client: RolloutClient,
    environment: AgentEnvironment,
    group: GroupOpened,
    problem: Problem,
    sampling: SamplingBody,
    limits: EpisodeLimits,
    noted: Mapping[str, float] = NOTHING,
) -> list[Played]:
    """Every sibling plays `problem`, then the group is finished. The caller aborts its sessions when this raises.

    `noted`: recorded beside each reward.

    Raises TimeoutError, EnvironmentFailedError, ValueError for a reward that is no finite number, or what the server says.
    """
    endpoints = _endpoints(client, group, sampling)
    agents = [asyncio.create_task(_traced(client, environment, problem, endpoint)) for endpoint in endpoints]
    beats = [asyncio.create_task(_beat(client, one.session_id, limits.heartbeat_s)) for one in endpoints]
    try:
        async with asyncio.timeout(limits.timeout_s):
            await _all_ended(agents, beats)
        played = [Played(one.session_id, agent.result(), 0) for one, agent in zip(endpoints, agents, strict=True)]
        await client.finish_group(group.group_id, FinishGroup(rewards=[episode.as_reward(noted) for episode in played]))
        return played
    finally:
        await _end(*agents, *beats)


async def _all_ended(agents: Sequence[asyncio.Task[Ended]], beats: Sequence[asyncio.Task[None]]) -> None:
    """Until every agent has ended, or one of them, or of the sessions, has failed: then it raises why."""
    going = set(agents)
    while going:
        done, _ = await asyncio.wait({*going, *beats}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        going -= done


async def play_apart(
    client: RolloutClient,
    environment: AgentEnvironment,
    group: GroupOpened,
    problems: Sequence[Problem],
    sampling: SamplingBody,
    limits: EpisodeLimits,
    *,
    shown: int = 0,
) -> list[Played | Lost]:
    """Play `problems[i]` in session `i`; no session is open any more when this returns or is cancelled.

    `shown`: of so many of them the last turn is asked for.
    """
    async with asyncio.TaskGroup() as siblings:
        playing = [
            siblings.create_task(_play(client, environment, problem, endpoint, limits, shown=place < shown))
            for place, (endpoint, problem) in enumerate(zip(_endpoints(client, group, sampling), problems, strict=True))
        ]
    return [task.result() for task in playing]


def _endpoints(client: RolloutClient, group: GroupOpened, sampling: SamplingBody) -> list[AgentEndpoint]:
    return [
        AgentEndpoint(
            base_url=f"{client.url}/sessions/{name}/v1",
            api_key=key,
            session_id=name,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            verify=client.trust.verify,
        )
        for name, key in zip(group.session_ids, group.api_keys, strict=True)
    ]


async def _play(
    client: RolloutClient,
    environment: AgentEnvironment,
    problem: Problem,
    endpoint: AgentEndpoint,
    limits: EpisodeLimits,
    *,
    shown: bool,
) -> Played | Lost:
    session_id = endpoint.session_id
    agent = asyncio.create_task(_traced(client, environment, problem, endpoint))
    beats = asyncio.create_task(_beat(client, session_id, limits.heartbeat_s))
    try:
        async with asyncio.timeout(limits.timeout_s):
            await _all_ended([agent], [beats])
        ended = agent.result()
        last = await _last_turn(client, session_id) if shown else None
        body = FinishSession(reward=ended.reward, components=components(ended))
        finished = await client.finish_session(session_id, body)
        return Played(session_id, ended, finished.sampled_tokens, finished.finish_reason == "length", last=last)
    except asyncio.CancelledError:
        await abort(client, [session_id])
        raise
    except (RollmeshError, TimeoutError, ValueError) as error:
        reached = await abort(client, [session_id])
        return Lost(session_id, cause_of(error) if reached else "server", limits.describe(error))
    finally:
        await _end(agent, beats)


async def _last_turn(client: RolloutClient, session_id: str) -> LastTurn | None:
    """What the user asked last, the calls of tools that followed and what they gave, and the policy's answer.

    None where that is not known: the episode counts all the same."""
    try:
        told = await client.trajectory_messages(session_id)
    except RollmeshError as error:
        _log.debug("the last turn of an episode is not shown", session=session_id, why=str(error))
        return None
    for messages in reversed(told.conversations):
        if len(messages) > 1 and messages[-1].get("role") == "assistant":
            *before, answer = messages
            users = [place for place, message in enumerate(before) if message.get("role") == "user"]
            place = users[-1] if users else len(before) - 1
            between = "\n".join(_in_words(message) for message in before[place + 1 :])
            return LastTurn(_in_words(before[place]), _in_words(answer), between)
    return None


def _in_words(message: Mapping[str, object]) -> str:
    """Its text, and its calls of tools as JSON."""
    parts = [part for part in (message.get("content"), message.get("tool_calls")) if part]
    return "\n".join(part if isinstance(part, str) else msgspec.json.encode(part).decode() for part in parts)


async def _traced(
    client: RolloutClient, environment: AgentEnvironment, problem: Problem, endpoint: AgentEndpoint
) -> Ended:
    with client.tracing.span("environment.episode") as span:
        span.note(session=endpoint.session_id)
        ended = await _guarded(environment, problem, endpoint)
        span.note(reward=ended.reward, success=ended.success)
    return ended


async def _guarded(environment: AgentEnvironment, problem: Problem, endpoint: AgentEndpoint) -> Ended:
    """Run the agent; its exceptions become EnvironmentFailedError, except for a missing reward."""
    try:
        ended = await environment.play(problem, endpoint)
    except RewardFailedError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentFailedError(f"{environment.name}: {describe(error)}") from error
    except asyncio.CancelledError as error:
        if (current := asyncio.current_task()) is not None and current.cancelling():
            raise
        raise EnvironmentFailedError(f"{environment.name}: the agent cancelled itself") from error
    if not isinstance(ended, Ended):
        raise EnvironmentFailedError(f"{environment.name}: play returned {ended!r}", "return an Ended")
    return ended


async def _beat(client: RolloutClient, session_id: str, every_s: float) -> None:
    """Send heartbeats for the session while the agent runs. Raises when the session has ended."""
    pause_s, missed = every_s, 0
    while True:
        await asyncio.sleep(pause_s)
        try:
            status = await client.heartbeat(session_id)
        except (ServerUnreachableError, NotReadyError):
            missed += 1
            if missed == _MISSED_BEATS:
                raise
            continue
        missed = 0
        if status.expires_in_s is not None:
            pause_s = min(every_s, max(0.05, status.expires_in_s / 3))


async def _end(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
    done, stubborn = await asyncio.wait(tasks, timeout=_CANCEL_S)
    for task in done:
        if not task.cancelled():
            task.exception()  # Looked at, so that nobody says that nobody did.
    if stubborn:
        _log.warning("an agent goes on after it was cancelled", agents=len(stubborn))


async def abort(client: RolloutClient, session_ids: Sequence[str]) -> bool:
    """Abort sessions, all at once; those that ended already stay as they are.

    False when the server cannot be reached or does not know one of them: then it was started anew meanwhile.
    """

    async def one(session_id: str) -> bool:
        try:
            await client.abort_session(session_id)
        except (ServerUnreachableError, NotReadyError, NotFoundError):
            return False
        except RollmeshError:
            return True
        return True

    try:
        async with asyncio.timeout(ABORT_S):
            return all(await asyncio.gather(*(one(session_id) for session_id in session_ids)))
    except TimeoutError:
        return False


_ARRIVING_S = 0.5


async def open_group(client: RolloutClient, body: OpenGroup, name: str | None = None) -> GroupOpened:
    """As `RolloutClient.open_group`; when cancelled, it leaves no open group behind.

    open ──answered──► the group
      └──cancelled──► answered within _ARRIVING_S? ──yes──► abort its sessions
                                                   └──no───► close the connection: the server drops the unread group
    """
    opening = asyncio.create_task(client.open_group(body, name))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        await _take_back(client, opening)
        raise


async def _take_back(client: RolloutClient, opening: asyncio.Task[GroupOpened]) -> None:
    await asyncio.wait({opening}, timeout=_ARRIVING_S)
    if not opening.done():
        opening.cancel()
        await asyncio.wait({opening})
    if not opening.cancelled() and opening.exception() is None:
        await abort(client, opening.result().session_ids)
