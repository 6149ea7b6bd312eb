"""Runs of agents: what is lost and played again, servers that die, runs that conclude, texts played through chat."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from clients.environments import chat as chats
from clients.environments.base import AgentEndpoint, Answer, Dialect, Ended, Problem, Split, agent_environment
from clients.environments.chat import ChatEnvironment
from clients.environments.registry import make_environment
from clients.environments.tasks.guess_number import GuessNumber
from clients.rollout.client import RolloutClient
from clients.rollout.server_pool import ServerPool
from clients.rollout.transport import ServerUnreachableError
from clients.runner.agent_episodes import EpisodeLimits
from clients.runner.evaluation import ATTEMPTS, evaluate
from clients.runner.failures import GroupLostError, TooManyLostError
from clients.runner.groups import in_dialect, play_to_end
from clients.runner.measured import Measured
from clients.runner.runner import run_environment
from rollout_server.lifecycle.expire import LEFT_AFTER_S
from services.wire.errors import ContextLengthError, NotFoundError, RollmeshError
from services.wire.packed import unpack_mask
from services.wire.rollout_api import CommonestAnswer, GroupOpened, OpenGroup, RunState, ShownAnswer
from services.wire.session_api import FinishSession, SessionFinished, SessionStatus, TrajectoryMessages
from tests.support.agent_playing import (
    A_PROBLEM,
    SAMPLING,
    closed_groups,
    numbered,
    one_call,
    open_group,
    plan_for,
    playing,
    say,
    states,
)
from tests.support.rollout_host import hosting, small_batch
from tests.support.scripted_engine import ScriptedEngine
from tests.support.until import until


async def test_a_run_that_concludes_does_not_wait_for_agents_that_think(
    redis_url: str, run_id: str, chat_policy: Path, tmp_path: Path
) -> None:
    thinking = asyncio.Event()

    async def thinker(problem: Problem, endpoint: AgentEndpoint) -> Ended:
        await say(endpoint, "x")
        if problem.split == "train":
            thinking.set()
            await asyncio.sleep(60)
        return Ended(1.0, True)

    environment = agent_environment("thinker", numbered, thinker)
    async with playing(redis_url, run_id, chat_policy) as (host, _):
        running = asyncio.create_task(run_environment([host.url], plan_for(environment, tmp_path)))
        await asyncio.wait_for(thinking.wait(), 10.0)
        await host.ledger.conclude(0)
        await asyncio.wait_for(running, 6.0)
    assert (tmp_path / "evaluation.json").exists()


async def test_an_environment_with_resources_is_entered_and_left(
    redis_url: str, run_id: str, chat_policy: Path, tmp_path: Path
) -> None:
    class Serving:
        name = "serving"

        def __init__(self) -> None:
            self.said: list[str] = []

        async def __aenter__(self) -> Serving:
            self.said.append("entered")
            return self

        async def __aexit__(self, *_: object) -> None:
            self.said.append("left")

        def problem(self, split: Split, index: int, seed: int) -> Problem:
            return numbered(split, index, seed)

        async def play(self, problem: Problem, endpoint: AgentEndpoint) -> Ended:
            assert self.said == ["entered"]
            return await one_call(problem, endpoint)

    environment = Serving()
    async with playing(redis_url, run_id, chat_policy) as (host, _):
        await host.ledger.conclude(0)
        await asyncio.wait_for(run_environment([host.url], plan_for(environment, tmp_path)), 20.0)
    assert environment.said == ["entered", "left"]


async def test_a_lost_problem_is_played_again_and_then_given_up(
    redis_url: str, run_id: str, chat_policy: Path, tmp_path: Path
) -> None:
    plays: Counter[int] = Counter()

    async def cursed(problem: Problem, endpoint: AgentEndpoint) -> Ended:
        await say(endpoint, "x")
        if problem.split == "train":
            plays[problem.index] += 1
            if problem.index == 1 or (problem.index == 2 and plays[2] == 1):
                raise RuntimeError("cursed")
        return Ended(1.0, True)

    environment = agent_environment("cursed", numbered, cursed)
    async with playing(redis_url, run_id, chat_policy) as (host, _):
        with capture_logs() as logs:
            plan = plan_for(environment, tmp_path, group_size=1, concurrency=1, retries=2)
            running = asyncio.create_task(run_environment([host.url], plan))
            await closed_groups(host, 12, running)
            await host.ledger.conclude(0)
            await asyncio.wait_for(running, 10.0)
    assert plays[1] == 3, "played, and played again twice"
    assert plays[0] == 1
    lost = [line for line in logs if line["event"] == "group lost"]
    assert [(line["problem"], line["attempt"], line["again"]) for line in lost[:3]] == [
        (1, 0, True),
        (1, 1, True),
        (1, 2, False),
    ]
    assert all(line["cause"] == "environment" and "cursed" in line["why"] for line in lost)


async def test_an_environment_that_always_fails_ends_the_run_with_its_reason(
    redis_url: str, run_id: str, chat_policy: Path, tmp_path: Path
) -> None:
    async def broken(problem: Problem, endpoint: AgentEndpoint) -> Ended:
        if problem.split == "train":
            raise KeyError("answer")
        return await one_call(problem, endpoint)

    environment = agent_environment("broken", numbered, broken)
    async with playing(redis_url, run_id, chat_policy) as (host, _):
        with pytest.raises(TooManyLostError, match=r"KeyError: 'answer' \(test_client_agent_runs\.py:\d+\)"):
            await asyncio.wait_for(
                run_environment([host.url], plan_for(environment, tmp_path, group_size=1, concurrency=16)), 20.0
            )

        async def all_closed() -> bool:
            return (await host.report())["open_groups"] == 0

        # A group that opened as its player was cancelled is taken back, or swept.
        await until(all_closed, LEFT_AFTER_S + 10.0)


async def test_a_broken_environment_of_texts_is_lost_as_a_group(redis_url: str, run_id: str, tiny_policy: Path) -> None:
    class Broken:
        name = "broken"
        first_turn = "12="

        def problem(self, split: Split, index: int, seed: int) -> Problem:
            return numbered(split, index, seed)

        def start(self, problem: Problem) -> Broken:
            return self

        def respond(self, answer: object) -> Ended:
            raise ZeroDivisionError("a bug")

    async with playing(redis_url, run_id, tiny_policy) as (_, client):
        group = await open_group(client, 2)
        with pytest.raises(GroupLostError, match="ZeroDivisionError: a bug") as lost:
            await play_to_end(client, Broken(), group, A_PROBLEM, SAMPLING, EpisodeLimits(10.0))
        assert lost.value.cause == "environment"
        assert await states(client, group) == ["aborted", "aborted"]


async def test_a_server_that_dies_under_agents_is_passed_over(
    redis_url: str, run_id: str, chat_policy: Path, tmp_path: Path
) -> None:
    environment = agent_environment("letters", numbered, one_call)
    async with AsyncExitStack() as stack:
        kept, _ = await stack.enter_async_context(playing(redis_url, run_id, chat_policy))
        async with hosting(
            ScriptedEngine(answer_length=3, max_model_len=2048, step_s=0.02),
            redis_url=redis_url,
            run_id=run_id,
            model=chat_policy,
            settings=small_batch(k=50, batch=4),
            server_id="s1",
        ) as doomed:
            # All four players may wait at the server that dies: their agents' calls wait long, three heartbeats end them.
            plan = plan_for(environment, tmp_path, concurrency=4, heartbeat_s=0.5)
            running = asyncio.create_task(run_environment([kept.url, doomed.url], plan))
            await closed_groups(kept, 8, running)
        before = (await kept.ledger.accounts()).closed_groups
        await closed_groups(kept, before + 20, running)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_episodes_that_are_lost_in_an_evaluation_count_as_not_solved(
    redis_url: str, run_id: str, chat_policy: Path
) -> None:
    async def half(problem: Problem, endpoint: AgentEndpoint) -> Ended:
        assert endpoint.temperature == 0.0
        if problem.index % 2:
            raise RuntimeError("odd")
        return await one_call(problem, endpoint)

    environment = agent_environment("half", numbered, half)
    async with playing(redis_url, run_id, chat_policy) as (host, client):
        measured = await evaluate(
            ServerPool([client]), environment, seed=1, problems=40, max_tokens=8, limits=EpisodeLimits(10.0)
        )
        assert measured.success == 0.5
        assert measured.mean_length == 2.0
        assert (measured.cut_off, measured.equal_rewards) == (None, None)
        assert measured.lost == 20 and "RuntimeError: odd" in measured.lost_why
        assert await host.published() == []


@pytest.mark.parametrize("dialect", ["text", "chat"])
async def test_sampled_answers_of_an_evaluation_are_drawn_apart_and_the_same_each_time(
    dialect: Dialect, redis_url: str, run_id: str, chat_policy: Path
) -> None:
    """With one seed for all, they would be right or wrong together, and the interval of their share would not hold."""
    engine = ScriptedEngine(answer_length=3, max_model_len=2048)
    settings = small_batch(k=50, batch=4)
    async with (
        hosting(engine, redis_url=redis_url, run_id=run_id, model=chat_policy, settings=settings) as host,
        RolloutClient(host.url, patience_s=0.2) as client,
    ):
        environment = await in_dialect(client, make_environment("sums"), dialect)
        drawn, measured = [], []
        for max_tokens in (8, 8, 2):
            before = len(engine.requests)
            measured.append(
                await evaluate(
                    ServerPool([client]),
                    environment,
                    seed=3,
                    problems=20,
                    samples=2,
                    max_tokens=max_tokens,
                    temperature=1.0,
                    limits=EpisodeLimits(10.0),
                )
            )
            drawn.append(sorted(str(request.sampling.seed) for request in engine.requests[before:]))
    assert len(set(drawn[0])) == 40
    assert drawn[0] == drawn[1]
    assert [each.cut_off for each in measured] == [0, 0, 40]
    assert [each.equal_rewards for each in measured] == [20, 20, 20], "no answer is right"


async def test_an_environment_of_texts_plays_through_chat_in_one_segment(
    redis_url: str, run_id: str, chat_policy: Path
) -> None:
    class Echo:
        """Three turns, each of which names what was said before."""

        name = "echo"

        def __init__(self) -> None:
            self.first_turn, self.turns = "hello", 0

        def problem(self, split: Split, index: int, seed: int) -> Problem:
            return numbered(split, index, seed)

        def start(self, problem: Problem) -> Echo:
            return Echo()

        def respond(self, answer: object) -> object:
            from clients.environments.base import NextTurn

            self.turns += 1
            return NextTurn(f"again {self.turns}") if self.turns < 3 else Ended(2.0, True)

    async with playing(redis_url, run_id, chat_policy) as (host, client):
        environment = await in_dialect(client, Echo(), "auto")  # type: ignore[arg-type]
        assert isinstance(environment, ChatEnvironment)
        group = await open_group(client, 1)
        await play_to_end(client, environment, group, A_PROBLEM, SAMPLING, EpisodeLimits(10.0))
        (trajectory,) = await host.published()
    assert len(trajectory.segments) == 1
    mask = unpack_mask(trajectory.segments[0].loss_mask).tolist()
    stretches = sum(1 for before, now in zip([0, *mask], mask, strict=False) if now > before)
    assert stretches == 3
    assert trajectory.reward == 2.0


async def test_a_model_without_a_template_is_spoken_to_in_plain_text(
    redis_url: str, run_id: str, tiny_policy: Path
) -> None:
    environment = make_environment("running-sums")
    async with playing(redis_url, run_id, tiny_policy) as (host, client):
        assert await in_dialect(client, environment, "auto") is environment
        assert isinstance(await in_dialect(client, environment, "chat"), ChatEnvironment)
        assert (await host.report())["open_groups"] == 0


@pytest.mark.parametrize("template", [True, False], ids=["template", "no template"])
async def test_plain_text_that_nobody_chose_is_warned_of_where_the_model_has_a_template(
    redis_url: str, run_id: str, chat_policy: Path, tiny_policy: Path, template: bool
) -> None:
    environment = make_environment("running-sums")
    async with playing(redis_url, run_id, chat_policy if template else tiny_policy) as (host, client):
        with capture_logs() as logs:
            assert await in_dialect(client, environment, "text") is environment
            assert not logs, "it was chosen"
            assert await in_dialect(client, environment, "text", assumed=True) is environment
        assert (await host.report())["open_groups"] == 0
    said = [line["event"] for line in logs if line["log_level"] == "warning"]
    assert len(said) == template
    assert all("add ?dialect=chat, or ?dialect=text if it is meant" in line for line in said)


class Server(RolloutClient):
    """A server that plays every episode with three tokens, or fails as told. `opened`: the groups it was asked for."""

    def __init__(self, *, refuses: RollmeshError | None = None, forgets: bool = False) -> None:
        super().__init__("http://a-server")
        self.said = [message("user", "1+1")]
        self.opened: list[OpenGroup] = []
        self._refuses, self._forgets = refuses, forgets

    async def open_group(self, body: OpenGroup, name: str | None = None) -> GroupOpened:
        self.opened.append(body)
        if self._refuses is not None:
            raise self._refuses
        names = [f"s{number}" for number in range(body.group_size)]
        return GroupOpened(group_id="g", ordinal=-1, session_ids=names, api_keys=names, policy_version=0)

    async def run_state(self, patience_s: float | None = None) -> RunState:
        if self._refuses is not None:
            raise self._refuses
        return RunState(run_id="r", policy_version=7, concluded=False, final_version=None)

    async def trajectory_messages(self, session_id: str) -> TrajectoryMessages:
        return TrajectoryMessages(session_id=session_id, conversations=[[*self.said, message("assistant", session_id)]])

    async def finish_session(self, session_id: str, body: FinishSession) -> SessionFinished:
        if self._forgets:
            raise NotFoundError(f"no session {session_id}")
        return SessionFinished(
            session_id=session_id, stream_id=None, reward=body.reward or 0.0, segments=1, sampled_tokens=3
        )

    async def abort_session(self, session_id: str) -> SessionStatus:
        raise NotFoundError(f"no session {session_id}")


def message(role: str, content: str, **others: object) -> dict[str, object]:
    return {"role": role, "content": content, **others}


async def solved(_: Problem, __: AgentEndpoint) -> Ended:
    return Ended(1.0, True)


async def measure(*servers: Server, problems: int = 2, every_answer: bool = False) -> Measured:
    environment = agent_environment("solved", numbered, solved)
    pool = ServerPool(servers, patience_s=1.0)
    limits = EpisodeLimits(5.0)
    return await evaluate(
        pool, environment, seed=1, problems=problems, max_tokens=8, limits=limits, every_answer=every_answer
    )


UNREACHABLE = ServerUnreachableError("http://a-server", "refused", sent=False)


async def test_an_evaluation_group_is_played_again_at_a_server_that_does_not_lose_it() -> None:
    unreachable, started_anew, good = Server(refuses=UNREACHABLE), Server(forgets=True), Server()
    measured = await measure(unreachable, started_anew, good)
    wanted = Measured(success=1.0, mean_length=3.0, solved=[1, 1], first_version=0, last_version=7, cut_off=0)
    shown = [ShownAnswer(asked="1+1", answer=session, reward=1.0, success=True) for session in ("s0", "s1")]
    assert measured == wanted.model_copy(
        update={
            "task": measured.task,
            "different": 2,
            "mean_reward": 1.0,
            "shown": shown,
            "commonest": CommonestAnswer(answer="s0", share=0.5, different=2),
        }
    )
    assert [len(server.opened) for server in (unreachable, started_anew, good)] == [1, 1, 1]
    assert {group.purpose for group in good.opened} == {"evaluate"}


async def test_an_agents_calls_of_tools_stand_between_what_it_was_asked_and_its_answer() -> None:
    server = Server()
    call = {"function": {"name": "add", "arguments": "{}"}}
    server.said = [
        message("system", "Be brief."),
        message("user", "1+1"),
        message("assistant", "", tool_calls=[call]),
        message("tool", "2"),
    ]
    shown = (await measure(server)).shown[0]
    assert (shown.asked, shown.answer) == ("1+1", "s0")
    assert shown.between == '[{"function":{"name":"add","arguments":"{}"}}]\n2'


async def test_the_commonest_answer_is_told_of_all_answers_or_not_at_all() -> None:
    some = await measure(Server(), problems=6)
    assert len(some.shown) == 4 and some.commonest is None
    every = await measure(Server(), problems=6, every_answer=True)
    assert every.commonest is not None
    assert (len(every.shown), every.commonest.different) == (4, 6)


async def test_an_evaluation_gives_up_after_as_many_servers_as_it_tries() -> None:
    servers = [Server(refuses=UNREACHABLE) for _ in range(ATTEMPTS + 1)]
    with pytest.raises(ExceptionGroup) as failed:
        await measure(*servers)
    assert failed.group_contains(ServerUnreachableError, match="refused")
    assert [len(server.opened) for server in servers] == [1] * ATTEMPTS + [0]
    servers = [Server(forgets=True) for _ in range(ATTEMPTS + 1)]
    assert (await measure(*servers)).success == 0.0
    assert [len(server.opened) for server in servers] == [1] * ATTEMPTS + [0]


@pytest.mark.parametrize("answers", [0, 1])
async def test_a_conversation_that_outgrows_the_model_is_the_policys_doing_once_it_has_spoken(
    monkeypatch: pytest.MonkeyPatch, answers: int
) -> None:
    asked = 0

    async def chat(*_: object) -> tuple[dict[str, Any], Answer]:
        nonlocal asked
        asked += 1
        if asked > answers:
            raise ContextLengthError(9, 8)
        return {"role": "assistant", "content": "1"}, Answer("1", True)

    monkeypatch.setattr(chats, "chat", chat)
    problem = Problem("train", 0, prompt="abc:", solution="20")
    playing_it = ChatEnvironment(GuessNumber()).play(problem, AgentEndpoint("http://a", "key", "s", 8, 1.0, True))
    if not answers:
        with pytest.raises(ContextLengthError):
            await playing_it
        return
    assert await playing_it == Ended(reward=0.0, success=False, components={"context_exceeded": 1.0})
    assert asked == 2
