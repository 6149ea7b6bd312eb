"""Completion of command lines in bash, zsh and fish: what may follow the words so far.

A shell's script asks `rollmesh completion words -- WORD… INCOMPLETE` and offers the lines of the answer; where there is
none it offers files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

_BASH = """\
_rollmesh() {
    local IFS=$'\\n'
    COMPREPLY=( $(rollmesh completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null) )
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[.=] ]]; then compopt -o nospace 2>/dev/null; fi
    return 0
}
complete -o default -F _rollmesh rollmesh
"""
_ZSH = """\
#compdef rollmesh
_rollmesh() {
    local -a found
    found=("${(@f)$(rollmesh completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n "$found[1]" ]]; then
        compadd -Q -- ${found:#*[.=]}
        compadd -Q -S '' -- ${(M)found:#*[.=]}
    else
        _files
    fi
}
compdef _rollmesh rollmesh
"""
_FISH = """\
function __rollmesh_words
    set -l words (commandline -opc) "$(commandline -ct)"
    rollmesh completion words -- $words[2..] 2>/dev/null
end
complete -c rollmesh -a '(__rollmesh_words)'
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def words_of(command: TyperCommand | TyperGroup, words: Sequence[str]) -> list[str]:
    """What may stand in place of the last of `words`, which follow the command's name."""
    *before, incomplete = words
    while isinstance(command, TyperGroup) and before and before[0] in command.commands:
        below = command.commands[before.pop(0)]
        assert isinstance(below, TyperCommand | TyperGroup), "typer makes no others"
        command = below
    options = [each for each in command.params if isinstance(each, TyperOption) and not each.hidden]
    named = next((each for each in options if before and before[-1] in each.opts and not each.is_flag), None)
    if named is not None:
        return _starting(_choices(named), incomplete)
    if incomplete.startswith("-"):
        return _starting((name for each in options for name in (*each.opts, *each.secondary_opts)), incomplete)
    found = _starting(command.commands, incomplete) if isinstance(command, TyperGroup) else []
    return found + (settings_of(incomplete) if _takes_settings(command) else [])


def _choices(option: TyperOption) -> list[str]:
    """Those of an option that takes one of some words."""
    kind = option.type_descriptor.annotation
    return [str(each.value) for each in kind] if isinstance(kind, type) and issubclass(kind, Enum) else []


def _takes_settings(command: TyperCommand | TyperGroup) -> bool:
    if command.context_settings.get("allow_extra_args"):
        return True
    return any(isinstance(each, TyperArgument) and "KEY=VALUE" in (each.metavar or "") for each in command.params)


def settings_of(incomplete: str) -> list[str]:
    """Names of settings, a section at a time: `trainer.`, then `trainer.threads=`."""
    from services.config.load import known_keys

    if "=" in incomplete:
        return []
    depth = incomplete.count(".") + 1
    found = set()
    for key in _starting(known_keys(), incomplete):
        parts = key.split(".")
        found.add(".".join(parts[:depth]) + ("." if len(parts) > depth else "="))
    return sorted(found)


def _starting(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
