"""The names and shapes that a model's weights are published under: those of its Hugging Face folder.

    in the model   mlp.experts.gate_up_proj [E, 2·I, H]      transformers holds some weights fused, or under other names
    in the folder  mlp.experts.0.gate_proj.weight [I, H] …   what vLLM, and `transformers` itself, load

Each published tensor is a view into a live one: nothing is copied, and what is written to one is in the other. Of one that
is spread over ranks (DTensor) it is a view into this rank's part. How a
model's names become its folder's is `transformers`' own knowledge (`revert_weight_conversion`); it is asked once, with
tensors without memory, and what it does to them is written down.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from services.wire.errors import UNDECODABLE, UsageError
from weight_bus.manifest.computed import ComputedTensor, PublishedTensor, computed
from weight_bus.manifest.local_part import LocalPart, PartView, Ranges, Strided, part_of, plan_view

_HEADER_LENGTH_BYTES = 8


@dataclass(frozen=True)
class _View:
    """Of the live tensor `source`, whose stride is `whole`, in elements."""

    source: str
    whole: tuple[int, ...]
    strided: Strided


class PublishedNames:
    """For `model`, whose weights are `tensors`, by their names in it; a tied one under one name.

    Raises UsageError where the folder's tensors are no views into the model's.
    """

    def __init__(self, model: PreTrainedModel, tensors: Mapping[str, PublishedTensor]) -> None:
        empty = {name: _shape_of(tensor) for name, tensor in tensors.items()}
        sources = {one.untyped_storage()._cdata: name for name, one in empty.items()}
        order = {name: place for place, name in enumerate(tensors)}
        found: dict[str, _View] = {}
        for name, one in revert_weight_conversion(model, dict(empty)).items():
            source = sources.get(one.untyped_storage()._cdata)
            if source is None:
                raise UsageError(
                    f"{name} of a {model.config.model_type} model is no part of one of its weights: each "
                    "publication would have to copy it",
                    "train a model of another family",
                )
            whole = _stride(tensors[source])
            found[name] = _View(source, whole, Strided(tuple(one.shape), tuple(one.stride()), one.storage_offset()))
        self._views = dict(sorted(found.items(), key=lambda item: (order[item[1].source], item[1].strided.offset)))
        """In the order of the model's own, and of memory."""
        self._parts: dict[str, tuple[tuple[Ranges, ...], PartView]] = {}
        """Of tensors that are spread over ranks: what lies here, and how a published one is had from it."""

    @overload
    def views(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]: ...
    @overload
    def views(self, tensors: Mapping[str, PublishedTensor]) -> dict[str, PublishedTensor]: ...
    def views(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """`tensors`, by the model's names, as they are published; a part of a computed one is computed for itself."""
        return {name: self._view(name, tensors[view.source], view) for name, view in self._views.items()}

    def _view(self, name: str, tensor: PublishedTensor, view: _View) -> PublishedTensor:
        strided = view.strided
        if strided.shape == tuple(tensor.shape) and strided.stride == view.whole:
            return tensor
        if isinstance(tensor, DTensor):
            tensor = part_of(view.source, tensor)
        if isinstance(tensor, LocalPart):
            known = self._parts.get(name)
            if known is None or known[0] != tensor.spans:
                known = self._parts[name] = tensor.spans, plan_view(name, tensor.shape, tensor.spans, strided)
            return known[1].of(tensor.local)
        if isinstance(tensor, ComputedTensor):
            if tensor.placed_as is None:
                return ComputedTensor(
                    torch.Size(strided.shape), lambda: computed(self._view(name, tensor.compute().contiguous(), view))
                )
            raise UsageError(
                f"{name} is a part of {view.source}, which is computed and spread over ranks", "train it on one rank"
            )
        if tuple(tensor.stride()) != view.whole:
            raise ValueError(f"{view.source} lies in memory with strides {tensor.stride()}, and lay with {view.whole}")
        return tensor.as_strided(strided.shape, strided.stride, tensor.storage_offset() + strided.offset)


def check_folder(folder: Path, weights: Mapping[str, PublishedTensor], prefix: str = "") -> None:
    """Raise UsageError unless the folder's own weight files have each of `weights`, of its shape.

    `prefix`: of the model's layers, which some folders leave out (GPT-2). Files of another format are not read.
    """
    shapes = _shapes_in(folder)
    for name, tensor in weights.items() if shapes else ():
        stored = name_in(shapes, name, prefix)
        known = None if stored is None else shapes[stored]
        if known != tuple(tensor.shape):
            has = "no such tensor" if known is None else f"one of {list(known)}"
            raise UsageError(
                f"{name} {list(tensor.shape)} would be published, and {folder} has {has}",
                "load it with transformers, save that, and give --model the folder saved",
            )


def name_in(stored: Collection[str], name: str, prefix: str) -> str | None:
    """What a folder of tensors `stored` calls the published `name`; None where it has none such. `prefix`: as above."""
    return next((each for each in (name, name.removeprefix(prefix), prefix + name) if each in stored), None)


def _stride(tensor: PublishedTensor) -> tuple[int, ...]:
    """A computed one is contiguous, and one in parts as a whole would be."""
    whole = tensor if isinstance(tensor, Tensor) else torch.empty(tensor.shape, device="meta")
    return tuple(whole.stride())


def _shape_of(tensor: PublishedTensor) -> Tensor:
    """`tensor` without its memory; with the views of it that contiguity would copy."""
    dtype = torch.float32 if isinstance(tensor, ComputedTensor) else tensor.dtype
    empty = torch.empty_strided(tensor.shape, _stride(tensor), dtype=dtype, device="meta")
    return empty.as_subclass(_Uncopied)


class _Uncopied(torch.Tensor):
    """Stays a view where a contiguous copy is asked for."""

    def contiguous(self, *_: Any, **__: Any) -> Tensor:
        return self


def _shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """Of the tensors in the folder's safetensors files, which are not read beyond their headers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                header = msgspec.json.decode(file.read(int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")))
        except (OSError, *UNDECODABLE) as error:
            raise UsageError(f"{path} is no safetensors file ({error})", "give --model a whole folder") from error
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes
