"""Checkpoints: weights and optimizer state as safetensors (no pickle), visible only when whole.

checkpoints/
  step-00000020/   model.safetensors      weights by their Hugging Face names, training dtype
                   optimizer.safetensors  "<parameter>/<state>": exp_avg, exp_avg_sq, step
                   meta.json              {"schema", "run_id", "version", "fingerprint"}
  final/           a Hugging Face folder with tokenizer, as `transformers` loads it

The two newest are kept: should the newest turn out broken, the one before it still leads back, through the step log.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from services.wire.errors import RollmeshError
from trainer.folders import appearing, sweep
from trainer.learner import Learner, named_weights

SCHEMA = 1
KEEP = 2
_PREFIX = "step-"
# Written anew with the model; everything else of its folder (tokenizer, chat template …) is carried over.
_WRITTEN_ANEW = ("config.json", "generation_config.json", "model.safetensors.index.json")

_log = structlog.get_logger()


class CheckpointError(RollmeshError):
    """A checkpoint does not fit the model, or cannot be read."""

    code = "checkpoint"


class Meta(msgspec.Struct, frozen=True):
    schema: int
    run_id: str
    version: int
    fingerprint: str


@dataclass(frozen=True)
class Snapshot:
    """Copies of everything a checkpoint holds, so that training can go on while it is written."""

    meta: Meta
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def snapshot(learner: Learner, run_id: str, fingerprint: str) -> Snapshot:
    """Copy the learner's state to the host."""
    names = {id(parameter): name for name, parameter in learner.model.named_parameters()}
    state = {
        f"{names[id(parameter)]}/{key}": value.detach().to("cpu", copy=True)
        for parameter, values in learner.optimizer.state.items()
        for key, value in values.items()
    }
    weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in learner.weights().items()}
    return Snapshot(Meta(SCHEMA, run_id, learner.version, fingerprint), weights, state)


def save(folder: Path, taken: Snapshot) -> Path:
    """Write a snapshot under `folder` and forget all but the newest two; returns its path. Raises OSError."""
    target = folder / f"{_PREFIX}{taken.meta.version:08d}"
    if not target.exists():
        with appearing(target) as making:
            save_file(taken.weights, making / "model.safetensors", metadata={"format": "pt"})
            save_file(taken.optimizer, making / "optimizer.safetensors")
            (making / "meta.json").write_bytes(msgspec.json.encode(taken.meta))
    for old in versions(folder)[:-KEEP]:
        shutil.rmtree(folder / f"{_PREFIX}{old:08d}", ignore_errors=True)
    return target


def versions(folder: Path) -> list[int]:
    """Versions of the checkpoints under `folder`, oldest first."""
    found = (path.name.removeprefix(_PREFIX) for path in folder.glob(f"{_PREFIX}*"))
    return sorted(int(version) for version in found if version.isdigit())


def restore_newest(folder: Path, learner: Learner, run_id: str) -> int | None:
    """Load the newest readable checkpoint into `learner`; returns its version, or None where there is none.

    Raises CheckpointError when none that is there can be used.
    """
    sweep(folder)
    known = versions(folder)
    for version in reversed(known):
        try:
            _restore(folder / f"{_PREFIX}{version:08d}", learner, run_id)
            return version
        except (OSError, msgspec.DecodeError, SafetensorError, ValueError, KeyError, CheckpointError) as error:
            _log.warning("checkpoint not usable", version=version, why=str(error))
    if known:
        raise CheckpointError(f"no checkpoint under {folder} can be used", "start a new run with another --run-dir")
    return None


def save_final(folder: Path, model: PreTrainedModel, base: Path) -> Path:
    """Write `folder/final`: the model, and what else its original folder `base` holds. Raises OSError."""
    target = folder / "final"
    shutil.rmtree(target, ignore_errors=True)
    with appearing(target) as making:
        for path in base.iterdir():
            if path.is_file() and path.suffix != ".safetensors" and path.name not in _WRITTEN_ANEW:
                shutil.copy2(path, making / path.name)
        model.save_pretrained(making)
    return target


def _restore(path: Path, learner: Learner, run_id: str) -> None:
    meta = msgspec.json.decode((path / "meta.json").read_bytes(), type=Meta)
    if (meta.schema, meta.run_id) != (SCHEMA, run_id):
        raise CheckpointError(f"{path} belongs to run {meta.run_id}", "choose another --run-dir")
    weights = load_file(path / "model.safetensors")
    state = load_file(path / "optimizer.safetensors")
    live = named_weights(learner.model)
    if weights.keys() != live.keys() or any(live[name].shape != tensor.shape for name, tensor in weights.items()):
        raise CheckpointError(f"{path} holds other weights than the model", "give --model the run's own model")
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(weights[name])
    parameters = dict(learner.model.named_parameters())
    learner.optimizer.state.clear()
    for key, value in state.items():
        name, _, field = key.rpartition("/")
        parameter = parameters[name]
        learner.optimizer.state[parameter][field] = value.to(parameter.device)
    learner.version = meta.version
