"""A run on two ranks, one of them killed again and again; and a run that changes its number of ranks.

killed     deterministic, with a critic: kill -9 of a rank at seeded points, one of them while a checkpoint is written
           ─► ranks that know only first weights, step log and stream come to the same final bytes
           ─► published = trained + dropped; every session that was open at a kill is trained, its tokens as they were
regrouped  1 ─► 2 ─► 1 ranks, killed in between ─► the run goes on, above what was announced where its bytes are others
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import msgspec

from benchmarks.faults.mesh import conflicts_in
from benchmarks.harness.rank_mesh import RankMesh, rank_mesh
from benchmarks.harness.ranked import run_ranks
from benchmarks.harness.recomputed import Recomputed
from benchmarks.trainer.report import Measured
from services.host.run_folder import RunFolder
from services.supervisor.summary import read_report
from services.wire.errors import RollmeshError
from services.wire.packed import unpack_tokens
from services.wire.run_metrics import TrainerReport
from services.wire.trajectory import Trajectory
from trainer.checkpoint.checkpoint import good_versions
from trainer.checkpoint.log_lines import EnvironmentRecord, Outcome, StepRecord, decode_lines
from trainer.metrics.files import read_metrics

RANKS, K = 2, 2
KILLS, STEPS, CHECKPOINT_EVERY = 20, 60, 24
REGROUPED_STEPS = 18
_ENDS_WITHIN_S = 30.0
_CHECKPOINT_WITHIN_S = 120.0
_RECOMPUTED_WITHIN_S = 1200.0
_LATEST_S = 0.4
_SMALL = ("rollout.groups_per_step=4", "rollout.group_size=4", "trainer.threads=1", "evaluation.problems=8")


@dataclass(frozen=True)
class Point:
    """A kill of `rank`, `after_s` seconds after step `step`; None: while the next checkpoint is written."""

    step: int
    rank: int
    after_s: float | None


@dataclass
class Seen:
    """Of a run's kills. `open`: sessions at any of them, with the tokens of each answer so far."""

    open: dict[str, list[list[int]]] = field(default_factory=dict)
    ended_s: list[float] = field(default_factory=list)
    unfinished: bool = False
    """The checkpoint that was being written at a kill was not there afterwards."""


def points(seed: int, kills: int, steps: int, checkpoint_every: int) -> list[Point]:
    """`kills` points, by step: one in the first checkpoint, the others anywhere; each rank as often as the other.

    What is open at the last of them is consumed before the run ends. Raises ValueError for more than there are steps.
    """
    random = Random(seed)
    ranks = [number % RANKS for number in range(kills)]
    random.shuffle(ranks)
    at = sorted(
        random.sample([step for step in range(1, steps - 2 * K - 2) if step != checkpoint_every - 1], kills - 1)
    )
    found = [Point(step, rank, random.uniform(0.0, _LATEST_S)) for step, rank in zip(at, ranks, strict=False)]
    return sorted([*found, Point(checkpoint_every - 1, ranks[-1], None)], key=lambda point: point.step)


async def measure_killed_ranks(
    seed: int,
    say: Callable[[str], None],
    *,
    kills: int = KILLS,
    steps: int = STEPS,
    checkpoint_every: int = CHECKPOINT_EVERY,
    regrouped_steps: int = REGROUPED_STEPS,
    cache: Path | None = None,
) -> Measured:
    """`resume_equal`: 1 where all holds that is said above, else 0, and `seen` says what does not; `resume_conflicts`: how
    often the bus refused a version. `cache`: of warm starts. Raises RollmeshError when the mesh fails.
    """
    with tempfile.TemporaryDirectory(prefix="rollmesh-killed-") as scratch:
        folder = Path(scratch)
        warm = (f"warm_start.cache_dir={cache or folder / 'warm-starts'}",)
        at = points(seed, kills, steps, checkpoint_every)
        killed = await _killed(
            _new_folder(folder / "killed"), [*_words(steps, checkpoint_every), *warm], at, steps, say
        )
        regrouped = await _regrouped(
            _new_folder(folder / "regrouped"), [*_words(regrouped_steps, 4, ranks=1), *warm], regrouped_steps
        )
        say(f"1, 2 and 1 ranks: {regrouped.told}")
    return Measured(
        rounds={
            "resume_equal": [float(not killed.wrong and not regrouped.wrong)],
            "resume_conflicts": [float(killed.conflicts + regrouped.conflicts)],
        },
        seen={f"{kills} kills of {RANKS} ranks": killed.told, "1, 2 and 1 ranks": regrouped.told},
    )


