"""Checkpoints: weights and optimizer state as safetensors (no pickle), visible only when whole. Named by version.

checkpoints/
  step-00000020/   model.safetensors      weights by the model's own names, training dtype; with LoRA the adapters alone
                   optimizer.safetensors  "<parameter>/<state>": exp_avg, exp_avg_sq, step; others of Muon's and 8 bits'
                   critic.safetensors, critic_optimizer.safetensors      the same of a critic, where there is one
                   meta.json              `Meta`
                   written by several ranks: model-00000-of-00004.safetensors …, a rank's part each (`parts`)
  final/           a Hugging Face folder with tokenizer, as `transformers` loads it; adapters are merged into its weights
  final-adapter/   the adapters alone, as `peft` loads them; with LoRA only

The two newest good ones are kept: should the newest turn out broken, the one before it still leads back, through the step
log. A broken one is written anew when its version is reached once more.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import structlog
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from services.host.files import appearing, remove_unfinished, sync
from services.wire.errors import RollmeshError
from trainer.algorithms.advantages.shaping import Moments
from trainer.checkpoint.host_copy import copied
from trainer.checkpoint.model_folder import Gathered
from trainer.checkpoint.parts import (
    Part,
    Stored,
    Writers,
    collect,
    hand_in,
    held_part,
    is_written_here,
    placed_as,
    stale,
    unspread,
    write_tensors,
)
from trainer.model.learner import named_weights, trained_weights
from trainer.model.roles import Roles
from trainer.parallel.orders import Checkpoint, Gather, tell
from trainer.parallel.ranks import Ranks
from trainer.parallel.sharding import whole
from weight_bus.manifest.computed import PublishedTensor, computed

SCHEMA = 1
KEEP = 2
PREFIX = "step-"

_log = structlog.get_logger()


class CheckpointError(RollmeshError):
    """A checkpoint does not fit the model, or cannot be read."""

    code = "checkpoint"


class MismatchError(CheckpointError):
    """A checkpoint that may be sound is of another run, model or format. Exit code 2: a restart would come to the same."""

    exit_code = 2


class UnreadableError(CheckpointError):
    """Of the checkpoints that are there none can be read."""


class Meta(msgspec.Struct, frozen=True):
    schema: int
    run_id: str
    version: int
    fingerprint: str
    log_price: float | None = None
    """Of a cost (`trainer.algorithms.advantages.rewards`); None where there is none."""
    moments: dict[str, tuple[int, float, float]] | None = None
    """Of each task's rewards (`trainer.algorithms.advantages.shaping`); None where they are not normalised."""
    skipped: int = 0
    """Versions below `version` that no step made (`trainer.model.learner.Learner.skipped`)."""
    sizes: dict[str, int] = {}
    """Bytes of each file of tensors; empty in checkpoints of before they were written down."""


@dataclass(frozen=True)
class Snapshot:
    """Copies of everything a checkpoint holds, so that training can go on while it is written.

    `tensors`: by file, then by name. `parts`: which of them are parts of larger ones, spread over ranks.
    """

    meta: Meta
    tensors: dict[str, dict[str, Tensor]]
    parts: dict[str, dict[str, Part]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for file in self.tensors.values() for tensor in file.values())


