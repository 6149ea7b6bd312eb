"""Layers that vLLM quantises when it loads a model: a version is staged as it is published, then quantised by vLLM.

    published   bf16 ── staged, hashed ──► plain spare            the host's memory: two sets, which change places
                                               │ keep: the layer's own method, on a stand-in for the layer
                                               ▼
    served      fp8, scales … ◄── flip ── served spare            sets as of any other weights (`weight_bus.vllm.sets`)

vLLM drops the weights that it has quantised: `keep_plain_weights` has it leave them in the host's memory. Its own method is
called with a stand-in, which has the layer's attributes and the weights to be quantised; the layer itself, which decodes
meanwhile, is not touched. When the engine is attached, what every layer holds is made again in this way and compared: a
layer of which that does not come out, or whose kernel keeps something beside the layer's parameters, is refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from blake3 import blake3
from torch import nn

from weight_bus.errors import StageError
from weight_bus.receiver.buckets import throttle_beside
from weight_bus.vllm.sets import Held, Sets, Tensors, beside, bytes_of, host_copies

PLAIN = "rollmesh_plain"
_DONE = "_already_called_process_weights_after_loading"
_WRAPPED = "rollmesh_original_process"
_SCALES_OF_ITS_OWN = frozenset(
    {
        "Fp8PerBlockOnlineLinearMethod",
        "Fp8PerBlockOnlineMoEMethod",
        "Mxfp8OnlineLinearMethod",
        "Mxfp8OnlineMoEMethod",
        "Mxfp4OnlineLinearMethod",
        "Mxfp4OnlineMoEMethod",
    }
)
"""Methods of which a rank's scales are those of its own blocks. With others all ranks agree on them by a collective call,
which could meet one of a step on the thread that decodes."""


@dataclass(frozen=True)
class Plain:
    """A layer's parameters before vLLM quantised them, in the host's memory, and vLLM's configuration, for its methods."""

    tensors: Tensors
    config: Any = None


def plain_of(module: nn.Module) -> Plain | None:
    found = module.__dict__.get(PLAIN)
    return found if isinstance(found, Plain) else None


def quantised_layers(model: nn.Module) -> dict[str, nn.Module]:
    """By name, those that were quantised when they were loaded, and whose plain weights were kept."""
    return {name: module for name, module in model.named_modules() if plain_of(module) is not None}


def keep_plain_weights_from_start(worker_kind: type[Any]) -> None:
    """Have workers of this class begin with `keep_plain_weights`. Idempotent.

    Before a worker has its device vLLM's layers cannot be imported: they ask for the device's operators.
    """
    original = worker_kind.init_device
    if hasattr(original, _WRAPPED):
        return

    def init_device(worker: Any) -> None:
        keep_plain_weights()
        original(worker)

    setattr(init_device, _WRAPPED, original)
    worker_kind.init_device = init_device


def keep_plain_weights() -> None:
    """Have vLLM's online methods keep a layer's weights, as they were loaded, in the host's memory. Idempotent."""
    # Imported with all of them, so that every class is known.
    from vllm.model_executor.layers.quantization.online import base
    from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase

    for kind in (*_kinds(base.OnlineLinearBase), *_kinds(OnlineMoEMethodBase)):
        _keep_in(kind)


def _kinds(base: type[Any]) -> Iterator[type[Any]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)


def _keep_in(kind: type[Any]) -> None:
    original = vars(kind).get("process_weights_after_loading")
    if original is None or hasattr(original, _WRAPPED):
        return

    def process(method: Any, layer: nn.Module) -> None:
        # Weights that came quantised are not those that are published.
        from_plain = getattr(method, "requantization_source", None) is None
        if from_plain and plain_of(layer) is None and not getattr(layer, _DONE, False):
            layer.__dict__[PLAIN] = _plain_of_loaded(layer)
        original(method, layer)

    setattr(process, _WRAPPED, original)
    kind.process_weights_after_loading = process


def _plain_of_loaded(layer: nn.Module) -> Plain:
    from vllm.config import get_current_vllm_config_or_none

    loaded = {name: parameter.data for name, parameter in layer.named_parameters(recurse=False)}
    return Plain(host_copies(loaded), get_current_vllm_config_or_none())


