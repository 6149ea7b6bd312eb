"""Which complete groups are worth a place in a batch. Pure.

    group complete ──► its baseline came? ──► rewards differ? ──► may be taken
                             │ no                  │ no, and fewer than `most_equal` were dropped since the last batch
                             └─────────────────────┴──► dropped, counted by cause; admission makes up for it

DAPO's dynamic sampling (Yu et al. 2025, arXiv:2503.14476, equation 11): a group whose rewards are all equal has advantages
of 0. The bound ends what the paper leaves open: where a task is solved, or hopeless, every group is such a one, and the run
would open groups for ever. Past it they are trained as they are, and the run comes to its end.
"""

from __future__ import annotations

from collections.abc import Mapping

from services.policies.batching import DropCause


class GroupFilter:
    """`most_equal`: groups of equal rewards dropped between two batches at the most; 0: none is. `baseline`: sibling 0 is
    what the others are compared with, so that a group is nothing without it."""

    def __init__(self, *, most_equal: int = 0, baseline: bool = False) -> None:
        self._most_equal, self._baseline = most_equal, baseline
        self._dropped = 0

    def judge(self, rewards: Mapping[int, float]) -> tuple[DropCause, str] | None:
        """`rewards`: of each sibling that finished, by its number. Why the group is dropped; None where it may be taken."""
        if self._baseline and (0 not in rewards or len(rewards) < 2):
            return DropCause.NO_BASELINE, "its greedy sibling was lost, or is alone"
        if self._dropped < self._most_equal and len(set(rewards.values())) == 1:
            self._dropped += 1
            reward = next(iter(rewards.values()))
            return DropCause.EQUAL_REWARDS, f"all {len(rewards)} rewards are {reward:g}: nothing to compare"
        return None

    def batch_taken(self) -> None:
        """The next batch begins."""
        self._dropped = 0
