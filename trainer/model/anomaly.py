"""What may go wrong in a step: numbers that are not finite, and memory that runs out."""

from __future__ import annotations

import gc
import math

import torch

from services.wire.errors import RollmeshError


class AnomalyError(RollmeshError):
    """The loss or the gradient of a step is not finite: the step is not made, and the weights are as before it.

    Exit code 2: the same batch would end the same way once more.
    """

    exit_code = 2
    code = "anomaly"


def check_finite(steps: int, what: str, loss: float | None, grad_norm: float | None) -> None:
    """Raise AnomalyError unless both numbers of the step after so many are finite. `what`: whose they are."""
    if any(number is None or not math.isfinite(number) for number in (loss, grad_norm)):
        raise AnomalyError(
            f"step {steps + 1} is not made: the loss of the {what} is {loss}, the norm of its gradient {grad_norm}",
            "look at the batch; trainer.on_anomaly=skip goes on without it, and a smaller trainer.learning_rate or "
            "trainer.clip_grad_norm may be set for the rest of the run",
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: with fewer tokens a pass it may not."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # Torch's allocators for hosts raise plain RuntimeErrors.
    told = str(error)
    return isinstance(error, RuntimeError) and any(words in told for words in _ALLOCATORS)


_ALLOCATORS = ("can't allocate memory", "not enough memory", "out of memory")


def release_memory() -> None:
    """Give back what a failed pass has left."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
