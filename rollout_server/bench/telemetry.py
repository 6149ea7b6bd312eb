"""`rollmesh bench telemetry`: what figures, logs and traces cost a rollout server's throughput.

    this process: the client ──HTTP──► server, telemetry as it is by default     `off`
                             ──HTTP──► the same once more                         `control`: the noise
                             ──HTTP──► … its /metrics read every second           `scraped`
                             ──HTTP──► … its logs as JSON                         `json_logs`
                             ──HTTP──► … every call traced ──OTLP──► a sink       `traced`
                             ──HTTP──► … all three                                `all`

All are up together and idle but for the one that is measured; each round runs them in a random order. Every request is
a chat completion in a session that its agent opens just before: two calls, and with traces three spans. Costs are of one
arm beside `off` in the same round; what `control` shows is no cost but the machine's noise. The CPU time of the server's
process is much steadier than its speed. The figures of /metrics are kept in all arms: there is no switch to keep none.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.wire.errors import UsageError

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog="Example: rollmesh bench telemetry --rounds 9 --json")
def telemetry(
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each arm, interleaved")] = 9,
    requests: Annotated[int, typer.Option(min=1, help="Requests a run")] = 192,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, max=1024, help="Tokens of an answer, on average")] = 64,
    only: Annotated[list[str] | None, typer.Option(help="An arm to put beside `off`, any number; else all")] = None,
    hidden_size: Annotated[int, typer.Option(min=32, help="Width of the random policy, a multiple of 32")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the random policy")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output instead of a table")] = False,
) -> None:
    """What figures, logs and traces cost: the rollout server with each beside the same server without."""
    if hidden_size % 32:
        raise UsageError(f"a hidden size of {hidden_size}", "give a multiple of 32")

    from rollout_server.bench.telemetry_report import ARMS, BASE, as_table

    arms = tuple(arm for arm in ARMS if arm == BASE or not only or arm in only)
    if unknown := set(only or ()).difference(ARMS):
        raise UsageError(f"no arm {min(unknown)!r}", f"known: {', '.join(ARMS)}")

    import msgspec

    from rollout_server.bench.telemetry_measuring import TelemetryShape, measure_telemetry
    from services.trace_settings import TraceSettings
    from services.tracing import check_installed

    check_installed(TraceSettings(traces="otlp"))
    shape = TelemetryShape(
        arms=arms,
        rounds=rounds,
        requests=requests,
        concurrency=concurrency,
        max_tokens=max_tokens,
        hidden_size=hidden_size,
        layers=layers,
    )
    say = Console(stderr=True, soft_wrap=True, highlight=False)
    # Ended as Ctrl-C ends it, so that nothing that was started stays behind.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as scratch:
        bench = asyncio.run(measure_telemetry(shape, Path(scratch), say.print))
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(bench), indent=2).decode() + "\n")
    else:
        Console().print(as_table(bench))
