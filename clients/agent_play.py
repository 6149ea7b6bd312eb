"""Playing one group of an agent environment: every sibling's agent at once, each in its own session.

agent plays ─────────────► Ended ──► finish the session (its trajectory is written)  ──► Played
  │  heartbeats meanwhile ──► the session is gone  ─┐
  ├── raises ───────────────────────────────────────┼──► abort the session ──► Lost(cause, why); its siblings go on
  └── its time is over ─────────────────────────────┘
cancelled ──► every agent cancelled, every open session aborted
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from clients.agent import AgentEndpoint, AgentEnvironment
from clients.environment import Ended, Problem
from clients.losses import Cause, EnvironmentFailedError, describe
from clients.play import Played, components
from clients.repeating import ServerUnreachableError
from clients.rollout import RolloutClient
from services.wire.errors import NotReadyError, RollmeshError
from services.wire.rollout_api import GroupOpened, SamplingBody
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


async def play_agents(
    client: RolloutClient,
    environment: AgentEnvironment,
    group: GroupOpened,
    problems: Sequence[Problem],
    sampling: SamplingBody,
    limits: EpisodeLimits,
) -> list[Played | Lost]:
    """Play `problems[i]` in session `i`; no session is open any more when this returns or is cancelled."""
    async with asyncio.TaskGroup() as siblings:
        playing = [
            siblings.create_task(_play(client, environment, problem, _endpoint(client, session, key, sampling), limits))
            for session, key, problem in zip(group.session_ids, group.api_keys, problems, strict=True)
        ]
    return [task.result() for task in playing]


def _endpoint(client: RolloutClient, session_id: str, api_key: str, sampling: SamplingBody) -> AgentEndpoint:
    url = f"{client.url}/sessions/{session_id}/v1"
    return AgentEndpoint(url, api_key, session_id, sampling.max_tokens, sampling.temperature)


async def _play(
    client: RolloutClient,
    environment: AgentEnvironment,
    problem: Problem,
    endpoint: AgentEndpoint,
    limits: EpisodeLimits,
) -> Played | Lost:
    session_id = endpoint.session_id
    try:
        ended = await _until_ended(client, environment, problem, endpoint, limits)
        body = FinishSession(reward=ended.reward, components=components(ended))
        finished = await client.finish_session(session_id, body)
        return Played(session_id, ended, finished.sampled_tokens)
    except TimeoutError:
        lost = Lost(session_id, "timeout", f"no end after {limits.timeout_s:g} s")
    except EnvironmentFailedError as error:
        lost = Lost(session_id, "environment", str(error))
    except (ServerUnreachableError, NotReadyError) as error:
        lost = Lost(session_id, "server", str(error))
    except (RollmeshError, ValueError) as error:
        # A ValueError: the reward or a component is no finite number.
        lost = Lost(session_id, "session" if isinstance(error, RollmeshError) else "environment", str(error))
    except asyncio.CancelledError:
        await abort(client, [session_id])
        raise
    if not await abort(client, [session_id]):
        # What the agent met with is what we meet with: nobody is to be blamed but the server.
        return Lost(session_id, "server", lost.why)
    return lost


async def _until_ended(
    client: RolloutClient,
    environment: AgentEnvironment,
    problem: Problem,
    endpoint: AgentEndpoint,
    limits: EpisodeLimits,
) -> Ended:
    """Raises TimeoutError, EnvironmentFailedError, or what the server says of a session that is gone."""
    agent = asyncio.create_task(_guarded(environment, problem, endpoint))
    beats = asyncio.create_task(_beat(client, endpoint.session_id, limits.heartbeat_s))
    try:
        await asyncio.wait({agent, beats}, timeout=limits.timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if agent.done():
            return agent.result()
        if beats.done():
            beats.result()
        raise TimeoutError
    finally:
        await _end(agent, beats)


async def _guarded(environment: AgentEnvironment, problem: Problem, endpoint: AgentEndpoint) -> Ended:
    """The agent, with whatever it may raise turned into EnvironmentFailedError."""
    try:
        ended = await environment.play(problem, endpoint)
    except (Exception, SystemExit) as error:
        raise EnvironmentFailedError(f"{environment.name}: {describe(error)}") from error
    except asyncio.CancelledError as error:
        if (current := asyncio.current_task()) is not None and current.cancelling():
            raise
        raise EnvironmentFailedError(f"{environment.name}: the agent cancelled itself") from error
    if not isinstance(ended, Ended):
        raise EnvironmentFailedError(f"{environment.name}: play returned {ended!r}", "return clients.environment.Ended")
    return ended


async def _beat(client: RolloutClient, session_id: str, every_s: float) -> None:
    """Tell the server, while the agent is busy elsewhere, that the session lives. Raises when it does not."""
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
    """Abort sessions, all at once; False when the server cannot be reached. Those that ended already stay as they are."""

    async def one(session_id: str) -> bool:
        try:
            await client.abort_session(session_id)
        except (ServerUnreachableError, NotReadyError):
            return False
        except RollmeshError:
            return True
        return True

    try:
        async with asyncio.timeout(ABORT_S):
            return all(await asyncio.gather(*(one(session_id) for session_id in session_ids)))
    except TimeoutError:
        return False
