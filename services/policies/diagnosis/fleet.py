"""Findings of a run's servers: weights that differ, one that is slower than its siblings, leases that come and go; and of
the run's account. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from services.policies.balance import Counted, Durable, corrections
from services.policies.diagnosis.finding import Finding, error, warning
from services.wire.weights_api import VerifyView, WeightEvent

SLOWEST_SHARE = 0.25
"""Of what siblings sample for each of their samples: a server below it holds up its groups."""
LEAST_TOKENS = 64
"""Sampled by the siblings between two looks: with fewer nothing is said."""
FLAPS = 2
"""Leases of one engine that ran out in FLAPS_WITHIN_S: a process that ends once is no flapping."""
FLAPS_WITHIN_S = 600.0


def of_weights(seen: VerifyView) -> Iterator[Finding]:
    """Engines of one version must serve the same bytes, and those of the version that was published."""
    answered = [each for each in seen.engines if each.version >= 0 and each.root_digest]
    for version in sorted({each.version for each in answered}):
        digests = Counter(each.root_digest for each in answered if each.version == version)
        right = seen.root_digest if version == seen.version and seen.root_digest else digests.most_common(1)[0][0]
        for each in answered:
            if each.version == version and each.root_digest != right:
                yield error(
                    "weights-diverged",
                    f"{each.engine_id} serves other weights than version {version}",
                    f"root digest {each.root_digest[:16]}…, not {right[:16]}…",
                    f"end that server: it starts again with the right ones (`rollmesh weights verify`, log of "
                    f"{each.engine_id})",
                )


@dataclass(frozen=True)
class Sampling:
    """A rollout server between two looks: tokens that it sampled, and the samples it generated at both (the smaller)."""

    name: str
    tokens: int
    running: int


def stragglers(servers: Sequence[Sampling]) -> dict[str, str]:
    """Server → evidence, of those that sample far fewer tokens for each of their samples than the others."""
    busy = [each for each in servers if each.running > 0]
    found = {}
    for each in busy:
        others = [other for other in busy if other is not each]
        if not others or sum(other.tokens for other in others) < LEAST_TOKENS:
            continue
        usual = median(other.tokens / other.running for other in others)
        if usual > 0 and each.tokens / each.running < SLOWEST_SHARE * usual:
            found[each.name] = (
                f"{each.tokens / each.running:.1f} tokens a sample, {usual:.1f} at the other servers in the same time"
            )
    return found


def of_stragglers(first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[Finding]:
    """Of two looks on end, so that one long prefill is none."""
    for name in sorted(first.keys() & second.keys()):
        yield warning(
            "straggler",
            f"{name} is much slower than the other rollout servers, and its groups hold up batches",
            second[name],
            "see what else runs on its machine (py-spy, nvidia-smi), or end it: the gateway sends its sessions elsewhere",
        )


def of_events(events: Sequence[WeightEvent], now: float) -> Iterator[Finding]:
    """`events`: the weight bus's; `now`: Unix seconds, by its clock."""
    lately = Counter(
        each.engine_id for each in events if each.kind == "left" and each.engine_id and now - each.at < FLAPS_WITHIN_S
    )
    for engine, times in sorted(lately.items()):
        if times >= FLAPS:
            yield warning(
                "lease-flapping",
                f"{engine} is lost and found again",
                f"its lease at the weight bus ran out {times} times in {FLAPS_WITHIN_S / 60:.0f} minutes",
                "its machine has too few cores, is out of memory, or the network drops calls: see its log for "
                "heartbeats that failed",
            )


def of_account(counted: Counted, *, unaccounted: int, corrected: int, read: bool) -> Iterator[Finding]:
    """The run's two balances: of trajectories and of groups.

    `unaccounted`, `corrected`: as the trainer found at its last comparison; `read`: all of the stream has been delivered.
    """
    itself = Durable(
        trained=counted.trained,
        consumed=counted.opened_groups - counted.dropped_groups - len(counted.standing),
        consumed_lately=frozenset(),
        held=frozenset(),
    )
    off = corrections(counted, itself)
    wrong = []
    lost = counted.trained + counted.dropped - counted.published
    if (read and off.published) or lost > 0:
        wrong.append(
            f"published {counted.published} ≠ trained {counted.trained} + dropped {counted.dropped} + unsettled "
            f"{counted.unsettled}"
        )
    if off.closed_groups:
        wrong.append(
            f"groups: opened {counted.opened_groups} ≠ closed {counted.closed_groups} + open {counted.open_groups}"
        )
    if unaccounted:
        wrong.append(f"{unaccounted} unaccounted for when the trainer last compared")
    remedy = "see that Redis' append-only file is whole and its disk sound; a trainer that starts again corrects it"
    if wrong:
        yield error("account-wrong", "the run's account does not balance", "; ".join(wrong), remedy)
    elif corrected:
        yield warning(
            "account-wrong",
            "Redis had lost a part of the run",
            f"{corrected} trajectories and groups of its account were corrected",
            remedy,
        )
