"""What `./dev bench trainer` reports: some figures, each a median over rounds, and what they are made of.

part of the benchmark ──► Measured ──┐
another part          ──► Measured ──┴──► TrainerBench ──► table, JSON
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from rich.table import Table

FIGURES = (
    "packed_vs_padded",
    "vs_trl",
    "packed_vs_padded_32k",
    "vs_trl_32k",
    "vs_trl_shared",
    "shared_prefix_time",
    "short_prefix_time",
    "head_peak",
    "head_time",
    "ckpt_peak",
    "mfu_full",
    "mfu_compiled",
    "mfu_adapters",
    "vs_float32",
    "long_row_gb",
    "idle_fraction",
    "async_vs_sync",
    "eval_cost",
    "ckpt_block",
    "metrics_lag",
    "ckpt_memory",
    "scaling_2",
    "overhead_1",
    "pack_share",
    "publish_peak_share",
    "scaling_smollm2",
    "resume_equal",
    "resume_conflicts",
    "parallel_max_error",
    "parallel_half_error",
    "peak_vs_estimate",
    "formula_vs_fake",
)


@dataclass(frozen=True)
class Measured:
    """`rounds`: some of FIGURES, one value a round. `missing`: those that could not be measured, and why. `seen`: what
    people may want to know besides, by name."""

    rounds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    seen: Mapping[str, str] = field(default_factory=dict)


class TrainerBench(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints. None: not measured, `missing` says why.

    `packed_vs_padded`: trained tokens a second, packed ÷ a padded Hugging Face loop. `vs_trl`: ÷ TRL's GRPO step. `…_32k`:
    with a vocabulary of 32,768. `vs_trl_shared`: seconds of a step ÷ TRL's, at prompts of 256 tokens.
    `shared_prefix_time`, `short_prefix_time`: seconds of a step ÷ those where each sibling's prompt is computed, at prompts
    and answers of 256 and 64 tokens, 64 and 256. `head_peak`: bytes of the language head, forward and backward, ÷ those of
    all its logits; `head_time`: its CPU seconds ÷ those of the plain one. `ckpt_peak`: bytes of activations, all layers
    checkpointed ÷ none. On a GPU (`benchmarks.trainer.device`) `mfu_full`, `mfu_adapters`: floating-point operations a
    second ÷ the card's, in bfloat16; `mfu_compiled`: as `mfu_full`, layers compiled; `vs_float32`: tokens a second ÷ those
    in float32; `long_row_gb`: the most memory of a step on one row of 32,768 tokens.
    `idle_fraction`: share of the time that the training thread waits for a batch, at K = 2. `async_vs_sync`: trained tokens
    a second, K = 2 ÷ K = 0. `eval_cost`: share of trained tokens a second that evaluations of 256 problems every 20
    versions take away. `ckpt_block`: seconds that a checkpoint holds up training ÷ those of one memcpy of the state. With a
    disk 20 times slower `metrics_lag`: steps by which lines of metrics are late, at most; `ckpt_memory`: bytes of the
    trainer's process above those without checkpoints ÷ one copy of the state. `scaling_2`: trained tokens a second of two
    ranks on a core each ÷ one's; `overhead_1`: of one rank of a process group ÷ a learner's without any; `pack_share`:
    share of a step for packing and advantages; `publish_peak_share`: the most bytes that one of two ranks holds for
    publishing with one arena ÷ those of its share and two buckets; `scaling_smollm2`: steps of two ranks ÷ one's, SmolLM2.
    `resume_equal`: 1 where a run whose ranks are killed ends with the bytes that other ranks compute, and trains all that
    was open (`benchmarks.trainer.killed_ranks`), else 0; `resume_conflicts`: versions that the bus refused it.
    `parallel_max_error`: the largest difference of losses, gradients and weights of ranks from one process's, of each
    tensor's maximum, under each layout and option of memory; `parallel_half_error`: in bfloat16, the error of ranks ÷ one
    process's (`benchmarks.trainer.rank_errors`). `peak_vs_estimate`: what `rollmesh memory` predicts ÷ the most resident
    memory of a process that makes those steps; `formula_vs_fake`: its formula ÷ its fake run; each of the case that is
    farthest from 1.
    """

    packed_vs_padded: float | None
    vs_trl: float | None
    packed_vs_padded_32k: float | None
    vs_trl_32k: float | None
    vs_trl_shared: float | None
    shared_prefix_time: float | None
    short_prefix_time: float | None
    head_peak: float | None
    head_time: float | None
    ckpt_peak: float | None
    mfu_full: float | None
    mfu_compiled: float | None
    mfu_adapters: float | None
    vs_float32: float | None
    long_row_gb: float | None
    idle_fraction: float | None
    async_vs_sync: float | None
    eval_cost: float | None
    ckpt_block: float | None
    metrics_lag: float | None
    ckpt_memory: float | None
    scaling_2: float | None
    overhead_1: float | None
    pack_share: float | None
    publish_peak_share: float | None
    scaling_smollm2: float | None
    resume_equal: float | None
    resume_conflicts: float | None
    parallel_max_error: float | None
    parallel_half_error: float | None
    peak_vs_estimate: float | None
    formula_vs_fake: float | None
    rounds: dict[str, list[float]]
    missing: dict[str, str]
    seen: dict[str, str]
    load_before: tuple[float, float, float]
    cores: int
    versions: dict[str, str]


def put_together(
    parts: Sequence[Measured], load_before: tuple[float, float, float], versions: dict[str, str]
) -> TrainerBench:
    """The report of all parts that were asked for."""
    rounds = {name: [round(value, 4) for value in values] for part in parts for name, values in part.rounds.items()}
    missing = {name: why for part in parts for name, why in part.missing.items()}
    figures = {name: round(statistics.median(rounds[name]), 3) if rounds.get(name) else None for name in FIGURES}
    return TrainerBench(
        **figures,
        rounds=rounds,
        missing={name: missing.get(name, "not asked for") for name in FIGURES if figures[name] is None},
        seen={name: what for part in parts for name, what in part.seen.items()},
        load_before=load_before,
        cores=os.cpu_count() or 1,
        versions=versions,
    )


def as_table(bench: TrainerBench) -> Table:
    table = Table(title="The trainer")
    for column in ("figure", "median", "rounds"):
        table.add_column(column, overflow="fold")
    for name in FIGURES:
        value = getattr(bench, name)
        spread = ", ".join(f"{each:g}" for each in bench.rounds.get(name, ()))
        table.add_row(name, "–" if value is None else f"{value:g}", spread or bench.missing.get(name, ""))
    for name, what in bench.seen.items():
        table.add_row(name, "", what)
    load = ", ".join(f"{figure:.2f}" for figure in bench.load_before)
    numbers = ", ".join(f"{name} {number}" for name, number in bench.versions.items())
    table.caption = f"{bench.cores} cores, load before {load}; {numbers}"
    return table