def snapshot(
    roles: Roles, run_id: str, fingerprint: str, over: Snapshot | None = None, writers: Writers | None = None
) -> Snapshot:
    """Copy the state to the host; with `writers`, what this rank is to write of it.

    `over`: an earlier snapshot, which nobody reads any more: its memory is written over, so that no new pages are needed,
    or let go of where the state has other tensors by now.
    """
    tensors: dict[str, dict[str, Tensor]] = {}
    parts: dict[str, dict[str, Part]] = {}
    for name, (model, optimizer) in roles.models().items():
        for file, live in (
            (name, trained_weights(model)),
            (_optimizer_file(name), _optimizer_state(model, optimizer)),
        ):
            written, parts[file] = {}, {}
            for key, tensor in live.items():
                if writers is None or is_written_here(tensor, writers.rank):
                    written[key], part = held_part(tensor)
                    if part is not None:
                        parts[file][key] = part
            tensors[file] = copied(written, {} if over is None else over.tensors.get(file, {}))
    log_price = None if roles.advantage_computer.price is None else roles.advantage_computer.price.log_value
    learner = roles.learner
    shaper = roles.advantage_computer.shaper
    moments = {task: (each.count, each.mean, each.squares) for task, each in shaper.by_task.items()}
    meta = Meta(
        SCHEMA,
        run_id,
        learner.version,
        fingerprint,
        log_price,
        moments if shaper.remembers else None,
        learner.skipped,
    )
    return Snapshot(meta, tensors, parts)


def gather_policy(roles: Roles) -> Gathered | None:
    """All of the policy, on rank 0, and nothing of it on others; None where one rank has it.

    Of several ranks all call it, rank 0 first: it has the others told to.
    """
    ranks, learner = roles.ranks, roles.learner
    if not ranks.several:
        return None
    if ranks.leads:
        tell(ranks, Gather())

    def gathered(tensors: Mapping[str, PublishedTensor]) -> dict[str, Tensor]:
        # One after the other: no rank but the first holds more than one whole.
        every = ((key, whole(computed(tensor))) for key, tensor in tensors.items())
        return {key: tensor.cpu() for key, tensor in every if ranks.leads}

    own, adapters = named_weights(learner.model), learner.adapters
    if adapters is None:
        return Gathered(gathered(own), {})
    return Gathered(gathered(adapters.merged(own)), gathered(adapters.state()))


def save(folder: Path, taken: Snapshot) -> Path:
    """Write a snapshot under `folder` and forget all but the newest two good ones; returns its path. Raises OSError.

    One that is there already and good is left alone: the same version has the same bytes.
    """
    target = path_of(folder, taken.meta.version)
    if not is_good(target):
        _set_aside(target)
        with appearing(target) as making:
            sizes = _write(making, taken, {file: f"{file}.safetensors" for file in taken.tensors})
            _write_meta(making, taken, sizes)
        shutil.rmtree(_aside(target), ignore_errors=True)
    _forget(folder, taken.meta.version)
    return target


def take(folder: Path, roles: Roles, run_id: str, fingerprint: str, over: Snapshot | None = None) -> Snapshot:
    """`snapshot` of what this rank is to write under `folder`. For rank 0: the others are told to write theirs."""
    learner, ranks = roles.learner, roles.ranks
    tell(ranks, Checkpoint(str(folder), learner.version, learner.skipped))
    return snapshot(roles, run_id, fingerprint, over, writers_of(ranks))


def writers_of(ranks: Ranks) -> Writers | None:
    """None for one rank, which writes whole files."""
    return Writers(ranks.rank, ranks.layout.ranks, ranks.launch) if ranks.several else None


def write(folder: Path, taken: Snapshot, writers: Writers | None = None) -> Path:
    """`save`, or `save_part` where several ranks write."""
    return save(folder, taken) if writers is None else save_part(folder, taken, writers)


def save_part(folder: Path, taken: Snapshot, writers: Writers) -> Path:
    """Write this rank's part of a checkpoint, which all ranks of `writers` write together; returns its path.

    On rank 0 it waits for the others, makes the checkpoint visible and forgets older ones, as `save` does. Raises OSError,
    and DeadlineError on rank 0 where another does not come.
    """
    target = path_of(folder, taken.meta.version)
    making = writers.making(target)
    if writers.rank == 0:
        for left in stale(folder, writers.launch):
            shutil.rmtree(left, ignore_errors=True)
    making.mkdir(parents=True, exist_ok=True)
    hand_in(target, writers, _write(making, taken, {file: writers.file(file) for file in taken.tensors}))
    if writers.rank:
        return target
    _write_meta(making, taken, collect(target, writers, taken.nbytes))
    sync(making / "meta.json")
    sync(making)
    if is_good(target):
        shutil.rmtree(making)
    else:
        _set_aside(target)
        making.rename(target)
        sync(folder)
        shutil.rmtree(_aside(target), ignore_errors=True)
    _forget(folder, taken.meta.version)
    return target


