"""Reference pages made from docstrings: what environments and agents import, and the fields of a run's files."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from dataclasses import dataclass
from textwrap import dedent
from typing import Any

from services.supervisor.summary import Summary
from services.wire.run_metrics import EvaluationReport, Sample, StepMetrics, TrainerReport

MADE = "<!-- Made by `./dev docs`. -->"
_PUBLIC = {
    "Writing an environment": ("clients.environments.base", []),
    "Training an agent of openai-agents": ("clients.environments.adapters.openai_agents", ["openai_agent_environment"]),
    "Calling a rollout server": ("clients.rollout.client", ["RolloutClient"]),
    "Calling it from blocking code": ("clients.rollout.sync_client", ["SyncRolloutClient"]),
    "Asking for rewards": ("clients.environments.rewards", ["RewardsClient"]),
    "Operating the weight bus": ("clients.weights.client", []),
}
"""Heading → module, and the names of it that others use; none: all that it defines and does not begin with `_`."""


def python_page() -> str:
    """Classes and functions that environments and agents import."""
    lines = [
        "# Python",
        "",
        MADE,
        "",
        "What environments and agents import. None of it needs torch or vLLM.",
        "",
    ]
    for heading, (module, names) in _PUBLIC.items():
        lines += [f"## {heading}", "", f"`{module}`", ""]
        members = vars(importlib.import_module(module))
        defined = [name for name, each in members.items() if getattr(each, "__module__", "") == module]
        for name in names or [name for name in defined if name[0] != "_"]:
            lines += _documented(name, members[name])
    return "\n".join(lines)


def _documented(name: str, what: Any) -> list[str]:
    if not isinstance(what, type):
        return [f"### {name}{_signature(what)}", "", as_text(what), ""] if inspect.isfunction(what) else []
    lines = [f"### {name}", "", as_text(what), ""]
    if fields := _fields_of(what):
        lines += ["| field | |", "|---|---|", *(f"| `{each.said}` | {as_cell(each.text)} |" for each in fields), ""]
    rows = [
        f"| `{method}{_signature(each)}` | {as_cell(as_text(each))} |"
        for method, each in vars(what).items()
        if method[0] != "_" and inspect.isfunction(each)
    ]
    return [*lines, "| method | |", "|---|---|", *rows, ""] if rows else lines


@dataclass(frozen=True)
class _Field:
    """Of a struct: as its source says it, and the docstring behind it."""

    name: str
    kind: str
    default: str
    text: str

    @property
    def said(self) -> str:
        return f"{self.name}: {self.kind}" + (f" = {self.default}" if self.default else "")


def _fields_of(what: type) -> list[_Field]:
    """The fields of a class of our own and of those that it extends, first those of the first base."""
    found: list[_Field] = []
    for each in reversed(what.__mro__):
        if not each.__module__.startswith(("services.", "clients.")) or not hasattr(each, "__match_args__"):
            continue
        (parsed,) = ast.parse(dedent(inspect.getsource(each))).body
        assert isinstance(parsed, ast.ClassDef)
        for line, after in zip(parsed.body, [*parsed.body[1:], None], strict=True):
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.target.id[0] != "_":
                told = after.value if isinstance(after, ast.Expr) else None
                text = told.value if isinstance(told, ast.Constant) and isinstance(told.value, str) else ""
                default = "" if line.value is None else ast.unparse(line.value)
                made = re.match(r"field\(default_factory=(dict|list)", default)
                default = {"dict": "{}", "list": "[]"}[made[1]] if made else default
                found.append(_Field(line.target.id, ast.unparse(line.annotation), default, text))
    return found


def run_files_page() -> str:
    """Every field of the files in a run folder."""
    lines = [
        "# Files of a run: their fields",
        "",
        MADE,
        "",
        "What the JSON in a [run folder](../the-loop.md#the-run-folder) holds;",
        "[reading a run](../tutorials/reading-a-run.md) says what to look at.",
        "",
    ]
    for heading, kind in (
        ("metrics.jsonl: a line for each optimizer step", StepMetrics),
        ("rollmesh samples --json: a line for each rollout", Sample),
        ("summary.json", Summary),
        ("evaluation.json", EvaluationReport),
        ("trainer_report.json", TrainerReport),
    ):
        lines += [f"## {heading}", "", as_text(kind), "", "| field | kind | |", "|---|---|---|"]
        lines += [f"| `{each.name}` | `{as_cell(each.kind)}` | {as_cell(each.text)} |" for each in _fields_of(kind)]
        lines += [""]
    return "\n".join(lines)


def _signature(what: Any) -> str:
    parameters = [each for each in inspect.signature(what).parameters if each != "self"]
    return f"({', '.join(parameters)})"


def as_text(what: Any) -> str:
    """A docstring for Markdown; empty for a dataclass without one, which gets its signature."""
    written: str = what.__doc__ or ""
    return "" if written.startswith(f"{what.__name__}(") else inspect.cleandoc(written).replace("<", "&lt;")


def as_cell(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
