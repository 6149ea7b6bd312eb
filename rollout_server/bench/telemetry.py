"""`rollmesh bench telemetry`: what figures and traces cost a rollout server's throughput.

    this process: the client ──HTTP──► server, traces and JSON logs switched on
        `off`      calls of a trace that is recorded nowhere        `control`  the same once more: the noise
        `scraped`  … and /metrics read every second                `traced`   every call recorded ──OTLP──► a sink
        `all`      both

All arms are of one process, in rounds of random order: two processes of the same program differ by several percent in
speed for their whole life, which would hide what is looked for. For the same reason several servers are measured, one
after the other. Every request is a chat completion in a session that its agent opens just before: two calls, and where
they are recorded three spans. Costs are of an arm beside `off` in the same round. Figures are kept in all arms: there is
no switch to keep none, and nothing is counted by token. The server writes no line for a call that goes well: JSON costs
nothing there.
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


@app.command(epilog="Example: rollmesh bench telemetry --servers 3 --json")
def telemetry(
    servers: Annotated[int, typer.Option(min=1, help="Servers, one after the other")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each arm a server, interleaved")] = 4,
    requests: Annotated[int, typer.Option(min=1, help="Requests a run")] = 128,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, max=1024, help="Tokens of an answer, on average")] = 64,
    hidden_size: Annotated[int, typer.Option(min=32, help="Width of the random policy, a multiple of 32")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the random policy")] = 4,
    alone: Annotated[int, typer.Option(min=1, help="Sessions a round where telemetry is seen alone")] = 400,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output instead of a table")] = False,
) -> None:
    """What figures and traces cost a rollout server: calls with each beside calls without."""
    if hidden_size % 32:
        raise UsageError(f"a hidden size of {hidden_size}", "give a multiple of 32")

    import msgspec

    from rollout_server.bench.telemetry_measuring import TelemetryShape, measure_telemetry
    from rollout_server.bench.telemetry_report import as_table
    from services.observability.setup import check_installed
    from services.trace_settings import TraceSettings

    check_installed(TraceSettings(traces="otlp"))
    shape = TelemetryShape(
        servers=servers,
        rounds=rounds,
        requests=requests,
        concurrency=concurrency,
        max_tokens=max_tokens,
        hidden_size=hidden_size,
        layers=layers,
        alone=alone,
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