def _write(making: Path, taken: Snapshot, names: Mapping[str, str]) -> dict[str, int]:
    """The snapshot's tensors under `names`; returns the files' sizes in bytes."""
    for file, tensors in taken.tensors.items():
        write_tensors(making / names[file], tensors, taken.parts.get(file, {}))
    return {name: (making / name).stat().st_size for name in names.values()}


def _write_meta(making: Path, taken: Snapshot, sizes: dict[str, int]) -> None:
    meta = msgspec.structs.replace(taken.meta, sizes=sizes)
    (making / "meta.json").write_bytes(msgspec.json.encode(meta))


def _forget(folder: Path, newest: int) -> None:
    kept = good_versions(folder)[-KEEP:]
    for version in versions(folder):
        if version not in kept and version < newest:
            shutil.rmtree(path_of(folder, version), ignore_errors=True)


def versions(folder: Path) -> list[int]:
    """Versions of the checkpoints under `folder`, oldest first."""
    found = (path.name.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*"))
    return sorted(int(version) for version in found if version.isdigit())


def good_versions(folder: Path) -> list[int]:
    """Those of `versions` that are whole, as far as their headers tell."""
    return [version for version in versions(folder) if is_good(path_of(folder, version))]


def is_good(path: Path) -> bool:
    """Whether a checkpoint is there with all its files, each as long as it was written; tensors are not read."""
    try:
        meta = _meta(path)
        for name in meta.sizes or [file.name for file in path.glob("*.safetensors")]:
            with safe_open(path / name, framework="pt") as file:
                file.keys()
        return all((path / name).stat().st_size == size for name, size in meta.sizes.items())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, SafetensorError):
        return False


def restore_version(folder: Path, version: int, roles: Roles, run_id: str) -> None:
    """Load the checkpoint of `version`, which rank 0 has loaded. Raises what keeps another rank from it."""
    _restore(path_of(folder, version), roles, run_id)


def restore_newest(folder: Path, roles: Roles, run_id: str) -> int | None:
    """Load the newest readable checkpoint into `roles`; returns its version, or None where there is none.

    Raises UnreadableError when none that is there can be read, MismatchError where one is of another run or model;
    then nothing has changed.
    """
    remove_unfinished(folder)
    mismatch: MismatchError | None = None
    known = versions(folder)
    for version in reversed(known):
        try:
            _restore(path_of(folder, version), roles, run_id)
            return version
        except MismatchError as error:
            mismatch = mismatch or error
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, SafetensorError, ValueError, KeyError) as error:
            _log.warning("checkpoint not usable", version=version, why=str(error))
    if mismatch is not None:
        raise mismatch
    if known:
        raise UnreadableError(f"no checkpoint under {folder} can be used", "start a new run with another --run-dir")
    return None


def load_weights(path: Path, model: PreTrainedModel) -> None:
    """The weights of the checkpoint `path` into `model`, with its adapters where there are any.

    Raises UnreadableError for one that is not there or not whole, MismatchError for one of another model.
    """
    if not is_good(path):
        there = ", ".join(map(str, good_versions(path.parent))) or "none"
        raise UnreadableError(f"{path} is no whole checkpoint", f"versions there are: {there}")
    _put(trained_weights(model), _weights(path, "model", trained_weights(model)))


