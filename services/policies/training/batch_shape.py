"""Minibatches and epochs: how the groups of a batch become optimizer steps.

    batch of M · n groups ──► minibatches of n groups, 0 … M − 1, one step each        epoch 1:  steps 0 … M − 1
                              the same minibatches once more, in the same order         epoch 2:  steps M … 2M − 1
                              …                                                         U = M · E steps in all

Versions, and with them staleness, count all U steps: a token is M steps older in each further epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class BatchShape:
    """`minibatches`: M; `epochs`: E, passes over a batch. Raises ValueError for less than one of either."""

    minibatches: int = 1
    epochs: int = 1

    def __post_init__(self) -> None:
        if self.minibatches < 1 or self.epochs < 1:
            raise ValueError(f"a batch has ≥ 1 minibatch and ≥ 1 epoch, not {self.minibatches} and {self.epochs}")

    @property
    def updates(self) -> int:
        """U: optimizer steps of a batch."""
        return self.minibatches * self.epochs

    def of(self, updates: int) -> BatchShape:
        """The shape of a batch with so many optimizer steps and the same epochs: a run's last one may have fewer.

        Raises ValueError where they do not make whole epochs.
        """
        minibatches, left = divmod(updates, self.epochs)
        if left or not minibatches:
            raise ValueError(f"{updates} optimizer steps do not make {self.epochs} whole epochs")
        return replace(self, minibatches=minibatches)

    def places(self) -> list[tuple[int, int]]:
        """Epoch, from 1, and minibatch, from 0, of each step of a batch."""
        return [(epoch, place) for epoch in range(1, self.epochs + 1) for place in range(self.minibatches)]

    def finished(self, steps: int) -> int:
        """How many minibatches of a run have had their last step after `steps` optimizer steps."""
        batches, within = divmod(steps, self.updates)
        return batches * self.minibatches + max(0, within - (self.epochs - 1) * self.minibatches)


ONE_STEP = BatchShape()
"""A batch that is one optimizer step."""
