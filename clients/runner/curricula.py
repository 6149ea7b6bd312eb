"""Curricula of a run: which problem of a file a group plays, by what was measured, and the file that outlives a restart.

    draw ──► number of a problem        played ──► its success        every few seconds ──► RUN/curriculum-<runner>.json

The rules are `services.policies.training.curriculum`. The file is written whole: a runner that is killed loses what it
learned in the last seconds, and goes on in the pass that it was in.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from clients.environments.base import FiniteEnvironment, Problem, pass_order
from clients.runner.files import write_whole
from services.policies.training.curriculum import Curriculum, CurriculumRules, CurriculumState
from services.wire.errors import UNDECODABLE, UsageError
from services.wire.run_metrics import SKIPPED

_SAVE_EVERY_S = 5.0
_LARGEST_SHARE = 0.05
"""Of the time, that writing may take."""

_log = structlog.get_logger()


class _Kept(msgspec.Struct):
    """Of one task. `problems`: a digest of them."""

    problems: str
    state: CurriculumState


class TaskCurriculum:
    """The curriculum of one task, `name`. `order`: what the orders of its passes follow from, beside the seed.

    Raises UsageError for a task without a problem.
    """

    def __init__(
        self, name: str, order: str, source: FiniteEnvironment, seed: int, rules: CurriculumRules, kept: _Kept | None
    ) -> None:
        count = source.count("train")
        if not count:
            raise UsageError(f"task {name} has no problem to train on", "give it some")
        self._name, self._source, self._count = name, source, count
        self._digest = _digest(source, count)
        if kept is not None and kept.problems != self._digest:
            _log.warning("the curriculum begins anew: these are other problems", task=name, problems=count)
            kept = None

        def in_order(passed: int) -> Sequence[int]:
            return pass_order(order, "train", passed, seed, count)

        try:
            self._curriculum = Curriculum(count, rules, in_order, None if kept is None else kept.state)
        except ValueError as error:
            _log.warning("the curriculum begins anew", task=name, why=str(error))
            self._curriculum = Curriculum(count, rules, in_order)
        self._told = -1

    def draw(self) -> Problem:
        number = self._curriculum.draw()
        plan = self._curriculum.plan
        if plan.passed != self._told:
            self._told = plan.passed
            _log.info(
                "pass of a curriculum",
                task=self._name,
                passed=plan.passed,
                problems=len(plan.playing),
                skipped=round(plan.share_skipped, 3),
                always_solved=plan.solved,
                never_solved=plan.unsolved,
            )
        return self._source.numbered("train", number)

    def played(self, number: int, solved: int, of: int) -> None:
        self._curriculum.played(number, solved, of)

    @property
    def noted(self) -> Mapping[str, float]:
        """What is recorded beside rewards of the pass."""
        return {SKIPPED: self._curriculum.plan.share_skipped}

    def kept(self) -> _Kept:
        return _Kept(self._digest, self._curriculum.state())


class Curricula:
    """Those of a run, by the place of the task. An async context manager: the file is written in the block and after it."""

    def __init__(self, of: Mapping[int, TaskCurriculum], names: Sequence[str], file: Path | None) -> None:
        self._of, self._names, self._file = of, names, file
        self._changed = False

    @staticmethod
    def opened(
        tasks: Sequence[tuple[str, object]], seed: int, rules: CurriculumRules | None, run_dir: Path, runner: str | None
    ) -> Curricula:
        """`tasks`: their names and environments; those that have no count of problems have no curriculum.

        `runner`: the name that it is started again under; without one nothing is kept. Several runners of a run go through
        the problems in different orders. Raises UsageError where rules are given and no task is finite.
        """
        names = [name for name, _ in tasks]
        finite = {
            place: (name, source)
            for place, (name, source) in enumerate(tasks)
            if rules is not None and isinstance(source, FiniteEnvironment)
        }
        if rules is None:
            return Curricula({}, names, None)
        if not finite:
            raise UsageError(
                f"no task of {', '.join(names)} has a count of problems, so that there can be no curriculum",
                "leave curriculum.enabled out, or play a file of prompts",
            )
        file = None if runner is None else run_dir / f"curriculum-{runner}.json"
        kept = {} if file is None else _read(file)
        return Curricula(
            {
                place: TaskCurriculum(name, f"{name}/{runner or ''}", source, seed, rules, kept.get(name))
                for place, (name, source) in finite.items()
            },
            names,
            file,
        )

    def of(self, task: int) -> TaskCurriculum | None:
        """The curriculum of the task at this place, where it has one."""
        return self._of.get(task)

    def draw(self, task: int) -> Problem | None:
        """The next problem; None for a task without a curriculum."""
        if task not in self._of:
            return None
        self._changed = True
        return self._of[task].draw()

    def played(self, task: int, number: int, solved: int, of: int) -> None:
        """A group of the task's problem came to its end, with so many right answers."""
        if task in self._of:
            self._changed = True
            self._of[task].played(number, solved, of)

    async def __aenter__(self) -> Curricula:
        self._over = asyncio.Event()
        self._saving = asyncio.create_task(self._keep(), name="keeping curricula")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        await self._saving

    async def _keep(self) -> None:
        """Until it is over; what changed by then is written."""
        pause_s, over = _SAVE_EVERY_S, False
        while not over:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    over = await self._over.wait()
            if self._file is None or not self._changed:
                continue
            began = time.monotonic()
            self._changed = False
            await asyncio.to_thread(self._write, self._file, self._content())
            pause_s = max(_SAVE_EVERY_S, (time.monotonic() - began) / _LARGEST_SHARE)

    def _content(self) -> dict[str, _Kept]:
        return {self._names[place]: each.kept() for place, each in self._of.items()}

    def _write(self, file: Path, content: dict[str, _Kept]) -> None:
        try:
            write_whole(file, msgspec.json.encode(content))
        except OSError as error:
            self._changed = True
            _log.warning("the curriculum is not kept", file=str(file), why=error.strerror)


def _read(file: Path) -> dict[str, _Kept]:
    """Empty where there is none, or none that can be read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, _Kept])
    except FileNotFoundError:
        return {}
    except (OSError, *UNDECODABLE) as error:
        _log.warning("the curriculum begins anew", file=str(file), why=str(error))
        return {}


def _digest(source: FiniteEnvironment, count: int) -> str:
    digest = hashlib.blake2s(digest_size=16)
    for number in range(count):
        digest.update(source.numbered("train", number).prompt.encode() + b"\0")
    return digest.hexdigest()
