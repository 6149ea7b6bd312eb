"""`rollmesh bench gateway`: what the gateway and the servers behind it cost, and how soon agents go on when a server dies.

    this process: the client ──HTTP──► gateway ──► 2 rollout servers (engine inside)     one process each
                             ──HTTP──► the same two servers, half of the requests each
                             ──pipe──► 2 bare engines, the same class, no HTTP             one process each
                             ──kill -9──► a server, under talking agents

Everything runs on one machine and shares its cores: on two of them the gateway, Redis and the client take from the engines
what they need. Arms that are compared are up together and idle but for the one that is measured; each round runs them in
a random order.

`gateway_vs_engine`: tokens/s of chat completions, not streamed, each in a session that its agent opens just before ÷ two
bare engines at the same time, each with half of the same requests and half of the number in flight, until the later one
ends.
`added_latency_ms_p50`: one chat completion alone through the gateway, less a bare engine on the same prompt, in pairs.
`prefill_vs_optimum`: siblings of many groups, which ask in random order; tokens prefilled in all servers ÷ the nodes of the
trie of all prompts (each distinct prefix computed once in the whole fleet). `rollout.kv_policy` is `salt`.
`failover_s_p95`: agents hold conversations, half of them streamed; servers are killed at random moments; seconds from the
kill to the next chunk of each streamed answer that was in flight there. An error that any agent sees fails the benchmark.
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


@app.command(epilog="Example: rollmesh bench gateway --rounds 5 --json")
def gateway(
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each arm, interleaved")] = 5,
    requests: Annotated[int, typer.Option(min=2, help="Requests a run")] = 192,
    concurrency: Annotated[int, typer.Option(min=2, help="Requests in flight, at both servers together")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, max=1024, help="Tokens of an answer, on average")] = 128,
    pairs: Annotated[int, typer.Option(min=2, help="Single requests for the added latency")] = 500,
    groups: Annotated[int, typer.Option(min=1, help="Groups whose siblings ask the same")] = 16,
    siblings: Annotated[int, typer.Option(min=1, help="Sessions of each group")] = 8,
    agents: Annotated[int, typer.Option(min=4, help="Agents that talk while servers are killed")] = 32,
    kills: Annotated[int, typer.Option(min=1, help="Servers killed, one after another")] = 10,
    hidden_size: Annotated[int, typer.Option(min=32, help="Width of the random policy, a multiple of 32")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the random policy")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output instead of a table")] = False,
) -> None:
    """The gateway and two rollout servers beside bare engines: speed, latency, prefills, and servers killed under load."""
    if hidden_size % 32:
        raise UsageError(f"a hidden size of {hidden_size}", "give a multiple of 32")

    import msgspec

    from rollout_server.bench.gateway_measuring import GatewayShape, measure_gateway
    from rollout_server.bench.gateway_report import as_table

    shape = GatewayShape(
        rounds=rounds,
        requests=requests,
        concurrency=concurrency,
        max_tokens=max_tokens,
        pairs=pairs,
        groups=groups,
        siblings=siblings,
        agents=agents,
        kills=kills,
        hidden_size=hidden_size,
        layers=layers,
    )
    say = Console(stderr=True, soft_wrap=True, highlight=False)
    # Ended as Ctrl-C ends it, so that nothing that was started stays behind.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as scratch:
        bench = asyncio.run(measure_gateway(shape, Path(scratch), say.print))
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(bench), indent=2).decode() + "\n")
    else:
        Console().print(as_table(bench))
