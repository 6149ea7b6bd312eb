"""Tasks by name: what is understood, what is refused and with which mend, what a user's own code may be."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from clients.environments.base import AgentEndpoint, AgentEnvironment, Answer, Ended, Environment, Problem
from clients.environments.registry import make_task
from services.cli import ROLLMESH
from services.config.load import dump_settings, load_settings
from services.supervisor.preflight import find_task, new_run_id
from services.wire.errors import UsageError
from services.wire.tasks.name import BUILT_IN, LIBRARIES, parse_task

OWN = '''
from dataclasses import dataclass
from clients.environments.base import Answer, Ended, Problem
import helper_beside_it

@dataclass
class Doubling:
    """Double the number."""
    name: str = "doubling"
    factor: int = 2

    def problem(self, split, index, seed):
        return Problem(split, index, prompt=f"{index}*{self.factor}=", solution=str(index * self.factor))

    def start(self, problem):
        return Episode(problem)

@dataclass
class Episode:
    problem: Problem

    @property
    def first_turn(self):
        return self.problem.prompt

    def respond(self, answer):
        right = answer.complete and answer.text == self.problem.solution
        return Ended(reward=float(right), success=right)

class Agent:
    name = "agent"

    def problem(self, split, index, seed):
        return Problem(split, index, prompt="?")

    async def play(self, problem, endpoint):
        return Ended(1.0, True)

doubling = Doubling()
def make_agent(): return Agent()
def broken(): return 1 / 0
def needy(): import a_library_that_nobody_has
def number(): return 7
'''


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "helper_beside_it.py").write_text("")
    file = tmp_path / "json.py"
    file.write_text(OWN)
    return file


@pytest.mark.parametrize("text", [*BUILT_IN, *(library.example for library in LIBRARIES.values())])
def test_a_name_reads_back_the_same_and_has_a_label_for_folders(text: str) -> None:
    name = parse_task(text)
    assert str(name) == text
    assert set(name.label) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert new_run_id(name.label).startswith(name.label)
    assert load_settings(None, [f'task="{text}"']).task == text


def test_options_survive_the_configuration_file(tmp_path: Path) -> None:
    task = "reasoning-gym:chain_sum?max_terms=3&dialect=text"
    file = tmp_path / "config.toml"
    file.write_text(dump_settings(load_settings(None, [f"task={task}"])))
    assert load_settings(file, []).task == task
    assert dict(parse_task(task).options) == {"max_terms": "3", "dialect": "text"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("guess-numbr", "did you mean 'guess-number'?"),
        ("reasoning_gym:chain_sum", "did you mean 'reasoning-gym:…'?"),
        ("reasoning-gym", "write it as reasoning-gym:chain_sum"),
        ("textarena:", "write it as textarena:GuessTheNumber-v0"),
        ("running-sums?digits=3", "takes neither"),
        ("python:module", "python:package.module:name"),
        ("textarena:X?a=1&a=2", "gives an option twice"),
        ("textarena:X?a", "write ?key=value"),
    ],
)
def test_what_is_no_task_is_refused_with_its_mend(text: str, complaint: str) -> None:
    with pytest.raises(UsageError) as refused:
        make_task(text)
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)
    with pytest.raises(UsageError):
        load_settings(None, [f'task="{text}"'])


def test_code_of_ones_own_is_found_by_file_whatever_the_files_name(own: Path) -> None:
    task = make_task(f"python:{own}:doubling")
    assert task.dialect == "text"
    environment = task.environment
    assert isinstance(environment, Environment) and not isinstance(environment, AgentEnvironment)
    problem = environment.problem("train", 21, 0)
    assert environment.start(problem).respond(Answer("42", True)) == Ended(1.0, True)
    assert json.loads("1") == 1, "a file called json.py does not stand in for the library's module"


def test_text_that_nobody_chose_is_told_apart(own: Path) -> None:
    made = {
        query: make_task(f"python:{own}:Doubling{query}").assumed for query in ("", "?dialect=text", "?dialect=chat")
    }
    assert made == {"": True, "?dialect=text": False, "?dialect=chat": False}
    assert not make_task(f"python:{own}:make_agent").assumed
    assert not make_task("running-sums").assumed


def test_a_task_is_looked_at_without_any_server(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.cli.configure_logging", lambda *_, **__: None)
    task = f"python:{own}:doubling"
    assert ROLLMESH.run(["run-environment", "--check", "--task", task]) == 0
    assert capsys.readouterr().out == "the task can be made: doubling, speaks plain text\n"
    for how in (["--check", "--json"], ["--trial"]):
        assert ROLLMESH.run(["run-environment", *how, "--task", task]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["task"], found["speaks"], found["assumed"]) == ("doubling", "text", True)
        assert found.get("unplayed") is None
    assert ROLLMESH.run(["run-environment", "--trial", "--task", f"python:{own}:make_agent"]) == 0
    assert json.loads(capsys.readouterr().out)["unplayed"].startswith("an agent is not played")
    assert ROLLMESH.run(["run-environment", "--task", task, "--run-id", "a"]) == 2
    assert "--rollout-url, --run-dir must be given" in capsys.readouterr().err


def test_a_factory_is_called_with_the_options(own: Path) -> None:
    environment = make_task(f"python:{own}:Doubling?factor=3&name=tripling&dialect=chat")
    assert environment.dialect == "chat"
    assert environment.environment.name == "tripling"
    assert environment.environment.problem("train", 5, 0) == Problem("train", 5, "5*3=", "15")
    assert isinstance(make_task(f"python:{own}:make_agent").environment, AgentEnvironment)


def test_modules_are_looked_for_where_the_command_is_run(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own.rename(own.with_name("my_tasks_of_today.py"))
    monkeypatch.chdir(own.parent)
    assert make_task("python:my_tasks_of_today:doubling").environment.name == "doubling"


@pytest.mark.parametrize(
    ("rest", "complaint"),
    [
        ("json.py:doublin", "did you mean 'doubling'?"),
        ("json.py:number", "is int, no environment"),
        ("json.py:broken", "ZeroDivisionError: division by zero (json.py:"),
        ("json.py:needy", "a_library_that_nobody_has, which is not installed"),
        ("json.py:doubling?factor=3", "takes no options"),
        ("json.py:Doubling?factr=3", "did you mean 'factor'?"),
        ("json.py:Doubling?dialekt=chat", "did you mean 'dialect'? known: dialect, factor, name"),
        ("json.py:doubling?dialekt=chat", "did you mean dialect?"),
        ("json.py:doubling?dialect=morse", "known: auto, text, chat"),
        ("nothing.py:x", "nothing.py"),
    ],
)
def test_code_that_makes_no_environment_is_refused_with_its_mend(own: Path, rest: str, complaint: str) -> None:
    with pytest.raises(UsageError) as refused:
        make_task(f"python:{own.parent}/{rest}")
    assert complaint in str(refused.value)


def test_a_module_that_cannot_be_imported_is_refused_with_its_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_tasks_of_today.py").write_text("1 / 0\n")
    (tmp_path / "needy_tasks_of_today.py").write_text("import a_library_that_nobody_has\n")
    for name, complaint in [
        ("tasks_that_nobody_wrote.of_today:x", f"no module 'tasks_that_nobody_wrote': it is looked for .* {tmp_path}"),
        ("broken_tasks_of_today:x", r"broken_tasks_of_today cannot be imported \(ZeroDivisionError"),
        ("./broken_tasks_of_today.py:x", r"broken_tasks_of_today.py cannot be imported \(ZeroDivisionError"),
        ("needy_tasks_of_today:x", "a_library_that_nobody_has, which is not installed"),
    ]:
        with pytest.raises(UsageError, match=complaint):
            make_task(f"python:{name}")


def test_a_file_means_the_same_from_another_folder(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own.parent)
    found = find_task("python:./json.py:Doubling?factor=3")
    assert found == f"python:{own}:Doubling?factor=3"
    assert find_task("reasoning-gym:chain_sum") == "reasoning-gym:chain_sum"


def test_a_missing_library_says_what_to_install(own: Path) -> None:
    own.write_text("import a_library_that_nobody_has\n")
    with pytest.raises(UsageError, match="a_library_that_nobody_has, which is not installed"):
        make_task(f"python:{own}:x")


@pytest.mark.parametrize(
    ("task", "module", "mend"),
    [
        ("reasoning-gym:chain_sum", "reasoning_gym", "pip install '.[environments]'"),
        ("textarena:GuessTheNumber-v0", "textarena", "pip install '.[environments]'"),
        ("verifiers:my-taskset", "verifiers", "in an environment of its own"),
    ],
)
def test_a_missing_library_of_environments_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, task: str, module: str, mend: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=f"needs {module}, which is not installed") as refused:
        make_task(task)
    assert mend in str(refused.value)


def test_an_endpoint_is_all_that_an_openai_client_asks_for() -> None:
    endpoint = AgentEndpoint("http://127.0.0.1:1/sessions/s/v1", "rs-key", "s", 8, 1.0)
    assert endpoint.base_url.endswith("/v1")
