"""Admission: how many groups may be open so that tokens over K stay rare.

Symbols: `batch` groups an optimizer step consumes; `v` the version an engine serves; `v0` the version the run started
from; `opened` groups ever opened, `dropped` those that will never be trained.

The group with ordinal `n` (not counting dropped ones) is consumed, first in first out, by the step that starts from
version `v0 + ⌊n / batch⌋`. Started under `v`, its first token will then be `v0 + ⌊n / batch⌋ − v` steps old. That is ≤ K
exactly when

    n  <  (v − v0 + K + 1) · batch                                                                  (1)

Since `v − v0` steps have consumed `(v − v0) · batch` groups, at most `(K + 1) · batch` groups are open at once.
K = 0 admits the next batch only when the engine serves the weights of the step before: exactly synchronous.
"""

from __future__ import annotations


def admission_limit(engine_version: int, base_version: int, k: int, batch: int) -> int:
    """The right-hand side of (1): how many groups (less dropped ones) may have been opened in all."""
    if k < 0 or batch < 1:
        raise ValueError(f"K must be ≥ 0 and batch ≥ 1, got K={k}, batch={batch}")
    if engine_version < base_version:
        raise ValueError(f"an engine at version {engine_version} is older than the run's first version {base_version}")
    return (engine_version - base_version + k + 1) * batch


def may_open(opened: int, dropped: int, engine_version: int, base_version: int, k: int, batch: int) -> bool:
    """Whether one more group may be opened by an engine that serves `engine_version`."""
    return opened - dropped < admission_limit(engine_version, base_version, k, batch)
