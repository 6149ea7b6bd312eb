"""Findings of a planned run: its model folder, and memory that a machine without GPUs has not. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from services.policies.diagnosis.finding import Finding, error, warning
from services.policies.placement.engine_memory import EngineOptions, engine_estimate
from services.policies.training.memory import MemoryOptions, estimate
from services.policies.training.model_shape import ModelShape

_GIB = 1 << 30
_SHOWN = 10
"""Characters that are named."""


@dataclass(frozen=True)
class ModelFiles:
    """What a model folder holds. `config`, `tokenizer`: why that file cannot be used, None where it can.

    `weights`: how many files of weights; `chat_template`: whether there is one; `shape`: None where config.json does not
    say what is needed. `characters`: all that its tokenizer knows, where it has a token for each character alone; None for
    one of another kind.
    """

    folder: str
    config: str | None = None
    tokenizer: str | None = None
    weights: int = 1
    chat_template: bool = True
    shape: ModelShape | None = None
    characters: frozenset[str] | None = None


def of_model(model: ModelFiles, *, chats: bool = False) -> Iterator[Finding]:
    """`chats`: the task speaks to the policy in chat messages. The errors in the order in which a run would meet them."""
    if model.config is not None:
        yield error(
            "model-folder",
            f"{model.folder} is no Hugging Face model folder",
            f"config.json: {model.config}",
            "it must hold a config.json: set model.path to such a folder, or to a name (`rollmesh models`)",
        )
        return
    if not model.weights:
        yield error(
            "model-folder",
            f"{model.folder} holds no weights",
            "there is no .safetensors and no .bin file in it",
            "fetch the model whole (`rollmesh models fetch NAME`), or save it with `save_pretrained`",
        )
    if model.tokenizer is not None:
        yield error(
            "tokenizer",
            f"{model.folder} holds no tokenizer that can be used",
            f"tokenizer.json: {model.tokenizer}",
            "save the model's tokenizer there: AutoTokenizer.from_pretrained(…).save_pretrained(FOLDER)",
        )
    if chats and not model.chat_template:
        yield error(
            "chat-template",
            "the task speaks in chat messages, and the model has no chat template",
            f"{model.folder} has neither chat_template.jinja nor one in tokenizer_config.json",
            "take an instruct model, or save a template with its tokenizer; or a task that speaks plain text",
        )


def least_host_bytes(
    shape: ModelShape, trainer: MemoryOptions | None, *, engines: int, item_bytes: float
) -> dict[str, int]:
    """The least memory of a run without GPUs, by part: rows of one token, engines that hold two sets of weights, no cache.

    `trainer`: its options, None where there is none; `item_bytes`: of a served weight. Formulas: those of
    `services.policies.training.memory` and `services.policies.placement.engine_memory`.
    """
    parts: dict[str, int] = {}
    if trainer is not None:
        parts["trainer"] = estimate(shape, replace(trainer, tokens=1)).total
    engine = engine_estimate(shape, EngineOptions(context=1, item_bytes=item_bytes, batched=1, running=1)).parts
    parts[f"{engines} engine{'s' if engines > 1 else ''}"] = engines * (engine["weights"] + engine["update"])
    return parts


def of_characters(model: ModelFiles, task: str, characters: str) -> Iterator[Finding]:
    """`characters`: of the task's prompts."""
    unknown = [] if model.characters is None else [each for each in characters if each not in model.characters]
    if unknown:
        shown = " ".join(each if each.isprintable() and each != " " else repr(each) for each in unknown[:_SHOWN])
        more = " …" if len(unknown) > _SHOWN else ""
        yield warning(
            "unknown-characters",
            f"the model cannot read all of what task {task} asks",
            f"its tokenizer has no token for {shown}{more}: each becomes the unknown token",
            "pose problems in characters that it knows, or take a model with a larger vocabulary",
        )


def of_memory(parts: Mapping[str, int], there: int) -> Iterator[Finding]:
    """`parts`: what the run takes at the least; `there`: bytes of this machine."""
    least = sum(parts.values())
    if least > there:
        shown = " + ".join(f"{name} {size / _GIB:.1f}" for name, size in parts.items())
        yield error(
            "memory",
            f"the run takes {least / _GIB:.1f} GiB of memory at the least, this machine has {there / _GIB:.1f}",
            f"in GiB {shown}, without activations and caches",
            "take a smaller model, adapters (trainer.lora.rank=16), fewer servers, or a larger machine",
        )
