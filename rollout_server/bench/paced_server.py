"""A rollout server over an engine that draws by the clock (`paced_engine`), for benchmarks that start it by command.

python -m rollout_server.bench.paced_server --run-id r --server-id s0 --port 8100 --redis-url … --bus-url … --model FOLDER
    --config FILE --median 40 --sigma 1 --longest 640 --token-s 0.01 --places 64
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def paced_server(
    run_id: Annotated[str, typer.Option()],
    server_id: Annotated[str, typer.Option()],
    port: Annotated[int, typer.Option()],
    redis_url: Annotated[str, typer.Option()],
    bus_url: Annotated[str, typer.Option()],
    model: Annotated[Path, typer.Option(help="Complete: it is not waited for")],
    config: Annotated[Path, typer.Option()],
    median: Annotated[float, typer.Option(help="Of answers' lengths, in tokens")],
    sigma: Annotated[float, typer.Option(help="Deviation of their logarithm")],
    longest: Annotated[int, typer.Option(help="In tokens; longer answers are drawn again")],
    token_s: Annotated[float, typer.Option(help="Seconds a token")],
    places: Annotated[int, typer.Option(help="Answers that are drawn at once")],
) -> None:
    """Serve random answers at a given pace, and take weights as any engine does."""
    from rollout_server.app import make_rollout_app
    from rollout_server.bench.paced_engine import Pace, PacedEngine
    from rollout_server.engines.model_config import vocabulary_size
    from rollout_server.engines.torch_engine import TorchEngine
    from rollout_server.server import ServerPlan
    from services.app import Stop, open_port, serve
    from services.config_file import load_settings
    from services.telemetry import configure_logging
    from weight_bus.bus_client import BusClient

    configure_logging(server_id, run_id=run_id)
    settings = load_settings(config, [])
    listener = open_port("127.0.0.1", port)
    weights = TorchEngine(
        model,
        run_id=run_id,
        dtype=settings.model.dtype,
        max_running=1,
        threads=1,
        transport=settings.weights.transport,
        seed=0,
    )
    pace = Pace(median=median, sigma=sigma, longest=longest, token_s=token_s, places=places)
    engine = PacedEngine(
        weights, pace, vocabulary_size(model), settings.seed * 1_000_003 + zlib.crc32(server_id.encode())
    )
    weights.preload()
    plan = ServerPlan(
        run_id=run_id,
        server_id=server_id,
        url=f"http://127.0.0.1:{port}",
        redis_url=redis_url,
        model=model,
        settings=settings,
    )
    bus = BusClient(bus_url, run_id, deadline_s=2.0)
    stop = Stop()
    serve(make_rollout_app(plan, engine, bus, stop), "127.0.0.1", port, listener=listener, stop=stop)


if __name__ == "__main__":
    app()
