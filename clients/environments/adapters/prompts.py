"""Prompts of a file, judged by the reward service: a task without any code of its own.

    prompts:./questions.jsonl?success=0.9

Each line is a JSON object with a `prompt`; all else in it is handed to the reward's components as metadata, such as the
solution. One answer ends the episode. `success` is the reward from which on a problem counts as solved (1 if left out).

A split is gone through in a new order each time, which follows from the seed. Held out: prompts. Each prompt belongs to one
split for good, by a hash of its text.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import structlog

from clients.environments.adapters.options import refuse_unknown, values
from clients.environments.base import Answer, Judging, Problem, Split, problem_rng, split_of
from clients.environments.rewards import RewardsAddress, RewardsClient
from services.wire.errors import UsageError
from services.wire.reward_api import JudgeSample

_log = structlog.get_logger()
_SOLVED = 1.0
_row = msgspec.json.Decoder(dict[str, Any])


class Prompts:
    """Use as an async context manager, for its connection to the service. Raises UsageError for a file of no prompts."""

    def __init__(self, file: Path, options: Mapping[str, str], rewards: RewardsAddress | None) -> None:
        self.name = f"prompts:{file.stem}"
        refuse_unknown(self.name, options, {"success"})
        success = values(options).get("success", _SOLVED)
        if isinstance(success, bool) or not isinstance(success, int | float):
            raise UsageError(f"{self.name}: success={success!r} is no number", "give the reward of a solved problem")
        self._solved = float(success)
        self._rows: dict[Split, list[dict[str, Any]]] = {"train": [], "held_out": []}
        for row in _read(file):
            self._rows[split_of(row["prompt"])].append(row)
        self._rewards = rewards
        self._client: RewardsClient | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Prompts:
        if self._rewards is None:
            raise UsageError(
                f"{self.name} has nobody to judge its answers", "set rewards.enabled, or give --rewards-url"
            )
        self._client = await self._stack.enter_async_context(
            RewardsClient(
                self._rewards.url,
                api_key=self._rewards.key,
                trust=self._rewards.trust,
                tracing=self._rewards.tracing,
            )
        )
        in_force = await self._client.formula()
        _log.info("answers are judged by", formula=in_force.formula, components=in_force.components)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        """Raises UsageError for a split that no prompt belongs to."""
        rows = self._rows[split]
        if not rows:
            raise UsageError(
                f"{self.name} has no prompt for the split {split}", "give it more: one in eight is held out"
            )
        times, place = divmod(index, len(rows))
        row = rows[_order(self.name, split, times, seed, len(rows))[place]]
        return Problem(split, index, row["prompt"], details={key: row[key] for key in row if key != "prompt"})

    def start(self, problem: Problem) -> PromptEpisode:
        if self._client is None:
            raise UsageError(f"{self.name} is not connected", "use it as an async context manager")
        return PromptEpisode(problem, self.name, self._client, self._solved)


@dataclass(frozen=True)
class PromptEpisode:
    problem: Problem
    task: str
    client: RewardsClient
    solved: float

    @property
    def first_turn(self) -> str:
        return self.problem.prompt

    def respond(self, answer: Answer) -> Judging:
        metadata = self.problem.details
        assert isinstance(metadata, dict)
        sample = JudgeSample(
            task=self.task,
            prompt=self.problem.prompt,
            answer=answer.text,
            complete=answer.complete,
            metadata=metadata,
        )
        return self.client.judging(sample, lambda given: given.reward >= self.solved)


@lru_cache(maxsize=8)
def _order(name: str, split: Split, times: int, seed: int, count: int) -> tuple[int, ...]:
    return tuple(problem_rng(name, split, times, seed).sample(range(count), count))


def _read(file: Path) -> list[dict[str, Any]]:
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"no prompts can be read from {file} ({error.strerror})", "check the path") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = _row.decode(line)
        except msgspec.MsgspecError as error:
            raise UsageError(f"{file}, line {number}: {error}", "write one JSON object a line") from error
        if not isinstance(row.get("prompt"), str):
            raise UsageError(f"{file}, line {number} has no prompt", 'write {"prompt": "…", …}')
        rows.append(row)
    return rows
