"""For every alert a mesh in which it must fire, and one beside it in which it must not.

A series is written as promtool writes it, a sample every 15 s: `0+5x40` begins at 0 and grows by 5, forty times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.observability import catalog

Series = Mapping[str, str]
"""A series' name with its labels → its samples."""


@dataclass(frozen=True)
class AlertCase:
    """`bad` fires at `fires_at` (with `labels` and `summary`), not yet at `not_yet`; `good` fires at neither."""

    alert: str
    bad: Series
    good: Series
    fires_at: str
    summary: str
    not_yet: str
    labels: Mapping[str, str] = field(default_factory=dict)


_GATEWAY = {"instance": "gateway:8000", "job": "rollmesh-gateway"}
_UP = 'up{instance="gateway:8000",job="rollmesh-gateway"}'
_NOT_READY = f'{catalog.SERVICE_NOT_READY.name}{{instance="gateway:8000",job="rollmesh-gateway"}}'
_SERVED = catalog.BUS_SERVED.name
_SECONDS = catalog.TRAINER_SECONDS.name
_FAILED = f'{catalog.REWARDS_FAILED.name}{{cause="timeout",component="judge"}}'
_TRAINED = f'{catalog.TRAINER_TOKENS.name}{{staleness="1"}}'

CASES = (
    AlertCase(
        "RollmeshServiceDown",
        bad={_UP: "1x8 0x20"},
        good={_UP: "1x8 0x2 1x20", 'up{instance="other:9100",job="node"}': "0x40"},
        not_yet="3m",
        fires_at="4m",
        labels=_GATEWAY,
        summary="gateway:8000 does not answer Prometheus",
    ),
    AlertCase(
        "RollmeshServiceNotReady",
        bad={_NOT_READY: "0x8 2x20"},
        good={_NOT_READY: "0x8 2x4 0x20"},
        not_yet="4m",
        fires_at="5m",
        labels=_GATEWAY,
        summary="gateway:8000 is not ready",
    ),
    AlertCase(
        "RollmeshTrainerWaits",
        bad={catalog.TRAINER_WAITING.name: "0x8 5+15x20"},
        good={catalog.TRAINER_WAITING.name: "0x8 5 20 0 5 20 0 5 20 0 5 20 0 0x20"},
        not_yet="2m45s",
        fires_at="4m",
        summary="The trainer waits for 1m 50s",
    ),
    AlertCase(
        "RollmeshTrainerIdle",
        bad={f'{_SECONDS}{{activity="wait"}}': "0+9x100", f'{_SECONDS}{{activity="train"}}': "0+6x100"},
        good={f'{_SECONDS}{{activity="wait"}}': "0+6x100", f'{_SECONDS}{{activity="train"}}': "0+9x100"},
        not_yet="9m",
        fires_at="20m",
        summary="The trainer is idle for 60% of its time",
    ),
    AlertCase(
        "RollmeshTokensOverK",
        bad={catalog.TRAINER_MASKED.name: "0+50x120", _TRAINED: "0+150x120"},
        good={catalog.TRAINER_MASKED.name: "0+10x120", _TRAINED: "0+150x120"},
        not_yet="9m",
        fires_at="25m",
        summary="25% of the tokens are over K and not trained",
    ),
    AlertCase(
        "RollmeshFewEffectiveSamples",
        bad={catalog.TRAINER_ESS.name: "0.9x8 0.25x100"},
        good={catalog.TRAINER_ESS.name: "0.9x8 0.25x20 0.4x100"},
        not_yet="11m",
        fires_at="15m",
        summary="Of the last step's tokens 25% count",
    ),
    AlertCase(
        "RollmeshAccountWrong",
        bad={catalog.TRAINER_CORRECTED.name: "0x8 128x20"},
        good={catalog.TRAINER_CORRECTED.name: "128x40"},
        not_yet="2m",
        fires_at="3m",
        summary="Redis has lost a part of the run",
    ),
    AlertCase(
        "RollmeshEngineLost",
        bad={catalog.BUS_LOST.name: "0x8 1x20"},
        good={catalog.BUS_LOST.name: "1x40"},
        not_yet="2m",
        fires_at="3m",
        summary="The weight bus has lost an engine",
    ),
    AlertCase(
        "RollmeshUpdatesFail",
        bad={f'{catalog.BUS_SETTLED.name}{{state="failed"}}': "0x8 1 2 3x20"},
        good={
            f'{catalog.BUS_SETTLED.name}{{state="failed"}}': "0x8 1x40",
            f'{catalog.BUS_SETTLED.name}{{state="committed"}}': "0+4x40",
        },
        not_yet="2m15s",
        fires_at="4m",
        labels={"state": "failed"},
        summary="Weight updates fail",
    ),
    AlertCase(
        "RollmeshEngineBehind",
        bad={
            catalog.BUS_LATEST.name: "20+1x40",
            f'{_SERVED}{{engine="s0"}}': "20+1x40",
            f'{_SERVED}{{engine="s1"}}': "20x40",
        },
        good={
            catalog.BUS_LATEST.name: "20+1x40",
            f'{_SERVED}{{engine="s0"}}': "20+1x40",
            f'{_SERVED}{{engine="s1"}}': "14+1x40",
        },
        not_yet="4m",
        fires_at="5m",
        labels={"engine": "s1"},
        summary="s1 is 20 versions behind",
    ),
    AlertCase(
        "RollmeshRewardsFail",
        bad={catalog.REWARDS_GIVEN.name: "0+90x120", _FAILED: "0+10x120"},
        good={catalog.REWARDS_GIVEN.name: "0+99x120", _FAILED: "0+1x120"},
        not_yet="9m",
        fires_at="25m",
        summary="10% of the samples get no reward",
    ),
)
