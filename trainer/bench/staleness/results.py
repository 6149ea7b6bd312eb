"""What is asked of a run and what came out of it, and the file that keeps both, so that an interrupted table goes on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from services.wire.errors import UsageError
from trainer.bench.staleness.arms import ARMS


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
    """One drawn at temperature 1: it also falls where the policy is only less sure."""
    behaviour_success: float
    """Mean reward of the last fifth of the rollouts, which the policy of K steps before drew: it hides a late collapse."""
    mean_staleness: float
    largest_staleness: int
    effective_samples: float | None
    """Mean over the last fifth of the steps (`trainer.step_sums`)."""
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
