"""One opened group, whatever kind of environment plays it, to its end: finished with rewards, or given up and aborted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from clients.agent import AgentEnvironment
from clients.agent_play import EpisodeLimits, Lost, abort, play_agents
from clients.environment import Environment, Problem
from clients.losses import EnvironmentFailedError, GroupLostError
from clients.play import Played, play_group
from clients.repeating import ServerUnreachableError
from clients.rollout import RolloutClient
from services.wire.errors import (
    ConflictError,
    ContextLengthError,
    NotFoundError,
    NotReadyError,
    SessionConcludedError,
    SessionExpiredError,
)
from services.wire.rollout_api import FinishGroup, GroupOpened, SamplingBody

AnyEnvironment = Environment | AgentEnvironment


async def play_to_end(
    client: RolloutClient,
    environment: AnyEnvironment,
    group: GroupOpened,
    problems: Sequence[Problem],
    sampling: SamplingBody,
    limits: EpisodeLimits,
    *,
    count_tokens: bool = False,
) -> list[Played | Lost]:
    """Play `problems[i]` in session `i`; no session is open any more when this returns, raises or is cancelled.

    Episodes of an agent environment may be lost one by one. An Environment's siblings take their turns together and are
    lost together: then it raises GroupLostError. Raises ConcludedError when the run has concluded.
    """
    if isinstance(environment, AgentEnvironment):
        return await play_agents(client, environment, group, problems, sampling, limits)
    try:
        async with asyncio.timeout(limits.timeout_s):
            played = await play_group(client, environment, group, problems, count_tokens=count_tokens)
            await client.finish_group(group.group_id, FinishGroup(rewards=[episode.as_reward() for episode in played]))
        return list(played)
    except (ServerUnreachableError, NotReadyError) as error:
        raise GroupLostError("server", str(error)) from error
    except (ConflictError, NotFoundError, SessionConcludedError, SessionExpiredError) as error:
        raise GroupLostError("session", str(error)) from error
    except TimeoutError as error:
        await abort(client, group.session_ids)
        raise GroupLostError("timeout", f"no end after {limits.timeout_s:g} s") from error
    except (EnvironmentFailedError, ContextLengthError, ValueError) as error:
        # A ValueError: a reward that is no finite number.
        await abort(client, group.session_ids)
        raise GroupLostError("environment", str(error)) from error
    except asyncio.CancelledError:
        await abort(client, group.session_ids)
        raise
