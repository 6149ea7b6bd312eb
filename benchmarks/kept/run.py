"""`./dev bench kept`: what it costs to keep 100,000 rollouts, and how long any of them takes to be found and opened.

    10,000 steps of one group of ten ──RolloutWriter──► rollouts.sqlite3 ◄── the questions that the dashboard asks of it

Prompts and answers are words at random, of the lengths of a small task. Building them is not counted. Each question is
asked several times, of places all over the run, each through a connection of its own, as the dashboard's are; the slowest
is told. The file lies in the system's cache: it was just written.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec
import numpy as np
import typer
from rich.table import Table

from benchmarks.harness.command import Say, progress, show
from services.dashboard.rollouts.answers import MOST_TOKENS, distinct, shown_rollout, token_window, wanted_tokens
from services.run_store.rollouts.database import database_of
from services.run_store.rollouts.record import KeptRollout, SegmentColumns
from services.run_store.rollouts.search import RolloutReader, Search
from services.run_store.rollouts.writer import Entry, RolloutWriter
from services.wire.errors import UsageError
from services.wire.packed import pack_logprobs, pack_mask, pack_tokens, unpack_tokens
from services.wire.sampling import SamplingParams
from services.wire.trajectory import Segment, Trajectory, VersionSpan

app = typer.Typer(add_completion=False, rich_markup_mode=None)
VOCABULARY = 4000
PROMPT = 60
LONGEST_S = 1.0


class Question(msgspec.Struct, frozen=True):
    """Milliseconds, of several of its kind."""

    name: str
    median_ms: float
    slowest_ms: float


class KeptBench(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints. `keeping_cpu_ms`: of the writing thread, a step."""

    rollouts: int
    file_mb: float
    keeping_cpu_ms: float
    slowest_question_ms: float
    questions: list[Question]


@app.command(epilog="Example: ./dev bench kept --json")
def kept(
    steps: Annotated[int, typer.Option(min=10, help="Steps of the run")] = 10_000,
    rollouts: Annotated[int, typer.Option(min=1, help="Rollouts a step")] = 10,
    tokens: Annotated[int, typer.Option(min=8, help="Sampled tokens of a rollout, in the mean")] = 100,
    asked: Annotated[int, typer.Option(min=1, help="Times that each question is asked")] = 10,
    keep: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the file there, and leave it")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output instead of a table")] = False,
) -> None:
    """What keeping rollouts costs the trainer, and how long any of them takes to be found and opened."""
    if keep is not None and database_of(keep).exists():
        raise UsageError(f"{database_of(keep)} is there already", "name another folder")
    say = progress()
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as scratch:
        folder = Path(scratch) if keep is None else keep
        cpu_s = write(folder, steps, rollouts, tokens, say)
        questions = ask(folder, steps, asked)
        bench = KeptBench(
            rollouts=steps * rollouts,
            file_mb=database_of(folder).stat().st_size / 1e6,
            keeping_cpu_ms=cpu_s / steps * 1e3,
            slowest_question_ms=max(each.slowest_ms for each in questions),
            questions=questions,
        )
    show(bench, as_json, _table(bench))
    if bench.slowest_question_ms > LONGEST_S * 1e3:
        raise typer.Exit(1)


def write(folder: Path, steps: int, rollouts: int, tokens: int, say: Say) -> float:
    """Seconds of a core that keeping took."""
    words, numbers = vocabulary(), np.random.default_rng(1)
    writer, spent = RolloutWriter(folder, 1 << 40), 0.0
    for step in range(1, steps + 1):
        entries = [*step_of(step, rollouts, tokens, words, numbers)]
        pieces = {} if step > 1 else {token: word.encode() for token, word in enumerate(words)}
        began = time.thread_time()
        writer.append(step, step - 1, 1.79e9 + step, rollouts, entries, pieces)
        spent += time.thread_time() - began
        if step % 1000 == 0:
            say(f"{step} of {steps} steps are kept")
    writer.close()
    return spent


def vocabulary() -> list[str]:
    """Words with a space before them, a token each."""
    chance = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return [" " + "".join(chance.choices(letters, k=chance.randint(2, 9))) for _ in range(VOCABULARY)]


