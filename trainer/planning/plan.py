"""A folder and settings as a plan: the formula's answer, and the fake run's, for one rank of a machine.

What a CPU does not take (offloads, 8 bits of state by a library's kernels) is left out of the fake run, and counted on what
it found: `placed`.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from services.config.fitting import read_facts
from services.config.settings import RunSettings
from services.policies.training.memory import MemoryOptions, estimate, keeps_layers
from services.policies.training.memory_fit import fit as find_fit
from services.policies.training.memory_fit import smallest
from services.policies.training.model_shape import ModelShape, shape_of
from services.wire.errors import NoModelError, UsageError
from trainer.memory.options import Machine, options_of
from trainer.planning.report import MemoryReport, MomentReport

_SHARES = (0.95, 0.87, 0.8, 0.7)
"""Of a GPU's memory that a fit may fill, by the formula: the next one where the fake run finds more."""


_GIB = 1 << 30


def find_folder(model: Path) -> Path:
    """A folder with a config.json, or that of a name. Raises UsageError as `find_model` does."""
    folder = model.expanduser()
    if (folder / "config.json").exists():
        return folder
    from trainer.fetch.local import find_model

    return find_model(model)


def read_shape(folder: Path) -> ModelShape:
    """Raises NoModelError for a config.json that does not say what is needed."""
    try:
        return shape_of(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise NoModelError(folder, error) from error


def read_context(folder: Path) -> int | None:
    """Tokens of the longest context that a config.json says. Raises NoModelError for one that cannot be read."""
    return read_facts(folder).context


def _fit_settings(
    shape: ModelShape, settings: RunSettings, machine: Machine, share: float
) -> tuple[RunSettings, list[str]]:
    """The settings with what the fit chose, and its lines. `share`: of the GPU's memory that may be filled.

    Raises UsageError, with the sum, where nothing fits.
    """
    assert machine.device_bytes is not None
    asked = options_of(settings, machine)
    found = find_fit(shape, asked, share * machine.device_bytes)
    if found is None:
        least = smallest(shape, asked).estimate
        raise UsageError(
            f"nothing fits: with everything checkpointed and offloaded it is {least.total / _GIB:.1f} GiB of "
            f"{machine.device_bytes / _GIB:.1f} ({least.words})",
            "take more GPUs, fewer trainer.micro_batch_tokens, or adapters (trainer.lora.rank=16)",
        )
    options, trainer = found.options, settings.trainer
    parallel = trainer.parallel.model_copy(update={"data": options.layout.data, "tensor": options.layout.tensor})
    chosen = trainer.model_copy(
        update={
            "micro_batch_tokens": options.tokens,
            "activation_checkpointing": options.checkpointing,
            "activation_offload": options.activation_offload,
            "optimizer": trainer.optimizer.model_copy(update={"offload": options.optimizer_offload}),
            "parallel": parallel,
        }
    )
    lines = [
        f"trainer.micro_batch_tokens = {options.tokens}",
        f'trainer.activation_checkpointing = "{options.checkpointing}"',
        f"trainer.activation_offload = {str(options.activation_offload).lower()}",
        f"trainer.optimizer.offload = {str(options.optimizer_offload).lower()}",
    ]
    if machine.ranks > 1:
        lines.append(f"trainer.parallel.data = {options.layout.data}")
        lines.append(f"trainer.parallel.tensor = {options.layout.tensor}")
    return settings.model_copy(update={"trainer": chosen}), lines


def make_report(
    folder: Path, settings: RunSettings, machine: Machine, *, row: int | None = None, fit: bool, quick: bool
) -> MemoryReport:
    """Raises UsageError for what cannot be planned, or, with `fit`, where nothing fits."""
    shape = read_shape(folder)
    if not fit:
        return _of(folder, shape, settings, machine, row, [], quick=quick)
    for share in _SHARES:
        chosen, lines = _fit_settings(shape, settings, machine, share)
        report = _of(folder, shape, chosen, machine, row, lines, quick=quick)
        if report.fits:
            break
    return report


def _of(
    folder: Path,
    shape: ModelShape,
    settings: RunSettings,
    machine: Machine,
    row: int | None,
    lines: list[str],
    *,
    quick: bool,
) -> MemoryReport:
    options = options_of(settings, machine)
    report = _by_formula(folder.name, shape, options, machine, lines)
    if quick:
        return report
    from services.host.process import heavy_imports

    with heavy_imports():
        from trainer.planning.fake_run import read_config, run_fake

    config = read_config(folder, trust_remote_code=settings.model.trust_remote_code)
    plan = run_fake(config, settings, options, row)
    moments = [MomentReport(where=each.where, bytes=each.total, parts=dict(each.parts)) for each in plan.moments]
    peak = max(moments, key=lambda moment: moment.bytes)
    return msgspec.structs.replace(
        report,
        parameters=plan.parameters,
        trained=plan.trained,
        peak=peak,
        moments=moments,
        fits=None if machine.device_bytes is None else peak.bytes <= machine.device_bytes,
        assumed=[*report.assumed, *plan.assumed],
    )


def _by_formula(
    name: str, shape: ModelShape, options: MemoryOptions, machine: Machine, lines: list[str]
) -> MemoryReport:
    said = estimate(shape, options)
    return MemoryReport(
        model=name,
        parameters=shape.parameters,
        trained=shape.adapters(options.lora_rank) * shape.layers if options.lora_rank else shape.parameters,
        ranks=options.layout.ranks,
        layout=str(options.layout),
        device="gpu" if machine.gpu else "cpu",
        device_bytes=machine.device_bytes,
        dtype="bfloat16" if options.half else "float32",
        tokens=options.tokens,
        peak=None,
        moments=[],
        formula_bytes=said.total,
        formula=said.words,
        host=dict(said.host),
        fits=None if machine.device_bytes is None else said.total <= machine.device_bytes,
        assumed=[],
        settings=lines,
        reshard_after_forward=None if options.layout.ranks == 1 else not keeps_layers(shape, options),
    )
