"""Checkpoints: weights and optimizer state as safetensors (no pickle), visible only when whole.

checkpoints/
  step-00000020/   model.safetensors      weights by their Hugging Face names, training dtype
                   optimizer.safetensors  "<parameter>/<state>": exp_avg, exp_avg_sq, step
                   critic.safetensors, critic_optimizer.safetensors      the same of a critic, where there is one
                   meta.json              {"schema", "run_id", "version", "fingerprint", "log_price"}
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

from services.host.files import appearing, remove_unfinished
from services.wire.errors import RollmeshError
from trainer.model.learner import named_weights
from trainer.model.roles import Roles

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
    log_price: float | None = None
    """Of a cost (`trainer.algorithms.advantages.rewards`); None where there is none."""


@dataclass(frozen=True)
class Snapshot:
    """Copies of everything a checkpoint holds, so that training can go on while it is written.

    `tensors`: by file, then by name.
    """

    meta: Meta
    tensors: dict[str, dict[str, Tensor]]


def snapshot(roles: Roles, run_id: str, fingerprint: str) -> Snapshot:
    """Copy the state to the host."""
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, (model, optimizer) in roles.models().items():
        weights = {key: tensor.detach().to("cpu", copy=True) for key, tensor in named_weights(model).items()}
        tensors |= {f"{name}.safetensors": weights, _optimizer_file(name): _optimizer_state(model, optimizer)}
    log_price = None if roles.advantage_computer.price is None else roles.advantage_computer.price.log_value
    return Snapshot(Meta(SCHEMA, run_id, roles.learner.version, fingerprint, log_price), tensors)


def save(folder: Path, taken: Snapshot) -> Path:
    """Write a snapshot under `folder` and forget all but the newest two; returns its path. Raises OSError."""
    target = folder / f"{_PREFIX}{taken.meta.version:08d}"
    if not target.exists():
        with appearing(target) as making:
            for name, tensors in taken.tensors.items():
                save_file(tensors, making / name, metadata={"format": "pt"})
            (making / "meta.json").write_bytes(msgspec.json.encode(taken.meta))
    for old in versions(folder)[:-KEEP]:
        shutil.rmtree(folder / f"{_PREFIX}{old:08d}", ignore_errors=True)
    return target


def versions(folder: Path) -> list[int]:
    """Versions of the checkpoints under `folder`, oldest first."""
    found = (path.name.removeprefix(_PREFIX) for path in folder.glob(f"{_PREFIX}*"))
    return sorted(int(version) for version in found if version.isdigit())


def restore_newest(folder: Path, roles: Roles, run_id: str) -> int | None:
    """Load the newest readable checkpoint into `roles`; returns its version, or None where there is none.

    Raises CheckpointError when none that is there can be used.
    """
    remove_unfinished(folder)
    known = versions(folder)
    for version in reversed(known):
        try:
            _restore(folder / f"{_PREFIX}{version:08d}", roles, run_id)
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


def _restore(path: Path, roles: Roles, run_id: str) -> None:
    meta = msgspec.json.decode((path / "meta.json").read_bytes(), type=Meta)
    if (meta.schema, meta.run_id) != (SCHEMA, run_id):
        raise CheckpointError(f"{path} belongs to run {meta.run_id}", "choose another --run-dir")
    if (meta.log_price is None) != (roles.advantage_computer.price is None):
        raise CheckpointError(f"{path} is of a run with another advantage.cost", "continue it with its own config.toml")
    loaded = {
        name: (load_file(path / f"{name}.safetensors"), load_file(path / _optimizer_file(name)))
        for name in roles.models()
    }
    for name, (model, _) in roles.models().items():
        live, weights = named_weights(model), loaded[name][0]
        if weights.keys() != live.keys() or any(live[key].shape != tensor.shape for key, tensor in weights.items()):
            raise CheckpointError(f"{path} holds other weights than the {name}", "give --model the run's own model")
    for name, (model, optimizer) in roles.models().items():
        weights, state = loaded[name]
        with torch.no_grad():
            for key, tensor in named_weights(model).items():
                tensor.copy_(weights[key])
        _load_optimizer(model, optimizer, state)
    if roles.advantage_computer.price is not None and meta.log_price is not None:
        roles.advantage_computer.price.log_value = meta.log_price
    roles.learner.version = meta.version


def _optimizer_file(model: str) -> str:
    return "optimizer.safetensors" if model == "model" else f"{model}_optimizer.safetensors"


def _optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}/{key}": value.detach().to("cpu", copy=True)
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
    }


def _load_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for key, value in state.items():
        name, _, field = key.rpartition("/")
        parameter = parameters[name]
        optimizer.state[parameter][field] = value.to(parameter.device)
