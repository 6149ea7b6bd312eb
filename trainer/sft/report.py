"""What a supervised training leaves beside the weights: a line a step, and a summary.

DIR/sft.jsonl      a `StepLine` for each optimizer step, written as it is made
DIR/summary.json   a `Summary`
DIR/sft.toml       every setting in force, with where it came from
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

LINES, SUMMARY, SETTINGS = "sft.jsonl", "summary.json", "sft.toml"


class StepLine(msgspec.Struct, frozen=True, kw_only=True):
    """`loss`: mean over the step's learned tokens, in nats, before the step; `held_out_loss`: after it, where measured.
    `tokens`: of all rows, prompts too; `seconds`: of the step."""

    step: int
    epoch: int
    loss: float
    learning_rate: float
    grad_norm: float | None
    examples: int
    tokens: int
    learned_tokens: int
    seconds: float
    held_out_loss: float | None = None


class ExampleCounts(msgspec.Struct, frozen=True, kw_only=True):
    """`too_long`, `nothing_to_learn`: dropped; `held_out`: never trained on; `measured`: of those."""

    read: int
    trained: int
    held_out: int
    measured: int
    too_long: int
    nothing_to_learn: int


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Losses: of the held-out examples that are measured, in nats a learned token; None where none are held out.

    `written_step`: after which step the weights are that were written. `train_s`: of all steps, measurements apart.
    """

    model: str
    data: str
    kind: str
    parameters_trained: int
    examples: ExampleCounts
    steps: int
    written_step: int
    loss_before: float | None
    loss_after: float | None
    loss_written: float | None
    learning_rate: float
    learning_rate_from: str
    tokens: int
    learned_tokens: int
    train_s: float
    tokens_per_s: float


class StepWriter:
    """Lines that can be followed while training goes on."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def add(self, line: StepLine) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()


@contextmanager
def step_lines(folder: Path) -> Iterator[StepWriter]:
    """Raises OSError."""
    with (folder / LINES).open("wb") as file:
        yield StepWriter(file)


def write_summary(folder: Path, summary: Summary) -> None:
    """Raises OSError."""
    (folder / SUMMARY).write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")


def as_lines(summary: Summary, out: Path) -> list[str]:
    """What a user is told at the end."""
    counts = summary.examples
    dropped = [f"{count} {why}" for count, why in _dropped(counts) if count]
    lines = {
        "loss, held out": f"{summary.loss_before:.3f} → {summary.loss_after:.3f} nats a token"
        if summary.loss_before is not None and summary.loss_after is not None
        else "not measured: nothing was held out",
        "examples": f"{counts.read:,} read = {counts.trained:,} for training + {counts.held_out:,} held out"
        + (f" + dropped: {', '.join(dropped)}" if dropped else ""),
        "optimizer steps": f"{summary.steps:,} in {summary.train_s:.1f} s",
        "tokens": f"{summary.tokens:,}, {summary.learned_tokens:,} of them learned; {summary.tokens_per_s:,.0f} a second",
        "learning rate": f"{summary.learning_rate:g} ({summary.learning_rate_from})",
    }
    if summary.written_step != summary.steps:
        lines["weights"] = f"of step {summary.written_step}, held out {summary.loss_written:.3f}: the best measured"
    return [*(f"{name:<19} {text}" for name, text in lines.items()), f"{'model':<19} {out}"]


def _dropped(counts: ExampleCounts) -> list[tuple[int, str]]:
    return [(counts.too_long, "too long"), (counts.nothing_to_learn, "without an answer")]
