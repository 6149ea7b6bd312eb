"""Two data ranks on two cores against one: trained tokens a second, what packing and advantages take of a step, and how
much memory a rank needs to publish. One rank of a process group against a learner without one.

    small     a random policy, a batch of heavy-tailed lengths
    smollm2   SmolLM2-135M under its recipe, a batch as that recipe makes them
    arm     1 or 2 processes, one thread of torch each ─► steps on one batch ─► seconds of each
    round   one rank ─► two ranks, or the other way round ─► one grouped rank and a bare learner, a step each in turn

Ranks are started by torchrun's variables, and do what the trainer's do: rank 0 packs and gives orders (`trainer.parallel`).
A run of one rank makes no process group. A grouped rank does, and shards its weights over itself: all that is done for
several ranks, but for waiting.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.harness.ranked import run_ranks
from benchmarks.trainer.report import Measured
from benchmarks.trainer.step_speed import HeavyTail, as_groups
from services.config.load import load_settings
from services.config.recipes import find_recipe
from services.host.models import packaged_folder
from services.host.run_folder import is_complete
from services.policies.training.layout import Layout
from trainer.checkpoint.model_folder import load_policy
from trainer.data.packing import pack
from trainer.data.rows import rows_of
from trainer.model.learner import Learner
from trainer.model.roles import make_roles
from trainer.model.train_batch import follow, train_batch
from trainer.parallel.orders import Stop, Train, decode, tell
from trainer.parallel.ranks import Ranks, joined
from trainer.sft.tiny_model import build_model
from weight_bus.publisher.publisher import Publisher
from weight_bus.publisher.ranks import Ranks as PublishingRanks
from weight_bus.publisher.sharding import local_part
from weight_bus.transports.shm import ShmExporter

HIDDEN_SIZE, LAYERS, STEPS = 256, 4, 5
SMOLLM2, SMOLLM2_STEPS = "smollm2-135m", 3
_WITHIN_S = 600.0
_TURNS = 4
"""Of a grouped rank and a bare learner in the time of a step on the whole batch."""
_BUCKET = 64 << 10
"""Bytes: weights of the small model are many."""


class Arm(msgspec.Struct, frozen=True):
    """Of one arm of one round. `step_s`: in the median; `pack_share`: of a step, for packing and advantages;
    `publish_share`: the most bytes that a rank holds for publishing with one arena ÷ its share and two buckets;
    `bare_s`: a step of the learner that made its steps in turn with those."""

    step_s: float
    pack_share: float
    publish_share: float = 0.0
    bare_s: float = 0.0


class _Asked(msgspec.Struct, frozen=True):
    """Of the ranks of an arm. `grouped`: one rank with a process group, beside a bare learner. `model`: its folder; None
    for a random policy of that size."""

    ranks: int
    hidden_size: int
    layers: int
    steps: int
    model: str | None = None
    grouped: bool = False


async def measure_ranks(
    rounds: int, say: Callable[[str], None], hidden_size: int = HIDDEN_SIZE, layers: int = LAYERS, steps: int = STEPS
) -> Measured:
    """Trained tokens a second: `scaling_2` of two ranks ÷ one's, `overhead_1` of one grouped rank ÷ a bare learner's.
    `pack_share`: of the steps of one rank; `publish_peak_share`: of two ranks. Raises RollmeshError when a rank fails."""
    found: dict[str, list[Arm]] = {"one": [], "two": [], "grouped": []}
    one = _Asked(1, hidden_size, layers, steps)
    two, grouped = msgspec.structs.replace(one, ranks=2), msgspec.structs.replace(one, grouped=True)
    seen = {}
    with tempfile.TemporaryDirectory(prefix="rollmesh-ranks-") as scratch:
        for number in range(1, rounds + 1):
            arms = [("one", one), ("two", two)]
            for name, asked in [*(arms if number % 2 else reversed(arms)), ("grouped", grouped)]:
                found[name].append(await _arm(asked, Path(scratch)))
            last = {name: arms[-1] for name, arms in found.items()}
            told = (
                f"a step {last['one'].step_s:.2f} s on one rank, {last['two'].step_s:.2f} s on two; of one in a group "
                f"{last['grouped'].step_s:.2f} s, of a learner in turn with it {last['grouped'].bare_s:.2f} s"
            )
            seen[f"ranks, round {number}"] = told
            say(f"ranks, round {number}: {told}")
    return Measured(
        rounds={
            "scaling_2": [one.step_s / two.step_s for one, two in zip(found["one"], found["two"], strict=True)],
            "overhead_1": [arm.bare_s / arm.step_s for arm in found["grouped"]],
            "pack_share": [arm.pack_share for arm in found["one"]],
            "publish_peak_share": [arm.publish_share for arm in found["two"]],
        },
        seen=seen,
    )


async def measure_smollm2_ranks(rounds: int, say: Callable[[str], None], steps: int = SMOLLM2_STEPS) -> Measured:
    """`scaling_smollm2`: optimizer steps of two ranks ÷ those of one, in the same time; 7 GB. Nothing without the model.

    Raises RollmeshError when a rank fails.
    """
    model = packaged_folder(SMOLLM2)
    if not is_complete(model):
        return Measured(missing={"scaling_smollm2": f"no model: rollmesh models fetch {SMOLLM2}"})
    scaling, seen = [], {}
    with tempfile.TemporaryDirectory(prefix="rollmesh-ranks-") as scratch:
        for number in range(1, rounds + 1):
            arms: dict[int, Arm] = {}
            for ranks in (1, 2) if number % 2 else (2, 1):
                arms[ranks] = await _arm(_Asked(ranks, 0, 0, steps, str(model)), Path(scratch))
            scaling.append(arms[1].step_s / arms[2].step_s)
            told = f"a step {arms[1].step_s:.1f} s on one rank, {arms[2].step_s:.1f} s on two"
            seen[f"ranks, SmolLM2, round {number}"] = told
            say(f"ranks, SmolLM2, round {number}: {told}")
    return Measured(rounds={"scaling_smollm2": scaling}, seen=seen)


async def _arm(asked: _Asked, scratch: Path) -> Arm:
    folder = Path(tempfile.mkdtemp(dir=scratch))
    found = folder / "arm.json"
    words = (str(found), msgspec.json.encode(asked).decode())
    await run_ranks(asked.ranks, "benchmarks.trainer.ranks", words, folder, _WITHIN_S)
    return msgspec.json.decode(found.read_bytes(), type=Arm)


def _run(found: Path, asked: _Asked) -> None:
    """One rank's part; rank 0 writes `found`. The first step is not counted."""
    torch.set_num_threads(1)
    tail, recipe = HeavyTail(), None
    if asked.model is not None:
        # As the run's first batches: 45 tokens of a prompt, and more than a third of the answers ends at the limit.
        tail, recipe = (
            HeavyTail(median=20.0, sigma=0.5, longest=24, vocabulary=49_152, prompt=45),
            find_recipe("smollm2"),
        )
    settings = load_settings(recipe, [f"steps={_TURNS * asked.steps + 1}", f"k={_TURNS * asked.steps + 1}"])
    groups, steps = as_groups(tail.answers(seed=1), tail.group_size), asked.steps
    if asked.grouped:
        # Shorter turns, and more of them: the pace of a core wanders from one second to the next.
        groups, steps = groups[: len(groups) // _TURNS], steps * _TURNS

    def load() -> PreTrainedModel:
        if asked.model is not None:
            return load_policy(Path(asked.model))
        return build_model(1, hidden_size=asked.hidden_size, layers=asked.layers, vocabulary=tail.vocabulary + 4)

    with ExitStack() as stack:
        bare = None
        if asked.grouped:
            dist.init_process_group("gloo")
            stack.callback(dist.destroy_process_group)
            own, bare = Ranks.of_group(Layout()), Learner(load(), settings.trainer)
        else:
            own = stack.enter_context(joined(Layout(data=asked.ranks)))
        roles = make_roles(load, settings, 0, ranks=own)
        if not own.leads:
            while isinstance(order := decode(own.receive()), Train):
                follow(roles, order)
            _publish_share(roles.learner, own, found.parent)
            return
        whole, packing, alone = [], [], list[float]()
        for _ in range(steps + 1):
            began = time.perf_counter()
            (made,) = train_batch(roles, settings, groups, 1)
            whole.append(time.perf_counter() - began)
            packing.append(made.pack_s)
            if bare is not None:
                began = time.perf_counter()
                rows, tally = rows_of(groups, bare.version, settings.k)
                bare.step(pack(rows, tally, settings.trainer.micro_batch_tokens, stem_width=bare.stem_width))
                alone.append(time.perf_counter() - began)
        tell(own, Stop())
        arm = Arm(
            statistics.median(whole[1:]),
            sum(packing[1:]) / sum(whole[1:]),
            _publish_share(roles.learner, own, found.parent) if asked.ranks > 1 else 0.0,
            statistics.median(alone[1:]) if alone else 0.0,
        )
        found.write_bytes(msgspec.json.encode(arm))


def _publish_share(learner: Learner, own: Ranks, folder: Path) -> float:
    """`Arm.publish_share`, of two versions that all ranks publish, one after the other, from one arena each."""
    run_id, weights = f"bench-{folder.name}", learner.published()
    publishing = PublishingRanks(_WITHIN_S)
    publisher = Publisher(run_id, weights, "float32", ShmExporter(run_id), _BUCKET, buffers=1, ranks=publishing)
    try:
        for version in (1, 2):
            publisher.publish(version, weights).manifest()
        share = sum(local_part(part).nbytes for part in weights.values() if isinstance(part, Tensor))
        told = publisher.held_bytes / (share + 2 * _BUCKET)
        return max(float(each) for each in own.gather(str(told).encode()))
    finally:
        publisher.close()
        publishing.close()


if __name__ == "__main__":
    _run(Path(sys.argv[1]), msgspec.json.decode(sys.argv[2].encode(), type=_Asked))