def step_of(
    step: int, rollouts: int, tokens: int, words: Sequence[str], numbers: np.random.Generator
) -> Iterator[Entry]:
    """A group of siblings: one prompt, answers of several versions."""
    prompt = numbers.integers(0, VOCABULARY, PROMPT)
    asked = f"problem {step}:" + "".join(words[token] for token in prompt.tolist())
    for member in range(rollouts):
        length = int(numbers.integers(tokens // 2, tokens + tokens // 2))
        said = numbers.integers(0, VOCABULARY, length)
        older = int(numbers.integers(0, length))
        ids = np.concatenate([prompt, said]).astype(np.int32)
        spans = [VersionSpan(PROMPT, older, max(0, step - 2)), VersionSpan(PROMPT + older, length - older, step - 1)]
        logprobs = np.concatenate([np.zeros(PROMPT), -3.0 * numbers.random(length)]).astype(np.float32)
        mask = np.repeat([0, 1], [PROMPT, length]).astype(np.uint8)
        segment = Segment(
            pack_tokens(ids), pack_mask(mask), pack_logprobs(logprobs), [span for span in spans if span.length]
        )
        one = Trajectory(
            run_id="bench",
            trajectory_id=f"{step}/{member}",
            group_id=f"group-{step}",
            group_ordinal=step,
            group_size=rollouts,
            member=member,
            task=("sums", "words", "games")[step % 3],
            segments=[segment],
            reward=float(numbers.integers(0, 5)) / 4,
            samplings=[SamplingParams(max_tokens=512)],
            server_id="server-0",
            opened_at=1.79e9 + step,
            finished_at=1.79e9 + step + 1,
        )
        current = (-3.0 * numbers.random(length)).astype(np.float32)
        columns = [SegmentColumns.of(pack_logprobs(current), pack_logprobs(np.ones(length, dtype=np.float32)))]
        record = KeptRollout(step=step, version=step - 1, k=2, trained=True, trajectory=one, columns=columns)
        answer = "".join(words[token] for token in said.tolist()) + f" answer {step}-{member}"
        yield Entry(record, asked, answer, 1.0)


def ask(folder: Path, steps: int, times: int) -> list[Question]:
    reader, chance = RolloutReader(folder), random.Random(2)

    def any_step() -> int:
        return chance.randint(1, steps)

    def search(**wanted: object) -> None:
        reader.extent()
        reader.search(msgspec.convert(wanted, Search))

    def open_one() -> None:
        number = chance.choice(reader.search(Search(step=(any_step(),) * 2)).rollouts).id
        one = reader.kept(number)
        shown = shown_rollout(number, one, reader.siblings(number), reader.pieces(wanted_tokens(one)))
        near = unpack_tokens(one.trajectory.segments[0].token_ids)
        told = token_window(one, 0, 0, MOST_TOKENS, reader.pieces(distinct(near)))
        msgspec.json.encode([shown, told])

    def by_step() -> None:
        first = any_step()
        search(step=(first, first + 10))

    questions: dict[str, Callable[[], None]] = {
        "newest page": lambda: search(),
        "a page far down": lambda: search(offset=chance.randrange(steps)),
        "by step": by_step,
        "by task": lambda: search(task=chance.choice(["sums", "words", "none"])),
        "by group": lambda: search(group=f"group-{any_step()}"),
        "by reward, sorted": lambda: search(reward=(0.5, 1.0), order="reward", offset=chance.randrange(steps)),
        "by length, sorted": lambda: search(length=(40, 90), order="length", offset=chance.randrange(steps)),
        "by text of one rollout": lambda: search(text=f" answer {any_step()}-0"),
        "by text of none": lambda: search(text=f"not there {any_step()}"),
        "by text and task, sorted by reward": lambda: search(text="ab", task="sums", order="reward"),
        "open a rollout, with its siblings and tokens": open_one,
    }
    return [_asked(name, question, times) for name, question in questions.items()]


def _asked(name: str, question: Callable[[], None], times: int) -> Question:
    took = []
    for _ in range(times):
        began = time.perf_counter()
        question()
        took.append((time.perf_counter() - began) * 1e3)
    return Question(name, median(took), max(took))


def _table(bench: KeptBench) -> Table:
    cost = f"keeping a step's takes {bench.keeping_cpu_ms:.2f} ms of a core"
    title = f"{bench.rollouts:,} rollouts in {bench.file_mb:,.0f} MB; {cost}"
    table = Table("question", "median, ms", "slowest, ms", title=title, box=None, pad_edge=False)
    for each in bench.questions:
        table.add_row(each.name, f"{each.median_ms:.1f}", f"{each.slowest_ms:.1f}")
    return table
