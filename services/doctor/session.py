"""A scripted session with a rollout server: a second turn that extends the first must stay one segment of its tokens.

    POST /sessions (evaluate) ─► two calls of chat, or of token ids where the model has no chat template ─► trajectory

Nothing of it is published or trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import msgspec

from services.policies.diagnosis.finding import Finding, error
from services.wire.errors import UNDECODABLE

_WITHIN_S = 6.0
_TOKENS = 4
_PROMPT = [5, 6, 7]
"""Ids of a first prompt: small enough for any vocabulary."""


class _Opened(msgspec.Struct):
    session_id: str
    base_url: str
    api_key: str


class _Segment(msgspec.Struct):
    token_ids: list[int]
    loss_mask: list[int]
    break_reason: str | None = None


class _Trajectory(msgspec.Struct):
    segments: list[_Segment]


async def of_session(http: httpx.AsyncClient, server: str, url: str, key: str | None) -> list[Finding]:
    """`server`, `url`: a rollout server that is ready; `key`: the agent key. Empty where it is too busy."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    opening = {"purpose": "evaluate", "env": "doctor", "group_size": 1, "idle_timeout_s": 30.0}
    try:
        answer = await http.post(f"{url}/sessions", json=opening, headers=headers, timeout=_WITHIN_S)
        if answer.status_code in (401, 403):
            return [_refused(server, answer)]
        opened = msgspec.json.decode(answer.raise_for_status().content, type=_Opened)
        at = f"{url}/sessions/{opened.session_id}"
        try:
            sampled = await _two_turns(http, f"{at}/v1", {"authorization": f"Bearer {opened.api_key}"})
            told = await http.get(f"{at}/trajectory?format=tokens", headers=headers, timeout=_WITHIN_S)
            trajectory = msgspec.json.decode(told.raise_for_status().content, type=_Trajectory)
        finally:
            await http.post(f"{at}/abort", headers=headers, timeout=_WITHIN_S)
    except (httpx.HTTPError, *UNDECODABLE):
        return []
    return of_trajectory(server, trajectory.segments, sampled)


def of_trajectory(server: str, segments: Sequence[_Segment], sampled: Sequence[Sequence[int]]) -> list[Finding]:
    """`sampled`: token ids of each answer."""
    reasons = ", ".join(sorted({each.break_reason for each in segments if each.break_reason}))
    remedy = (
        "see rollout.renderer and the chat template: it must render a conversation so that it extends the one before"
    )
    if len(segments) > 1:
        seen = f"two turns became {len(segments)} segments ({reasons or 'no reason given'})"
        return [error("prefix-broken", f"{server} cuts conversations that go on", seen, remedy)]
    kept = [token for each in segments for token, mask in zip(each.token_ids, each.loss_mask, strict=True) if mask]
    if kept != [token for answer in sampled for token in answer]:
        seen = f"{sum(map(len, sampled))} tokens were sampled, {len(kept)} are in the trajectory, or others"
        return [error("prefix-broken", f"{server} captures other tokens than it sampled", seen, remedy)]
    return []


async def _two_turns(http: httpx.AsyncClient, base: str, headers: Mapping[str, str]) -> list[list[int]]:
    """Token ids of both answers. Raises httpx.HTTPError."""
    limits = {"model": "policy", "max_tokens": _TOKENS, "return_token_ids": True}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "1+1="}]
    answers: list[list[int]] = []
    for turn in ("2+2=", ""):
        body = {**limits, "messages": messages}
        answer = await http.post(f"{base}/chat/completions", json=body, headers=headers, timeout=_WITHIN_S)
        if answer.status_code == 400 and not answers:
            return await _two_completions(http, base, headers, limits)
        choice = answer.raise_for_status().json()["choices"][0]
        answers.append(choice["token_ids"])
        messages += [choice["message"], {"role": "user", "content": turn}]
    return answers


async def _two_completions(
    http: httpx.AsyncClient, base: str, headers: Mapping[str, str], limits: Mapping[str, Any]
) -> list[list[int]]:
    prompt, answers = list(_PROMPT), list[list[int]]()
    for _ in range(2):
        body = {**limits, "prompt": prompt}
        answer = await http.post(f"{base}/completions", json=body, headers=headers, timeout=_WITHIN_S)
        answers.append(answer.raise_for_status().json()["choices"][0]["token_ids"])
        prompt += [*answers[-1], *_PROMPT]
    return answers


def _refused(server: str, answer: httpx.Response) -> Finding:
    return error(
        "keys",
        f"{server} does not take the agent key",
        f"POST /sessions answers {answer.status_code}",
        "give --keys-dir the folder of this mesh's keys (`rollmesh keys init` makes one)",
    )