def _weights(path: Path, name: str, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What this rank has of each weight. Raises MismatchError where the checkpoint is of another model."""
    with Stored.of_checkpoint(path, name) as stored:
        _check_fit(path, name, live, stored.shapes)
        return {key: stored.read(key, tensor) for key, tensor in live.items()}


@torch.no_grad()
def _put(live: Mapping[str, Tensor], read: Mapping[str, Tensor]) -> None:
    for key, tensor in live.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local.copy_(read[key])


def _check_fit(path: Path, name: str, live: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    if shapes.keys() != live.keys() or any(tuple(live[key].shape) != shape for key, shape in shapes.items()):
        raise MismatchError(f"{path} holds other weights than the {name}", "give --model the run's own model")


def path_of(folder: Path, version: int) -> Path:
    """Where the checkpoint of `version` is, or would be."""
    return folder / f"{PREFIX}{version:08d}"


def _aside(target: Path) -> Path:
    return target.with_name(f".broken-{target.name}")


def _set_aside(target: Path) -> None:
    """Make room for a checkpoint where a broken one lies; it is removed once the good one is there."""
    if target.exists():
        shutil.rmtree(_aside(target), ignore_errors=True)
        target.rename(_aside(target))
        sync(target.parent)


def _meta(path: Path) -> Meta:
    return msgspec.json.decode((path / "meta.json").read_bytes(), type=Meta)


def _restore(path: Path, roles: Roles, run_id: str) -> None:
    """Nothing is changed unless all of it can be read and fits."""
    meta = _meta(path)
    if meta.schema != SCHEMA:
        raise MismatchError(
            f"{path} is of format {meta.schema}, this rollmesh reads {SCHEMA}",
            "end the run with the rollmesh of before",
        )
    if meta.run_id != run_id:
        raise MismatchError(f"{path} belongs to run {meta.run_id}", "choose another --run-dir")
    if (meta.log_price is None) != (roles.advantage_computer.price is None):
        raise MismatchError(f"{path} is of a run with another advantage.cost", "continue it with its own config.toml")
    if (meta.moments is not None) != roles.advantage_computer.shaper.remembers:
        raise MismatchError(
            f"{path} is of a run with another advantage.reward.normalise", "continue it with its own config.toml"
        )
    loaded: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}
    for name, (model, _) in roles.models().items():
        weights = _weights(path, name, trained_weights(model))
        loaded[name] = weights, _stored_state(path, name, dict(model.named_parameters()))
    for name, (model, optimizer) in roles.models().items():
        weights, state = loaded[name]
        _put(trained_weights(model), weights)
        _load_optimizer(model, optimizer, state, on_host=roles.learner.settings.optimizer.offload)
    if roles.advantage_computer.price is not None and meta.log_price is not None:
        roles.advantage_computer.price.log_value = meta.log_price
    roles.advantage_computer.shaper.by_task = {
        task: Moments(*figures) for task, figures in (meta.moments or {}).items()
    }
    roles.learner.version, roles.learner.skipped = meta.version, meta.skipped


def _optimizer_file(model: str) -> str:
    return "optimizer" if model == "model" else f"{model}_optimizer"


def _stored_state(path: Path, name: str, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The optimizer's state, of weights that are spread over ranks as those are."""
    state: dict[str, Tensor] = {}
    with Stored.of_checkpoint(path, _optimizer_file(name)) as stored:
        for key, shape in stored.shapes.items():
            parameter = parameters.get(key.rpartition("/")[0])
            if parameter is None:
                raise ValueError(f"{path} holds the optimizer's state of {key}, which is no parameter")
            state[key] = placed_as(parameter, stored.read(key, parameter), shape)
    return state


def _optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state: dict[str, Tensor] = {}
    for parameter, values in optimizer.state.items():
        for field_name, value in values.items():
            key = f"{names[id(parameter)]}/{field_name}"
            unspread(key, value, parameter)
            state[key] = value
    return state


def _load_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Tensor], *, on_host: bool
) -> None:
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for key, value in state.items():
        name, _, field = key.rpartition("/")
        parameter = parameters[name]
        optimizer.state[parameter][field] = value if on_host else value.to(parameter.device)
