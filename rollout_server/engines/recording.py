"""Recording tensor code once, so that each call of it is one call from Python instead of hundreds.

Why: on a small model Python's share of a decode step is more than half (B=1: 1.6 ms → 0.55, B=128: 3.3 → 1.8), and a long
torch call made from Python hands the interpreter lock to whoever waits for it: beside a busy event loop a step that makes
hundreds of them crawls (38 ms), one that makes a dozen does not (6 ms).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch.jit._trace import TracerWarning

Recorded = Callable[..., torch.Tensor]


class RecordingError(Exception):
    """The code cannot be recorded: it looks at values, or does what the recorder does not know."""


def record(code: Callable[..., torch.Tensor], example: tuple[torch.Tensor, ...]) -> Recorded:
    """`torch.jit.trace` of a function or module, free in all sizes that `code` takes from its arguments' shapes.

    The caller checks the recording against `code` on other shapes and values. Raises RecordingError if it cannot be made.
    """
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        try:
            recorded = torch.jit.trace(  # type: ignore[no-untyped-call]
                code, example, check_trace=False
            )
        except (RuntimeError, TypeError, ValueError) as error:
            raise RecordingError(str(error).strip().partition("\n")[0]) from error
    if where := _frozen_value(caught):
        raise RecordingError(f"{where} depends on a value")
    return cast(Recorded, recorded)


def _frozen_value(caught: list[warnings.WarningMessage]) -> str:
    """Where Python branched on a tensor's value, which is thereby frozen into the recording."""
    for warning in caught:
        file = Path(warning.filename).name
        # There only the number of queries is looked at, and only for a forward without a mask.
        if issubclass(warning.category, TracerWarning) and file != "sdpa_attention.py":
            return f"{file}:{warning.lineno}"
    return ""
