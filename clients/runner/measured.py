"""What an evaluation measured: of one task, of several together, and as it is told to the run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pydantic import BaseModel

from clients.environments.base import Ended
from clients.runner.text_episodes import LastTurn
from services.policies.training.evaluation import interval
from services.wire.rollout_api import LONGEST_SHOWN, MOST_NAMES, CommonestAnswer, EvaluationAnswers, ShownAnswer

_LONGEST_NAME = 200


class OfTask(BaseModel):
    """What was measured of one task. `solved`: right answers to each of its problems."""

    task: str
    solved: list[int]
    mean_length: float


class Measured(BaseModel):
    """`solved`: right answers to each problem. `mean_length`: sampled tokens an episode, all its turns together.

    `success`: the share of answers that were right. `first_version` to `last_version` were served meanwhile. `tasks`: where
    there are several, each by itself; then all else is of all their problems, in this order.
    """

    success: float
    mean_length: float
    solved: list[int] = []
    first_version: int = 0
    last_version: int = 0
    tasks: list[OfTask] = []
    task: str = ""

    samples: int = 1
    """Answers to each problem."""
    cut_off: int | None = None
    """Episodes whose last answer ended at the limit of tokens; None where that is not known of all."""
    equal_rewards: int | None = None
    """Problems whose answers all got the same reward, of which a step learns nothing; None with one answer a problem."""
    lost: int = 0
    """Episodes that were lost, and count as not solved."""
    lost_why: str = ""
    """Of the first of them."""
    different: int | None = None
    """Problems, those that ask the same counted once; None where that is not known."""
    mean_reward: float | None = None
    """Of an episode; None in a file of before it was written down."""
    components: dict[str, tuple[float, int]] = {}
    """Of each that answers had beside their reward: sum, and number of answers that had it."""
    commonest: CommonestAnswer | None = None
    """None where answers are no texts, and of several tasks."""
    shown: list[ShownAnswer] = []
    """Answers to the first problems."""

    def in_words(self) -> dict[str, object]:
        """For the log."""
        by_task = {each.task: round(sum(each.solved) / len(each.solved) / self.samples, 3) for each in self.tasks}
        told: dict[str, object] = {"success": self.success, "mean_length": self.mean_length}
        if self.solved:
            found = interval(self.solved, self.samples, self.different)
            told["interval"] = f"{found.low:.3f} to {found.high:.3f}"
        return {**told, "by_task": by_task} if by_task else told


def together(measured: Sequence[Measured]) -> Measured:
    """All problems count alike."""
    if len(measured) == 1:
        return measured[0]
    solved = [right for each in measured for right in each.solved]
    tokens = sum(each.mean_length * len(each.solved) for each in measured)
    return Measured(
        task=", ".join(each.task for each in measured)[:_LONGEST_NAME],
        success=sum(solved) / len(solved) / measured[0].samples,
        mean_length=tokens / len(solved),
        solved=solved,
        first_version=min(each.first_version for each in measured),
        last_version=max(each.last_version for each in measured),
        tasks=[OfTask(task=each.task, solved=each.solved, mean_length=each.mean_length) for each in measured],
        samples=measured[0].samples,
        cut_off=known_sum(each.cut_off for each in measured),
        equal_rewards=known_sum(each.equal_rewards for each in measured),
        lost=sum(each.lost for each in measured),
        lost_why=next((each.lost_why for each in measured if each.lost), ""),
        different=known_sum(each.different for each in measured),
        mean_reward=sum((each.mean_reward or 0.0) * len(each.solved) for each in measured) / len(solved),
        components=added(each.components for each in measured),
        shown=[one for each in measured for one in each.shown],
    )


def added(parts: Iterable[Mapping[str, tuple[float, int]]]) -> dict[str, tuple[float, int]]:
    """Sums and counts by name."""
    whole: dict[str, tuple[float, int]] = {}
    for part in parts:
        for name, (value, answers) in part.items():
            before = whole.get(name, (0.0, 0))
            whole[name] = before[0] + value, before[1] + answers
    return whole


def known_sum(counts: Iterable[int | None]) -> int | None:
    """None where one is not known."""
    known = list(counts)
    return None if None in known else sum(count for count in known if count is not None)


def commonest_of(texts: Sequence[str]) -> CommonestAnswer | None:
    """None of none."""
    if not texts:
        return None
    (text, times), *_ = Counter(texts).most_common(1)
    return CommonestAnswer(answer=text[:LONGEST_SHOWN], share=times / len(texts), different=len(set(texts)))


def shown_of(last: LastTurn, ended: Ended) -> ShownAnswer:
    asked, answer, between = (text[:LONGEST_SHOWN] for text in last)
    return ShownAnswer(asked=asked, answer=answer, between=between, reward=ended.reward, success=bool(ended.success))


def as_told(measured: Measured, temperature: float, version: int, began: float) -> EvaluationAnswers:
    """What was measured of the version that was due. `began`: by the monotonic clock."""
    return EvaluationAnswers(
        due=version,
        temperature=temperature,
        seconds=time.monotonic() - began,
        at=time.time(),
        components={
            name: value / answers for name, (value, answers) in sorted(measured.components.items())[:MOST_NAMES]
        },
        **measured.model_dump(exclude={"success", "components"}),
    )
