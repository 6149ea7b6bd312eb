"""A model folder that several ranks load: each reads what it holds of every tensor, and no more.

    config.json ──► a model on meta ──► cut, sharded (`trainer.parallel`) ──► memory for this rank's parts
    *.safetensors ──────────────────── the ranges of indices that are here ──────────► written into them

A model holds some tensors fused, or under other names than its folder. What of the folder's tensors lies on a rank is asked
of what the rank would publish (`weight_bus.manifest.published`): views of its parts, by the folder's names. So what is read
is what would be written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from copy import deepcopy
from pathlib import Path

import structlog
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.initialization import meta_device_safe_creation_ops

from services.wire.errors import NoModelError, UsageError
from trainer.checkpoint.model_folder import check_policy
from trainer.checkpoint.parts import Stored
from trainer.model.forward import freeze_beside_text
from trainer.model.learner import named_weights
from weight_bus.manifest.local_part import LocalPart, Ranges, part_of
from weight_bus.manifest.published import PublishedNames, name_in

_MAPPED_BYTES = 16 << 20
"""Read of mapped files before they are let go of: until then they count as memory of the process. Pieces of tensors are no
larger."""
_log = structlog.get_logger()


class SharedFolder:
    """`empty` gives a model on meta; `fill`, once it is cut and sharded, its weights, as `load_policy` would."""

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        """Raises UsageError as `load_policy` does."""
        check_policy(folder, trust_remote_code=trust_remote_code)
        self._folder, self._trusted = folder, trust_remote_code
        self._paths = sorted(folder.glob("*.safetensors"))
        try:
            self._config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, KeyError) as error:
            raise NoModelError(folder, error) from error

    @property
    def why_whole(self) -> str | None:
        """Why its weights cannot be read in parts; None where they can."""
        if not self._paths:
            return "it has no safetensors files"
        if getattr(self._config, "quantization_config", None) is not None:
            return "its weights are quantised"
        return None

    def empty(self) -> PreTrainedModel:
        """The policy in float32, without weights: its parameters are on meta, its buffers are made. Raises UsageError."""
        try:
            with torch.device("meta"), meta_device_safe_creation_ops():
                model: PreTrainedModel = AutoModelForCausalLM.from_config(
                    deepcopy(self._config), dtype=torch.float32, trust_remote_code=self._trusted
                )
            if model.can_generate() and (self._folder / "generation_config.json").is_file():
                model.generation_config = GenerationConfig.from_pretrained(self._folder)
        except (OSError, ValueError, KeyError) as error:
            raise NoModelError(self._folder, error) from error
        model.config.name_or_path = str(self._folder)
        _make_buffers(model)
        with Stored(self._paths) as stored:
            _know_names(model, stored.shapes)
        freeze_beside_text(model)
        return model.eval()

    @torch.no_grad()
    def fill(self, model: PreTrainedModel, device: torch.device) -> None:
        """Read what this rank holds of the weights that are on meta, onto `device`. Others (adapters) stay as they are.

        Raises UsageError where the folder lacks one, or has it in another shape.
        """
        buffers = {name for name, _ in model.named_buffers()}
        empty = [name for name, each in named_weights(model).items() if each.is_meta or name in buffers]
        _make_parameters(model, device)
        state = model.state_dict(keep_vars=True)
        # peft moves a layer that it puts adapters on.
        wanted = {name.replace(".base_layer.", "."): state[name].detach() for name in empty}
        prefix, read, since = f"{model.base_model_prefix}.", 0, 0
        with Stored(self._paths) as stored:
            for name, tensor in PublishedNames(model, wanted).views(wanted).items():
                key, part = name_in(stored.shapes, name, prefix), _part(name, tensor)
                if key is None or stored.shapes[key] != tuple(part.shape):
                    has = "no such tensor" if key is None else f"one of {list(stored.shapes[key])}"
                    raise UsageError(
                        f"the model has {name} {list(part.shape)}, and {self._folder} has {has}",
                        "load it with transformers, save that, and give --model the folder saved",
                    )
                for spans, local in _pieces(part):
                    since += stored.read_into(key, spans, local)
                    if since >= _MAPPED_BYTES:
                        stored.let_go()
                        read, since = read + since, 0
        _log.info("this rank's part of the weights is read", mib=(read + since) >> 20)


def _make_buffers(model: PreTrainedModel) -> None:
    """As the model's own code makes them (rotary frequencies): on meta they were not."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    model.initialize_weights()


def _know_names(model: PreTrainedModel, keys: Collection[str]) -> None:
    """Which of its family's ways to name and fuse tensors the folder needs, as `from_pretrained` notes it."""
    conversions, state = get_model_conversion_mapping(model), model.state_dict()
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    for key in keys:
        rename_source_key(key, renamings, converters, model.base_model_prefix, state)
    model._weight_conversions = [each for each in conversions if each.was_used()]


def _make_parameters(model: nn.Module, device: torch.device) -> None:
    """Memory for this rank's part of each parameter that is on meta, without values; tied ones stay one."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(_room_for(parameter, device), parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]


def _room_for(parameter: Tensor, device: torch.device) -> Tensor:
    if not isinstance(parameter, DTensor):
        return torch.empty_like(parameter, device=device)
    local = torch.empty(parameter.to_local().shape, dtype=parameter.dtype, device=device)
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


def _pieces(part: LocalPart) -> Iterator[tuple[tuple[Ranges, ...], Tensor]]:
    """`part` as some of its rows after the others: their spans, and where they are to be written."""
    if not part.local.numel() or not part.spans:
        yield part.spans, part.local
        return
    rows = max(1, _MAPPED_BYTES * len(part.local) // part.local.nbytes)
    for first in range(0, len(part.local), rows):
        local = part.local[first : first + rows]
        yield (_among(part.spans[0], first, len(local)), *part.spans[1:]), local


def _among(ranges: Ranges, first: int, count: int) -> Ranges:
    """Of the indices in `ranges` `count`, from the one at place `first` on."""
    found, place = [], 0
    for start, stop in ranges:
        low, high = max(start, start + first - place), min(stop, start + first + count - place)
        if low < high:
            found.append((low, high))
        place += stop - start
    return tuple(found)


def _part(name: str, tensor: Tensor | LocalPart) -> LocalPart:
    """What of a tensor of the folder is on this rank."""
    if isinstance(tensor, LocalPart):
        return tensor
    if isinstance(tensor, DTensor):
        return part_of(name, tensor)
    return LocalPart(tensor.shape, tuple(((0, size),) for size in tensor.shape), tensor)
