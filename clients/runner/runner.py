"""The environment runner: keeps groups of a run's tasks in play until the run has concluded.

    evaluate ──► open ──► play ──► finish ──┐ × concurrency ──► (run concluded) ──► final weights served ──► evaluate
                  ▲──────────┬──────────────┘
                  └── lost ──┘  counted by cause; its problem is played again, a bounded number of times
                  beside: evaluate, every so many versions

It only uses the rollout API. With one address (a gateway) calls wait until that is back, and no group is lost. With several
a group whose server dies is dropped (admission opens another in its place), the server is skipped for a while, and the
problem is played on another one. `clients.runner.groups` hides whether an environment is an agent environment,
`clients.runner.tasks` which task and problem a group plays.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import structlog

from clients.rollout.calls import new_call_name
from clients.rollout.client import RolloutClient
from clients.rollout.server_pool import ServerPool
from clients.rollout.transport import OUTAGE_S, ServerUnreachableError
from clients.runner.agent_episodes import open_group
from clients.runner.curricula import Curricula
from clients.runner.evaluation import (
    EvaluationRecord,
    PeriodicEvaluation,
    Terms,
    evaluate_all,
)
from clients.runner.failures import GroupFailures, GroupLostError
from clients.runner.groups import play_to_end
from clients.runner.lease import Lease, new_runner
from clients.runner.left_behind import LeftBehind
from clients.runner.measured import Measured, as_told
from clients.runner.progress import Progress
from clients.runner.tasks import Drawn, PlayedTask, TaskInPlay, Tasks, entered
from clients.runner.text_episodes import Played
from services.observability.tracing import NO_TRACING, Span, Tracing
from services.policies.training.curriculum import CurriculumRules
from services.security.tls import PUBLIC, Trust
from services.wire.errors import (
    CapacityError,
    ConcludedError,
    ConflictError,
    DeadlineError,
    NotReadyError,
    RollmeshError,
)
from services.wire.rollout_api import GroupOpened
from services.wire.run_metrics import AFTER, BEFORE

_log = structlog.get_logger()
FINAL_WEIGHTS_S = 60.0
_POLL_S = 0.05
_CONCLUDED_POLL_S = 1.0
_PAUSE_AFTER_LOSS_S = 0.1
# Where there are several addresses: short, because the pool switches to another; it also waits through long outages.
_PATIENCE_S = 0.2
_TELL_EVERY_S = 30.0


@dataclass(frozen=True)
class RunnerPlan:
    """What to play. `concurrency`: groups in play at once, over all servers. `start_deadline_s`: for the servers' start.

    `retries`: how often a problem whose group was lost is played again. `name`: of this runner, unique in the run; a later
    process of that name takes its place at once. `patience_s`: how long the one address may be away before groups in play
    there are lost. `api_key`: the agent key of servers that ask for one; `trust`: whose certificates they may show.
    `greedy_baseline`: the first sibling of each training group is sampled greedily, for the others to be compared with.
    `curriculum`: of tasks that are finite, None for none.
    """

    tasks: Sequence[PlayedTask]
    seed: int
    group_size: int
    concurrency: int
    evaluation: Terms
    run_dir: Path
    greedy_baseline: bool = False
    curriculum: CurriculumRules | None = None
    heartbeat_s: float = 10.0
    retries: int = 2
    name: str | None = None
    patience_s: float = OUTAGE_S
    api_key: str | None = None
    trust: Trust = PUBLIC
    tracing: Tracing = NO_TRACING
    start_deadline_s: float = 3600.0


async def run_environment(urls: Sequence[str], plan: RunnerPlan) -> None:
    """Evaluate, play until the run has concluded, evaluate again, write `evaluation.json`.

    Raises DeadlineError when no server starts, or when all stay out of reach, TooManyLostError for an environment that
    only ever fails, ConflictError when another process takes its name. Cancelling it leaves no task and no session behind.
    """
    await _with_servers(urls, plan, _play_run)


async def evaluate_once(urls: Sequence[str], plan: RunnerPlan) -> None:
    """Evaluate what is served and write it to `evaluation.json`, as `EvaluationAnswers`.

    Raises as `run_environment` does.
    """
    await _with_servers(urls, plan, _evaluate_alone)


async def _with_servers(urls: Sequence[str], plan: RunnerPlan, play: _Play) -> None:
    runner = new_runner(plan.name)
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                RolloutClient(
                    url,
                    api_key=plan.api_key,
                    patience_s=plan.patience_s if len(urls) == 1 else _PATIENCE_S,
                    # The server has held the call for as long as it was told: then the next one asks.
                    waits_for_admission=False,
                    trust=plan.trust,
                    tracing=plan.tracing,
                )
            )
            for url in urls
        ]
        await _until_started(clients, urls, plan.start_deadline_s)
        lease = await stack.enter_async_context(Lease(runner, clients, plan.api_key, plan.trust))
        await lease.while_held(play(clients, plan, runner.runner_id))


async def _until_started(clients: Sequence[RolloutClient], urls: Sequence[str], within_s: float) -> None:
    """Raises what the first server says that has not started `within_s`."""
    _log.info("waiting", waiting_for="rollout servers to start", urls=list(urls), at_most_s=within_s)
    starting = asyncio.gather(*(client.run_state(patience_s=within_s) for client in clients))
    began = time.monotonic()
    try:
        while not (await asyncio.wait({starting}, timeout=_TELL_EVERY_S))[0]:
            passed = round(time.monotonic() - began)
            _log.info("waiting", waiting_for="rollout servers to start", after_s=passed, at_most_s=within_s)
        starting.result()
    finally:
        starting.cancel()


_Play = Callable[[Sequence[RolloutClient], RunnerPlan, str], Coroutine[None, None, None]]


async def _play_run(clients: Sequence[RolloutClient], plan: RunnerPlan, runner_id: str) -> None:
    sources = [(each.label, each.environment) for each in plan.tasks]
    curricula = Curricula.opened(sources, plan.seed, plan.curriculum, plan.run_dir, plan.name)
    async with entered(plan.tasks, clients[0], plan.heartbeat_s) as playing, curricula:
        pool = ServerPool(clients)
        tasks = Tasks(playing, curricula, plan.seed, plan.group_size, runner_id, greedy_baseline=plan.greedy_baseline)
        record = EvaluationRecord(plan.run_dir)
        before = record.read_before()
        if before is None:
            before = await _evaluate(pool, playing, plan, runner_id, _Answers(record, BEFORE, playing, plan))
            record.write_before(before)
        _log.info("evaluated", when="before", **before.in_words())

        async def measure() -> Measured:
            return await _evaluate(pool, playing, plan, runner_id)

        beside = PeriodicEvaluation(pool, plan.evaluation, measure)
        await _Players(pool, tasks, plan, beside).play_until_concluded()
        await _wait_for_final_weights(clients)
        after = await _evaluate(pool, playing, plan, runner_id, _Answers(record, AFTER, playing, plan))
        record.write_report(before, after, plan.evaluation.samples)
        _log.info("evaluated", when="after", **after.in_words())


async def _evaluate_alone(clients: Sequence[RolloutClient], plan: RunnerPlan, runner_id: str) -> None:
    async with entered(plan.tasks, clients[0], plan.heartbeat_s) as playing:
        began = time.monotonic()
        measured = await _evaluate(ServerPool(clients), playing, plan, runner_id, every_answer=True)
        told = as_told(measured, plan.evaluation.temperature, measured.first_version, began)
        EvaluationRecord(plan.run_dir).write_alone(told)


class _Answers:
    """Tells how many answers of an evaluation there are; called with how many more."""

    def __init__(self, record: EvaluationRecord, what: str, tasks: Sequence[TaskInPlay], plan: RunnerPlan) -> None:
        problems = sum(each.held_out(plan.evaluation.problems) for each in tasks)
        self._record, self._what, self._total = record, what, problems * plan.evaluation.samples
        self._done = 0
        record.write_progress(what, 0, self._total)

    def __call__(self, more: int) -> None:
        self._done += more
        self._record.write_progress(self._what, self._done, self._total)


async def _evaluate(
    pool: ServerPool,
    tasks: Sequence[TaskInPlay],
    plan: RunnerPlan,
    runner_id: str,
    answered: Callable[[int], None] = lambda _: None,
    every_answer: bool = False,
) -> Measured:
    try:
        return await evaluate_all(
            pool,
            tasks,
            plan.evaluation,
            seed=plan.seed,
            runner_id=runner_id,
            sessions_at_once=plan.concurrency * plan.group_size,
            answered=answered,
            every_answer=every_answer,
        )
    except BaseExceptionGroup as failed:
        raise _first(failed) from failed


def _first(failed: BaseExceptionGroup) -> BaseException:
    """The first failure, however nested: it cancelled the others, and is the cause."""
    first = failed.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


@dataclass
class _Next:
    """What a player does next. `call`: names its call for a group until that is answered: none is opened unheard of."""

    owed: Drawn | None = None
    """A problem whose group was lost, to be played again."""
    call: str | None = None


class _Players:
    """`concurrency` players, each with one group in play at a time."""

    def __init__(self, pool: ServerPool, tasks: Tasks, plan: RunnerPlan, evaluation: PeriodicEvaluation) -> None:
        self._evaluation = evaluation
        self._left_behind = LeftBehind(pool.clients)
        self._pool, self._tasks, self._plan = pool, tasks, plan
        self._failures = GroupFailures(plan.retries, plan.concurrency)
        self._progress = Progress(self._failures)

    async def play_until_concluded(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                players = [tasks.create_task(self._keep_playing()) for _ in range(self._plan.concurrency)]
                beside = [tasks.create_task(self._progress.run()), tasks.create_task(self._evaluation.run())]
                if self._tasks.any_agent:
                    # An agent may still run for minutes, although no trajectory is accepted any more.
                    watching = tasks.create_task(self._until_concluded())
                    await asyncio.wait([watching, *players], return_when=asyncio.FIRST_COMPLETED)
                    players.append(watching)
                else:
                    await asyncio.wait(players)
                for task in (*players, *beside):
                    task.cancel()
        except BaseExceptionGroup as failed:
            raise _first(failed) from failed
        finally:
            await self._left_behind.aclose()

    async def _until_concluded(self) -> None:
        while True:
            await asyncio.sleep(_CONCLUDED_POLL_S)
            client = await self._pool.choose()
            if await self._concluded(client):
                return

    async def _concluded(self, client: RolloutClient) -> bool:
        """Whether the run has concluded, as far as this server knows and can be asked."""
        try:
            return (await client.run_state(patience_s=_PATIENCE_S)).concluded
        except RollmeshError:
            return False

    async def _keep_playing(self) -> None:
        next_up = _Next()
        while True:
            client = await self._pool.choose()
            try:
                with self._plan.tracing.begin("environment.group") as span:
                    await self._play_one(client, next_up, span)
            except ConcludedError:
                return

    async def _play_one(self, client: RolloutClient, next_up: _Next, span: Span) -> None:
        """Open a group and play it, with the owed problem if any; notes what is owed then. Raises ConcludedError."""
        group = await self._open(client, next_up)
        if group is None:
            return
        playing = next_up.owed or self._tasks.drawn(group.ordinal)
        task = self._tasks.all[playing.task]
        self._evaluation.serves(group.policy_version)
        span.note(group=group.group_id, ordinal=group.ordinal, problem=playing.problem.index, attempt=playing.attempt)
        try:
            with structlog.contextvars.bound_contextvars(group=group.group_id, task=task.label):
                played = await self._play(client, group, playing)
        except GroupLostError as lost:
            span.note(lost=lost.cause)
            if await self._concluded(client):
                raise ConcludedError("the run has concluded") from lost
            next_up.owed = await self._lost(client, group, lost, playing)
            return
        next_up.owed = None
        self._tasks.played(playing, played)
        self._progress.count(task.label, played)
        span.note(success=sum(episode.ended.success for episode in played) / len(played))

    async def _open(self, client: RolloutClient, next_up: _Next) -> GroupOpened | None:
        """None where there is none yet. Raises ConcludedError."""
        if next_up.call is None or len(self._pool.clients) > 1:  # another address may belong to another server
            next_up.call = new_call_name()
        try:
            group = await open_group(client, self._tasks.opening(next_up.owed), next_up.call)
        except (ServerUnreachableError, NotReadyError, DeadlineError) as error:
            self._pool.set_aside(client, str(error))
            return None
        except CapacityError:
            _log.info("waiting", waiting_for="admission", url=client.url)
            group = None
        except ConflictError as error:
            _log.warning("a group ended before it was heard of", why=str(error))
            await asyncio.sleep(_PAUSE_AFTER_LOSS_S)
            group = None
        next_up.call = None
        return group

    async def _play(self, client: RolloutClient, group: GroupOpened, playing: Drawn) -> list[Played]:
        task = self._tasks.all[playing.task]
        self._progress.in_play += 1
        try:
            return await play_to_end(
                client,
                task.environment,
                group,
                playing.problem,
                self._tasks.sampling(playing.task),
                task.limits,
                self._tasks.noted(playing.task),
            )
        finally:
            self._progress.in_play -= 1

    async def _lost(
        self, client: RolloutClient, group: GroupOpened, lost: GroupLostError, playing: Drawn
    ) -> Drawn | None:
        again = self._failures.lost(lost.cause, lost.what, playing.attempt)
        _log.warning(
            "group lost",
            task=self._tasks.all[playing.task].label,
            cause=lost.cause,
            why=lost.what,
            problem=playing.problem.index,
            attempt=playing.attempt,
            again=again,
        )
        if lost.cause == "server":
            self._left_behind.add(group)
            self._pool.set_aside(client, lost.what)
        else:
            await asyncio.sleep(_PAUSE_AFTER_LOSS_S)
        return playing.again() if again else None


async def _wait_for_final_weights(clients: Sequence[RolloutClient]) -> None:
    """Wait until every server serves the final weights."""
    deadline = time.monotonic() + FINAL_WEIGHTS_S
    for client in clients:
        while True:
            state = await client.run_state(patience_s=FINAL_WEIGHTS_S)
            if state.final_version is not None and state.policy_version >= state.final_version:
                break
            if time.monotonic() > deadline:
                what = f"{client.url} serves version {state.policy_version}, not the final {state.final_version}"
                raise DeadlineError(f"{what}, after {FINAL_WEIGHTS_S:g} s", "see the weight bus's log")
            await asyncio.sleep(_POLL_S)
