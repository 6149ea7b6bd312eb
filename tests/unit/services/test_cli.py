"""The command line: dispatches by name, answers help without importing anything heavy, and exits with the right code."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.__main__ import BENCHES
from services.cli import COMMANDS


def rollmesh(*arguments: str, package: str = "services") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", package, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("package", "command"),
    [("services", name) for name in COMMANDS] + [("benchmarks", name) for name in BENCHES.commands],
)
def test_every_command_has_help_with_an_example(package: str, command: str) -> None:
    answer = rollmesh(command, "--help", package=package)
    assert answer.returncode == 0, answer.stderr
    assert "xample" in answer.stdout


def test_help_and_clients_import_neither_torch_nor_vllm() -> None:
    program = (
        "import importlib, sys\n"
        "from benchmarks.__main__ import BENCHES\n"
        "from services.cli import COMMANDS\n"
        "for command in [*COMMANDS.values(), *BENCHES.commands.values()]:\n"
        "    importlib.import_module(command.target.partition(':')[0])\n"
        "import clients.rollout.client, clients.runner.runner\n"
        "heavy = {'torch', 'vllm', 'transformers', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 0, answer.stderr


def test_an_unknown_command_is_misuse_and_names_the_nearest() -> None:
    answer = rollmesh("trian")
    assert answer.returncode == 2
    assert "did you mean 'train'?" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_benchmark_is_misuse_outside_a_checkout_and_is_named() -> None:
    answer = rollmesh("bench", "loop")
    assert answer.returncode == 2
    assert "./dev bench NAME" in answer.stderr


def test_no_command_at_all_is_misuse() -> None:
    answer = rollmesh()
    assert answer.returncode == 2
    assert "Usage: rollmesh COMMAND" in answer.stdout


def test_an_unknown_flag_is_misuse() -> None:
    answer = rollmesh("weight-bus", "--no-such-flag")
    assert answer.returncode == 2
    assert "Traceback" not in answer.stderr