class QuantisedSets:
    """Sets of a model, some of whose `layers` are quantised: what is staged and hashed of those are their plain weights.

    `served`: the sets of all parameters as they are served. Raises StageError, naming it, for a layer whose weights do not
    come out again.
    """

    def __init__(self, layers: Mapping[str, nn.Module], served: Sets) -> None:
        self._layers, self._served = dict(layers), served
        self._plain: Tensors = {
            f"{name}.{leaf}": tensor
            for name, layer in layers.items()
            for leaf, tensor in plain_weights(layer).tensors.items()
        }
        self._plain_spare: Tensors = host_copies(self._plain)
        self._others = [name for name in served.live if name.rpartition(".")[0] not in self._layers]
        self._known: dict[tuple[int, int], Tensors] = {}
        self._flips = 0
        for name, layer in self._layers.items():
            self._check_made_again(name, layer)
        self._sum = self._spare_sum = self._sum_of(served.live)
        """Hashes of the quantised weights in the two sets."""

    @property
    def live(self) -> Tensors:
        """As they are published: plain weights of quantised layers, and all others as they are served."""
        return self._published(self._served.live, self._plain)

    @property
    def spare(self) -> Tensors:
        return self._published(self._served.spare, self._plain_spare)

    @property
    def held(self) -> Held:
        served = self._served.held
        return Held(served.beside, served.host + bytes_of(self._plain) + bytes_of(self._plain_spare))

    def keep(self) -> None:
        """Quantise what was staged. On a background thread."""
        throttle = throttle_beside(self._served.spare.values())
        for name, layer in self._layers.items():
            self._quantise(name, layer)
            throttle.rest()
        self._spare_sum = self._sum_of(self._served.spare)
        self._served.keep()

    def flip(self) -> None:
        self._served.flip()
        self._swap()

    def flip_back(self) -> None:
        self._served.flip_back()
        self._swap()

    def check_served(self) -> None:
        """Raise StageError unless the quantised weights that are served are those that were made of the plain ones. On any
        thread but that which decodes."""
        while True:
            flips, expected = self._flips, self._sum
            found = self._sum_of(self._served.live)
            # A flip meanwhile may have changed what was hashed.
            if flips == self._flips:
                break
        if found != expected:
            raise StageError(
                "quantised weights that are served are not those that were made of the version", "restart this engine"
            )

    def _swap(self) -> None:
        self._plain, self._plain_spare = self._plain_spare, self._plain
        self._sum, self._spare_sum = self._spare_sum, self._sum
        self._flips += 1

    def _published(self, served: Mapping[str, torch.Tensor], plain: Tensors) -> Tensors:
        """Made once for each pair: the receiver knows sets by their tensors."""
        found = self._known.get((id(served), id(plain)))
        if found is None:
            found = {name: served[name] for name in self._others} | plain
            self._known[id(served), id(plain)] = found
        return found

    def _quantise(self, name: str, layer: nn.Module) -> None:
        spare = self._served.spare
        weights = {leaf: self._plain_spare[f"{name}.{leaf}"] for leaf in plain_weights(layer).tensors}
        with torch.no_grad(), beside(_own(layer)):
            for leaf, made in quantise(layer, weights).items():
                spare[f"{name}.{leaf}"].copy_(made, non_blocking=True)

    def _check_made_again(self, name: str, layer: nn.Module) -> None:
        own = _own(layer)
        made = quantise(layer, plain_weights(layer).tensors)
        for leaf, tensor in own.items():
            again = made.get(leaf)
            if again is None or again.shape != tensor.shape or not torch.equal(_bytes(again), _bytes(tensor)):
                raise StageError(
                    f"{name}.{leaf} is quantised by {_method(layer)} in a way that does not come out again",
                    "serve the model without rollout.vllm.quantization",
                )

    def _sum_of(self, served: Mapping[str, torch.Tensor]) -> str:
        digest = blake3()
        for name, layer in self._layers.items():
            for leaf in _own(layer):
                digest.update(_bytes(served[f"{name}.{leaf}"]).cpu().numpy().data)
        return str(digest.hexdigest())


