"""The blocking rollout client, for agents that are plain synchronous code: the methods of `RolloutClient`, one by one.

    with SyncRolloutClient("http://127.0.0.1:8100") as client:
        session = client.open_session(OpenSession(env="my-agent"))
        ...  # an OpenAI client with base_url=session.base_url and api_key=session.api_key does its work
        client.finish_session(session.session_id, FinishSession(reward=1.0))

It may be used from several threads at once.
"""

from __future__ import annotations

import time

import httpx
from tenacity import Retrying, retry_if_exception, stop_after_delay

from clients.rollout import calls
from clients.rollout.calls import AnswerT, Call
from clients.rollout.transport import ServerUnreachableError, first_pause_s, headers, pause, worth_repeating
from services.security.tls import PUBLIC, Trust
from services.wire import rollout_api, session_api
from services.wire.error_answer import typed_error
from services.wire.errors import RollmeshError

# As in the async client: a connection is given up before the server closes it.
_KEEP_ALIVE_S = 3.0


class SyncRolloutClient:
    """One server's rollout API. Use as a context manager. What a method raises is said at `RolloutClient`."""

    def __init__(
        self, url: str, *, api_key: str | None = None, patience_s: float = 30.0, trust: Trust = PUBLIC
    ) -> None:
        """As `RolloutClient`. `patience_s` bounds the repeating of one call."""
        self.url, self._trust = trust.address(url), trust
        self._patience_s = patience_s
        self._headers = headers(api_key)
        self._http: httpx.Client | None = None

    def __enter__(self) -> SyncRolloutClient:
        limits = httpx.Limits(max_connections=None, keepalive_expiry=_KEEP_ALIVE_S)
        self._http = httpx.Client(headers=self._headers, limits=limits, trust_env=False, verify=self._trust.verify)
        return self

    def __exit__(self, *_: object) -> None:
        if self._http is not None:
            self._http.close()

    def open_group(self, body: rollout_api.OpenGroup, name: str | None = None) -> rollout_api.GroupOpened:
        return self._call(calls.open_group(body, name))

    def take_turns(
        self, group_id: str, body: rollout_api.TakeTurns, within_s: float = rollout_api.TURN_LEAST_S
    ) -> rollout_api.TurnsTaken:
        return self._call(calls.take_turns(group_id, body, within_s))

    def finish_group(self, group_id: str, body: rollout_api.FinishGroup) -> rollout_api.GroupFinished:
        return self._call(calls.finish_group(group_id, body))

    def group_state(self, group_id: str) -> session_api.GroupState:
        return self._call(calls.group_state(group_id))

    def run_state(self, patience_s: float | None = None) -> rollout_api.RunState:
        return self._call(calls.run_state(), patience_s)

    def join_runner(self, runner: rollout_api.Runner) -> rollout_api.RunnerLease:
        return self._call(calls.join_runner(runner))

    def renew_runner(self, runner: rollout_api.Runner) -> rollout_api.RunnerLease:
        return self._call(calls.renew_runner(runner))

    def leave_runner(self, runner: rollout_api.Runner) -> None:
        self._call(calls.leave_runner(runner))

    def tell_evaluation(self, body: rollout_api.EvaluationAnswers) -> None:
        self._call(calls.tell_evaluation(body))

    def evaluations(self) -> list[rollout_api.Evaluation]:
        return self._call(calls.evaluations()).evaluations

    def open_session(self, body: session_api.OpenSession) -> session_api.SessionOpened:
        return self._call(calls.open_session(body))

    def session_status(self, session_id: str) -> session_api.SessionStatus:
        return self._call(calls.session_status(session_id))

    def give_reward(self, session_id: str, body: session_api.GiveReward) -> session_api.SessionStatus:
        return self._call(calls.give_reward(session_id, body))

    def finish_session(self, session_id: str, body: session_api.FinishSession) -> session_api.SessionFinished:
        return self._call(calls.finish_session(session_id, body))

    def abort_session(self, session_id: str) -> session_api.SessionStatus:
        return self._call(calls.abort_session(session_id))

    def heartbeat(self, session_id: str) -> session_api.SessionStatus:
        return self._call(calls.heartbeat(session_id))

    def delete_session(self, session_id: str) -> None:
        self._call(calls.delete_session(session_id))

    def trajectory_tokens(self, session_id: str) -> session_api.TrajectoryTokens:
        return self._call(calls.trajectory_tokens(session_id))

    def trajectory_messages(self, session_id: str) -> session_api.TrajectoryMessages:
        return self._call(calls.trajectory_messages(session_id))

    def trajectories(self, after: str = "", *, limit: int = 100, wait_s: float = 0.0) -> session_api.TrajectoryPage:
        return self._call(calls.trajectories(after, limit, wait_s))

    def _call(self, call: Call[AnswerT], patience_s: float | None = None) -> AnswerT:
        try:
            content = self._send(call)
        except RollmeshError as error:
            patience_s = self._patience_s if patience_s is None else patience_s
            pause_s = first_pause_s(error)
            if not worth_repeating(error) or pause_s > patience_s:
                raise
            time.sleep(pause_s)
            content = self._repeat(call, patience_s - pause_s)
        return call.read(self.url, content)

    def _repeat(self, call: Call[AnswerT], patience_s: float) -> bytes:
        retrying = Retrying(
            retry=retry_if_exception(worth_repeating),
            wait=pause,
            stop=stop_after_delay(patience_s),
            reraise=True,
        )
        content: bytes = retrying(self._send, call)
        return content

    def _send(self, call: Call[AnswerT]) -> bytes:
        if self._http is None:
            raise RuntimeError("use the client as a context manager: with SyncRolloutClient(url) as client")
        url = f"{self.url}{call.path}"
        try:
            response = self._http.request(
                call.method, url, headers=call.headers, content=call.payload, timeout=call.timeout_s
            )
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            if (refused := self._trust.refusal(self.url, error)) is not None:
                raise refused from error
            raise ServerUnreachableError(self.url, str(error) or "no connection", sent=False) from error
        except httpx.TimeoutException as error:
            raise ServerUnreachableError(self.url, f"no answer in {call.timeout_s:g} s", sent=True) from error
        except httpx.TransportError as error:
            raise ServerUnreachableError(self.url, str(error) or type(error).__name__, sent=True) from error
        if response.status_code < 400:
            return response.content
        raise typed_error(
            f"{call.method} {url}", response.status_code, response.headers.get("Retry-After"), response.content
        )
