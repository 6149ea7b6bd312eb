"""Low-rank adapters that are published alone (`weights.publish = "adapter"`): their tensors' names, and their base.

    y = W·x + B·(A·x)       W: of the model folder, as an engine has loaded it; never moved
                            A [rank, in], B [out, rank]: a version; alpha / rank is in B already

A version is the adapter and its base together: the manifest names the folder's digest, and an engine that loaded another
folder refuses it. No torch here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from services.config.training.lora import ALL_LINEAR
from services.wire.errors import UsageError
from weight_bus.errors import StageError
from weight_bus.manifest.manifest import Manifest
from weight_bus.manifest.snapshot import manifest_of_folder, shapes_of_folder

_A, _B = ".lora_A.weight", ".lora_B.weight"
_WEIGHT = ".weight"
_NOT_LINEAR = frozenset(
    {"lm_head", "embed_tokens", "embed_tokens_per_layer", "word_embeddings", "wte", "wpe", "gate", "router"}
)
"""Matrices that are embeddings, routers or the language head, by the last part of their modules' names."""
_EXPERTS = ".experts."


@dataclass(frozen=True)
class AdapterPlan:
    """What an engine is told of the adapters that it will get. `targets`: as `trainer.lora.targets`; `base`: the model
    folder that it loads."""

    rank: int
    targets: str | list[str]
    base: Path


def a_name(module: str) -> str:
    return module + _A


def b_name(module: str) -> str:
    return module + _B


def adapted_modules(shapes: Mapping[str, tuple[int, ...]], targets: str | list[str]) -> list[str]:
    """Which modules get adapters, in the order of `shapes`, the published weights. A target is the end of a name.

    What trains them knows the model's classes and is right; where this differs, the first version is refused by name.
    """
    modules = [
        name.removesuffix(_WEIGHT) for name, shape in shapes.items() if name.endswith(_WEIGHT) and len(shape) == 2
    ]
    if targets == ALL_LINEAR:
        return [each for each in modules if each.rpartition(".")[2] not in _NOT_LINEAR and _EXPERTS not in f".{each}"]
    return [each for each in modules if any(each == target or each.endswith(f".{target}") for target in targets)]


def adapted_layers(plan: AdapterPlan) -> list[str]:
    """The last parts of the names of `plan`'s modules, as the base's own files have them. Raises UsageError for a folder
    without safetensors, or in which no module is meant."""
    found = adapted_modules(shapes_of_folder(plan.base), plan.targets)
    if not found:
        raise UsageError(
            f"trainer.lora.targets={plan.targets}: {plan.base} has no such weights", "name linear layers of the model"
        )
    return _unique(module.rpartition(".")[2] for module in found)


def base_digest(folder: Path) -> str:
    """What names the weights of a model folder; every byte is read once. Raises UsageError as `manifest_of_folder`."""
    return manifest_of_folder(folder, "base", 0).root_digest


class _Folder:
    """The digest of a model folder, read once. For any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._digest: str | None = None

    def know(self) -> str:
        with self._lock:
            if self._digest is None:
                self._digest = base_digest(self._folder)
            return self._digest


class Base:
    """The weights that an engine's adapters belong to. For any thread. `like`: of another run's adapters on them."""

    def __init__(self, plan: AdapterPlan, like: Base | None = None) -> None:
        self._plan = plan
        self._folder: _Folder = _Folder(plan.base) if like is None else like._folder

    def know(self) -> str:
        """Its digest. The first time that takes as long as reading the base: an engine asks for it when it starts."""
        return self._folder.know()

    def check(self, manifest: Manifest) -> None:
        """Raise StageError unless `manifest` is of an adapter of this base, UsageError where that cannot be read."""
        adapter = manifest.adapter
        if adapter is None:
            raise StageError(
                f"version {manifest.version} is a whole model's weights, and this engine serves adapters",
                "give trainer and engines the same weights.publish",
            )
        known = self.know()
        if adapter.base_digest != known:
            raise StageError(
                f"version {manifest.version} is an adapter of a base {adapter.base_digest[:16]}…, and {self._plan.base} "
                f"has {known[:16]}…",
                "start the engine on the model folder that the trainer began with",
            )
        if adapter.rank != self._plan.rank:
            raise StageError(
                f"version {manifest.version} is an adapter of rank {adapter.rank}, and this engine serves rank "
                f"{self._plan.rank}",
                "give trainer and engines the same trainer.lora.rank",
            )


def check_whole(manifest: Manifest) -> None:
    """Raise StageError for an adapter, of an engine that serves whole weights."""
    if manifest.adapter is not None:
        raise StageError(
            f"version {manifest.version} is an adapter alone, and this engine serves whole weights",
            "give trainer and engines the same weights.publish; engine http and a plain vllm serve take merged weights",
        )


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
