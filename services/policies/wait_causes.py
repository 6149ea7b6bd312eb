"""Diagnosis of a run that does not go on: causes from what was seen of its services, the surest first. Pure.

| cause           | seen                                                                  | sure |
|-----------------|-----------------------------------------------------------------------|------|
| `gone`          | nothing listens where the service was                                 | yes  |
| `silent`        | it takes connections and answers nothing: stopped, hung, or cut off   | yes  |
| `unheard`       | it answers, but Redis does not hear of it any more                    | yes  |
| `not_ready`     | it says itself why it cannot do its work                              | yes  |
| `starting`      | the same, before the run has made a step, and of a server that has    | no   |
|                 | sampled nothing yet                                                   |      |
| `store_full`    | Redis holds as much as a run may fill, and admits no group            | yes  |
| `draws_nothing` | a server has samples, and generated no token between two readings     | no   |
| `open_group`    | the trainer waits, and this is the oldest group that is not whole     | no   |
| `evaluates`     | the same, before the first step, and engines generate                 | no   |
| `nobody_plays`  | the trainer waits, no group is open and nobody waits to open one      | no   |

A service that is gone or silent is a cause whether or not the trainer waits yet: it will. What is only likely is named
where the trainer waits and nothing sure was seen. That services still start is said in any case, and is no fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from services.policies.admission import StoreUse

CauseKind = Literal[
    "gone",
    "silent",
    "unheard",
    "not_ready",
    "starting",
    "store_full",
    "draws_nothing",
    "open_group",
    "evaluates",
    "nobody_plays",
]
ProbeOutcome = Literal["ready", "not_ready", "silent", "refused"]


@dataclass(frozen=True)
class SeenService:
    """One service as it was found. `alive`: its lease lasts; None where it holds none. `last_heard`: Unix seconds.

    `reasons`: what it says of not being ready. `running`, `sampled`: samples being generated, and tokens sampled
    between two looks `apart_s` apart; None where that is not known.
    """

    name: str
    alive: bool | None
    last_heard: float
    probe: ProbeOutcome
    reasons: Sequence[str] = ()
    running: int = 0
    sampled: int | None = None
    apart_s: float = 0.0
    worked: bool = False
    """A server that has sampled tokens: it does not start any more, also where no trainer makes a step."""


@dataclass(frozen=True)
class SeenGroup:
    """An open group. `held_by`: the server that its sessions are on now. `finished`: siblings in the stream so far."""

    group_id: str
    ordinal: int
    held_by: str
    opened_at: float
    finished: int


@dataclass(frozen=True)
class Cause:
    """`service`: who is to blame; None where nobody is. `since`: Unix seconds. `sure`: seen, not guessed."""

    kind: CauseKind
    service: str | None
    since: float
    what: str
    sure: bool
    groups: tuple[SeenGroup, ...] = ()


def find_causes(
    services: Sequence[SeenService],
    groups: Sequence[SeenGroup],
    *,
    trainer_waits_since: float | None,
    asking_groups: int,
    now: float,
    store: StoreUse | None = None,
    starting: bool = False,
) -> list[Cause]:
    """`trainer_waits_since`: Unix seconds, None while it does not. `asking_groups`: that wait for admission. `store`: what
    Redis holds, as the servers heard last; None where nothing bounds it. `starting`: the run has made no step yet.

    The most groups held up first, among equals the longest.
    """
    by_server: dict[str, list[SeenGroup]] = {}
    for group in sorted(groups, key=lambda each: each.ordinal):
        by_server.setdefault(group.held_by, []).append(group)
    found = [
        cause
        for each in services
        if (cause := _of_service(each, tuple(by_server.get(each.name, ())), now, starting=starting))
    ]
    if store is not None and store.full:
        what = (
            f"Redis holds {store} (run_store.max_bytes): no group is admitted until a checkpoint frees what is trained"
        )
        found.append(Cause("store_full", None, now, what, True))
    sure = [cause for cause in found if cause.sure]
    if sure or trainer_waits_since is None:
        causes = [cause for cause in found if cause.sure or cause.kind == "starting"]
    else:
        causes = found or _of_groups(services, by_server, trainer_waits_since, asking_groups, now, starting)
    return sorted(causes, key=lambda cause: (-len(cause.groups), cause.since))


def _of_service(seen: SeenService, groups: tuple[SeenGroup, ...], now: float, *, starting: bool) -> Cause | None:
    heard = f"last heard of {max(0.0, now - seen.last_heard):.0f} s ago"
    if seen.probe == "refused":
        what = f"{seen.name} is gone: nothing listens at its address, {heard}"
        return Cause("gone", seen.name, seen.last_heard, what, True, groups)
    if seen.probe == "silent":
        what = f"{seen.name} takes connections and answers nothing (stopped, hung or cut off), {heard}"
        return Cause("silent", seen.name, seen.last_heard, what, True, groups)
    if seen.alive is False:
        what = f"{seen.name} answers, but let its lease run out (can it reach Redis?), {heard}"
        return Cause("unheard", seen.name, seen.last_heard, what, True, groups)
    if seen.probe == "not_ready":
        starting = starting and not seen.worked
        what = f"{seen.name} is not ready{' yet' if starting else ''}: {'; '.join(seen.reasons)}"
        return Cause("starting" if starting else "not_ready", seen.name, now, what, not starting, groups)
    if seen.running and seen.sampled == 0:
        what = f"{seen.name} generated no token in {seen.apart_s:.1f} s, with {seen.running} samples to generate"
        return Cause("draws_nothing", seen.name, now - seen.apart_s, what, False, groups)
    return None


def _of_groups(
    services: Sequence[SeenService],
    by_server: dict[str, list[SeenGroup]],
    trainer_waits_since: float,
    asking_groups: int,
    now: float,
    starting: bool,
) -> list[Cause]:
    if by_server:
        server, groups = min(by_server.items(), key=lambda item: item[1][0].ordinal)
        oldest = groups[0]
        what = (
            f"group {oldest.ordinal} on {server} is open for {max(0.0, now - oldest.opened_at):.0f} s, "
            f"{oldest.finished} of its siblings are in the stream; {_work_of(server, services)}"
        )
        return [Cause("open_group", server, oldest.opened_at, what, False, tuple(groups))]
    if asking_groups:
        return []
    generating = sum(each.running for each in services)
    if starting and generating:
        what = (
            f"no group is open yet: held-out problems are answered before training, {generating} samples are generated"
        )
        return [Cause("evaluates", None, trainer_waits_since, what, False)]
    what = "no group is open and none waits to be opened: no environment plays"
    return [Cause("nobody_plays", None, trainer_waits_since, what, False)]


def _work_of(server: str, services: Sequence[SeenService]) -> str:
    """What the server does meanwhile: whether to wait for its engine, or for what plays with it."""
    seen = next((each for each in services if each.name == server), None)
    if seen is None:
        return "that server is in no registry"
    if not seen.running:
        return "the engine has nothing to generate: the environment, a tool or a reward is waited for"
    rate = "" if seen.sampled is None else f" ({seen.sampled} tokens in {seen.apart_s:.1f} s)"
    return f"the engine generates {seen.running} samples{rate}"