def _new_folder(path: Path) -> Path:
    path.mkdir()
    return path


@dataclass(frozen=True)
class Judged:
    """`wrong`: what does not hold, in words."""

    conflicts: int
    wrong: Sequence[str]
    told: str


def _words(steps: int, checkpoint_every: int, ranks: int = RANKS) -> list[str]:
    deterministic = str(ranks == RANKS).lower()
    return [
        *(*_SMALL, f"steps={steps}", f"k={K}"),
        *(f"trainer.parallel.data={ranks}", f"trainer.deterministic={deterministic}"),
        *("trainer.advantage.estimator=gae", f"trainer.checkpoint_every={checkpoint_every}"),
    ]


async def _killed(
    folder: Path, words: Sequence[str], at: Sequence[Point], steps: int, say: Callable[[str], None]
) -> Judged:
    seen = Seen()
    async with rank_mesh(folder, words) as mesh:
        for number, point in enumerate(at, start=1):
            await mesh.start()
            await _kill(mesh, point, seen)
            say(f"kill {number} of {len(at)}: rank {point.rank} after step {mesh.steps()}")
        await mesh.start()
        if await mesh.ended(_RECOMPUTED_WITHIN_S):
            raise RollmeshError("the run was not made to its end", mesh.log.read_text()[-4000:])
        wrong = await _wrong_account(mesh, steps)
        stream = await mesh.trajectories()
        again = folder / "again.json"
        told = (str(mesh.folder.root), mesh.redis_url, str(again))
        await run_ranks(RANKS, "benchmarks.harness.recomputed", told, folder, _RECOMPUTED_WITHIN_S)
        found = msgspec.json.decode(again.read_bytes(), type=Recomputed)
        wrong += [f"{len(found.differ)} of {found.tensors} tensors differ"] if found.differ else []
        wrong += [f"{found.steps} batches were repeated, {steps} are due"] if found.steps != steps else []
        wrong += wrong_sessions(seen.open, stream, trained_entries(mesh.folder))
        wrong += [] if seen.unfinished else ["no kill met a checkpoint that was being written"]
        wrong += (
            [f"the trainer ended {max(seen.ended_s):.0f} s after a kill"] if max(seen.ended_s) > _ENDS_WITHIN_S else []
        )
        report = read_report(mesh.folder.trainer_report, TrainerReport)
        wrong += [] if report.final_version == steps else [f"it ended at version {report.final_version}"]
        conflicts = conflicts_in(mesh.log)
    told_of = (
        f"{found.steps} steps repeated from the first weights, {len(found.differ)} of {found.tensors} tensors differ; "
        f"{len(seen.open)} sessions were open at kills; all ranks gone after {max(seen.ended_s):.1f} s at most"
    )
    return Judged(conflicts, wrong, "; ".join([told_of, *wrong]))


async def _kill(mesh: RankMesh, point: Point, seen: Seen) -> None:
    # In each life it comes back, and makes a step at least.
    await mesh.until_step(max(point.step, mesh.steps() + 1))
    victim = mesh.rank(point.rank)
    seen.open |= await mesh.open_sessions()
    before = good_versions(mesh.folder.checkpoints)
    if point.after_s is None:
        await asyncio.to_thread(_kill_while_writing, mesh.folder.checkpoints, victim.pid)
    else:
        await asyncio.sleep(point.after_s)
        victim.kill()
    killed = time.monotonic()
    await mesh.ended(2 * _ENDS_WITHIN_S)
    seen.ended_s.append(time.monotonic() - killed)
    if point.after_s is None:
        seen.unfinished = good_versions(mesh.folder.checkpoints) == before


def _kill_while_writing(checkpoints: Path, pid: int) -> None:
    """As soon as a checkpoint's parts are being written. Raises RollmeshError where none is begun."""
    ends = time.monotonic() + _CHECKPOINT_WITHIN_S
    while not any(path.name.startswith(".parts-") for path in checkpoints.iterdir()):
        if time.monotonic() > ends:
            raise RollmeshError(f"no checkpoint was begun within {_CHECKPOINT_WITHIN_S:.0f} s", f"see {checkpoints}")
        time.sleep(0.0002)
    os.kill(pid, signal.SIGKILL)


