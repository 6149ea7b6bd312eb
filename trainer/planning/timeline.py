"""What held memory, and when: events of a step ──► the tightest moment, and what was alive then, by part.

weights, gradients, optimizer    of the policy; known one by one
critic, reference                all of theirs, but for passes
gathered                         weights and gradients that ranks collect for a layer, whole
exchange                         memory through which ranks of one machine without GPUs exchange these
activations                      made by layers in a forward pass, and kept for the backward pass
head                             made between the last layer and the loss, and back
temporaries                      everything else: what a layer makes and gives up, a layer computed once more
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainer.memory.tracker import Event

PARTS = (
    "weights",
    "gradients",
    "optimizer",
    "reference",
    "critic",
    "gathered",
    "exchange",
    "activations",
    "head",
    "temporaries",
)
FORWARD, HEAD, BACKWARD, STEP = "forward", "head", "backward", "optimizer"
"""How the words for a moment begin."""


@dataclass(frozen=True)
class Moment:
    """`where`: what was going on. `parts`: bytes of each of PARTS that had some."""

    where: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def tightest(events: Sequence[Event], known: Mapping[int, str], since: int = 0) -> Moment:
    """The moment of the most bytes at or after event `since`.

    `known`: the parts of storages that are known one by one. Raises ValueError where there is no such moment.
    """
    return max(moments(events, known, since), key=lambda moment: moment.total)


def moments(events: Sequence[Event], known: Mapping[int, str], since: int = 0) -> list[Moment]:
    """The fullest moment of each `where` at or after event `since`, in the order in which they came first."""
    parts = _parts_of(events, known)
    live: dict[str, int] = defaultdict(int)
    total = 0
    best: dict[str, tuple[int, dict[str, int]]] = {}
    where = ""
    for number, event in enumerate(events):
        if number >= since and event.where != where:
            # What was there when it began belongs to it.
            where = event.where
            _keep(best, where, total, live)
        live[parts[event.storage]] += event.nbytes
        total += event.nbytes
        if number >= since and event.nbytes > 0:
            _keep(best, where, total, live)
    return [
        Moment(where, {part: found[part] for part in PARTS if found.get(part)}) for where, (_, found) in best.items()
    ]


def with_head(found: Sequence[Moment], more: int) -> list[Moment]:
    """The moments with so many bytes more in the head."""
    return [
        Moment(moment.where, {**moment.parts, "head": moment.parts.get("head", 0) + more})
        if more and _kind(moment.where) == HEAD
        else moment
        for moment in found
    ]


def _keep(best: dict[str, tuple[int, dict[str, int]]], where: str, total: int, live: Mapping[str, int]) -> None:
    if where not in best or total > best[where][0]:
        best[where] = (total, dict(live))


def _parts_of(events: Iterable[Event], known: Mapping[int, str]) -> dict[int, str]:
    """The part of each storage. What a forward pass makes is an activation if it is there when the pass has ended."""
    parts: dict[int, str] = {}
    open_: set[int] = set()
    """Made in the forward pass that is going on."""
    for event in events:
        if open_ and _kind(event.where) not in (FORWARD, ""):
            parts |= dict.fromkeys(open_, "activations")
            open_ = set()
        if event.storage in parts:
            if event.nbytes < 0:
                open_.discard(event.storage)
            continue
        kind = _kind(event.where)
        if event.storage in known:
            parts[event.storage] = known[event.storage]
        elif kind == HEAD:
            parts[event.storage] = "head"
        else:
            parts[event.storage] = "temporaries"
            if kind == FORWARD:
                open_.add(event.storage)
    return parts


def _kind(where: str) -> str:
    """Which of the kinds of moments: the words before the comma, without whose they are."""
    return where.partition(",")[0].rpartition(" ")[2]
