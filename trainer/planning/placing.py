"""Settings, a model's shape and devices as a placement: what each process wants, and where it stands.

trainer            one device a rank, by the memory formula
rollout-server-N   rollout.tensor_parallel devices, by the engine's sum
teacher            likewise, where `rollmesh up` serves one
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from services.config.checks import ranks_asked
from services.config.settings import RunSettings
from services.host.devices import Device
from services.policies.placement.engine_memory import RUNTIME, SETS, EngineOptions, engine_estimate
from services.policies.placement.place import Placement, PlacementError, Wanted, place
from services.policies.placement.propose import Proposal, propose
from services.policies.training.memory import Estimate, estimate
from services.policies.training.model_shape import ModelShape
from services.wire.errors import UsageError
from trainer.memory.options import Machine, options_of
from trainer.planning.plan import read_context, read_shape

_CONTEXT = 4096
"""Taken where a configuration says none."""


def engine_options(settings: RunSettings, context: int | None) -> EngineOptions:
    """What the engine's sum reads of the settings. `context`: of the model, in tokens."""
    rollout, vllm = settings.rollout, settings.rollout.vllm
    item = 4.0 if settings.model.dtype == "float32" else 2.0
    told, alone = vllm.quantization or "", settings.weights.publish == "adapter"
    weights = 1.0 if "8" in told else 0.5 if "4" in told else item
    return EngineOptions(
        context=vllm.max_model_len or context or _CONTEXT,
        ranks=rollout.tensor_parallel,
        item_bytes=weights,
        kv_bytes=1.0 if "8" in (vllm.kv_cache_dtype or "") else item,
        batched=vllm.max_num_batched_tokens or 8192,
        running=rollout.max_running,
        # Merged with a base that is held, too.
        sets=SETS[settings.weights.shadow] + float(alone and settings.engine == "torch"),
        adapter_rank=settings.trainer.lora.rank if alone and settings.engine != "torch" else 0,
    )


def placement_of(
    settings: RunSettings, model: Path | None, devices: Sequence[Device], *, trainer: bool = True
) -> Placement:
    """`model`: its folder, None where a tiny one is still made. `trainer`: whether there is one.

    Raises UsageError, with the sum, for what cannot be placed.
    """
    ranks = ranks_asked(settings.trainer.parallel)
    wanted = Wanted("trainer", ranks, _of_trainer(settings, model, devices), together=False) if trainer else None
    takes = _of_engine(settings, model)
    engines = [
        Wanted(f"rollout-server-{number}", settings.rollout.tensor_parallel, takes)
        for number in range(settings.servers)
    ]
    teacher = settings.trainer.teacher
    if trainer and teacher.model is not None and teacher.url is None:
        of_teacher = _of_engine(settings, Path(teacher.model))
        engines.append(Wanted("teacher", settings.rollout.tensor_parallel, of_teacher))
    try:
        return place(wanted, engines, devices, shared=shares(settings, devices))
    except PlacementError as error:
        raise UsageError(str(error), "see `rollmesh placement --fit`, or take more GPUs") from error


def propose_for(settings: RunSettings, model: Path, devices: Sequence[Device]) -> tuple[Proposal, list[str]]:
    """What fits, and its settings as lines of a configuration. Raises UsageError, with the sum, where nothing does."""
    shape = read_shape(model)
    smallest = min(device.nbytes for device in devices)
    asked = options_of(settings, Machine(ranks_asked(settings.trainer.parallel), smallest))
    try:
        found = propose(shape, asked, engine_options(settings, read_context(model)), devices)
    except PlacementError as error:
        raise UsageError(str(error), "take more GPUs, or larger ones, or adapters (trainer.lora.rank=16)") from error
    options = found.trainer.options
    lines = [
        f"servers = {found.engines}",
        f"rollout.tensor_parallel = {found.ranks}",
        f"trainer.parallel.data = {options.layout.data}",
        f"trainer.parallel.tensor = {options.layout.tensor}",
        f"trainer.micro_batch_tokens = {options.tokens}",
        f'trainer.activation_checkpointing = "{options.checkpointing}"',
        f"trainer.activation_offload = {str(options.activation_offload).lower()}",
        f"trainer.optimizer.offload = {str(options.optimizer_offload).lower()}",
    ]
    return found, lines


def shares(settings: RunSettings, devices: Sequence[Device]) -> bool:
    """Whether trainer and engines stand on one device."""
    return settings.placement.shared == "always" or (settings.placement.shared == "auto" and len(devices) == 1)


def _of_trainer(settings: RunSettings, model: Path | None, devices: Sequence[Device]) -> Estimate:
    shape = None if model is None else _shape(model)
    if shape is None:
        return Estimate("trainer", {"runtime": RUNTIME})
    smallest = min((device.nbytes for device in devices), default=0)
    machine = Machine(ranks_asked(settings.trainer.parallel), smallest)
    found = estimate(shape, options_of(settings, machine))
    return replace(found, parts={**found.parts, "runtime": RUNTIME // 4})


def _of_engine(settings: RunSettings, model: Path | None) -> Estimate:
    shape = None if model is None else _shape(model)
    if model is None or shape is None:
        return Estimate("engine", {"runtime": RUNTIME})
    return engine_estimate(shape, engine_options(settings, read_context(model)))


def _shape(model: Path) -> ModelShape | None:
    """None for a configuration that the formula does not know: then its memory is not known beforehand."""
    try:
        return read_shape(model)
    except UsageError:
        return None
