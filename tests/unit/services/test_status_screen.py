"""The screen of `rollmesh status`, line by line."""

from __future__ import annotations

import io

from rich.console import Console

from services.observability.mesh_status.report import CauseView, GroupView, MeshReport, QueueView, ServiceView, WaitView
from services.policies.training.evaluation import point_of
from services.run_store.status import TrainerStatus
from services.status.render import screen
from services.wire.run_metrics import TaskOutcome
from tests.support.evaluations import evaluation


def shown(report: MeshReport) -> list[str]:
    """The screen's lines, each with its runs of spaces made one."""
    console = Console(file=io.StringIO(), width=400, color_system=None)
    console.print(screen(report))
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines() if line]


def test_the_screen_says_everything_that_the_report_does() -> None:
    server = ServiceView(
        name="s0",
        kind="rollout-server",
        url="http://a:1",
        probe="ready",
        reasons=[],
        alive=True,
        last_heard=95.0,
        policy_version=7,
        running=3,
        kv_use=0.41,
        waiting=0,
        open_sessions=12,
        open_groups=10,
    )
    gone = ServiceView(
        name="g1",
        kind="gateway",
        url="http://a:2",
        probe="not_ready",
        reasons=["no server", "and more"],
        alive=False,
        last_heard=60.0,
    )
    unheard = ServiceView(
        name="g2", kind="gateway", url="http://a:3", probe="ready", reasons=[], alive=False, last_heard=70.0
    )
    groups = [GroupView(group=f"g{n}", ordinal=n, server="s0", opened_at=90.0, finished=2) for n in range(10)]
    wait = WaitView(component="trainer", waiting_for="the batch of step 4", since=97.5)
    sure = CauseView(kind="gone", service="g1", since=60.0, what="g1 is gone", sure=True, groups=[])
    likely = CauseView(kind="open_group", service="s0", since=90.0, what="s0 is slow", sure=False, groups=groups)
    queue = QueueView(
        opened_groups=20,
        open_groups=10,
        dropped_groups=1,
        published=80,
        trained=64,
        dropped=4,
        in_stream=12,
        asking_groups=5,
        concluded=True,
    )
    trainer = TrainerStatus(
        step=3,
        steps=60,
        k=2,
        at=97.0,
        busy_share=0.75,
        over_steps=3,
        tokens_per_s=12345.6,
        staleness_mean=1.25,
        staleness_max=3,
        staleness_histogram={"0": 5, "3": 1},
        masked_fraction=0.125,
        effective_samples=0.75,
        dropped={"expired": 4},
        tasks={
            name: TaskOutcome(groups=2, trajectories=8, reward=reward, success=reward, response_length=9.5)
            for name, reward in (("code", 0.25), ("gsm8k", 0.5))
        },
    )
    report = MeshReport(
        run_id="run-1",
        at=100.0,
        services=[server, gone, unheard],
        queue=queue,
        trainer=trainer,
        trainer_waits=wait,
        waits=[wait, WaitView(component="environment", waiting_for="admission", since=99.0)],
        causes=[sure, likely],
        evaluation=point_of(evaluation(20, 0.5, at=90.0)),
        unread=["the ledger: Redis failed"],
    )
    held = ", ".join(f"{n} (open 10 s, 2 siblings finished)" for n in range(8))
    assert shown(report) == [
        "run run-1 concluded",
        "the trainer waits 2.5 s for the batch of step 4",
        "because: g1 is gone",
        "likely because: s0 is slow",
        f"holds groups {held} and 2 more",
        "service state version running KV waiting sessions groups url",
        "s0 ready 7 3 41% 0 12 10 http://a:1",
        "g1 not ready, lease ran out, heard 40 s ago: no server - - - - - - http://a:2",
        "g2 unheard, lease ran out, heard 30 s ago - - - - - - http://a:3",
        "trainer step 3/60, 12,346 tokens/s, 75% busy, 25% idle over 3 steps",
        "staleness mean 1.25, max 3 of K 2, over K 12.5% (tokens by steps: 0:5 3:1)",
        "effective samples 0.75",
        "task code success 25.0%, reward 0.25, 9.5 tokens, 2 groups",
        "task gsm8k success 50.0%, reward 0.5, 9.5 tokens, 2 groups",
        "dropped expired 4",
        "held out 50.0% (0.0% to 100.0%) of 4 problems, versions 20 to 20, 10 s ago",
        "queue 12 trajectories in the stream, 64 trained",
        "groups 10 open, 5 wait for admission, 1 of 20 dropped",
        "environment waits 1.0 s for admission",
        "not read: the ledger: Redis failed",
    ]
    assert not report.well


def test_the_screen_of_an_empty_run_says_that_nothing_is_there() -> None:
    wait = WaitView(component="trainer", waiting_for="a batch", since=99.0)
    report = MeshReport(
        run_id="run-1",
        at=100.0,
        services=[],
        queue=None,
        trainer=None,
        trainer_waits=wait,
        waits=[wait],
        causes=[],
        evaluation=None,
        unread=[],
    )
    assert shown(report) == [
        "run run-1",
        "the trainer waits 1.0 s for a batch",
        "nothing is at fault as far as can be seen",
        "no service stands in the directory",
    ]


def test_where_the_run_has_ended_the_screen_says_so_in_one_line() -> None:
    unread = ["registry: Connection refused", "accounts: Connection refused", "waits: Connection refused"]
    report = MeshReport(
        run_id="run-1",
        at=100.0,
        services=[],
        queue=None,
        trainer=None,
        trainer_waits=None,
        waits=[],
        causes=[],
        evaluation=None,
        unread=unread,
    )
    text = " ".join(shown(report))
    assert text.endswith("the run has ended, or Redis is away")
    assert "not read" not in text
