"""The rollout client: groups and sessions over a rollout server's REST API. `clients.rollout.sync_client` is its
blocking twin.

    async with RolloutClient("http://127.0.0.1:8100") as client:
        sampling = SamplingBody(max_tokens=16)
        group = await client.open_group(OpenGroup(task="demo", group_size=2, sampling=sampling, wait_s=20))
        turns = [Turn(session_id=session, text="12340123=") for session in group.session_ids]
        taken = await client.take_turns(group.group_id, TakeTurns(turns=turns))
        rewards = [SessionReward(session_id=r.session_id, reward=1.0, components={"success": 1.0}) for r in taken.results]
        await client.finish_group(group.group_id, FinishGroup(rewards=rewards))

        session = await client.open_session(OpenSession(env="my-agent"))
        ...  # an OpenAI client with base_url=session.base_url and api_key=session.api_key does its work
        await client.finish_session(session.session_id, FinishSession(reward=1.0))

Error answers come back as the typed errors that the server raised; `clients.rollout.transport` says which calls are
sent again.
"""

from __future__ import annotations

from clients.rollout import calls
from clients.rollout.transport import Transport
from services.observability.tracing import NO_TRACING, Tracing
from services.security.tls import PUBLIC, Trust
from services.wire import rollout_api, session_api


class RolloutClient:
    """One server's rollout API. Use as an async context manager; any number of calls may be in flight."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        patience_s: float = 30.0,
        waits_for_admission: bool = True,
        trust: Trust = PUBLIC,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        """`url` such as `http://127.0.0.1:8100`; `api_key`: the agent key of a server that asks for one.

        `patience_s` bounds the time spent on repeating one call; `waits_for_admission`: also one that is answered 429.
        `trust`: whose certificates servers may show, such as
        `services.security.tls.read_trust(folder)`. `tracing`: calls belong to its current span.
        """
        self._transport = Transport(
            url,
            api_key=api_key,
            patience_s=patience_s,
            waits_for_admission=waits_for_admission,
            trust=trust,
            tracing=tracing,
        )
        self.url, self.trust, self.tracing = self._transport.url, trust, tracing

    async def __aenter__(self) -> RolloutClient:
        await self._transport.__aenter__()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._transport.__aexit__(*raised)

    async def open_group(self, body: rollout_api.OpenGroup, name: str | None = None) -> rollout_api.GroupOpened:
        """Open a group, held by the server up to `body.wait_s` for admission.

        `name`: of the call (`calls.new_call_name`), for whoever makes it again after its answer was lost for good: of one
        name one group is opened. Raises ConcludedError when the run is over, CapacityError when admission stayed closed
        throughout, ConflictError where the group of that name has ended.
        """
        return await self._transport.call(calls.open_group(body, name))

    async def take_turns(
        self, group_id: str, body: rollout_api.TakeTurns, within_s: float = rollout_api.TURN_LEAST_S
    ) -> rollout_api.TurnsTaken:
        """Append texts to sessions and generate an answer in each: once, however often the call has to be sent.

        `within_s`: the group's `turn_within_s`; a server that has not answered by then is taken for lost.
        """
        return await self._transport.call(calls.take_turns(group_id, body, within_s))

    async def finish_group(self, group_id: str, body: rollout_api.FinishGroup) -> rollout_api.GroupFinished:
        """Hand in the rewards; the trajectories are published exactly once, however often this is repeated."""
        return await self._transport.call(calls.finish_group(group_id, body))

    async def group_state(self, group_id: str) -> session_api.GroupState:
        """Which siblings of a group have finished, and which are missing."""
        return await self._transport.call(calls.group_state(group_id))

    async def run_state(self, patience_s: float | None = None) -> rollout_api.RunState:
        """How far the run is. `patience_s` overrides the client's, for waiting until a server has started."""
        return await self._transport.call(calls.run_state(), patience_s)

    async def tell_evaluation(self, body: rollout_api.EvaluationAnswers) -> None:
        """Record an evaluation of the run; a version that has one keeps it."""
        await self._transport.call(calls.tell_evaluation(body))

    async def evaluations(self) -> list[rollout_api.Evaluation]:
        """The run's evaluations so far, in the order of their versions."""
        return (await self._transport.call(calls.evaluations())).evaluations

    async def join_runner(self, runner: rollout_api.Runner) -> rollout_api.RunnerLease:
        """Take a runner's name; the groups of an earlier process of that name are given up."""
        return await self._transport.call(calls.join_runner(runner))

    async def renew_runner(self, runner: rollout_api.Runner) -> rollout_api.RunnerLease:
        """Keep the runner's groups for another lease. Raises ConflictError where another process has its name."""
        return await self._transport.call(calls.renew_runner(runner))

    async def leave_runner(self, runner: rollout_api.Runner) -> None:
        """The runner ends: its groups are given up at once."""
        await self._transport.call(calls.leave_runner(runner))

    async def open_session(self, body: session_api.OpenSession) -> session_api.SessionOpened:
        """Open a session, held by the server up to `body.wait_s` for admission; repeated calls open it once.

        Raises ConflictError for an id that is taken by another body, ConcludedError and CapacityError as `open_group`.
        """
        return await self._transport.call(calls.open_session(body))

    async def session_status(self, session_id: str) -> session_api.SessionStatus:
        return await self._transport.call(calls.session_status(session_id))

    async def give_reward(self, session_id: str, body: session_api.GiveReward) -> session_api.SessionStatus:
        """Reward the session, or one of its calls. Raises SessionConcludedError when it has ended."""
        return await self._transport.call(calls.give_reward(session_id, body))

    async def finish_session(self, session_id: str, body: session_api.FinishSession) -> session_api.SessionFinished:
        """End the session and write its trajectory, exactly once however often this is repeated."""
        return await self._transport.call(calls.finish_session(session_id, body))

    async def abort_session(self, session_id: str) -> session_api.SessionStatus:
        """End the session without a trajectory."""
        return await self._transport.call(calls.abort_session(session_id))

    async def heartbeat(self, session_id: str) -> session_api.SessionStatus:
        """Keep an idle session alive. Raises SessionExpiredError or SessionConcludedError when it is too late."""
        return await self._transport.call(calls.heartbeat(session_id))

    async def delete_session(self, session_id: str) -> None:
        """Delete the session; it is aborted if it is open."""
        await self._transport.call(calls.delete_session(session_id))

    async def trajectory_tokens(self, session_id: str) -> session_api.TrajectoryTokens:
        """What was captured so far, as tokens."""
        return await self._transport.call(calls.trajectory_tokens(session_id))

    async def trajectory_messages(self, session_id: str) -> session_api.TrajectoryMessages:
        """What was captured so far, as the agent saw it."""
        return await self._transport.call(calls.trajectory_messages(session_id))

    async def trajectories(
        self, after: str = "", *, limit: int = 100, wait_s: float = 0.0
    ) -> session_api.TrajectoryPage:
        """Finished trajectories in the order of their completion; the server waits up to `wait_s` for the first."""
        return await self._transport.call(calls.trajectories(after, limit, wait_s))
