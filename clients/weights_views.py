"""What `rollmesh weights` shows: tables for people, JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from services.wire.weights_api import EnginesView, UpdateView, VerifyView, VersionsView, WeightEvent


def show_json(view: BaseModel) -> None:
    sys.stdout.write(view.model_dump_json() + "\n")
    sys.stdout.flush()


def show_status(engines: EnginesView, versions: VersionsView) -> None:
    _table(
        ["engine", "version", "staged", "ranks", "url"],
        [
            [each.engine_id, each.policy_version, _or_dash(each.staged_version), each.ranks, each.url]
            for each in engines.engines
        ],
        "no engine is registered",
    )
    _table(
        ["version", "state", "served by", "MiB", "digest"],
        [
            [
                f"{each.version}{' (withdrawn)' if each.withdrawn else ''}",
                each.state,
                ", ".join(each.served_by) or "-",
                f"{each.nbytes / (1 << 20):.1f}",
                each.root_digest[:16] or "-",
            ]
            for each in versions.versions
        ],
        "no version was announced",
    )


def show_update(view: UpdateView) -> None:
    took = "" if view.publish_to_commit_ms is None else f" after {view.publish_to_commit_ms:.0f} ms"
    why = "" if view.why is None else f": {view.why}"
    _say(f"version {view.version} is {view.state}{took}{why}")
    _table(
        ["engine", "state", "MiB", "stage ms", "flip ms", "why"],
        [
            [
                each.engine_id,
                each.state,
                f"{each.bytes_read / (1 << 20):.1f}",
                f"{each.stage_ms:.1f}",
                f"{each.flip_ms:.2f}",
                each.why or "",
            ]
            for each in view.engines
        ],
        "no engine is registered",
    )


def show_verified(view: VerifyView) -> None:
    expected = "no version" if view.version is None else f"version {view.version}"
    _say(f"{expected}: {'every engine serves its bytes' if view.match else 'NOT every engine serves its bytes'}")
    drawn = {} if view.canary is None else {each.engine_id: each for each in view.canary.engines}
    rows: list[Sequence[object]] = []
    for each in view.engines:
        canary = drawn.get(each.engine_id)
        tokens = "" if canary is None else canary.why or " | ".join(" ".join(map(str, row)) for row in canary.tokens)
        rows.append([each.engine_id, each.version, each.why or each.root_digest[:16], tokens])
    _table(["engine", "version", "digest", "greedy tokens"], rows, "no engine is registered")
    if view.canary is not None:
        _say("the canaries agree" if view.canary.agree else "the canaries do NOT agree")


def show_event(event: WeightEvent) -> None:
    at = datetime.fromtimestamp(event.at, UTC).strftime("%H:%M:%S.%f")[:-3]
    version = "" if event.version is None else f" v{event.version}"
    who = "" if event.engine_id is None else f" {event.engine_id}"
    why = "" if event.why is None else f": {event.why}"
    _say(f"{at} {event.kind}{version}{who}{why}")


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]], empty: str) -> None:
    if not rows:
        _say(empty)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    Console().print(table, markup=False)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
