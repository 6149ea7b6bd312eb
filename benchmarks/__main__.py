"""`./dev bench NAME …`: the benchmarks by name. They stand on every package, are in no wheel, and nobody imports them."""

from __future__ import annotations

import sys

from services.cli import Command, Dispatcher
from services.host.process import leave_quickly

BENCHES = Dispatcher(
    prog="./dev bench",
    summary="Benchmarks: a table for people, JSON with --json.",
    example="./dev bench loop --json",
    commands={
        "loop": Command("benchmarks.loop.run:app", "The whole loop beside TRL's GRPOTrainer"),
        "rollout": Command("benchmarks.rollout.run:app", "The rollout server beside its engine and vllm serve"),
        "gateway": Command("benchmarks.gateway.run:app", "The gateway beside bare engines, and servers killed"),
        "faults": Command("benchmarks.faults.run:app", "Services killed and Redis broken in a whole mesh"),
        "telemetry": Command("benchmarks.telemetry.run:app", "What figures and traces cost a rollout server"),
        "staleness": Command("benchmarks.staleness.cli:app", "Corrections on tokens that are K optimizer steps old"),
        "trainer": Command("benchmarks.trainer.run:app", "The trainer's step beside a padded loop and TRL's GRPO step"),
        "weights": Command("benchmarks.weights.cli:app", "Weight updates under load beside paused reloads"),
    },
)

if __name__ == "__main__":
    code = BENCHES.run(sys.argv[1:])
    leave_quickly()
    sys.exit(code)
