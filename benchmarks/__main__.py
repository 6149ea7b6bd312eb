"""`./dev bench NAME …`: the benchmarks by name. They stand on every package, are in no wheel, and nobody imports them."""

from __future__ import annotations

import sys

from benchmarks.harness.against import compare, read_wish
from benchmarks.harness.history import record
from services.cli import Command, Dispatcher, fail
from services.host.process import leave_quickly
from services.wire.errors import RollmeshError

BENCHES = Dispatcher(
    prog="./dev bench",
    summary="Benchmarks: a table for people, JSON with --json.",
    example="./dev bench loop --json",
    commands={
        "loop": Command("benchmarks.loop.run:app", "The whole loop beside TRL's GRPOTrainer"),
        "rollout": Command("benchmarks.rollout.run:app", "The rollout server beside its engine and vllm serve"),
        "guard": Command("benchmarks.guard.run:app", "Whether this checkout costs more than another commit"),
        "gateway": Command("benchmarks.gateway.run:app", "The gateway beside bare engines, and servers killed"),
        "faults": Command("benchmarks.faults.run:app", "Services killed and Redis broken in a whole mesh"),
        "telemetry": Command("benchmarks.telemetry.run:app", "What figures and traces cost a rollout server"),
        "staleness": Command("benchmarks.staleness.cli:app", "Corrections on tokens that are K optimizer steps old"),
        "trainer": Command("benchmarks.trainer.run:app", "The trainer's step beside a padded loop and TRL's GRPO step"),
        "docs": Command("benchmarks.harness.history:app", "Write docs/benchmarks.md from the newest figures"),
        "kept": Command("benchmarks.kept.run:app", "What keeping rollouts costs, and how fast any is found"),
        "weights": Command("benchmarks.weights.cli:app", "Weight updates under load beside paused reloads"),
    },
)


def main(arguments: list[str]) -> int:
    """Run a benchmark; with `--against REV` here and in that commit's checkout, in turns; `--record` keeps its figures."""
    name = arguments[0] if arguments else ""
    try:
        if name in BENCHES.commands and "--record" in arguments:
            return record(name, [each for each in arguments[1:] if each not in ("--record", "--json")])
        if name in ("guard", "docs") or name not in BENCHES.commands:
            return BENCHES.run(arguments)
        wish = read_wish(arguments[1:])
        if wish.revision is None:
            return BENCHES.run(arguments)
        compare(name, wish)
    except RollmeshError as error:
        return fail(str(error), error.exit_code)
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    leave_quickly()
    sys.exit(code)
