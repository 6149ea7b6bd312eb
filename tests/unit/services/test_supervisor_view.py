"""What a run shows of itself: the metrics file followed as it grows, the plain lines, the screen."""

from __future__ import annotations

import io
import re
import time
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import pytest
from rich.cells import cell_len
from rich.color import Color, ColorSystem
from rich.console import Console

from services.host.run_folder import RunFolder
from services.observability import terminal
from services.observability.run_view.observer import MetricsTail, Observer
from services.observability.run_view.snapshot import History, Snapshot
from services.policies.progress.bottleneck import Bound
from services.policies.progress.phase import Part, Phase
from services.run_store.client import connect
from services.run_store.rollouts.database import database_of
from services.run_store.status import Wait, WaitBoard
from services.supervisor.view.screen import screen
from services.supervisor.view.views import LiveView, PlainView, make_view
from services.wire.rollout_api import EngineReport
from services.wire.run_metrics import BEFORE, WARM_START, Sample, SampledSegment, SampledSpan, WorkProgress
from tests.support.kept_rollouts import keep_text
from tests.support.step_lines import step_line, step_metrics

TRAINING = Phase("training", 0.5)
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


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
    assert tail.history.success == [0.01, 0.02, 0.03]


async def test_a_snapshot_is_had_even_where_nothing_answers_yet(redis_url: str, run_id: str, tmp_path: Path) -> None:
    redis = connect(redis_url)
    await WaitBoard(redis, run_id, "trainer").post("group 7 of server s1")
    folder = RunFolder(tmp_path)
    warm, servers = Part(WARM_START, 1, 2, "sft"), Part("servers", 0, 1, "rollout-server-0")
    async with httpx.AsyncClient() as http:
        observer = Observer(
            began_at=time.time(),
            steps=60,
            k=2,
            folder=folder,
            run_id=run_id,
            redis=redis,
            http=http,
            urls=["http://127.0.0.1:1"],
        )
        begins = await observer.collect([warm, servers])
        folder.progress.write_bytes(msgspec.json.encode(WorkProgress(what=WARM_START, done=90, total=180)))
        further = await observer.collect([warm, servers])
        folder.progress.write_bytes(msgspec.json.encode(WorkProgress(what=BEFORE, done=64, total=256)))
        evaluates = await observer.collect([Part(WARM_START, 2, 2), Part("servers", 1, 1)])
        folder.evaluation_before.write_text("{}")
        evaluated = await observer.collect([Part(WARM_START, 2, 2), Part("servers", 1, 1)])
    await redis.aclose()
    assert [each.phase.name for each in (begins, evaluates, evaluated)] == ["starting", BEFORE, "training"]
    assert begins.phase.share < further.phase.share < evaluates.phase.share < 1.0
    assert [part.done for part in further.phase.parts] == [1.5, 0]
    assert evaluates.phase.parts == (Part(BEFORE, 64, 256),)
    assert begins.metrics is None
    assert begins.engines == []
    assert begins.waits["trainer"].waiting_for == "group 7 of server s1"


async def test_a_snapshot_of_training_has_curves_a_sample_and_what_is_left(
    redis_url: str, run_id: str, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    # Between the third and the fourth it stood still, and was resumed.
    ends = [102.0, 104.0, 106.0, 9000.0, 9002.0, 9004.0]
    lines = [
        step_line(step, time=ends[step - 1], step_ms=2000.0, success=step / 10, reward=1.0) for step in range(1, 7)
    ]
    folder.metrics.write_bytes(b"\n".join(lines) + b"\n")
    redis = connect(redis_url)
    async with httpx.AsyncClient() as http:
        observer = Observer(began_at=90.0, steps=10, k=2, folder=folder, run_id=run_id, redis=redis, http=http, urls=[])
        database = database_of(folder.rollouts)
        database.parent.mkdir()
        database.write_bytes(b"no database" * 1000)
        broken = await observer.collect()
        keep_text(folder.rollouts, 3, "1+1=3")
        found = await observer.collect()
    await redis.aclose()
    assert broken.sample is None
    assert found.sample is not None
    assert (found.sample.step, found.sample.segments) == (3, [SampledSegment("1+1=3", [SampledSpan(2, "3")], None)])
    assert found.phase == Phase("training", 0.6)
    assert found.left_s == 8.0, "four steps of two seconds"
    assert found.history.success == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]


def sample(text: str, answer: str | None = None) -> Sample:
    answer = text[-1] if answer is None else answer
    return Sample(
        step=3,
        group="g",
        ordinal=1,
        member=0,
        task="a",
        server="s0",
        reward=1.0,
        versions=[1],
        segments=[SampledSegment(text=text, spans=[SampledSpan(version=1, text=answer)], break_reason=None)],
        tokens=1,
    )


