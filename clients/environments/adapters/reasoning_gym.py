"""Tasks of reasoning-gym: procedurally generated questions, scored by the library itself.

    reasoning-gym:chain_sum?min_terms=2&max_terms=3       options are those of the data set's configuration
    …&instruction=Reply with the number only.              one of ours: stands behind each question
    …&extract=-?[0-9]{1,9}                                 one of ours: the answer is the last such piece of what is said

The question opens the conversation; the answer is what stands between the last `<answer>` and `</answer>`, or all of it
where there are none; of that, with `extract`, the last match of a regular expression. The reward is the library's score,
0 … 1, often with a little credit for being near; `success` is a full score. An answer that was cut off scores nothing.

Held out: questions. Each question belongs to one split for good, by a hash of its text: no held-out question is ever
trained on, under any seed. A data set with few different questions repeats them within a split.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from clients.environments.adapters.options import no_such, pattern, refuse_unknown, values
from clients.environments.base import Answer, Ended, Problem, Split, problem_rng, split_of
from services.wire.errors import UsageError

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_FULL_SCORE = 1.0 - 1e-6
_TRIES = 1000
_OURS = ("instruction", "extract")
_NUMBERS = 1 << 31


class ReasoningGym:
    """One data set. Raises UsageError for a data set or an option that the library does not have."""

    def __init__(self, dataset: str, options: Mapping[str, str]) -> None:
        from reasoning_gym.factory import DATASETS, create_dataset

        self.name = f"reasoning-gym:{dataset}"
        ours = {key: options[key] for key in _OURS if key in options}
        options = {key: value for key, value in options.items() if key not in _OURS}
        self._instruction, self._extract = (
            ours.get("instruction", ""),
            pattern(self.name, "extract", ours.get("extract")),
        )
        if dataset not in DATASETS:
            raise no_such("reasoning-gym", dataset, DATASETS)
        refuse_unknown(self.name, options, {*_OURS, *(field.name for field in fields(DATASETS[dataset][1]))})
        try:
            # Which questions a run sees follows from the run's seed; the data set's own stays the same for all runs.
            self._dataset: Any = create_dataset(dataset, **{"seed": 0, **values(options)})
        except Exception as error:
            raise UsageError(
                f"{self.name} refuses these options ({error or type(error).__name__})", "correct them"
            ) from error
        self._endless = self._beyond_its_size()

    def _beyond_its_size(self) -> bool:
        """Most data sets make an entry from any number; a few only have as many as their `size`."""
        try:
            self._dataset[_NUMBERS - 1]
        except Exception:  # noqa: BLE001 - data sets say it in many ways
            return False
        return True

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        """Raises UsageError for a data set with so few questions that none was found for the split."""
        numbers = problem_rng(self.name, split, index, seed)
        for _ in range(_TRIES):
            number = numbers.randrange(_NUMBERS)
            entry = self._dataset[number if self._endless else number % len(self._dataset)]
            if split_of(entry["question"]) == split:
                asked = f"{entry['question']} {self._instruction}".rstrip()
                return Problem(split, index, asked, str(entry["answer"]), details=entry)
        raise UsageError(f"{self.name} has no question for the split {split}", "give it options with more of them")

    def start(self, problem: Problem) -> ReasoningGymEpisode:
        return ReasoningGymEpisode(self._dataset, problem, self._extract)


@dataclass(frozen=True)
class ReasoningGymEpisode:
    dataset: Any
    problem: Problem
    extract: re.Pattern[str] | None = None

    @property
    def first_turn(self) -> str:
        return f"{self.problem.prompt}\n"

    def respond(self, answer: Answer) -> Ended:
        final = _final(answer.text, self.extract)
        score = float(self.dataset.score_answer(final, self.problem.details)) if answer.complete else 0.0
        return Ended(reward=score, success=score >= _FULL_SCORE)


def _final(said: str, extract: re.Pattern[str] | None) -> str:
    tagged: list[str] = _TAGGED.findall(said)
    answer = (tagged[-1] if tagged else said).strip()
    matches = [] if extract is None else [match.group() for match in extract.finditer(answer)]
    return matches[-1] if matches else answer
