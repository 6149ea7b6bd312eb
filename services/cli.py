"""`rollmesh COMMAND …`: the commands of all rooms by name; nothing heavy is imported before one is called."""

from __future__ import annotations

import sys
from importlib.metadata import version

from services.dispatch import Command, Dispatcher, fail
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
    "weights": Command("clients.weights.cli:app", "See and steer which weights engines serve"),
    "play": Command("services.supervisor.play_cli:app", "Play a run's task as its settings say"),
    "run-environment": Command("clients.runner.cli:app", "Run an environment against rollout servers"),
    "demonstrations": Command(
        "clients.environments.tasks.demonstrations:app", "Write demonstrations of a task for `sft`"
    ),
    "status": Command("services.status.cli:app", "Show how a run is, and why its trainer waits"),
    "monitoring": Command("services.monitoring.cli:app", "Write Prometheus's alert rules and Grafana's dashboard"),
    "dead-letters": Command("services.dead_letters_cli:app", "Show trajectories that were dropped, and why"),
    "keys": Command("services.keys_cli:app", "Make the keys of a mesh, one file each"),
}

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
    if sys.argv[1:2] == ["bench"]:
        sys.exit(fail("benchmarks are run in a checkout of the sources: ./dev bench NAME", 2))
    code = ROLLMESH.run(sys.argv[1:])
    leave_quickly()
    sys.exit(code)
