"""Runs of the staleness table and their results, kept in a file, so that an interrupted table can be resumed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.harness.processes import PYTHON, running
from services.config.settings import TrainerSettings
from services.config.training.algorithm import CorrectionSettings, LossSettings
from services.policies.admission import most_updates
from services.wire.errors import RollmeshError, UsageError
from trainer.algorithms.describe import describe


class StaleRun(msgspec.Struct, frozen=True, kw_only=True):
    """One training run: `updates` optimizer steps, each on tokens that are `k` steps old (fewer in the first `k`)."""

    correction: str
    k: int
    seed: int
    updates: int

    @property
    def name(self) -> str:
        return f"{self.correction} K={self.k} seed {self.seed}"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A run's end. Accuracies are of the trainer's policy on held-out problems, one answer each."""

    run: StaleRun
    greedy: float
    """The likeliest answer: the mesh's own judge of held-out problems, and what the promises are about."""
    sampled: float
    """One sampled at temperature 1: it also falls where the policy is only less sure."""
    behaviour_success: float
    """Mean reward of the last fifth of the rollouts, sampled by the policy of K steps before: it hides a late collapse."""
    mean_staleness: float
    largest_staleness: int
    effective_samples: float | None
    """Mean over the last fifth of the steps (`trainer.model.token_stats`)."""
    seconds: float
    formula: str
    versions: dict[str, str]


class ResultsFile:
    """JSON lines, appended to as runs end. A line counts for a run with the same formula and versions; others are kept."""

    def __init__(self, path: Path | None, versions: dict[str, str]) -> None:
        self._path = path
        self._versions = versions

    def known(self, runs: Iterable[StaleRun]) -> list[Outcome]:
        """The outcomes of `runs` that are in the file. Raises UsageError for a file that holds something else."""
        if self._path is None or not self._path.exists():
            return []
        try:
            outcomes = msgspec.json.Decoder(Outcome).decode_lines(self._path.read_bytes())
        except (OSError, msgspec.DecodeError) as error:
            raise UsageError(f"{self._path} holds no results ({error})", "choose another --out") from error
        asked = set(runs)
        return [outcome for outcome in outcomes if outcome.run in asked and self._holds(outcome)]

    def append(self, outcome: Outcome) -> None:
        """Raises UsageError when the file cannot be written."""
        if self._path is None:
            return
        try:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(outcome) + b"\n")
        except OSError as error:
            raise UsageError(f"cannot write {self._path} ({error.strerror})", "choose another --out") from error

    def _holds(self, outcome: Outcome) -> bool:
        formula = ARMS[outcome.run.correction].formula(outcome.run.k)
        return (outcome.formula, outcome.versions) == (formula, self._versions)


# The compared corrections, fixed before the measurement: bounds are those of the sources; caps, which the sources leave
# open, the default of `services.config.training.algorithm`; the geometric bounds from earlier runs on this task.

UNCORRECTED = "none"


@dataclass(frozen=True)
class Arm:
    """`updates_per_batch`: optimizer steps that share one proximal policy."""

    loss: LossSettings
    updates_per_batch: int = 1

    def settings(self, k: int) -> TrainerSettings:
        """The trainer's defaults but for the loss; no more steps a batch than K allows."""
        return TrainerSettings(loss=self.loss, minibatches_per_batch=min(self.updates_per_batch, most_updates(k)))

    def formula(self, k: int) -> str:
        """Loss and advantage in force."""
        settings = self.settings(k)
        steps = settings.updates_per_batch
        return describe(settings) + (f";  {steps} optimizer steps a batch" if steps > 1 else "")


def _plain(**correction: object) -> LossSettings:
    return LossSettings(policy="policy_gradient", correction=CorrectionSettings.model_validate(correction))


ARMS: Mapping[str, Arm] = {
    UNCORRECTED: Arm(_plain()),
    # Schulman et al. 2017: ε = 0.2.
    "PPO": Arm(LossSettings(policy="ppo_clip", clip_low=0.2, clip_high=0.2)),
    # Four minibatches a batch, as AReaL (arXiv:2505.24298) runs it: with one it would be truncated importance sampling.
    "decoupled": Arm(
        LossSettings(policy="ppo_clip", anchor="proximal", correction=CorrectionSettings(weight="token", cap=2.0)),
        updates_per_batch=4,
    ),
    "TIS": Arm(_plain(weight="token", cap=2.0)),
    # Bounds 0.5 and 5 (arXiv:2510.18855).
    "IcePop": Arm(_plain(weight="token", cap=math.inf, mask="token", mask_low=0.5, mask_high=5.0)),
    "geometric": Arm(_plain(weight="token", cap=2.0, mask="geometric", mask_low=0.8, mask_high=1.25)),
    "sequence": Arm(_plain(weight="sequence", cap=2.0)),
    # No lower bound (arXiv:2506.13585); weights of at most 5 (ScaleRL, arXiv:2510.13786).
    "CISPO": Arm(LossSettings(policy="cispo", clip_low=1.0, clip_high=4.0)),
    # 3e-4, 4e-4 and a mean over segments (arXiv:2507.18071, section 5.1).
    "GSPO": Arm(LossSettings(policy="gspo", clip_low=3e-4, clip_high=4e-4, mean="segments")),
}


def named_arms(names: Sequence[str]) -> list[str]:
    """The arms' names in their own order and spelling; upper and lower case are the same. Raises UsageError."""
    known = {name.lower(): name for name in ARMS}
    unknown = [name for name in names if name.lower() not in known]
    if unknown:
        raise UsageError(f"no correction {unknown[0]!r}", f"known: {', '.join(ARMS)}")
    asked = {name.lower() for name in names}
    return [name for lower, name in known.items() if lower in asked]


# rollmesh demonstrations ──► <folder>/task: problems.jsonl, held_out.jsonl, … ──rollmesh sft──► <folder>/model (or cached)

TASK = "running-sums"
HELD_OUT = 512
_DEADLINE_S = 300.0


def problems_in(folder: Path) -> Path:
    """The train problems in the order of a run."""
    return folder / "task" / "problems.jsonl"


def held_out_in(folder: Path) -> Path:
    return folder / "task" / "held_out.jsonl"


def model_in(folder: Path) -> Path:
    return folder / "model"


async def warm_start(folder: Path, seed: int, problems: int) -> None:
    """Fill `folder` for the runs of `seed`. Raises RollmeshError, with the end of the log, when a command fails."""
    task = folder / "task"
    asked = ["--problems", str(problems), "--held-out", str(HELD_OUT)]
    await _finish("demonstrations", ["--task", TASK, "--seed", str(seed), "--out", str(task), *asked], folder)
    model = ["--demonstrations", str(task), "--seed", str(seed), "--out", str(model_in(folder)), "--threads", "1"]
    await _finish("sft", model, folder)


async def _finish(name: str, arguments: list[str], folder: Path) -> None:
    async with running(name, [*PYTHON, "services", name, *arguments], folder) as child:
        try:
            async with asyncio.timeout(_DEADLINE_S):
                code = await child.process.wait()
        except TimeoutError as error:
            raise RollmeshError(f"rollmesh {name} took longer than {_DEADLINE_S:.0f} s", child.tail()) from error
        if code:
            child.check()
