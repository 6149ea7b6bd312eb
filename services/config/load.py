"""Loading the configuration tree: TOML file, then dotted overrides; every error is one line with its remedy."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ValidationError

from services.config.base import Section
from services.config.checks import check
from services.config.settings import RunSettings
from services.wire.errors import UsageError

SectionT = TypeVar("SectionT", bound=Section)

_RENAMED = {"trainer.updates_per_batch": "trainer.minibatches_per_batch"}
"""Settings by the names that older files have, with the same meaning: run folders stay readable."""
_GONE = {
    "trainer.micro_batch": "write trainer.micro_batch_tokens: tokens of a pass instead of rows (64 rows of 40: 2560)",
}


def load_settings(path: Path | None, overrides: Sequence[str]) -> RunSettings:
    """The tree from `path` (defaults without one) with `section.key=value` overrides on top.

    Raises UsageError for a file that cannot be read, an unknown key (with the nearest known one), a bad value,
    or values that do not go together.
    """
    settings = load_tree(RunSettings, path, overrides)
    check(settings)
    return settings


def read_section(kind: type[SectionT], tree: Mapping[str, Any], prefix: str = "") -> SectionT:
    """`tree` as a section of this kind. `prefix`: of its keys in messages, `trainer.loss.own.`.

    Raises UsageError for an unknown key, with the nearest known one, and for a bad value.
    """
    _refuse_unknown(tree, kind, prefix, lambda: known_keys(kind, prefix))
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise UsageError(*_explain(error, kind, prefix)) from error


def load_tree(root: type[SectionT], path: Path | None, overrides: Sequence[str]) -> SectionT:
    """Another tree than a run's, in the same way; whether its values go together is not looked at."""
    tree: dict[str, Any] = {} if path is None else _read(path)
    for override in overrides:
        _apply(tree, override)
    _rename(tree)
    return read_section(root, tree)


def origins_of(path: Path | None, overrides: Sequence[str], root: type[BaseModel] = RunSettings) -> dict[str, str]:
    """Where settings of `load_tree` come from: dotted name → the file's name, command line or default."""
    origins = dict.fromkeys(known_keys(root), "default")
    tree: dict[str, Any] = {}
    for source, text in [] if path is None else [(path.name, _read(path))]:
        _rename(text)
        origins |= dict.fromkeys(_leaves(text, ""), source)
    for override in overrides:
        _apply(tree, override)
    _rename(tree)
    return origins | dict.fromkeys(_leaves(tree, ""), "command line")


def flat_settings(path: Path) -> dict[str, object]:
    """What a configuration file says: dotted name → value, unchecked, former names replaced. Raises UsageError."""
    tree = _read(path)
    _rename(tree)
    return _leaves(tree, "")


def _leaves(tree: Mapping[str, Any], prefix: str) -> dict[str, object]:
    leaves: dict[str, object] = {}
    for key, value in tree.items():
        leaves |= _leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return leaves


def dump_settings(settings: Section) -> str:
    """TOML text that `load_tree` reads back to the same tree."""
    return tomli_w.dumps(settings.model_dump(mode="json", exclude_none=True))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the configuration {path} ({error.strerror})", "check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML ({error})", "correct the file") from error


