"""The reference pages that are made from the code: settings, commands, metrics, files of a run, Python, errors."""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal, Union, get_args, get_origin

import annotated_types
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from docs.reference_structs import MADE, as_cell, as_text, python_page, run_files_page
from services.cli import COMMANDS, ROLLMESH, Dispatcher, in_one_style
from services.config.settings import RunSettings
from services.observability import catalog
from services.wire import errors
from services.wire.errors import RollmeshError

FOLDER = Path(__file__).parent / "reference"


def references() -> Mapping[Path, str]:
    """Every such page: path → text, as it should be."""
    pages = {
        "settings": _settings,
        "commands": _commands,
        "metrics": _metrics,
        "run-files": run_files_page,
        "python": python_page,
        "errors": _errors,
    }
    return {FOLDER / f"{name}.md": page() for name, page in pages.items()}


# Which processes read a setting; the longest beginning of its name counts.
_READ_BY = {
    "seed": "up, environment, rollout server, trainer",
    "task": "up, environment",
    "tasks": "up, environment",
    "engine": "up, rollout server",
    "servers": "up",
    "steps": "up, trainer",
    "k": "trainer, rollout server",
    "run_dir": "up",
    "redis_url": "up",
    "notify": "up",
    "run_store": "rollout server, trainer",
    "placement": "up",
    "model": "up, trainer, rollout server",
    "warm_start": "up",
    "curriculum": "environment",
    "rollout": "rollout server",
    "rollout.groups_per_step": "trainer, rollout server",
    "rollout.group_size": "environment",
    "rollout.min_group_size": "trainer",
    "rollout.temperature": "environment, rollout server",
    "rollout.max_tokens": "environment",
    "rollout.episode_timeout_s": "environment",
    "rollout.start_timeout_s": "up, rollout server, trainer",
    "rollout.max_body_mib": "rollout server, gateway",
    "gateway": "gateway",
    "gateway.enabled": "up",
    "dashboard": "up",
    "rewards": "reward service",
    "rewards.enabled": "up",
    "trainer": "trainer",
    "trainer.stop_timeout_s": "up",
    "trainer.teacher": "up, trainer",
    "trainer.parallel": "up, trainer",
    "evaluation": "environment",
    "evaluation.every": "environment, trainer",
    "evaluation.keep_best": "trainer",
    "evaluation.stop_at": "trainer",
    "weights": "trainer, weight bus, rollout server",
    "weights.nccl": "trainer, rollout server",
    "weights.nixl": "trainer, rollout server",
    "weights.packed": "rollout server",
    "weights.publish": "trainer, rollout server",
    "weights.shadow": "rollout server",
    "security": "every service",
    "telemetry": "every service",
    "telemetry.trainer_host": "trainer",
    "telemetry.trainer_port": "trainer",
    "tracking": "trainer",
    "samples": "trainer",
}


