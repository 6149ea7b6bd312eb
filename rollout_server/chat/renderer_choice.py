"""Which of the kept library's renderers a model folder gets."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_server.chat.text_decoder import TokenTable
from services.wire.errors import UsageError

if TYPE_CHECKING:
    from renderers import RendererConfig

AUTO = "auto"


def choose_config(name: str, folder: Path, template: str, table: TokenTable) -> RendererConfig:
    """The configuration for `name`, or for `auto` what the folder's name and vocabulary say.

    `auto` takes the family that the library lists for a model of this name (`…/Qwen/Qwen3-8B`, or its folder in a hub
    cache). Every other folder keeps its own template, and gets the parsers whose markers its vocabulary has.
    Raises UsageError for an unknown name.
    """
    from renderers import DefaultRendererConfig
    from renderers.base import MODEL_RENDERER_MAP
    from renderers.configs import config_from_name

    listed = next((MODEL_RENDERER_MAP[model] for model in model_names(folder) if model in MODEL_RENDERER_MAP), None)
    wanted = listed if name == AUTO and listed is not None else name
    if wanted not in (AUTO, "default"):
        try:
            chosen: RendererConfig | None = config_from_name(wanted)
        except ValueError as error:
            known = sorted({AUTO, "default", *MODEL_RENDERER_MAP.values()})
            close = difflib.get_close_matches(wanted, known, n=3)
            raise UsageError(
                f"no renderer {wanted!r}",
                f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}",
            ) from error
        assert chosen is not None
        return chosen
    markers = set(table.markers.values())
    return DefaultRendererConfig(
        tool_parser=_tool_parser(markers, template),
        reasoning_parser="think" if {"<think>", "</think>"} <= markers else None,
    )


def model_names(folder: Path) -> list[str]:
    """Hub names that a folder's path may say: its last two parts, or those of a hub cache (`models--A--B/snapshots/…`)."""
    parts = folder.resolve().parts
    cached = [part.removeprefix("models--").replace("--", "/", 1) for part in parts if part.startswith("models--")]
    return [*cached, "/".join(parts[-2:])]


def _tool_parser(markers: set[str], template: str) -> str | None:
    if "<｜tool▁calls▁begin｜>" in markers:
        return "deepseek-v3"
    if not {"<tool_call>", "</tool_call>"} <= markers:
        return None
    if "<function=" in template:
        return "qwen3.5"
    return "glm" if "<arg_key>" in template else "qwen3"
