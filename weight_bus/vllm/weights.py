"""vLLM's fused parameters as views by Hugging Face name, live and shadow; slices of tensor parallel ranks.

vLLM fuses: `qkv_proj` holds the rows of `q_proj`, `k_proj` and `v_proj` one below the other, `gate_up_proj` those of
`gate_proj` and `up_proj`; embeddings have rows of padding at the end.

    vLLM parameter          [ q rows | k rows | v rows ]        one storage
    Hugging Face names        q_proj   k_proj   v_proj          row views into it

The model class's `packed_modules_mapping` says which names a fused module holds; experts have a file of their own
(`weight_bus.vllm.experts`). Of a tensor parallel engine, every rank has its slices. Weights are those that are published:
of layers that vLLM quantised when it loaded them, `weight_bus.vllm.quantised` makes the served form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from services.config.settings import PackedWeights
from weight_bus.errors import StageError
from weight_bus.receiver.buckets import RestoredTensors
from weight_bus.receiver.slices import Slice
from weight_bus.vllm.experts import expert_views, is_experts
from weight_bus.vllm.packed.sets import PackedSets, is_held_packed, multiplying_layers
from weight_bus.vllm.quantised import QuantisedSets, check_layers, plain_weights, quantised_layers
from weight_bus.vllm.sets import Sets, ShadowMode, make_sets, on_device


class VllmWeights:
    """A model's weights as the receiver wants them (`weight_bus.receiver.receiver.WeightTarget`).

    `shadow`: where a version is staged (`weight_bus.vllm.sets`); `in_place`: whether the parameters' addresses must stay,
    which is so on a device; `packed`: whether a CPU's matrices are to be held packed alone (`weight_bus.vllm.packed.sets`);
    `holds_packed` says whether they are. Raises StageError, naming the tensor, for a weight that cannot be replaced in
    place.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        shadow: ShadowMode = "device",
        *,
        in_place: bool | None = None,
        packed: PackedWeights = "off",
    ) -> None:
        parameters = dict(model.named_parameters())
        quantised = quantised_layers(model)
        # Before memory is taken for it.
        check_layers(quantised)
        # Not kept: what is held packed instead is freed.
        views = hugging_face_views(model, published_form(parameters, quantised))
        self.slices = {name: part for name, _, part in views if part is not None}
        """The part that this rank has, of tensors that are split over ranks."""
        # A kernel of experts remembers its scales.
        stay = True if any(is_experts(layer) for layer in quantised.values()) else in_place
        self._packed: PackedSets | None = None
        layers = {} if stay or quantised or shadow != "device" or on_device(parameters) else multiplying_layers(model)
        if is_held_packed(packed, parameters, layers):
            self._packed = PackedSets(parameters, layers, _published_rows(layers))
        self.sets: Sets = self._packed or make_sets(parameters, shadow, in_place=stay)
        self._quantised = QuantisedSets(quantised, self.sets) if quantised else None
        if self._quantised is not None:
            self.sets = self._quantised
        self._model = model
        self._views: dict[int, Mapping[str, torch.Tensor]] = {}
        self._restored: dict[int, RestoredTensors] = {}
        for storage in (self.sets.live, self.sets.spare):
            self._views_of(storage)

    @property
    def holds_packed(self) -> bool:
        return self._packed is not None

    def in_place(self) -> Mapping[str, torch.Tensor]:
        """As `live`, to be written to: after `unpack`, while nothing decodes."""
        return self._views_of(self.sets.live)

    def unpack(self) -> None:
        """Let layers multiply by the weights of `in_place` until the next flip."""
        if self._packed is not None:
            self._packed.unpack()

    def give_back(self) -> None:
        """Leave the model's layers as they were, so that others may be made of it."""
        if self._packed is not None:
            self._packed.give_back()

    @property
    def storage(self) -> Mapping[str, torch.Tensor]:
        """What is served, by the model's own parameter names."""
        return self.sets.live

    @property
    def spare(self) -> Mapping[str, torch.Tensor]:
        """The shadow, by the same names."""
        return self.sets.spare

    def live(self) -> Mapping[str, torch.Tensor]:
        if self._packed is None:
            return self._views_of(self.sets.live)
        return self._restored_of(self._packed, self.sets.live)

    def shadow(self) -> Mapping[str, torch.Tensor]:
        return self._views_of(self.sets.spare)

    def flip(self) -> None:
        self.sets.flip()

    def flip_back(self) -> None:
        self.sets.flip_back()

    def check_served(self) -> None:
        """Raise StageError where what is served is not what was made of the version. Not on the thread that decodes."""
        if self._quantised is not None:
            self._quantised.check_served()

    def _views_of(self, storage: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Made once for each set: sets live as long as this."""
        found = self._views.get(id(storage))
        if found is None:
            found = {name: tensor for name, tensor, _ in hugging_face_views(self._model, storage)}
            self._views[id(storage)] = found
        return found

    def _restored_of(self, packed: PackedSets, storage: Mapping[str, torch.Tensor]) -> RestoredTensors:
        """Likewise made once."""
        found = self._restored.get(id(storage))
        if found is None:
            owners = {
                name: owner
                for owner in packed.held_alone
                for name, _, _ in hugging_face_views(self._model, {owner: storage[owner]})
            }

            def restore(name: str) -> Mapping[str, torch.Tensor]:
                owner = owners[name]
                views = hugging_face_views(self._model, {owner: packed.restored(storage, owner)})
                return {each: view for each, view, _ in views}

            found = RestoredTensors(self._views_of(storage), owners.keys(), restore)
            self._restored[id(storage)] = found
        return found


def _published_rows(layers: Mapping[str, list[nn.Module]]) -> dict[str, int]:
    """Of matrices with rows of padding: how many are published."""
    return {
        name: len(rows_of_vocabulary(module, module.weight)[0])  # type: ignore[arg-type]
        for name, modules in layers.items()
        for module in modules
        if getattr(module, "org_vocab_size", None) is not None
    }


def published_form(
    parameters: Mapping[str, torch.nn.Parameter], quantised: Mapping[str, nn.Module]
) -> dict[str, torch.Tensor]:
    """A model's weights as they are published: of `quantised` layers those that were loaded."""
    found = {name: one.data for name, one in parameters.items() if name.rpartition(".")[0] not in quantised}
    for name, layer in quantised.items():
        found |= {f"{name}.{leaf}": tensor for leaf, tensor in plain_weights(layer).tensors.items()}
    return found


def hugging_face_views(
    model: torch.nn.Module, storage: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor, Slice | None]]:
    """Name and view of every weight in `storage`, a mapping of the model's own parameter names to memory of their shapes,
    and of which slice of the whole weight it is (None: all of it).

    A tied output head is one parameter and appears once, under the embedding's name, as in Hugging Face.
    """
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for name, tensor in storage.items():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        _check_replaceable(name, tensor)
        parent, _, last = owner.rpartition(".")
        if is_experts(module):
            yield from expert_views(name, module, tensor)
        elif last in packed:
            prefix = f"{parent}." if parent else ""
            for number, (part, rows) in enumerate(_parts(name, module, packed[last], tensor)):
                yield f"{prefix}{part}.{leaf}", rows, slice_of_part(module, number, rows)
        elif getattr(module, "org_vocab_size", None) is not None:
            yield name, *rows_of_vocabulary(module, tensor)
        else:
            yield name, tensor, slice_of(name, module, tensor)


