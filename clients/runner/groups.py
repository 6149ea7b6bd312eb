"""Plays one opened group, with either kind of environment: finished with rewards, or lost and aborted."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Literal, cast

import structlog

from clients.environments.base import (
    AgentEndpoint,
    AgentEnvironment,
    AnyEnvironment,
    Dialect,
    Environment,
    Problem,
    agent_of,
    needs_chat,
)
from clients.environments.chat import ChatEnvironment, NoChatTemplateError, chat
from clients.rollout.client import RolloutClient
from clients.rollout.transport import open_session
from clients.runner.agent_episodes import EpisodeLimits, Lost, abort, open_group, play_apart, play_together
from clients.runner.failures import GroupLostError, cause_of
from clients.runner.text_episodes import NOTHING, Played, play_group
from services.policies.diagnosis.environment import of_dialect
from services.wire.errors import ConcludedError, RollmeshError, UsageError
from services.wire.rollout_api import FinishGroup, GroupOpened, OpenGroup, SamplingBody


async def play_to_end(
    client: RolloutClient,
    environment: AnyEnvironment,
    group: GroupOpened,
    problem: Problem,
    sampling: SamplingBody,
    limits: EpisodeLimits,
    noted: Mapping[str, float] = NOTHING,
) -> list[Played]:
    """Every sibling plays `problem`; no session is open any more when this returns, raises or is cancelled.

    `noted`: recorded beside each reward.

    Raises GroupLostError with its cause, or ConcludedError when the run has concluded.
    """
    agent = agent_of(environment)
    try:
        if agent is not None:
            return await play_together(client, agent, group, problem, sampling, limits, noted)
        return await _play_texts(
            client, cast("Environment", environment), group, [problem] * len(group.session_ids), limits, noted
        )
    except asyncio.CancelledError:
        await abort(client, group.session_ids)
        raise
    except ConcludedError:
        raise
    except (RollmeshError, TimeoutError, ValueError) as error:
        raise await _lost(client, group, error, limits) from error


async def evaluate_group(
    client: RolloutClient,
    environment: AnyEnvironment,
    group: GroupOpened,
    problems: Sequence[Problem],
    sampling: SamplingBody,
    limits: EpisodeLimits,
    *,
    shown: int = 0,
) -> list[Played | Lost]:
    """Play `problems[i]` in session `i`, and count tokens. As `play_to_end`, but agents are lost one by one.

    `shown`: of so many of them the last turn is told.
    """
    agent = agent_of(environment)
    if agent is not None:
        return await play_apart(client, agent, group, problems, sampling, limits, shown=shown)
    try:
        return [*await _play_texts(client, cast("Environment", environment), group, problems, limits, evaluating=True)]
    except asyncio.CancelledError:
        await abort(client, group.session_ids)
        raise
    except (RollmeshError, TimeoutError, ValueError) as error:
        raise await _lost(client, group, error, limits) from error


async def _play_texts(
    client: RolloutClient,
    environment: Environment,
    group: GroupOpened,
    problems: Sequence[Problem],
    limits: EpisodeLimits,
    noted: Mapping[str, float] = NOTHING,
    *,
    evaluating: bool = False,
) -> list[Played]:
    async with asyncio.timeout(limits.timeout_s):
        played = await play_group(client, environment, group, problems, evaluating=evaluating)
        await client.finish_group(group.group_id, FinishGroup(rewards=[episode.as_reward(noted) for episode in played]))
    return played


async def _lost(client: RolloutClient, group: GroupOpened, error: Exception, limits: EpisodeLimits) -> GroupLostError:
    """Abort the open sessions. A server that cannot be reached for this is the cause, whatever failed before."""
    cause = cause_of(error)
    if cause != "server" and not await abort(client, group.session_ids):
        cause = "server"
    return GroupLostError(cause, limits.describe(error))


_log = structlog.get_logger()


async def in_dialect(
    client: RolloutClient, environment: AnyEnvironment, dialect: Dialect, *, assumed: bool = False
) -> AnyEnvironment:
    """The environment as it is to be played. `auto` costs one answer of one token, and so does text that is `assumed`."""
    if assumed:
        await _warn(client, environment)
    if isinstance(environment, AgentEnvironment) or dialect == "text":
        return environment
    if dialect == "auto":
        dialect = await ask(client)
        _log.info("dialect chosen", dialect=dialect, task=environment.name)
        if dialect == "text" and needs_chat(environment):
            raise UsageError(
                f"prompts of {environment.name} are chat messages, and the model has no chat template",
                "take a model that has one, or prompts that are texts",
            )
    return ChatEnvironment(environment) if dialect == "chat" else environment


async def _warn(client: RolloutClient, environment: AnyEnvironment) -> None:
    """Say so where the model could be asked in its chat template. A server that does not answer is met later."""
    try:
        if await ask(client) == "chat":
            found = of_dialect(environment.name)
            _log.warning(f"{found.cause}: {found.remedy}")
    except RollmeshError as error:
        _log.debug("whether the model has a chat template is not known", why=str(error))


async def ask(client: RolloutClient) -> Literal["text", "chat"]:
    """Whether the server's model has a chat template. Raises the server's error for any other reason."""
    opening = OpenGroup(task="dialect", group_size=1, sampling=SamplingBody(max_tokens=1), purpose="evaluate")
    group = await open_group(client, opening)
    (session_id,), (api_key,) = group.session_ids, group.api_keys
    endpoint = AgentEndpoint(f"{client.url}/sessions/{session_id}/v1", api_key, session_id, 1, 1.0, client.trust.verify)
    try:
        async with open_session(endpoint.verify) as http:
            await chat(http, endpoint, [{"role": "user", "content": "?"}])
    except NoChatTemplateError:
        return "text"
    finally:
        await abort(client, group.session_ids)
    return "chat"
