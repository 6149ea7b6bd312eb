"""Renders a status report as one screen of text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.observability.mesh_status.report import CauseView, MeshReport, ServiceView
from services.observability.terminal import BAD, GOOD, NOTE

_MOST_GROUPS = 8


def screen(report: MeshReport) -> RenderableType:
    """Everything of the report, the causes first."""
    if report.lost:
        why = f"Redis says nothing of run {report.run_id} ({report.unread[0]})"
        return Text(f"{why}: the run has ended, or Redis is away", style=BAD)
    parts: list[RenderableType] = [_head(report), *_causes(report), _services(report), _figures(report)]
    parts += [Text(f"not read: {line}", style=BAD) for line in report.unread]
    return Group(*parts)


def _head(report: MeshReport) -> Text:
    head = Text(f"run {report.run_id}", style="bold")
    if report.queue is not None and report.queue.concluded:
        head.append("  concluded", style=GOOD)
    wait = report.trainer_waits
    if wait is not None:
        head.append(f"\nthe trainer waits {report.at - wait.since:.1f} s for {wait.waiting_for}", style=NOTE)
    return head


def _causes(report: MeshReport) -> Sequence[Text]:
    if not report.causes:
        return [] if report.trainer_waits is None else [Text("  nothing is at fault as far as can be seen")]
    return [_cause(cause, report.at) for cause in report.causes]


def _cause(cause: CauseView, now: float) -> Text:
    begins = "because" if cause.sure else "starting" if cause.kind == "starting" else "likely because"
    text = Text(f"  {begins}: {cause.what}", style=BAD if cause.sure else NOTE)
    if cause.groups:
        shown = ", ".join(
            f"{group.ordinal} (open {now - group.opened_at:.0f} s, {group.finished} siblings finished)"
            for group in cause.groups[:_MOST_GROUPS]
        )
        more = len(cause.groups) - _MOST_GROUPS
        text.append(f"\n    holds groups {shown}{f' and {more} more' if more > 0 else ''}")
    return text


def _services(report: MeshReport) -> RenderableType:
    if not report.services:
        return Text("no service stands in the directory")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("service", "state", "version", "running", "KV", "waiting", "sessions", "groups", "url"):
        table.add_column(head, overflow="fold")
    for service in report.services:
        kv = None if service.kv_use is None else f"{service.kv_use:.0%}"
        figures = (
            service.policy_version,
            service.running,
            kv,
            service.waiting,
            service.open_sessions,
            service.open_groups,
        )
        table.add_row(service.name, _state(service, report.at), *map(_or_dash, figures), service.url)
    return table


def _state(service: ServiceView, now: float) -> Text:
    if service.probe == "ready" and service.alive is not False:
        return Text("ready", style=GOOD)
    state = service.probe.replace("_", " ") if service.probe != "ready" else "unheard"
    if service.alive is False:
        state += f", lease ran out, heard {now - service.last_heard:.0f} s ago"
    return Text(": ".join([state, *service.reasons[:1]]), style=BAD)


def _figures(report: MeshReport) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    trainer, queue = report.trainer, report.queue
    if trainer is not None:
        busy = f"{trainer.busy_share:.0%} busy, {1 - trainer.busy_share:.0%} idle over {trainer.over_steps} steps"
        table.add_row("trainer", f"step {trainer.step}/{trainer.steps}, {trainer.tokens_per_s:,.0f} tokens/s, {busy}")
        ages = " ".join(f"{age}:{count}" for age, count in trainer.staleness_histogram.items())
        spread = f"mean {trainer.staleness_mean:.2f}, max {trainer.staleness_max} of K {trainer.k}"
        table.add_row("staleness", f"{spread}, over K {trainer.masked_fraction:.1%}  (tokens by steps: {ages})")
        if trainer.effective_samples is not None:
            table.add_row("effective samples", f"{trainer.effective_samples:.2f}")
        for sign, words in trainer.warnings.items():
            table.add_row("may not learn", Text(f"{sign}: {words}", style=BAD))
        for name, one in trainer.tasks.items():
            if len(trainer.tasks) > 1 or one.skipped is not None:
                figures = f"success {one.success:.1%}, reward {one.reward:.3g}, {one.response_length:.1f} tokens"
                skipped = "" if one.skipped is None else f", {one.skipped:.1%} of its problems skipped"
                table.add_row(f"task {name}", f"{figures}, {one.groups} groups{skipped}")
        if trainer.dropped:
            table.add_row("dropped", ", ".join(f"{cause} {count}" for cause, count in trainer.dropped.items()))
    held_out = report.evaluation
    if held_out is not None:
        success = f"{held_out.success:.1%} ({held_out.low:.1%} to {held_out.high:.1%}) of {held_out.problems} problems"
        versions = f"versions {held_out.first_version} to {held_out.last_version}"
        table.add_row("held out", f"{success}, {versions}, {report.at - held_out.at:.0f} s ago")
        for name, each in held_out.tasks.items():
            table.add_row(
                f"  {name}", f"{each.success:.1%} ({each.low:.1%} to {each.high:.1%}) of {each.problems} problems"
            )
    if queue is not None:
        table.add_row("queue", f"{queue.in_stream} trajectories in the stream, {queue.trained} trained")
        if queue.unaccounted or queue.corrected:
            balance = f"{queue.unaccounted} unaccounted for, {queue.corrected} corrected: Redis has lost something"
            table.add_row("balance", Text(balance, style=BAD if queue.unaccounted else NOTE))
        dropped = f", {queue.dropped_groups} of {queue.opened_groups} dropped" if queue.dropped_groups else ""
        table.add_row("groups", f"{queue.open_groups} open, {queue.asking_groups} wait for admission{dropped}")
    for wait in report.waits:
        if wait is not report.trainer_waits:
            table.add_row(f"{wait.component} waits", f"{report.at - wait.since:.1f} s for {wait.waiting_for}")
    return table


def _or_dash(value: int | str | None) -> str:
    return "-" if value is None else str(value)
