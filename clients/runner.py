"""The environment runner: keeps groups of one task in play until the run has concluded.

    evaluate ──► open ──► play ──► finish ──┐ × concurrency ──► (run concluded) ──► final weights served ──► evaluate
                  ▲─────────────────────────┘

It knows the mesh by the rollout API alone. A group whose server dies is given up (the server's ledger makes up for it),
the server is set aside, and the next group goes elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import structlog

from clients.environment import Environment
from clients.evaluation import EvaluationRecord, Measured, evaluate
from clients.play import Played, play_group
from clients.repeating import ServerUnreachableError
from clients.rollout import RolloutClient
from clients.server_pool import ServerPool
from services.wire.errors import (
    CapacityError,
    ConcludedError,
    ConflictError,
    DeadlineError,
    NotFoundError,
    NotReadyError,
)
from services.wire.rollout_api import FinishGroup, OpenGroup, SamplingBody

_log = structlog.get_logger()
ADMISSION_WAIT_S = 20.0
PROGRESS_EVERY_S = 5.0
FINAL_WEIGHTS_S = 60.0
_POLL_S = 0.05
# With other servers at hand, one that is down is left at once; the pool waits out long outages.
_PATIENCE_S = 0.2


@dataclass(frozen=True)
class RunnerPlan:
    """What to play. `concurrency`: groups in play at once, over all servers. `start_deadline_s`: for the servers' start."""

    environment: Environment
    seed: int
    group_size: int
    temperature: float
    max_tokens: int
    concurrency: int
    evaluation_problems: int
    run_dir: Path
    start_deadline_s: float = 300.0


class Progress:
    """Counts what was played and says so every few seconds."""

    def __init__(self) -> None:
        self._episodes = self._successes = self._groups = 0
        self._said_at = time.monotonic()

    def count(self, played: Sequence[Played]) -> None:
        self._groups += 1
        self._episodes += len(played)
        self._successes += sum(episode.ended.success for episode in played)
        now = time.monotonic()
        if now - self._said_at >= PROGRESS_EVERY_S:
            success = round(self._successes / self._episodes, 3)
            _log.info("groups played", groups=self._groups, success=success, seconds=round(now - self._said_at, 1))
            self._episodes = self._successes = self._groups = 0
            self._said_at = now


async def run_environment(urls: Sequence[str], plan: RunnerPlan) -> None:
    """Evaluate, play until the run has concluded, evaluate again, write `evaluation.json`.

    Raises DeadlineError when no server starts, or when all stay out of reach. Cancelling it leaves nothing running.
    """
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(RolloutClient(url, patience_s=_PATIENCE_S)) for url in urls]
        pool = ServerPool(clients)
        _log.info("waiting", waiting_for="rollout servers to start", urls=list(urls))
        await asyncio.gather(*(client.run_state(patience_s=plan.start_deadline_s) for client in clients))
        record = EvaluationRecord(plan.run_dir)
        before = record.read_before()
        if before is None:
            before = await _evaluate(pool, plan)
            record.write_before(before)
        _log.info("evaluated", when="before", success=before.success, mean_length=before.mean_length)
        await _play_until_concluded(pool, plan)
        await _wait_for_final_weights(clients)
        after = await _evaluate(pool, plan)
        record.write_report(before, after, plan.evaluation_problems)
        _log.info("evaluated", when="after", success=after.success, mean_length=after.mean_length)


async def _evaluate(pool: ServerPool, plan: RunnerPlan) -> Measured:
    return await evaluate(
        pool, plan.environment, seed=plan.seed, problems=plan.evaluation_problems, max_tokens=plan.max_tokens
    )


async def _play_until_concluded(pool: ServerPool, plan: RunnerPlan) -> None:
    progress = Progress()
    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(plan.concurrency):
                workers.create_task(_keep_playing(pool, plan, progress))
    except BaseExceptionGroup as failed:
        # The first error ended the others; it alone is what happened.
        raise failed.exceptions[0] from failed


async def _keep_playing(pool: ServerPool, plan: RunnerPlan, progress: Progress) -> None:
    sampling = SamplingBody(max_tokens=plan.max_tokens, temperature=plan.temperature)
    opening = OpenGroup(
        task=plan.environment.name, group_size=plan.group_size, sampling=sampling, wait_s=ADMISSION_WAIT_S
    )
    while True:
        client = await pool.choose()
        try:
            group = await client.open_group(opening)
            problem = plan.environment.problem("train", group.ordinal, plan.seed)
            played = await play_group(client, plan.environment, group, [problem] * plan.group_size)
            await client.finish_group(group.group_id, FinishGroup(rewards=[episode.as_reward() for episode in played]))
            progress.count(played)
        except ConcludedError:
            return
        except CapacityError:
            _log.info("waiting", waiting_for="admission", url=client.url)
        except (ServerUnreachableError, NotReadyError) as error:
            pool.set_aside(client, str(error))
        except (NotFoundError, ConflictError) as error:
            _log.warning("group given up", url=client.url, why=str(error))


async def _wait_for_final_weights(clients: Sequence[RolloutClient]) -> None:
    """Until every server serves the weights that the trainer ended with."""
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
