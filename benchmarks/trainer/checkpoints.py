"""What checkpoints cost: how long one holds up training, and what a slow disk does to a run.

copy       in this process: `Saving.begin` with the last checkpoint written ÷ one copy of as many bytes
slow disk  a paced mesh whose trainer writes each checkpoint 20 times as long as the disk takes (`slow_disk`),
           beside one that writes none: lines of metrics that are late, memory of the trainer's process at its
           largest. All answers are equally long, or the arms' batches would differ
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks.harness.processes import PYTHON, peak_bytes
from benchmarks.trainer.idleness import PLAN, K, PacedRun, busy_seconds, make_policy, run_paced
from benchmarks.trainer.report import Measured
from services.config.settings import EvaluationSettings, TrainerSettings
from services.host.run_folder import RunFolder
from services.supervisor.processes import Child
from trainer.algorithms.advantages.compute import AdvantageComputer
from trainer.checkpoint.saving import Saving
from trainer.io_loop import Background
from trainer.metrics.files import read_metrics
from trainer.model.learner import Learner
from trainer.model.roles import Roles
from trainer.sft.tiny_model import build_model

SLOWER = 20
EVERY, STEPS = 5, 30
LARGE = replace(PLAN, groups_per_step=2, group_size=4, servers=1, sigma=0.0, longest=64, hidden_size=1024, layers=4)
"""50 million weights: a copy of the state, 600 MB, stands out from what a step takes, which varies by 10 MB."""
_LOOK_S = 0.02
_WITHIN_S = 120.0


def measure_copy(rounds: int, threads: int, say: Callable[[str], None], width: int = 1024) -> Measured:
    """`ckpt_block`: seconds that training is held up by a checkpoint ÷ those of one memcpy of the state."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with tempfile.TemporaryDirectory(prefix="rollmesh-ckpt-") as scratch:
            block, copy, size = _copies(rounds, Path(scratch), width)
    finally:
        torch.set_num_threads(before)
    held_ms, plain_ms = (statistics.median(each) * 1e3 for each in (block, copy))
    told = f"{size >> 20} MiB: held up {held_ms:.0f} ms, memcpy {plain_ms:.0f} ms"
    say(f"checkpoint: {told}")
    ratios = [held / plain for held, plain in zip(block, copy, strict=True)]
    return Measured(rounds={"ckpt_block": ratios}, seen={"checkpoint": told})


def _copies(rounds: int, folder: Path, width: int) -> tuple[list[float], list[float], int]:
    learner = Learner(build_model(seed=1, hidden_size=width, layers=4), TrainerSettings())
    for parameter in learner.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    learner.optimizer.step()
    settings = TrainerSettings()
    logged: Future[None] = Future()
    logged.set_result(None)
    with ThreadPoolExecutor(1) as thread, closing(Background()) as background:
        saving = Saving(
            folder=folder,
            evaluations_file=folder / "evaluations.json",
            roles=Roles(learner, AdvantageComputer(settings.advantage)),
            run_id="bench",
            fingerprint="",
            every=1,
            evaluation=EvaluationSettings(),
            logged=lambda: logged,
            thread=thread,
            background=background,
        )
        # The first copy makes the memory that all others are written over.
        saving.begin().result(_WITHIN_S)
        size = sum(path.stat().st_size for path in folder.glob("step-*/*.safetensors"))
        source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        block, copy = [], []
        for number in range(1, rounds + 1):
            learner.version = number
            began = time.perf_counter()
            written = saving.begin()
            block.append(time.perf_counter() - began)
            written.result(_WITHIN_S)
            began = time.perf_counter()
            target.copy_(source)
            copy.append(time.perf_counter() - began)
    return block, copy, size


@dataclass
class Watched:
    """What was seen of a trainer's process from outside: when each line of metrics was there, and its largest memory while
    so many were there.
    """

    arrived: list[float] = field(default_factory=list)
    peaks: dict[int, int] = field(default_factory=dict)

    async def watch(self, trainer: Child, run: RunFolder) -> None:
        """Until it is cancelled, or the process has ended."""
        while trainer.process.returncode is None:
            lines = len(read_metrics(run.metrics)) if run.metrics.exists() else 0
            self.arrived += [time.time()] * (lines - len(self.arrived))
            self.peaks[lines] = max(self.peaks.get(lines, 0), peak_bytes(trainer))
            await asyncio.sleep(_LOOK_S)

    def lag(self, made: PacedRun) -> int:
        """The most steps that had ended, and whose lines were not there yet, when the line of another one came."""
        ended = [line.time for line in made.lines]
        arrived = self.arrived[-len(ended) :]
        return max(sum(end <= there for end in ended[place + 1 :]) for place, there in enumerate(arrived))

    def held(self) -> int:
        """Bytes: the largest memory from the first checkpoint on, or from as many steps on."""
        return max(peak for lines, peak in self.peaks.items() if lines >= EVERY)


async def measure_slow_disk(rounds: int, say: Callable[[str], None], steps: int = STEPS) -> Measured:
    """`metrics_lag`, `ckpt_memory`: lines of metrics that are late, in steps; memory above that of a trainer which writes
    no checkpoint ÷ one copy of the state. Raises RollmeshError when a process fails.
    """
    names = ("metrics_lag", "ckpt_memory")
    if not rounds:
        return Measured(missing=dict.fromkeys(names, "no paced rounds were asked for"))
    found: dict[str, list[float]] = {name: [] for name in names}
    seen = {}
    with tempfile.TemporaryDirectory(prefix="rollmesh-paced-") as scratch:
        folder = Path(scratch)
        model = await make_policy(LARGE, folder)
        busy_s = await busy_seconds(LARGE, model, folder / "quick")
        for number in range(1, rounds + 1):
            runs: dict[str, tuple[PacedRun, Watched, Path]] = {}
            for name, every in (("none", 1_000_000), ("slow", EVERY)):
                watched, place = Watched(), folder / f"{name}-{number}"
                made = await run_paced(
                    LARGE,
                    k=K,
                    token_s=K * busy_s / LARGE.longest,
                    steps=steps,
                    warm_up=K,
                    model=model,
                    folder=place,
                    checkpoint_every=every,
                    trainer=(*PYTHON, "benchmarks.harness.slow_disk", "--slower", str(SLOWER)),
                    watch=watched.watch,
                )
                runs[name] = made, watched, place
            made, watched, place = runs["slow"]
            written = sorted((place / "run" / "checkpoints").glob("step-*"))
            size = sum(path.stat().st_size for path in written[-1].glob("*.safetensors"))
            found["metrics_lag"].append(float(watched.lag(made)))
            found["ckpt_memory"].append((watched.held() - runs["none"][1].held()) / size)
            told = f"slow disk, round {number}"
            seen[told] = "; ".join(
                f"{name}: {run.tokens_per_s:.0f} tokens/s, {eyes.held() / 2**20:.0f} MiB"
                for name, (run, eyes, _) in runs.items()
            )
            seen[told] += f"; {len(written)} checkpoints of {size >> 20} MiB are kept"
            say(f"{told}: {seen[told]}")
    return Measured(rounds=found, seen=seen)
