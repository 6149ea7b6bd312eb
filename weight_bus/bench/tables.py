"""The benchmark's figures for people: a table an engine, and one of what holds for all."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from weight_bus.bench.report import ArmFigures, EngineFigures, Exactness, WeightsBench


def as_tables(bench: WeightsBench) -> Iterator[Table]:
    """In the order in which they are to be read."""
    for name, engine in bench.engines.items():
        yield _engine_table(name, engine, bench)
    yield _summary(bench)


def _engine_table(name: str, engine: EngineFigures, bench: WeightsBench) -> Table:
    setting = bench.setting
    table = Table(
        title=f"Weight updates of the {name} engine: {setting.weight_bytes / 1e6:.0f} MB, {setting.streams} streams"
    )
    for column in (
        "arm",
        "stall ms",
        "least … most",
        "own gap ms",
        "step ms",
        "update ms",
        "tokens lost",
        "pace while staging",
    ):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for arm, figures in engine.arms.items():
        table.add_row(arm, *_cells(figures))
    table.caption = f"{_exactness(engine.exact)}; others kept {engine.others_cores:.2f} cores busy"
    return table


def _exactness(exact: Exactness | None) -> str:
    if exact is None:
        return "exactness: not measured"
    same = "the same" if exact.tokens_equal else "OTHER"
    return (
        f"after {exact.updates} updates {same} {exact.tokens} greedy tokens as when freshly loaded, "
        f"logprobs within {exact.max_logprob_error:.1e}"
    )


def _cells(arm: ArmFigures) -> list[str]:
    pace = "" if arm.pace_while_staging is None else f"{arm.pace_while_staging:.2f}"
    return [
        f"{arm.stall_ms:.2f}",
        f"{min(arm.stalls_ms):.1f} … {max(arm.stalls_ms):.1f}",
        f"{arm.own_gap_ms:.2f}",
        f"{arm.decode_step_ms:.1f}",
        f"{arm.update_ms:.0f}",
        f"{arm.tokens_lost:.1f}",
        pace,
    ]


def _summary(bench: WeightsBench) -> Table:
    table = Table(title="The weight bus, worst of the engines")
    for column in ("figure", "median", "rounds"):
        table.add_column(column)
    table.add_row(
        "stall of a commit", f"{bench.stall_ms:.2f} ms", f"{bench.nothing_stall_ms:.2f} ms where nothing happens"
    )
    table.add_row(
        "longest stall of any commit", f"{bench.longest_stall_ms:.2f} ms", f"a step: {bench.decode_step_ms:.2f} ms"
    )
    table.add_row("shorter than the shortest paused arm", f"{bench.times_shorter:.1f} times", "")
    table.add_row("decode speed while staging", f"{bench.decode_while_staging:.2f}", "")
    for name in ("publish_vs_memcpy", "publish_apart_vs_memcpy", "nixl_vs_readv", "shm_vs_memcpy"):
        value = getattr(bench, name)
        rounds = ", ".join(f"{figure:.2f}" for figure in bench.spread.get(name, []))
        table.add_row(name, "not measured" if value is None else f"{value:.2f}", rounds)
    if bench.plain_serve is not None:
        table.add_row(
            "plain vllm serve", "exact" if bench.plain_serve.exact else "NOT exact", _exactness(bench.plain_serve)
        )
    for bar, reached in bench.bars.items():
        table.add_row(bar, "yes" if reached else "NO", "")
    load = ", ".join(f"{figure:.2f}" for figure in bench.load_before)
    versions = ", ".join(f"{name} {number}" for name, number in bench.versions.items())
    notes = "".join(f"\n{note}" for note in bench.notes)
    table.caption = f"{bench.setting.rounds} rounds; {bench.cores} cores, load before {load}; {versions}{notes}"
    return table