def snapshot(step: int) -> Snapshot:
    of = {"groups": 1, "trajectories": 4, "reward": 1.0, "response_length": 8.0}
    tasks = {"a": {**of, "success": 1.0}, "b": {**of, "success": 0.5}}
    figures = {"success": 0.75, "response_length": 11.5, "tokens_per_s": 9000.0, "staleness_max": 2, "tasks": tasks}
    history = History()
    for earlier in range(1, step + 1):
        history.add(step_metrics(earlier, **figures, time=100.0 + earlier))
    return Snapshot(
        steps=60,
        k=2,
        at=1000.0,
        elapsed_s=12.0,
        phase=Phase("training", step / 60),
        metrics=step_metrics(step, **figures),
        history=history,
        waits={"trainer": Wait(waiting_for="16 complete groups", since=997.0)},
        bound=Bound("generation", "the trainer waits 60% of the time for 1 generating", "add servers, or raise k to 4"),
        sample=sample("12+34=46", "46"),
    )


STRANGE = "\x1b]0;owned\x07\x1b[2J\x9b5n\u202egnp\r\n\t漢字漢字 " + "very long " * 60


def hostile() -> Snapshot:
    """Of which everything that others say is long and would steer a terminal."""
    engines = [
        EngineReport(
            server_id=f"s{number}\x1b[31m",
            name="torch",
            policy_version=number,
            running=1,
            waiting=0,
            paused=False,
            tokens_generated=1,
            prefill_tokens=1,
            commits=1,
            stalls_ms=[1.0],
            open_groups=1,
            admission_waiting=0,
            http_cpu_s=0.0,
        )
        for number in range(64)
    ]
    of = {"groups": 1, "trajectories": 4, "reward": 1.0, "response_length": 8.0, "success": 1.0}
    tasks = {STRANGE: of, "b": of}
    history = History([0.5] * 5000, [float("inf")] * 5000, [1e9] * 5000, [1.0 * step for step in range(5000)])
    return Snapshot(
        steps=10**9,
        k=2,
        at=1000.0,
        elapsed_s=1e7,
        phase=Phase("training", 0.5, (Part("servers", 1, 64, STRANGE),)),
        metrics=step_metrics(5000, tasks=tasks, warnings={"no_signal": STRANGE, STRANGE: "x"}),
        history=history,
        engines=engines,
        waits={STRANGE: Wait(waiting_for=STRANGE, since=1.0)},
        bound=Bound("generation", STRANGE, STRANGE),
        sample=sample(STRANGE * 20, "\x1b[2J"),
    )


def starting(share: float = 0.4) -> Snapshot:
    parts = (Part(WARM_START, 1.25, 2, "sft"), Part("servers", 1, 2, "rollout-server-1: starting its engine"))
    return Snapshot(steps=60, k=2, at=1000.0, elapsed_s=5.0, phase=Phase("starting", share, parts))


