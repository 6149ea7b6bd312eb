"""Prompts of a file, judged by the reward service: a task without any code of its own.

    prompts:./questions.jsonl?success=0.9
    prompts:./gsm8k.parquet?prompt=question&solution=answer&extract=#### (.*)&held_out=./gsm8k-test.parquet

| option        | meaning                                                                                          |
|---------------|--------------------------------------------------------------------------------------------------|
| `prompt`      | the column that is said (`prompt` if left out): a text, or a list of chat messages               |
| `solution`    | the column that the reward's components get as `solution`                                        |
| `extract`     | they get the last match of a regular expression in it, or of the expression's first group        |
| `instruction` | stands behind each prompt                                                                        |
| `held_out`    | a file of the held-out split                                                                     |
| `success`     | the reward from which on a problem counts as solved (1 if left out)                              |

All other columns are handed to the reward's components as metadata. One answer ends the episode.

A split is gone through in a new order each time, which follows from the seed. Held out: prompts. Without `held_out` each
prompt belongs to one split for good, by a hash of its text; with it, what stands in both files is left out of training.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from clients.environments.adapters.options import pattern, refuse_unknown, values
from clients.environments.adapters.prompt_rows import Columns, PromptRow, read_prompts
from clients.environments.base import Answer, Judging, Problem, Split, place_in_pass, split_of
from clients.environments.rewards import RewardsAddress, RewardsClient
from services.wire.errors import UsageError
from services.wire.reward_api import JudgeSample

_log = structlog.get_logger()
_SOLVED = 1.0
_OPTIONS = {"prompt", "solution", "extract", "instruction", "held_out", "success"}


class Prompts:
    """Use as an async context manager, for its connection to the service. Raises UsageError for a file of no prompts.

    `name`: what judges hear. `speaks_chat`: prompts are messages, which the text dialect cannot say.
    """

    def __init__(self, name: str, file: Path, options: Mapping[str, str], rewards: RewardsAddress | None) -> None:
        self.name = name
        refuse_unknown(self.name, options, _OPTIONS)
        success = values(options).get("success", _SOLVED)
        if isinstance(success, bool) or not isinstance(success, int | float):
            raise UsageError(f"{self.name}: success={success!r} is no number", "give the reward of a solved problem")
        self._solved = float(success)
        columns = Columns(
            options.get("prompt", Columns.prompt),
            options.get("solution"),
            options.get("instruction", ""),
            pattern(self.name, "extract", options.get("extract")),
        )
        apart = options.get("held_out")
        self._rows = _split(
            self.name, read_prompts(file, columns), None if apart is None else read_prompts(Path(apart), columns)
        )
        self.speaks_chat = any(row.messages is not None for rows in self._rows.values() for row in rows)
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

    def count(self, split: Split) -> int:
        return len(self._rows[split])

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        """Raises UsageError for a split that no prompt belongs to."""
        rows = self._rows[split]
        if not rows:
            raise UsageError(
                f"{self.name} has no prompt for the split {split}",
                "give it more: one in eight is held out, unless held_out= names a file of them",
            )
        return _as_problem(split, index, rows[place_in_pass(self.name, split, index, seed, len(rows))])

    def numbered(self, split: Split, number: int) -> Problem:
        return _as_problem(split, number, self._rows[split][number])

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
        row = self.problem.details
        assert isinstance(row, PromptRow)
        sample = JudgeSample(
            task=self.task,
            prompt=row.prompt if row.messages is None else None,
            messages=None if row.messages is None else [dict(message) for message in row.messages],
            answer=answer.text,
            complete=answer.complete,
            # Tables hold dates and bytes, which JSON does not.
            metadata=msgspec.to_builtins(row.metadata, str_keys=True),
        )
        return self.client.judging(sample, lambda given: given.reward >= self.solved)


def _as_problem(split: Split, index: int, row: PromptRow) -> Problem:
    return Problem(split, index, row.prompt, details=row, messages=row.messages)


def _split(name: str, rows: list[PromptRow], apart: list[PromptRow] | None) -> dict[Split, list[PromptRow]]:
    """`apart`: the held-out rows, where they are in a file of their own. Raises UsageError where they are all there are."""
    if apart is None:
        splits: dict[Split, list[PromptRow]] = {"train": [], "held_out": []}
        for row in rows:
            splits[split_of(row.key)].append(row)
        return splits
    held_out = {row.key for row in apart}
    train = [row for row in rows if row.key not in held_out]
    if not train:
        raise UsageError(f"{name}: every prompt is held out, too", "name two different files")
    if len(train) < len(rows):
        _log.warning("held-out prompts are left out of training", task=name, prompts=len(rows) - len(train))
    return {"train": train, "held_out": apart}
