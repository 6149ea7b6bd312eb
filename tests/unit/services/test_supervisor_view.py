"""What a run shows of itself: the metrics file followed as it grows, the plain lines, the live table."""

from __future__ import annotations

import io
import time
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from services.run_store.client import connect
from services.run_store.status import Wait, WaitBoard
from services.supervisor.live_view import LiveView, MetricsTail, Observer, PlainView, Snapshot, make_view
from tests.support.step_lines import step_line, step_metrics


def line(step: int) -> bytes:
    return step_line(step, success=step / 100) + b"\n"


def test_the_tail_follows_a_growing_file_and_ignores_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read() is None
    path.write_bytes(line(1) + line(2)[:7])
    first = tail.read()
    assert first is not None
    assert first.step == 1
    path.write_bytes(line(1) + line(2) + line(3))
    latest = tail.read()
    assert latest is not None
    assert (latest.step, latest.success) == (3, 0.03)
    assert tail.read() is latest


async def test_a_snapshot_is_had_even_where_nothing_answers_yet(redis_url: str, run_id: str, tmp_path: Path) -> None:
    redis = connect(redis_url)
    await WaitBoard(redis, run_id, "trainer").post("group 7 of server s1")
    async with httpx.AsyncClient() as http:
        observer = Observer(
            began_at=time.time(),
            metrics=tmp_path / "metrics.jsonl",
            evaluated=tmp_path / "evaluation_before.json",
            run_id=run_id,
            redis=redis,
            http=http,
            urls=["http://127.0.0.1:1"],
        )
        snapshot = await observer.collect()
        assert snapshot.evaluates_before
        assert not (await observer.collect(["bus"])).evaluates_before, "nothing is answered before all have started"
        (tmp_path / "evaluation_before.json").write_text("{}")
        assert not (await observer.collect()).evaluates_before
    await redis.aclose()
    assert snapshot.metrics is None
    assert snapshot.engines == []
    assert snapshot.waits["trainer"].waiting_for == "group 7 of server s1"


def snapshot(step: int) -> Snapshot:
    of = {"groups": 1, "trajectories": 4, "reward": 1.0, "response_length": 8.0}
    tasks = {"a": {**of, "success": 1.0}, "b": {**of, "success": 0.5}}
    shown = {"success": 0.75, "response_length": 11.5, "tokens_per_s": 9000.0, "staleness_max": 2, "tasks": tasks}
    metrics = step_metrics(step, **shown)
    wait = Wait(waiting_for="16 complete groups", since=time.time() - 3.0)
    return Snapshot(elapsed_s=12.0, metrics=metrics, waits={"trainer": wait})


def shown(view: PlainView | LiveView, console: Console) -> str:
    with view:
        view.say("weight-bus is ready")
        view.show(snapshot(59))
        view.show(snapshot(60))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_plain_lines_say_what_happened_and_who_waits() -> None:
    console = Console(file=io.StringIO(), width=200)
    view = make_view(console, steps=60, k=2, plain=False)
    assert isinstance(view, PlainView), "no terminal, no live view"
    said = shown(view, console).splitlines()
    assert said[0].endswith("weight-bus is ready")
    assert len(said) == 2, "the last step is told at once, others every few seconds"
    for fact in (
        "step 60/60",
        "success 0.75",
        "by task a 1.00, b 0.50",
        "length 11.5",
        "tokens/s 9,000",
        "max 2 of 2",
        "trainer waits for 16 com",
    ):
        assert fact in said[1]


def test_the_evaluation_before_training_is_no_wait_of_the_trainer() -> None:
    wait = Wait(waiting_for="the batch of step 1: groups 0/16 ready", since=time.time() - 3.0)
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    with make_view(console, steps=60, k=2, plain=False) as view:
        view.show(Snapshot(elapsed_s=12.0, waits={"trainer": wait}, evaluates_before=True))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "of held-out problems, before training: 0 tokens generated" in text
    assert "waits for" not in text


def test_the_live_view_shows_the_same_facts() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    view = make_view(console, steps=60, k=2, plain=False)
    assert isinstance(view, LiveView)
    text = shown(view, console)
    for fact in ("60/60", "0.75", "a 1.00, b 0.50", "11.5", "9,000", "max 2 of 2", "waits for 16 complete groups (3."):
        assert fact in text


@pytest.mark.parametrize("plain", [True, False])
def test_a_look_costs_a_fraction_of_a_core(plain: bool) -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with make_view(console, steps=60, k=2, plain=plain) as view:
        view.show(snapshot(1))
        began = time.process_time()
        for step in range(20):
            view.show(snapshot(step))
        spent = (time.process_time() - began) / 20
    assert spent < 0.03, "two looks a second must stay far below a tenth of a core"