def drawn(of: Snapshot, width: int) -> list[str]:
    """The lines as `rollmesh up` draws them: its console would let long ones run on."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, soft_wrap=True)
    console.print(screen(of, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().removesuffix("\n").split("\n")


@pytest.mark.parametrize("width", [40, 80, 100, 160])
@pytest.mark.parametrize("of", [hostile(), snapshot(30), starting()], ids=["hostile", "training", "starting"])
def test_no_line_is_wider_than_the_terminal_and_nothing_steers_it(of: Snapshot, width: int) -> None:
    lines = drawn(of, width)
    assert max(map(cell_len, lines)) <= width
    assert not CONTROL.search("".join(lines))
    assert len(lines) < 40


def test_hostile_text_is_shown_as_text() -> None:
    text = "".join("".join(drawn(hostile(), 160)).split())
    assert "\\x1b]0;owned\\x07" in text
    assert "\\u202egnp\\r\\n\\t" in text


@pytest.mark.parametrize("width", [80, 160])
def test_the_screen_has_the_facts_of_training(width: int) -> None:
    text = " ".join(" ".join(drawn(snapshot(30), width)).split())
    for fact in (
        "30/60 training, 12 s, about 30 s left",
        "0.75",
        "a 1.00, b 0.50",
        "11.5",
        "9,000 tokens/s",
        "max 2 of 2",
        "trainer: 16 complete groups (3.0 s)",
        "bound by generation: add servers, or raise k to 4",
        "of step 3, reward 1, 1 tokens",
        "12+34=46",
    ):
        assert fact in text


def test_curves_and_answers_use_a_wider_terminal() -> None:
    curves = {width: max(line.count("▆") for line in drawn(snapshot(50), width)) for width in (60, 80, 160)}
    assert curves[60] < curves[80]
    assert any("50/60" in line and "waits" in line for line in drawn(snapshot(50), 160)), "side by side"


def test_the_start_is_a_percentage_and_its_parts() -> None:
    text = "\n".join(drawn(starting(), 80))
    for fact in (
        " 40%",
        "starting, 5 s",
        "warm start 62% (sft)",
        "servers 1/2 (rollout-server-1: starting its engine)",
    ):
        assert fact in text


def test_the_end_of_a_long_prompt_is_shown_with_the_answer() -> None:
    long = replace(snapshot(3), sample=sample("word " * 500 + "1+1?two", "two"))
    lines = drawn(long, 80)
    assert "1+1?two" in lines[-1]
    assert len(lines) < 20


def shown(view: PlainView | LiveView, console: Console) -> str:
    with view:
        view.say("weight-bus is ready")
        view.show(snapshot(59))
        view.show(snapshot(60))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_plain_lines_say_what_happened_and_who_waits() -> None:
    console = Console(file=io.StringIO(), soft_wrap=True)
    view = make_view(console, plain=False)
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
        "bound by generation: add servers, or raise k to 4",
        "trainer waits for 16 com",
    ):
        assert fact in said[1]


def test_plain_lines_say_how_far_the_start_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.supervisor.view.views.PLAIN_EVERY_S", 0.0)
    console = Console(file=io.StringIO(), soft_wrap=True)
    view = make_view(console, plain=True)
    view.show(starting())
    view.show(replace(starting(0.8), phase=Phase(BEFORE, 0.8, (Part(BEFORE, 64, 256),))))
    view.show(replace(starting(), waits={}, phase=Phase("training", 0.0)))
    view.show(
        replace(starting(), waits={"trainer": Wait(waiting_for="a batch", since=997.0)}, phase=Phase("training", 0.0))
    )
    assert isinstance(console.file, io.StringIO)
    first, second, third, fourth = (line.partition(" s  ")[2] for line in console.file.getvalue().splitlines())
    assert first == (
        "step 0/60 · starting 40%: warm start 62% (sft), servers 1/2 (rollout-server-1: starting its engine)"
    )
    assert second == "step 0/60 · start 80% · evaluation before training, 64 of 256 answered"
    assert third == "step 0/60 · training 0% · the trainer computes step 1"
    assert fourth == "step 0/60 · training 0% · trainer waits for a batch (3.0 s)"


def test_the_evaluation_before_training_is_no_wait_of_the_trainer() -> None:
    wait = Wait(waiting_for="the batch of step 1: groups 0/16 ready", since=997.0)
    evaluates = replace(starting(), waits={"trainer": wait}, phase=Phase(BEFORE, 0.8, (Part(BEFORE, 0, 256),)))
    text = "\n".join(drawn(evaluates, 100))
    assert re.search(r"^start .* 80%  evaluation before training", text)
    assert "0 of 256 answered" in text
    assert "groups 0/16" not in text


def test_the_live_view_draws_the_screen_in_place() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    view = make_view(console, plain=False)
    assert isinstance(view, LiveView)
    text = shown(view, console)
    assert "weight-bus is ready" in text
    assert "59/60" in text and "60/60" in text


STYLES = [terminal.GOOD, terminal.BAD, terminal.NOTE, terminal.HEAD]


@pytest.mark.parametrize("style", STYLES)
def test_colours_stand_out_from_white_and_from_black(style: str) -> None:
    color = Color.parse(style.split()[-1])
    shades = [(part / 255 + 0.055) / 1.055 if part > 10 else 0.0 for part in color.get_truecolor()]
    # WCAG 2.2's relative luminance and contrast ratio.
    luminance = sum(weight * shade**2.4 for weight, shade in zip((0.2126, 0.7152, 0.0722), shades, strict=True))
    assert min(1.05 / (luminance + 0.05), (luminance + 0.05) / 0.05) >= 3.4
    black, yellow, white = {0, 8}, {3, 11}, {7, 15}
    assert color.downgrade(ColorSystem.STANDARD).number not in black | yellow | white


def test_the_screen_has_no_other_colours_and_none_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    def codes() -> set[str]:
        console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="256")
        console.print(screen(hostile(), 100))
        assert isinstance(console.file, io.StringIO)
        return set(re.findall("\x1b\\[([0-9;]*)m", console.file.getvalue()))

    planned = {re.sub(r".*color\((\d+)\)", r"38;5;\1", style) for style in STYLES}
    monkeypatch.delenv("NO_COLOR", raising=False)
    colours = {code.removeprefix("1;") for code in codes()} - {"0", "1", "39"}
    assert colours and colours <= planned
    monkeypatch.setenv("NO_COLOR", "1")
    assert codes() <= {"0", "1"}, "bold stays"


@pytest.mark.parametrize("plain", [True, False])
def test_a_look_costs_a_fraction_of_a_core(plain: bool) -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with make_view(console, plain=plain) as view:
        view.show(snapshot(1))
        began = time.process_time()
        for step in range(20):
            view.show(snapshot(step))
        spent = (time.process_time() - began) / 20
    assert spent < 0.03, "two looks a second must stay far below a tenth of a core"