def _parts(
    name: str, module: torch.nn.Module, parts: list[str], tensor: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    sizes = part_rows(module)
    if sizes is None or len(sizes) != len(parts) or sum(sizes) != tensor.shape[0]:
        raise StageError(
            f"{name} of shape {tuple(tensor.shape)} does not split into {', '.join(parts)} (rows {sizes})",
            "this model type needs a rule in weight_bus/vllm/weights.py, or use --engine torch",
        )
    start = 0
    for part, size in zip(parts, sizes, strict=True):
        yield part, tensor[start : start + size]
        start += size


def _check_replaceable(name: str, tensor: torch.Tensor) -> None:
    if tensor.numel() == 0:
        raise StageError(f"vLLM packed {name} away", f"start the engine through rollmesh, which keeps {name} live")
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise StageError(f"{name} is quantised ({tensor.dtype})", "serve the model in float32, bfloat16 or float16")


def check_linears_are_live(model: torch.nn.Module) -> None:
    """Raise StageError for a layer that would ignore new weights: vLLM's CPU kernels keep packed copies.

    Each layer computes a product with a weight of zeros; a result that is not zero came from a copy.
    """
    for name, module in model.named_modules():
        product = getattr(module, "cpu_linear", None)
        if product is None:
            continue
        weight = module.weight
        nothing = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
        found = product(torch.ones(1, weight.shape[-1], dtype=weight.dtype), nothing, None)
        if bool(found.count_nonzero()):
            raise StageError(f"{name} computes with a packed copy of its weight", "set model.dtype=float32")


# How vLLM splits weights over tensor parallel ranks, as its own weight loaders do; read off the layers' attributes, vLLM
# is not imported.
#
# | vLLM's layer              | weight            | along | a rank's                                              |
# |---------------------------|-------------------|-------|-------------------------------------------------------|
# | column parallel           | `[out, in]`       | 0     | `out / ranks` rows; of the bias, too                  |
# | merged (gate and up, qkv) | parts of rows     | 0     | as many rows of each part; heads of keys and values   |
# |                           |                   |       | that are fewer than ranks are held by several ranks   |
# | row parallel              | `[out, in]`       | 1     | `in / ranks` columns; all of the bias                 |
# | embedding, output head    | `[vocabulary, …]` | 0     | `padded vocabulary / ranks` rows; padding is no one's |
# | replicated                |                   |       | all of it                                             |


def rows_of_vocabulary(module: nn.Module, tensor: torch.Tensor) -> tuple[torch.Tensor, Slice | None]:
    """The rows of an embedding that are vocabulary, and their slice; the rest is padding."""
    whole = int(module.org_vocab_size)  # type: ignore[arg-type]
    if _ranks(module) == 1:
        return tensor[:whole], None
    indices = module.shard_indices
    start, end = int(indices.org_vocab_start_index), int(indices.org_vocab_end_index)  # type: ignore[union-attr,arg-type]
    return tensor[: end - start], Slice((whole, *tensor.shape[1:]), 0, start)


def part_rows(module: nn.Module) -> list[int] | None:
    """How many rows of each of its parts a fused layer has here; None for a layer that has no parts."""
    sizes: list[int] | None = getattr(module, "output_sizes", None)
    return None if sizes is None else [size // _ranks(module) for size in sizes]


def slice_of_part(module: nn.Module, number: int, rows: torch.Tensor) -> Slice | None:
    """Where part `number` of a fused layer, of which `rows` are here, lies in the whole part."""
    ranks, own = _ranks(module), rows.shape[0]
    if ranks == 1:
        return None
    # Queries are never repeated; heads of keys and values are, where there are fewer than ranks.
    repeated = int(getattr(module, "num_kv_head_replicas", 1)) if number else 1
    start = int(module.tp_rank) // repeated * own  # type: ignore[arg-type]
    return Slice((own * ranks // repeated, *rows.shape[1:]), 0, start)


def slice_of(name: str, module: nn.Module, tensor: torch.Tensor) -> Slice | None:
    """Where a weight or bias that is not fused lies in the whole; None where it is the whole.

    Raises StageError, naming it, for a layer that is split in another way.
    """
    ranks = _ranks(module)
    if ranks == 1:
        return None
    whole_out, whole_in = getattr(module, "output_size", None), getattr(module, "input_size", None)
    if isinstance(whole_out, int) and isinstance(whole_in, int) and tensor.ndim in (1, 2):
        whole = (whole_out, whole_in)[: tensor.ndim]
        split = [dim for dim, size in enumerate(whole) if tensor.shape[dim] != size]
        if not split:
            return None
        found = Slice(whole, split[0], int(module.tp_rank) * tensor.shape[split[0]])  # type: ignore[arg-type]
        if tensor.shape[split[0]] * ranks == whole[split[0]] and found.fits(tuple(tensor.shape)):
            return found
    raise StageError(
        f"{name} of shape {tuple(tensor.shape)} is split over {ranks} ranks in a way that is not known here",
        "this layer needs a rule in weight_bus/vllm/weights.py, or serve the model with one GPU an engine",
    )


def _ranks(module: nn.Module) -> int:
    return int(getattr(module, "tp_size", 1))
