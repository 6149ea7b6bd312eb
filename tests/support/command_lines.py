"""Command lines of ours as files say them, judged by the parser that will read them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import typer

from services.cli import COMMANDS


def parse(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """`rollmesh COMMAND FLAGS…` → command, its parameters. Raises click's error for what the command does not take."""
    program, name, *flags = words
    assert program == "rollmesh"
    module, _, attribute = COMMANDS[name].target.partition(":")
    command = typer.main.get_command(getattr(importlib.import_module(module), attribute))
    context = command.make_context(name, list(flags))
    return name, dict(context.params)


@dataclass(frozen=True)
class TorchrunAsks:
    """What a `torchrun …` of ours asks for. `node`: its number; None: a variable says it. `command`: after `services`."""

    nodes: int
    ranks_a_node: int
    node: int | None
    master: str
    command: list[str]

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_a_node


def torchrun_asks(words: Sequence[str]) -> TorchrunAsks:
    """Read by torchrun's own parser. A node's number that a shell puts in is read as 0."""
    from torch.distributed.run import get_args_parser

    program, *flags = words
    assert program == "torchrun"
    told = [flag for flag in flags if flag.startswith("$")]
    read = get_args_parser().parse_args(["0" if flag in told else flag for flag in flags])
    assert (read.module, read.training_script) == (True, "services")
    # The number of a node is heeded where ranks meet at a fixed address alone.
    assert (read.rdzv_backend, read.rdzv_endpoint, int(read.max_restarts)) == ("static", "", 0)
    return TorchrunAsks(
        nodes=int(read.nnodes),
        ranks_a_node=int(read.nproc_per_node),
        node=None if told else int(read.node_rank),
        master=read.master_addr,
        command=read.training_script_args,
    )


def after_shell(words: Sequence[str]) -> list[str]:
    """What `sh -c '… exec … "$@"' NAME WORDS…` runs, where it runs anything: the words before `"$@"`, and those after."""
    if words[:2] not in (["sh", "-c"], ["bash", "-c"]):
        return list(words)
    script, _, *rest = words[2:]
    own = script.rpartition("exec ")[2].replace('"$@"', "").replace('"', "").split()
    return [*own, *rest]
