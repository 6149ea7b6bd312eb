"""The runs of the staleness table, over worker processes of one thread each."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.harness.command import Say
from benchmarks.harness.processes import PYTHON, Piped, answer_lines, replies_only, running_piped, versions
from benchmarks.staleness.results import Outcome, ResultsFile, StaleRun, warm_start
from services.config.settings import RolloutSettings
from services.host.aio import first_failure
from services.host.process import heavy_imports

_START_WITHIN_S = 120.0
_STEP_WITHIN_S = 10.0
# Neighbours that spin while they wait would take several times as long.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True)
class Table:
    """Which part of the table is asked for; `workers`: runs that train at once."""

    corrections: Sequence[str]
    ks: Sequence[int]
    seeds: Sequence[int]
    updates: int
    workers: int

    def runs(self) -> list[StaleRun]:
        """Seed by seed, so that an interrupted table has whole rows."""
        return [
            StaleRun(correction=correction, k=k, seed=seed, updates=self.updates)
            for seed in self.seeds
            for k in self.ks
            for correction in self.corrections
        ]


async def measure(table: Table, scratch: Path, out: Path | None, say: Say) -> list[Outcome]:
    """Every run of the table, those that `out` holds already from there. Raises RollmeshError when one fails."""
    installed = versions("rollmesh", "torch", "transformers")
    file = ResultsFile(out, installed)
    runs = table.runs()
    outcomes = {outcome.run: outcome for outcome in file.known(runs)}
    missing = deque(run for run in runs if run not in outcomes)
    if outcomes:
        say(f"{len(outcomes)} of {len(runs)} runs are in {out}")
    folders = await _warm_starts({run.seed for run in missing}, table, scratch, say)

    async def work(piped: Piped) -> None:
        while missing:
            run = missing.popleft()
            command = TrainStale(run, str(folders[run.seed]), installed)
            outcome = await piped.ask(command, Outcome, _START_WITHIN_S + run.updates * _STEP_WITHIN_S)
            outcomes[run] = outcome
            file.append(outcome)
            judged = f"greedy {outcome.greedy:.3f}, sampled {outcome.sampled:.3f}"
            say(f"{len(outcomes)}/{len(runs)} {run.name}: {judged} after {outcome.seconds:.1f} s")

    async def worker(number: int) -> None:
        command = [*PYTHON, "benchmarks.staleness.runs"]
        async with running_piped(
            f"worker {number}", command, scratch, start_within_s=_START_WITHIN_S, environment=_ONE_THREAD
        ) as piped:
            await work(piped)

    await _all(worker(number) for number in range(min(table.workers, len(missing))))
    return [outcomes[run] for run in runs]


async def _warm_starts(seeds: set[int], table: Table, scratch: Path, say: Say) -> dict[int, Path]:
    folders = {seed: scratch / f"seed-{seed}" for seed in sorted(seeds)}
    for folder in folders.values():
        folder.mkdir()
    at_once = asyncio.Semaphore(table.workers)

    async def prepare(seed: int) -> None:
        async with at_once:
            await warm_start(folders[seed], seed, table.updates * RolloutSettings().groups_per_step)
            say(f"warm start of seed {seed} ready")

    await _all(prepare(seed) for seed in folders)
    return folders


async def _all(parts: Iterable[Coroutine[None, None, None]]) -> None:
    """At once; what the first one raises ends the others."""
    with first_failure():
        async with asyncio.TaskGroup() as group:
            for part in parts:
                group.create_task(part)


# The worker process, `python -m benchmarks.staleness.runs`: answers each TrainStale with an Outcome, on one core.


class TrainStale(msgspec.Struct, frozen=True, tag=True):
    """Train `run` from a folder that `benchmarks.staleness.results` made."""

    run: StaleRun
    folder: str
    versions: dict[str, str]


def main() -> None:
    replies = replies_only()
    with heavy_imports():
        import torch

        from benchmarks.staleness.training import train_stale

    torch.set_num_threads(1)

    async def handle(command: TrainStale) -> Outcome:
        return await asyncio.to_thread(train_stale, command.run, Path(command.folder), command.versions)

    asyncio.run(answer_lines(replies, TrainStale, handle))


if __name__ == "__main__":
    main()