def _apply(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.lstrip("-").partition("=")
    if not separator or not key:
        raise UsageError(f"{override!r} is no override", "write section.key=value, such as trainer.learning_rate=1e-4")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, leaf = key.replace("-", "_").split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise UsageError(f"{key!r}: {section!r} is a value, not a section", "check the key")
    tree[leaf] = value


def _rename(tree: dict[str, Any]) -> None:
    for old, new in _RENAMED.items():
        section, _, key = old.rpartition(".")
        keys = tree.get(section)
        if isinstance(keys, dict) and key in keys:
            name = new.rpartition(".")[2]
            if name in keys:
                raise UsageError(f"{old!r} is the former name of {new!r}", "write the latter alone")
            keys[name] = keys.pop(key)


def _refuse_unknown(
    tree: Mapping[str, Any], model: type[BaseModel], prefix: str, known: Callable[[], list[str]]
) -> None:
    """`known`: all keys that there are, by their dotted names."""
    for key, value in tree.items():
        field = model.model_fields.get(key)
        if field is None and model.model_config.get("extra") == "allow":
            continue
        if field is None:
            if f"{prefix}{key}" in _GONE:
                raise UsageError(f"{prefix + key!r} is gone", _GONE[f"{prefix}{key}"])
            sections = [name for name, each in model.model_fields.items() if _is_section(each.annotation)]
            alike = get_close_matches(key, sections, n=1, cutoff=0.7) if isinstance(value, Mapping) else []
            near = " or ".join(map(repr, [f"{prefix}{alike[0]}"] if alike else _nearest(f"{prefix}{key}", known())))
            hint = f"the nearest known key is {near}" if near else f"known keys: {', '.join(model.model_fields)}"
            raise UsageError(f"unknown key {prefix + key!r}", hint)
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            if not isinstance(value, Mapping):
                raise UsageError(f"{prefix + key!r} is a section, not a value", f"set one of its keys: {prefix}{key}.…")
            _refuse_unknown(value, section, f"{prefix}{key}.", known)


def _is_section(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _nearest(key: str, known: Sequence[str]) -> list[str]:
    """Of the known keys those that `key` is short for (lr: learning_rate), else one that is alike, or has a name alike."""
    section, _, leaf = key.rpartition(".")
    names = {name: name.rpartition(".") for name in known}
    initials = {name: "".join(word[:1] for word in own.split("_")) for name, (_, _, own) in names.items()}
    short = [name for name in known if len(leaf) > 1 and initials[name] == leaf]
    short = [name for name in short if names[name][0] == section] or short
    alike = get_close_matches(key, known, n=1, cutoff=0.4)
    return short or alike or get_close_matches(leaf, [own for _, _, own in names.values()], n=1, cutoff=0.4)


def known_keys(root: type[BaseModel] = RunSettings, prefix: str = "") -> list[str]:
    """Every setting of a tree by its dotted name."""
    names = []
    for key, field in root.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            names += known_keys(section, f"{prefix}{key}.")
        else:
            names.append(f"{prefix}{key}")
    return names


def _explain(error: ValidationError, root: type[BaseModel], prefix: str) -> tuple[str, str]:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"{prefix}{key} is not set", "it has no default: set it"
    what = f"{prefix}{key} = {first['input']!r} cannot be"
    allowed = _allowed(key, root)
    if allowed:
        near = get_close_matches(str(first["input"]), allowed, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return what, f"{hint}known: {', '.join(allowed)}"
    # A check of our own speaks for itself; pydantic would put "Value error" before it.
    told = first.get("ctx", {})
    return what, str(told["error"]) if "error" in told else _to_write(first["type"], told) or first["msg"]


_TO_WRITE = (
    (("int_parsing", "int_type", "int_from_float"), "write a whole number"),
    (("float_parsing", "float_type"), "write a number, such as 0.001 or 1e-4"),
    (("bool_parsing", "bool_type"), "write true or false"),
    (("greater_than_equal",), "write {ge} or more"),
    (("greater_than",), "write more than {gt}"),
    (("less_than_equal",), "write {le} or less"),
    (("less_than",), "write less than {lt}"),
    (("literal_error",), "known: {expected}"),
)
"""pydantic's types of errors, and what to do about them."""


def _to_write(kind: str, told: Mapping[str, Any]) -> str:
    return next((words.format(**told) for kinds, words in _TO_WRITE if kind in kinds), "")


def _allowed(key: str, root: type[BaseModel]) -> list[str]:
    model = root
    *sections, leaf = key.split(".")
    for section in sections:
        annotation = model.model_fields[section].annotation if section in model.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    annotation = model.model_fields[leaf].annotation if leaf in model.model_fields else None
    return [str(value) for value in get_args(annotation)] if str(get_origin(annotation)) == "typing.Literal" else []
