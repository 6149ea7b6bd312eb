"""The calls of a rollout server's API, defined once for both clients, async and sync.

    open_session(body) ──► Call(method, path, payload, answer, timeout_s, name)
                                 └── the transport sends `payload` ──► content ──► `read` ──► typed answer

All calls are idempotent, so a call whose answer was lost is retried: those that would take effect twice otherwise (opening
a group, taking a turn) carry a `name`, by which the server recognises a retry.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar
from urllib.parse import quote, urlencode

import msgspec
from pydantic import BaseModel, ValidationError

from services.wire import rollout_api, session_api
from services.wire.errors import WireError
from services.wire.gateway_api import CALL_HEADER

CALL_TIMEOUT_S = 15.0
LEASE_TIMEOUT_S = 2.0
"""For a runner's heartbeat: a later one must still come in time."""

_SAME_VERSION = "run client and server of the same version"
_GROUP_OPENED = msgspec.json.Decoder(rollout_api.GroupOpened).decode
_TURNS_TAKEN = msgspec.json.Decoder(rollout_api.TurnsTaken).decode
_GROUP_FINISHED = msgspec.json.Decoder(rollout_api.GroupFinished).decode

AnswerT = TypeVar("AnswerT")
ModelT = TypeVar("ModelT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Call(Generic[AnswerT]):
    """`path` is encoded and starts with a slash; `payload` is JSON, None for a call without a body.

    `joins`: it may be sent in one request with others (`services.wire.joined_calls`).
    """

    method: str
    path: str
    payload: bytes | None
    answer: Callable[[bytes], AnswerT]
    timeout_s: float = CALL_TIMEOUT_S
    name: str | None = None
    joins: bool = False

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.name is None else {CALL_HEADER: self.name}

    def read(self, url: str, content: bytes) -> AnswerT:
        """Decode the server's answer. Raises WireError where it does not match this version of the API."""
        try:
            return self.answer(content)
        except ValidationError as error:
            wrong: Exception = error
            why = f"no {error.title} ({error.error_count()} errors)"
        except msgspec.MsgspecError as error:
            wrong, why = error, f"what is not expected ({error})"
        raise WireError(f"{self.method} {url}{self.path} answered {why}", _SAME_VERSION) from wrong


def open_group(body: rollout_api.OpenGroup, name: str | None = None) -> Call[rollout_api.GroupOpened]:
    timeout_s, name = body.wait_s + CALL_TIMEOUT_S, name or new_call_name()
    return Call("POST", "/groups", _json(body), _GROUP_OPENED, timeout_s, name, joins=True)


def take_turns(
    group_id: str, body: rollout_api.TakeTurns, within_s: float = rollout_api.TURN_LEAST_S
) -> Call[rollout_api.TurnsTaken]:
    path = f"{_group(group_id)}/turns"
    return Call("POST", path, _plain_json(body), _TURNS_TAKEN, within_s, new_call_name(), joins=True)


def finish_group(group_id: str, body: rollout_api.FinishGroup) -> Call[rollout_api.GroupFinished]:
    path = f"{_group(group_id)}/finish"
    return Call("POST", path, _plain_json(body), _GROUP_FINISHED, joins=True)


def group_state(group_id: str) -> Call[session_api.GroupState]:
    return _get(_group(group_id), session_api.GroupState)


def run_state() -> Call[rollout_api.RunState]:
    return _get("/run", rollout_api.RunState)


def tell_evaluation(body: rollout_api.EvaluationAnswers) -> Call[None]:
    return Call("POST", "/evaluations", _json(body), lambda _: None)


def evaluations() -> Call[rollout_api.Evaluations]:
    return _get("/evaluations", rollout_api.Evaluations)


def join_runner(runner: rollout_api.Runner) -> Call[rollout_api.RunnerLease]:
    return Call("POST", "/runners", _json(runner), rollout_api.RunnerLease.model_validate_json)


def renew_runner(runner: rollout_api.Runner) -> Call[rollout_api.RunnerLease]:
    answer = rollout_api.RunnerLease.model_validate_json
    return Call("POST", "/runners/heartbeat", _json(runner), answer, LEASE_TIMEOUT_S)


def leave_runner(runner: rollout_api.Runner) -> Call[None]:
    return Call("POST", "/runners/leave", _json(runner), lambda _: None, LEASE_TIMEOUT_S)


def open_session(body: session_api.OpenSession) -> Call[session_api.SessionOpened]:
    """The client chooses the id where the body has none, so that the server recognises a retry."""
    if body.session_id is None:
        body = body.model_copy(update={"session_id": f"s-{secrets.token_hex(16)}"})
    timeout_s = body.wait_s + CALL_TIMEOUT_S
    return Call("POST", "/sessions", _json(body), session_api.SessionOpened.model_validate_json, timeout_s)


def session_status(session_id: str) -> Call[session_api.SessionStatus]:
    return _get(_session(session_id), session_api.SessionStatus)


def give_reward(session_id: str, body: session_api.GiveReward) -> Call[session_api.SessionStatus]:
    return _session_call(session_id, "reward", _json(body), session_api.SessionStatus)


def finish_session(session_id: str, body: session_api.FinishSession) -> Call[session_api.SessionFinished]:
    return _session_call(session_id, "finish", _json(body), session_api.SessionFinished)


def abort_session(session_id: str) -> Call[session_api.SessionStatus]:
    return _session_call(session_id, "abort", None, session_api.SessionStatus)


def heartbeat(session_id: str) -> Call[session_api.SessionStatus]:
    return _session_call(session_id, "heartbeat", None, session_api.SessionStatus)


def delete_session(session_id: str) -> Call[None]:
    return Call("DELETE", _session(session_id), None, lambda _: None)


def trajectory_tokens(session_id: str) -> Call[session_api.TrajectoryTokens]:
    return _get(f"{_session(session_id)}/trajectory?format=tokens", session_api.TrajectoryTokens)


def trajectory_messages(session_id: str) -> Call[session_api.TrajectoryMessages]:
    return _get(f"{_session(session_id)}/trajectory?format=messages", session_api.TrajectoryMessages)


def trajectories(after: str, limit: int, wait_s: float) -> Call[session_api.TrajectoryPage]:
    asked = {"after": after} if after else {}
    query = urlencode(asked | {"limit": limit, "wait_s": wait_s})
    return _get(f"/trajectories?{query}", session_api.TrajectoryPage, CALL_TIMEOUT_S + wait_s)


def _get(path: str, answer: type[ModelT], timeout_s: float = CALL_TIMEOUT_S) -> Call[ModelT]:
    return Call("GET", path, None, answer.model_validate_json, timeout_s)


def new_call_name() -> str:
    """By which servers recognise a call that is sent again."""
    return secrets.token_hex(16)


def _group(group_id: str) -> str:
    return f"/groups/{quote(group_id, safe='')}"


def _session(session_id: str) -> str:
    return f"/sessions/{quote(session_id, safe='')}"


def _session_call(session_id: str, verb: str, payload: bytes | None, answer: type[ModelT]) -> Call[ModelT]:
    return Call("POST", f"{_session(session_id)}/{verb}", payload, answer.model_validate_json)


def _json(body: BaseModel) -> bytes:
    return body.model_dump_json(exclude_none=True).encode()


def _plain_json(body: rollout_api.PlainBody) -> bytes:
    return msgspec.json.encode(body, enc_hook=_fields)


def _fields(body: BaseModel) -> dict[str, object]:
    """Of a model within a struct."""
    return body.model_dump(exclude_none=True)
