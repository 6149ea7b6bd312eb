"""`rollmesh COMMAND …`: the commands of all rooms by name; nothing heavy is imported before one is called."""

from __future__ import annotations

import sys
from importlib.metadata import version

from services.dispatch import Command, Dispatcher
from services.imports import leave_quickly

COMMANDS = {
    "up": Command("services.supervisor.cli:app", "Run the whole mesh on this machine and train a model"),
    "prepare": Command(
        "services.supervisor.prepare_cli:app", "Make the run folder of a mesh that is started part by part"
    ),
    "sft": Command("trainer.sft_cli:app", "Warm-start a tiny policy by a short supervised run"),
    "train": Command("trainer.cli:app", "Run the trainer"),
    "rollout-server": Command("rollout_server.cli:app", "Run a rollout server"),
    "gateway": Command("services.gateway.cli:app", "Run the one address in front of the rollout servers"),
    "weight-bus": Command("weight_bus.cli:app", "Run the weight bus"),
    "redis": Command("services.supervisor.redis_cli:app", "Run the Redis of a mesh whose parts are started one by one"),
    "rewards": Command("services.rewards.cli:app", "Run the reward service: functions in sandboxes, reward models"),
    "weights": Command("clients.weights_cli:app", "See and steer which weights engines serve"),
    "play": Command("services.supervisor.play_cli:app", "Play a run's task as its settings say"),
    "run-environment": Command("clients.cli:app", "Run an environment against rollout servers"),
    "demonstrations": Command("clients.demonstrations_cli:app", "Write demonstrations of a task for `sft`"),
    "status": Command("services.status.cli:app", "Show how a run is, and why its trainer waits"),
    "monitoring": Command("services.monitoring.cli:app", "Write Prometheus's alert rules and Grafana's dashboard"),
    "dead-letters": Command("services.dead_letters_cli:app", "Show trajectories that were dropped, and why"),
    "keys": Command("services.keys_cli:app", "Make the keys of a mesh, one file each"),
    "bench": Command("services.cli:BENCHES", "Measure a part of the mesh"),
}

BENCHES = Dispatcher(
    prog="rollmesh bench",
    summary="Benchmarks: a table for people, JSON with --json.",
    example="rollmesh bench loop --json",
    commands={
        "loop": Command("services.supervisor.bench_loop:app", "The whole loop beside TRL's GRPOTrainer"),
        "rollout": Command("rollout_server.bench.rollout:app", "The rollout server beside its engine and vllm serve"),
        "gateway": Command("rollout_server.bench.gateway:app", "The gateway beside bare engines, and servers killed"),
        "telemetry": Command("rollout_server.bench.telemetry:app", "What figures and traces cost a rollout server"),
        "staleness": Command("trainer.bench.staleness.cli:app", "Corrections on tokens that are K optimizer steps old"),
        "trainer": Command("trainer.bench.trainer:app", "The trainer's step beside a padded loop and TRL's GRPO step"),
        "weights": Command("weight_bus.bench.weights:app", "Weight updates under load beside paused reloads"),
    },
)

ROLLMESH = Dispatcher(
    prog="rollmesh",
    summary="An asynchronous RL service mesh for language models.",
    example="rollmesh up --task running-sums --seed 1",
    commands=COMMANDS,
)


def main() -> None:
    """The console entry point."""
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"rollmesh {version('rollmesh')}\n")
        return
    code = ROLLMESH.run(sys.argv[1:])
    leave_quickly()
    sys.exit(code)