async def _regrouped(folder: Path, words: Sequence[str], steps: int) -> Judged:
    async with rank_mesh(folder, words) as mesh:
        for ranks, until in ((1, steps // 3), (RANKS, 2 * steps // 3)):
            mesh.on_ranks(ranks)
            await mesh.start()
            await mesh.until_step(until)
            mesh.rank(ranks - 1).kill()
            await mesh.ended()
        mesh.on_ranks(1)
        await mesh.start()
        if await mesh.ended():
            raise RollmeshError("the run was not made to its end", mesh.log.read_text()[-4000:])
        wrong = await _wrong_account(mesh, steps)
        layouts = layouts_of(mesh.folder)
        if [layout for _, layout in layouts] != ["1 rank", f"{RANKS} data", "1 rank"]:
            wrong.append(f"the step log tells of the layouts {layouts}")
        conflicts = conflicts_in(mesh.log)
        report = read_report(mesh.folder.trainer_report, TrainerReport)
    told = ", ".join(f"{layout} from version {version} on" for version, layout in layouts)
    return Judged(conflicts, wrong, "; ".join([f"{told}; ended at version {report.final_version}", *wrong]))


async def _wrong_account(mesh: RankMesh, steps: int) -> list[str]:
    """What does not hold of any run that has ended."""
    accounts, lines = await mesh.accounts(), read_metrics(mesh.folder.metrics)
    report = read_report(mesh.folder.trainer_report, TrainerReport)
    trained, logged = sum(line.trajectories for line in lines), trained_entries(mesh.folder)
    checks = {
        f"{accounts.published} published are not {accounts.trained} trained and {accounts.dropped_total()} dropped": (
            accounts.published == accounts.trained + accounts.dropped_total()
        ),
        f"steps hold {trained} trajectories, the step log {len(logged)}, the account {accounts.trained}": (
            trained == len(logged) == len(set(logged)) == accounts.trained
        ),
        f"{len(lines)} lines of metrics for {steps} steps": [line.step for line in lines] == [*range(1, steps + 1)],
        f"a token of staleness {report.max_staleness}": report.max_staleness <= K,
        "the engine serves other bytes than the trainer's": report.weights_digest_match,
    }
    return [what for what, holds in checks.items() if not holds]


def wrong_sessions(
    opened: Mapping[str, Sequence[Sequence[int]]], stream: Mapping[str, Trajectory], trained: Sequence[str]
) -> list[str]:
    """What does not hold of sessions that were `opened` at a kill: each is in the stream, among what was `trained`, and has
    the tokens of every answer that it had then."""
    entry_of = {one.trajectory_id: (entry, one) for entry, one in stream.items()}
    known, wrong = set(trained), []
    for session, answers in opened.items():
        entry, one = entry_of.get(session, ("", None))
        if one is None or entry not in known:
            wrong.append(f"session {session}, open at a kill, was not trained")
            continue
        segments = [unpack_tokens(segment.token_ids).tolist() for segment in one.segments]
        if any(all(segment[: len(answer)] != list(answer) for segment in segments) for answer in answers):
            wrong.append(f"session {session}, open at a kill, has other tokens now")
    return wrong


def trained_entries(folder: RunFolder) -> list[str]:
    """Entries of the stream that the step log says were trained."""
    lines = decode_lines((folder.checkpoints / "steps.jsonl").read_bytes().splitlines()[1:])
    dropped = {entry for line in lines if isinstance(line, Outcome) for entry in line.dropped}
    return [e for line in lines if isinstance(line, StepRecord) for e in line.entries if e not in dropped]


def layouts_of(folder: RunFolder) -> list[tuple[int, str]]:
    """Of the run's ranks: from which version on which layout, as the step log has it."""
    lines = decode_lines((folder.checkpoints / "steps.jsonl").read_bytes().splitlines()[1:])
    return [(line.version, line.parts.get("ranks", "1 rank")) for line in lines if isinstance(line, EnvironmentRecord)]
