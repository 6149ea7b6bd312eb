"""A finding: what is wrong, what was seen of it, what to do. Pure.

Every id has a section in docs/runbook.md, under a heading of that name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import msgspec

from services.wire.errors import UsageError

FindingId = Literal[
    # The machine
    "versions",
    "gpu-driver",
    "disk",
    "port-in-use",
    "keys",
    "nixl-unusable",
    "nixl-slow",
    "not-tried",
    # Redis
    "redis-unreachable",
    "redis-evicts",
    "redis-too-old",
    "redis-persistence",
    "redis-memory",
    "clock-skew",
    # The planned run
    "plan-refused",
    "model-folder",
    "tokenizer",
    "chat-template",
    "dialect",
    "unknown-characters",
    "memory",
    # The environment
    "environment-fails",
    "environment-nondeterministic",
    "environment-equal-rewards",
    "environment-slow",
    "environment-splits-overlap",
    "environment-repeats-problems",
    # The run
    "run-blocked",
    "run-failed",
    "groups-lost",
    "run-not-read",
    "out-of-memory",
    "throughput-drop",
    "reward-collapse",
    "equal-rewards",
    "logprob-gap",
    "cannot-learn",
    "account-wrong",
    "weights-diverged",
    "straggler",
    "lease-flapping",
    "prefix-broken",
]
FINDING_IDS: tuple[FindingId, ...] = get_args(FindingId)

Severity = Literal["error", "warning"]
"""error: the run cannot work, or does not do what it says; warning: it works, worse than it could."""

RUNBOOK = "docs/runbook.md"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong. `cause`, `evidence`, `remedy`: a line each, for people; `runbook`: page and section."""

    id: FindingId
    severity: Severity
    cause: str
    evidence: str
    remedy: str
    runbook: str


def error(which: FindingId, cause: str, evidence: str, remedy: str) -> Finding:
    """A finding of severity `error`."""
    return _found(which, "error", cause, evidence, remedy)


def warning(which: FindingId, cause: str, evidence: str, remedy: str) -> Finding:
    """A finding of severity `warning`."""
    return _found(which, "warning", cause, evidence, remedy)


def _found(which: FindingId, severity: Severity, cause: str, evidence: str, remedy: str) -> Finding:
    return Finding(
        id=which, severity=severity, cause=cause, evidence=evidence, remedy=remedy, runbook=f"{RUNBOOK}#{which}"
    )


def refuse(findings: Iterable[Finding]) -> None:
    """Raises UsageError for the first error among them: what is wrong before a run begins ends it."""
    for each in findings:
        if each.severity == "error":
            refused = UsageError(f"{each.cause} ({each.evidence})", each.remedy)
            refused.finding = each.id
            raise refused


@contextmanager
def refused_as(which: FindingId) -> Iterator[None]:
    """What the block refuses is of this kind, where it does not say another."""
    try:
        yield
    except UsageError as refused:
        refused.finding = refused.finding or which
        raise
