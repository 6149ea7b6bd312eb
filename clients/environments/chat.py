"""Playing an Environment through the chat API: its texts become user messages, the policy's answers assistant messages.

    first turn ──► [user] ──chat──► [user, assistant] ──respond──► [user, assistant, user] ──chat──► …

The model's own chat template is around every text then, as it was when the model learned to chat. The server keeps the
episode one segment by extending the captured tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from clients.environments.base import (
    AgentEndpoint,
    Answer,
    Ended,
    Environment,
    Judging,
    Problem,
    Split,
    reads_token_ids,
)
from clients.rollout.transport import HttpSession, open_session, post_json
from services.wire.errors import ContextLengthError, RollmeshError, WireError

CALL_TIMEOUT_S = 600.0


class NoChatTemplateError(RollmeshError):
    """The model's folder has no chat template: its server takes plain text only."""

    status = 400
    code = "no_chat_template"


@dataclass(frozen=True)
class ChatEnvironment:
    """An AgentEnvironment whose agent only passes an Environment's texts on. `system`: said first, if anything."""

    environment: Environment
    system: str | None = None

    @property
    def name(self) -> str:
        return self.environment.name

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        return self.environment.problem(split, index, seed)

    async def play(self, problem: Problem, endpoint: AgentEndpoint) -> Ended:
        """A conversation that outgrows the model after its first answer ends without reward: that is the policy's doing."""
        episode = self.environment.start(problem)
        messages: list[dict[str, Any]] = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages += (
            [{"role": "user", "content": episode.first_turn}]
            if problem.messages is None
            else [dict(message) for message in problem.messages]
        )
        spoken, token_ids = False, reads_token_ids(self.environment)
        async with open_session(endpoint.verify) as http:
            while True:
                try:
                    message, answer = await chat(http, endpoint, messages, token_ids)
                except ContextLengthError:
                    if not spoken:
                        raise
                    return Ended(reward=0.0, success=False, components={"context_exceeded": 1.0})
                spoken = True
                reply = episode.respond(answer)
                if isinstance(reply, Ended):
                    return reply
                if isinstance(reply, Judging):
                    return await reply.judge()
                messages += [message, {"role": "user", "content": reply.text}]


async def chat(
    http: HttpSession, endpoint: AgentEndpoint, messages: list[dict[str, Any]], token_ids: bool = False
) -> tuple[dict[str, Any], Answer]:
    """One chat completion: the assistant's message as it came, and what it says, by its tokens too where they are asked
    for. Raises the server's typed errors."""
    url = f"{endpoint.base_url}/chat/completions"
    body = {
        "model": "policy",
        "messages": messages,
        "max_tokens": endpoint.max_tokens,
        "temperature": endpoint.temperature,
        **({"return_token_ids": True} if token_ids else {}),
    }
    content = await post_json(http, url, body, endpoint.api_key, CALL_TIMEOUT_S, more_errors=(NoChatTemplateError,))
    completion = json.loads(content)
    try:
        choice = completion["choices"][0]
        message = choice["message"]
        complete = choice["finish_reason"] != "length"
        sampled = tuple(choice["token_ids"]) if token_ids else ()
        return message, Answer(message["content"] or "", complete, sampled)
    except (KeyError, IndexError, TypeError) as error:
        raise WireError(f"POST {url} answered no chat completion ({content[:200]!r})") from error
