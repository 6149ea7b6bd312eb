"""Tasks of the user's own: `python:package.module:name`, or `python:./file.py:name`.

`name` is an Environment or an AgentEnvironment, or something that makes one when it is called with the options of the
task's name: `python:./agent.py:make?difficulty=2` calls `make(difficulty=2)`. Modules are also looked for in the folder
that the command is run in, or beside the file.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

from clients.environments.adapters.options import refuse_unknown, values
from clients.environments.base import AgentEnvironment, AnyEnvironment, Environment, describe
from services.wire.errors import UsageError
from services.wire.tasks.name import TaskName


def load_environment(name: TaskName, options: Mapping[str, str]) -> AnyEnvironment:
    """Raises UsageError for a module that cannot be imported, a name it has not, or an object that is no environment.

    ModuleNotFoundError passes for a module that the user's own code misses.
    """
    where, attribute = name.python
    module = _from_file(Path(where)) if where.endswith(".py") else _from_path(where)
    found: object = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = get_close_matches(part, dir(found), n=1, cutoff=0.5)
            raise UsageError(f"{where} has no {part!r}", f"did you mean {near[0]!r}?" if near else "check the name")
        found = getattr(found, part)
    if _is_factory(found):
        _check_options(found, f"{name.kind}:{name.rest}", options)
        made = _called(found, str(name), options)
    elif options:
        hint = "did you mean dialect? " if get_close_matches("dialect", options, n=1) else ""
        raise UsageError(f"{name} takes no options", f"{hint}only what makes an environment does")
    else:
        made = found
    if isinstance(made, AgentEnvironment | Environment):
        return made
    raise UsageError(f"{name} is {type(made).__name__}, no environment", "see docs/environments.md for its methods")


def _is_factory(found: object) -> bool:
    """A class has the methods of its instances, so it looks like an environment; it is what makes one."""
    return isinstance(found, type) or (callable(found) and not isinstance(found, AgentEnvironment | Environment))


def _check_options(factory: object, what: str, options: Mapping[str, str]) -> None:
    """Raise UsageError, with the nearest one, for an option that is no argument of the factory, nor rollmesh's own."""
    if not callable(factory):
        return
    try:
        arguments = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # it does not say what it takes
        return
    if any(each.kind is each.VAR_KEYWORD for each in arguments):
        return
    named = [each.name for each in arguments if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    refuse_unknown(what, options, {*named, "dialect"})


def _called(factory: object, name: str, options: Mapping[str, str]) -> object:
    if not callable(factory):
        return factory
    try:
        return factory(**values(options))
    except (UsageError, ModuleNotFoundError):
        raise
    except Exception as error:
        raise UsageError(
            f"{name} cannot be made ({describe(error)})", "fix its code, or correct its options"
        ) from error


def _from_path(module: str) -> ModuleType:
    _look_in(Path.cwd())
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UsageError(
            f"no module {error.name!r}", f"it is looked for on Python's path and in {Path.cwd()}"
        ) from error
    except Exception as error:
        raise UsageError(f"{module} cannot be imported ({describe(error)})", "fix its code") from error


def _look_in(folder: Path) -> None:
    """Find modules in `folder` too, last, so that nothing in it stands in for a package that is installed."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _from_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise UsageError(f"no file {file}", f"paths are taken from {Path.cwd()}")
    # A name of its own: a file called json.py must not stand in for the module of that name.
    spec = importlib.util.spec_from_file_location(f"_task_{file.stem}", file.resolve())
    if spec is None or spec.loader is None:
        raise UsageError(f"{file} cannot be imported", "it must be a Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by its name.
    sys.modules[spec.name] = module
    _look_in(file.resolve().parent)
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError:
        raise
    except Exception as error:
        raise UsageError(f"{file} cannot be imported ({describe(error)})", "fix its code") from error
    return module
