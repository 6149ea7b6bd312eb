"""Loads a user's reward function by `module:function`, calls it with the arguments that it names, checks its value.

A function names what it wants: `answer`, `prompt`, `messages`, `task`, `complete`, `metadata`; other parameters are looked
up in the metadata, so `def exact(answer, solution)` gets `metadata["solution"]`. It needs nothing of rollmesh.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.policies.diagnosis.raised import authors_line
from services.policies.rewards import RewardFailure
from services.rewards.sandbox.protocol import Failed, Outcome, Sample, Value
from services.wire.errors import UsageError
from services.wire.extras import install

_OF_VERIFIERS = ("math_verify", "jsonschema")
_OWN = ("task", "prompt", "messages", "answer", "complete", "metadata")


@dataclass(frozen=True)
class RewardFunction:
    """`wanted`: its parameters by name, True for those without a default. `takes_any`: it has a `**parameter`."""

    name: str
    function: Callable[..., object]
    wanted: Mapping[str, bool]
    takes_any: bool

    def call(self, sample: Sample) -> Outcome:
        """The value of one sample; whatever goes wrong is a Failed."""
        given = {key: getattr(sample, key) for key in _OWN}
        known = {**sample.metadata, **given}
        missing = [key for key, needed in self.wanted.items() if needed and key not in known]
        if missing:
            return Failed(RewardFailure.SAMPLE, f"the sample's metadata has no {missing[0]!r}")
        arguments = known if self.takes_any else {key: known[key] for key in self.wanted if key in known}
        try:
            returned = self.function(**arguments)
            return _value(returned)
        except MemoryError:
            return Failed(RewardFailure.MEMORY, "it ran out of memory")
        except BaseException as error:  # noqa: BLE001 - also SystemExit: whatever ends a call is told
            return Failed(RewardFailure.RAISED, describe(error))


def load_function(name: str, folder: str) -> RewardFunction:
    """Raises UsageError for a function that cannot be imported or called."""
    module, _, attribute = name.partition(":")
    if folder not in sys.path:
        # Last: nothing in it stands in for a package that is installed.
        sys.path.append(folder)
    try:
        found: object = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:
        remedy = f"write module:function; modules are looked for on Python's path and in {folder}"
        if isinstance(error, ModuleNotFoundError) and error.name in _OF_VERIFIERS:
            remedy = install("verifiers")
        raise UsageError(f"{name} cannot be imported ({describe(error)})", remedy) from error
    if not callable(found):
        raise UsageError(f"{name} is {type(found).__name__}, no function", "name a function")
    if inspect.iscoroutinefunction(found):
        raise UsageError(
            f"{name} is a coroutine function", "write it as a plain one: each call has a process of its own"
        )
    wanted: dict[str, bool] = {}
    takes_any = False
    for parameter in inspect.signature(found).parameters.values():
        match parameter.kind:
            case inspect.Parameter.VAR_KEYWORD:
                takes_any = True
            case inspect.Parameter.VAR_POSITIONAL:
                continue
            case inspect.Parameter.POSITIONAL_ONLY:
                raise UsageError(f"{name} takes {parameter.name!r} by position only", "parameters are given by name")
            case _:
                wanted[parameter.name] = parameter.default is inspect.Parameter.empty
    return RewardFunction(name, found, wanted, takes_any)


def describe(error: BaseException) -> str:
    """`ValueError: no digits (my_rewards.py:12)`: what was raised, and the line of its author's code that raised it."""
    told = f"{type(error).__name__}: {error}{authors_line(error)}"[:2000]
    # Half a character (a lone surrogate) cannot be told on.
    return told.encode(errors="replace").decode()


def _value(returned: object) -> Outcome:
    try:
        value = float(returned)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return Failed(RewardFailure.VALUE, f"it returned {type(returned).__name__}, no number")
    if not math.isfinite(value):
        return Failed(RewardFailure.VALUE, f"it returned {value}")
    return Value(value)
