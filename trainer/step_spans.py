"""Optimizer steps as spans, with links to what they learned from: written down after the batch, off its clock.

trainer.batch ──┬── trainer.step v + 1 ──links──► the traces of the groups that it consumed
                ├── trainer.step v + 2 ──links──► …
                └── trainer.update v + 2 ──► the bus ──► each engine's commit
"""

from __future__ import annotations

from collections.abc import Sequence

from services.observability.tracing import Tracing
from trainer.batch_training import Trained

NAME = "trainer.step"


def record_steps(tracing: Tracing, trained: Sequence[Trained], began_ns: int, *, wait_s: float) -> None:
    """Below the current span. `began_ns`: when training began; `wait_s`: how long the batch had been waited for."""
    if not tracing.on:
        return
    for step in trained:
        ended_ns = began_ns + round((step.pack_s + step.train_s) * 1e9)
        # Siblings that were opened together have one context; each is linked once.
        links = {member.payload.trace for group in step.groups for member in group.members}
        tracing.record(
            NAME,
            began_ns,
            ended_ns,
            links=sorted(links),
            version=step.version,
            groups=len(step.groups),
            trajectories=sum(len(group.members) for group in step.groups),
            rows=step.rows,
            learning_rate=step.learning_rate,
            wait_ms=wait_s * 1e3,
        )
        began_ns, wait_s = ended_ns, 0.0