def _settings() -> str:
    rows = [
        f"| `{name}` | {_takes(field)} | {_default(field)} | {_reader(name)} |"
        for name, field in _fields(RunSettings, "")
    ]
    return "\n".join(
        [
            "# Settings: values and readers",
            "",
            MADE,
            "",
            "Every setting of a run, what it takes, and which process reads it. [Configuration](../configuration.md) says",
            "what each means.",
            "",
            "| setting | takes | default | read by |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _fields(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for key, field in section.model_fields.items():
        below = field.annotation
        if isinstance(below, type) and issubclass(below, BaseModel):
            yield from _fields(below, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", field


def _reader(name: str) -> str:
    parts = name.split(".")
    beginnings = [".".join(parts[:length]) for length in range(len(parts), -1, -1)]
    return next(_READ_BY[beginning] for beginning in beginnings if beginning in _READ_BY)


def _takes(field: FieldInfo) -> str:
    bounds = [_bound(each) for each in field.metadata]
    return ", ".join([_kind(field.annotation), *filter(None, bounds)])


def _kind(annotation: object) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{str(each).lower() if isinstance(each, bool) else each}`" for each in arguments)
    if origin in (Union, types.UnionType):
        kinds = dict.fromkeys(_kind(each) for each in arguments if each is not type(None))
        return " or ".join(kinds)
    if origin in (list, tuple):
        return f"a list: {_kind(arguments[0])}" if arguments else "a list"
    if origin is dict:
        return "a table"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(f"`{each.value}`" for each in annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a table"
    return names[annotation] if isinstance(annotation, type) and annotation in names else "a value"


def _bound(what: object) -> str:
    if isinstance(what, annotated_types.Ge):
        return f"≥ {what.ge}"
    if isinstance(what, annotated_types.Gt):
        return f"> {what.gt}"
    if isinstance(what, annotated_types.Le):
        return f"≤ {what.le}"
    if isinstance(what, annotated_types.Lt):
        return f"< {what.lt}"
    return ""


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value in (None, ""):
        return "–"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list | tuple):
        return f"`[{', '.join(str(each) for each in value)}]`"
    return "–" if value == {} else f"`{value}`"


def _commands() -> str:
    parts = [
        "# Commands",
        "",
        MADE,
        "",
        "`rollmesh COMMAND`, or `./dev COMMAND` in a checkout. Exit codes: 0 done, 1 failed, 2 misuse, 130 after Ctrl-C.",
        "",
    ]
    group = ""
    for name, command in COMMANDS.items():
        if command.group != group:
            group = command.group
            parts += [f"## {group}", ""]
        module, _, attribute = command.target.partition(":")
        target = getattr(importlib.import_module(module), attribute)
        if isinstance(target, Dispatcher):
            parts += [f"### {ROLLMESH.prog} {name}", "", f"{command.summary}.", ""]
            continue
        parts += _described(in_one_style(typer.main.get_command(target)), f"{ROLLMESH.prog} {name}", command.summary)
    return "\n".join(parts)


def _described(command: TyperCommand | TyperGroup, called: str, summary: str) -> list[str]:
    words = [each.metavar or "" for each in command.params if isinstance(each, TyperArgument)]
    said, _, examples = (command.help or summary).partition("Examples:")
    examples = examples or (command.epilog or "").removeprefix("Example:")
    lines = [f"### {called}", "", said.strip().replace("<", "&lt;"), ""]
    if isinstance(command, TyperGroup) and command.commands:
        lines[2] = f"{summary}."
        for name, below in command.commands.items():
            assert isinstance(below, TyperCommand | TyperGroup), "typer makes no others"
            lines += [line.replace("### ", "#### ") for line in _described(below, f"{called} {name}", below.help or "")]
        return lines
    lines += ["```text", f"{called} {' '.join(['[OPTIONS]', *words])}", "```", ""]
    rows = []
    for each in command.params:
        if isinstance(each, TyperOption) and not each.hidden:
            spelled = ", ".join(f"`{name}`" for name in [*each.opts, *each.secondary_opts])
            takes = "" if each.is_flag or not each.metavar else f" `{each.metavar}`"
            default = (
                "" if each.default in (None, False, (), []) or callable(each.default) else f"`{_shown(each.default)}`"
            )
            rows.append(f"| {spelled}{takes} | {as_cell(each.help or '')} | {default} |")
    if rows:
        lines += ["| option | meaning | default |", "|---|---|---|", *rows, ""]
    if examples.strip():
        lines += ["```console", *(f"$ {line.strip()}" for line in examples.strip().splitlines()), "```", ""]
    return lines


def _shown(default: object) -> str:
    value = default.value if isinstance(default, Enum) else default
    return str(value).replace(str(Path.home()), "~")


def _metrics() -> str:
    metrics = [each for each in vars(catalog).values() if isinstance(each, catalog.Metric)]
    rows = [
        f"| `{each.name}` | {each.kind} | {', '.join(f'`{label}`' for label in each.labels)} | {as_cell(each.help)} |"
        for each in metrics
    ]
    return "\n".join(
        [
            "# Metrics",
            "",
            MADE,
            "",
            "Every Prometheus metric. [Observability](../observability.md) says which answers which question.",
            "",
            "| metric | kind | labels | what it is |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _errors() -> str:
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, RollmeshError)]
    rows = []
    for each in kinds:
        when = as_text(each).partition("\n\n")[0]
        rows.append(f"| `{each.__name__}` | {each.status} | `{each.code}` | {each.exit_code} | {as_cell(when)} |")
    lines = [
        "# Errors",
        "",
        MADE,
        "",
        "An error says what happened, with which value, and what to do. A service answers it in OpenAI's form, a command",
        "prints one line and ends with its exit code, clients raise the same type.",
        "",
        "| type | HTTP | code | exit code | when |",
        "|---|---|---|---|---|",
        *rows,
        "",
    ]
    return "\n".join(lines)
