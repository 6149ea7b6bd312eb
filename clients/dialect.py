"""In which dialect an Environment speaks to the policy: plain text, or chat messages in the model's own template.

An agent environment calls the policy as it likes and is left alone. For an Environment, `auto` asks the server: chat where
the model has a chat template, text where it has none.
"""

from __future__ import annotations

from typing import Literal

import aiohttp
import structlog

from clients.agent_play import abort
from clients.chat import ChatEnvironment, NoChatTemplateError, chat
from clients.environment import AgentEndpoint, AgentEnvironment, AnyEnvironment
from clients.opening import open_group
from clients.rollout import RolloutClient
from services.wire.rollout_api import OpenGroup, SamplingBody

_log = structlog.get_logger()
Dialect = Literal["auto", "text", "chat"]


async def in_dialect(client: RolloutClient, environment: AnyEnvironment, dialect: Dialect) -> AnyEnvironment:
    """The environment as it is to be played. `auto` costs one answer of one token."""
    if isinstance(environment, AgentEnvironment) or dialect == "text":
        return environment
    if dialect == "auto":
        dialect = await ask(client)
        _log.info("dialect chosen", dialect=dialect, task=environment.name)
    return ChatEnvironment(environment) if dialect == "chat" else environment


async def ask(client: RolloutClient) -> Literal["text", "chat"]:
    """What the server's model understands. Raises what the server answers for any reason but a missing template."""
    opening = OpenGroup(task="dialect", group_size=1, sampling=SamplingBody(max_tokens=1), purpose="evaluate")
    group = await open_group(client, opening)
    (session_id,), (api_key,) = group.session_ids, group.api_keys
    endpoint = AgentEndpoint(f"{client.url}/sessions/{session_id}/v1", api_key, session_id, 1, 1.0, client.trust.verify)
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=endpoint.verify)) as http:
            await chat(http, endpoint, [{"role": "user", "content": "?"}])
    except NoChatTemplateError:
        return "text"
    finally:
        await abort(client, group.session_ids)
    return "chat"