def quantise(layer: nn.Module, weights: Mapping[str, torch.Tensor]) -> Tensors:
    """What vLLM's method makes of these weights for `layer`, by the names of its parameters. The layer stays as it is.

    `weights`: as they were before the layer was quantised, wherever they lie; the results are where the layer is.
    """
    device = next(iter(_own(layer).values())).device
    method: Any = copy.copy(layer.quant_method)
    for name, kernel in vars(layer.quant_method).items():
        if hasattr(kernel, "process_weights_after_loading"):
            setattr(method, name, copy.copy(kernel))
    # Not made by its class, which would allocate.
    stand_in: nn.Module = object.__new__(type(layer))
    stand_in.__dict__ = {each: value for each, value in layer.__dict__.items() if each not in (_DONE, PLAIN)}
    stand_in.__dict__["_buffers"] = dict(layer._buffers)
    stand_in.__dict__["_parameters"] = {
        name: nn.Parameter(weight.to(device, non_blocking=True), requires_grad=False)
        for name, weight in weights.items()
    }
    with torch.no_grad(), _vllm_config(plain_weights(layer).config):
        method.process_weights_after_loading(stand_in)
    return {name: parameter.data for name, parameter in stand_in.named_parameters(recurse=False)}


def _vllm_config(config: Any) -> Any:
    if config is None:
        return nullcontext()
    from vllm.config import set_current_vllm_config

    return set_current_vllm_config(config)


def quantising_bytes(layers: Mapping[str, nn.Module]) -> int:
    """Bytes on the device while the largest layer is quantised: its plain weights and what is made of them."""
    return max(
        (bytes_of(plain_weights(layer).tensors) + 2 * bytes_of(_own(layer)) for layer in layers.values()), default=0
    )


def check_layers(layers: Mapping[str, nn.Module]) -> None:
    """Raise StageError, naming it, for a layer that could not follow a version."""
    for name, layer in layers.items():
        _check_alone(name, layer)
        _check_reached(name, layer)


def _check_alone(name: str, layer: nn.Module) -> None:
    sizes = getattr(layer, "moe_config", None)
    ranks = int(getattr(layer if sizes is None else sizes, "tp_size", 1))
    if ranks > 1 and _method(layer) not in _SCALES_OF_ITS_OWN:
        raise StageError(
            f"{name} is split over {ranks} ranks, and {_method(layer)} takes scales of all of them, which cannot be while "
            "they decode",
            "use rollout.vllm.quantization=fp8_per_block, or rollout.tensor_parallel=1",
        )


def _check_reached(name: str, layer: nn.Module) -> None:
    """What a kernel multiplies by must be the layer's own parameters: a copy would stay that of the first version."""
    own = {parameter.data_ptr() for parameter in layer.parameters(recurse=False)}
    method: Any = layer.quant_method
    kernels = [each for each in vars(method).values() if hasattr(each, "process_weights_after_loading")]
    for holder in (layer, *kernels, getattr(method, "moe_quant_config", None)):
        for attribute, tensor in _tensors_in(holder):
            if tensor.is_floating_point() and tensor.data_ptr() not in own:
                raise StageError(
                    f"{name} keeps {attribute} beside its weights ({type(holder).__name__})",
                    "serve the model without rollout.vllm.quantization",
                )


def _tensors_in(holder: Any, depth: int = 2) -> Iterator[tuple[str, torch.Tensor]]:
    """Attributes that are tensors, also of what an object of a table is made of."""
    for attribute, value in vars(holder).items() if hasattr(holder, "__dict__") else ():
        if isinstance(value, torch.Tensor):
            yield attribute, value
        elif depth and is_dataclass(value) and not isinstance(value, type):
            yield from ((f"{attribute}.{name}", tensor) for name, tensor in _tensors_in(value, depth - 1))


def plain_weights(layer: nn.Module) -> Plain:
    found = plain_of(layer)
    if found is None:
        raise TypeError(f"{type(layer).__name__} has no plain weights")
    return found


def _own(layer: nn.Module) -> Tensors:
    return {name: parameter.data for name, parameter in layer.named_parameters(recurse=False)}


def _method(layer: nn.Module) -> str:
    return type(layer.quant_method).__name__


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """In the order of memory: a view, where it is dense."""
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.detach().permute(order).contiguous().view(-1).view(torch.uint8)
