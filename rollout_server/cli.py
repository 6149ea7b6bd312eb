"""`rollmesh rollout-server`: serve a policy to environments and take new weights while doing so."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.config import options
from services.wire.errors import UsageError

if TYPE_CHECKING:
    from socket import socket

    from rollout_server.engines.factory import EngineClass
    from services.config.fleet import RunOptions
    from services.config.settings import RunSettings
    from services.http.startup import ProcessContext

app = typer.Typer(add_completion=False, rich_markup_mode=None)
vllm_app = typer.Typer(add_completion=False, rich_markup_mode=None)
ENGINES: tuple[EngineClass, ...] = ("torch", "vllm", "http")


@app.command(
    help="Serve a policy to environments, stamp every token with its version, take new weights between decode steps.\n\n"
    "Example: rollmesh rollout-server --run-id demo --server-id s0 --port 8100 "
    "--redis-url redis://127.0.0.1:6379/0 --bus-url http://127.0.0.1:8200 --model runs/demo/model --engine torch"
)
def rollout_server(
    run_id: options.RunId,
    port: options.Port,
    redis_url: options.RedisUrl,
    model: Annotated[
        Path,
        typer.Option(
            help="Hugging Face folder, waited for while another process makes it, or smollm2-135m; with --engine http "
            "the tokenizer, template and config of what the engine there serves"
        ),
    ],
    engine: Annotated[
        str | None,
        typer.Option(
            help="torch, vllm, or http: a vllm serve at --url; left out, what the configuration's engine says"
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="With --engine http: where the engine listens, http://host:port")
    ] = None,
    engine_key_file: Annotated[
        Path | None, typer.Option(help="With --engine http: file with the key that the engine wants (its --api-key)")
    ] = None,
    server_id: Annotated[str, typer.Option(help="Name of this server, unique in the run")] = "s0",
    host: options.Host = options.LOOPBACK,
    own_url: options.OwnUrl = None,
    bus_url: Annotated[str | None, typer.Option(help="Weight bus to register with; none: serve fixed weights")] = None,
    config: options.OptionalConfig = None,
    keys_dir: options.KeysDir = None,
    agent_key_file: Annotated[
        Path | None, typer.Option(help="File with the key that environments must show; none: loopback may speak")
    ] = None,
    bus_key_file: options.BusKeyFile = None,
    weights_key_file: options.WeightsKeyFile = None,
    redis_password_file: options.RedisPasswordFile = None,
    tls_dir: options.TlsDir = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION=VALUE,…",
            help="A further run whose adapters this engine serves, on a port of its own (docs/lora.md): "
            "run-id=b,port=8101,config=b.toml,bus-url=http://…; may be repeated",
        ),
    ] = None,
) -> None:
    from services.host.process import begin_again_with_tunables

    begin_again_with_tunables()

    from contextlib import ExitStack

    from services.config.fleet import RunOptions, check_fleet, run_beside
    from services.host.engine_choice import choose_engine
    from services.host.models import folder_meant
    from services.host.process import heavy_imports
    from services.http.app import Stop, serve
    from services.http.together import Served, serve_together
    from services.security.keys import read_key
    from services.security.tls import read_trust
    from weight_bus.transports.environment import set_wire

    if engine is not None:
        _chosen(engine, url, engine_key_file)
    first = RunOptions(
        run_id=run_id,
        port=port,
        redis_url=redis_url,
        config=config,
        bus_url=bus_url,
        own_url=own_url,
        keys_dir=keys_dir,
        agent_key_file=agent_key_file,
        bus_key_file=bus_key_file,
        weights_key_file=weights_key_file,
        redis_password_file=redis_password_file,
    )
    told = [first, *(run_beside(text, first) for text in also or [])]
    contexts = [_context(each, server_id, tls_dir) for each in told]
    name = _chosen(engine or choose_engine(contexts[0].settings.engine), url, engine_key_file)
    # Before anything slow.
    model = folder_meant(model)
    if len(told) > 1:
        check_fleet({each.run_id: own.settings for each, own in zip(told, contexts, strict=True)}, name)
    for own in contexts:
        _check(own.settings, name)
    set_wire(contexts[0].settings.weights)
    engine_key = None if engine_key_file is None else read_key(engine_key_file)
    runs = [_open(each, own, host) for each, own in zip(told, contexts, strict=True)]

    seed = _seed_of(contexts[0].settings.seed, server_id)
    with heavy_imports():
        from rollout_server.engines.factory import SharingRun, make_engine, make_shared_engines

        if len(told) > 1:
            sharing = [SharingRun(run.run_id, run.context.settings, run.context.keys.weights) for run in runs]
            engines = make_shared_engines(model, sharing, seed=seed)
        else:
            made = make_engine(
                name,
                model,
                run_id,
                contexts[0].settings,
                seed=seed,
                url=url,
                key=engine_key,
                weights_key=contexts[0].keys.weights,
                # The engine behind --url may be anybody's.
                trust=read_trust(tls_dir, public=True),
                own_process=True,
            )
            engines = [made]
        preload = getattr(engines[0], "preload", None)
        if preload is not None:
            preload()
        from rollout_server.app import make_rollout_app
        from rollout_server.chat.template import has_template
        from rollout_server.server import ServerPlan
        from weight_bus.client.bus_client import BusClient

        if name == "torch" and has_template(model):
            # What renders chats needs it, and the first one would wait: 2 s, and longer on a busy machine.
            from transformers import AutoTokenizer  # noqa: F401
    services = []
    for run, policy in zip(runs, engines, strict=True):
        context = run.context
        plan = ServerPlan(
            run_id=run.run_id,
            server_id=server_id,
            url=run.url,
            redis_url=run.redis_url,
            model=model,
            settings=context.settings,
            keys=context.keys,
            trust=context.tls.trust,
            bus_url=run.bus_url,
            tracing=context.tracing,
        )
        # A heartbeat that fails is repeated by its owner, so one try may be short.
        bus = (
            None
            if run.bus_url is None
            else BusClient(run.bus_url, run.run_id, deadline_s=2.0, key=run.bus_key, trust=context.tls.trust)
        )
        stop = Stop()
        app = make_rollout_app(plan, policy, bus, stop)
        services.append(Served(run.run_id, app, run.listener, stop, context.tls.identity))
    with ExitStack() as traces:
        for own in contexts:
            traces.enter_context(own.tracing)
        if len(services) > 1:
            serve_together(services)
        else:
            [only] = services
            serve(only.app, host, port, listener=only.listener, stop=only.stop, identity=only.identity)


@dataclass(frozen=True)
class _Run:
    """One run's part of a rollout server, before there is an engine."""

    run_id: str
    context: ProcessContext
    url: str
    bus_url: str | None
    bus_key: str | None
    redis_url: str
    listener: socket


def _context(told: RunOptions, server_id: str, tls_dir: Path | None) -> ProcessContext:
    from services.http.startup import read_context

    return read_context(
        "rollout-server",
        told.run_id,
        server_id,
        config=told.config,
        keys_dir=told.keys_dir,
        key_files={
            "agent": told.agent_key_file,
            "weights": told.weights_key_file,
            "redis": told.redis_password_file,
        },
        tls_dir=tls_dir,
    )


def _check(settings: RunSettings, engine: EngineClass) -> None:
    from services.config.checks import check_dtype, check_engine
    from services.host.vllm_arguments import check_arguments

    check_engine(settings, engine)
    check_dtype(settings)
    check_arguments(settings.rollout.vllm.arguments())


def _open(told: RunOptions, context: ProcessContext, host: str) -> _Run:
    """Bind its port, and see that its Redis can hold it."""
    from services.security.keys import read_key

    tls = context.tls
    return _Run(
        told.run_id,
        context,
        url=tls.own_url(host, told.port, told.own_url),
        bus_url=None if told.bus_url is None else tls.trust.address(told.bus_url),
        bus_key=context.keys.peer if told.bus_key_file is None else read_key(told.bus_key_file),
        redis_url=context.redis_url(told.redis_url, check=True),
        listener=context.open_port(host, told.port),
    )


@vllm_app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    help="Run vLLM's own server with the run's settings: [rollout.vllm], dtype, ranks, KV policy. With --bus-url it joins "
    "the weight bus itself; without, it stands behind `rollmesh rollout-server --engine http` (docs/foreign-engines.md). "
    "Further flags of `vllm serve` may follow.\n\n"
    "Example: rollmesh vllm-serve --run-id demo --config runs/demo/config.toml --model runs/demo/model --port 8000 "
    "--bus-url http://127.0.0.1:8200",
)
def vllm_serve(
    context: typer.Context,
    run_id: options.RunId,
    port: options.Port,
    model: Annotated[Path, typer.Option(help="Hugging Face folder, which is complete")],
    host: options.Host = options.LOOPBACK,
    engine_id: Annotated[str | None, typer.Option(help="Its name on the bus, unique in the run")] = None,
    bus_url: Annotated[str | None, typer.Option(help="Weight bus to register with")] = None,
    config: options.OptionalConfig = None,
    show: Annotated[bool, typer.Option("--print", help="Print the variables and the command, and end")] = False,
) -> None:
    import os
    import shlex

    from rollout_server.engines.vllm.arguments import DEFAULTS, installed_platform
    from rollout_server.engines.vllm.serve import vllm_server
    from services.config.load import load_settings
    from services.host.engine_choice import choose_engine
    from services.host.models import folder_meant
    from services.host.run_folder import is_complete
    from services.host.vllm_arguments import check_arguments
    from weight_bus.transports.environment import set_wire

    settings = load_settings(config, [])
    choose_engine("vllm")
    check_arguments(settings.rollout.vllm.arguments())
    model = folder_meant(model)
    if not is_complete(model):
        raise UsageError(f"{model} is no model folder (no config.json)", "give a Hugging Face folder")
    name = engine_id or f"vllm-{host}-{port}"
    served = vllm_server(
        settings,
        model,
        installed_platform(),
        run_id=run_id,
        engine_id=name,
        seed=_seed_of(settings.seed, name),
        host=host,
        port=port,
        bus_url=bus_url,
        more=context.args,
    )
    wire: dict[str, str] = {} if show else dict(os.environ)
    set_wire(settings.weights, wire)
    if show:
        for variable, value in {**wire, **served.environ}.items():
            typer.echo(f"{variable}={shlex.quote(value)} \\")
        typer.echo(shlex.join(served.command))
        return
    # In this process's place: signals and the exit code are vLLM's own.
    os.execve(served.command[0], list(served.command), {**DEFAULTS, **wire, **served.environ})


def _seed_of(seed: int, name: str) -> int:
    """Two engines that sampled from one seed would generate the same."""
    import zlib

    return (seed * 1_000_003 + zlib.crc32(name.encode())) % (1 << 31)


def _chosen(engine: str, url: str | None, key_file: Path | None) -> EngineClass:
    """The engine's class. Raises UsageError for one that is not there, and for options that are not its own."""
    for known in ENGINES:
        if engine == known:
            break
    else:
        raise UsageError(f"no engine {engine!r}", f"known: {', '.join(ENGINES)}")
    if known != "http" and (url is not None or key_file is not None):
        raise UsageError(
            f"--url and --engine-key-file are not for engine {known}", "use --engine http, or leave them out"
        )
    if known == "http" and (url is None or not url.startswith(("http://", "https://"))):
        raise UsageError(f"--engine http with --url {url}", "give the engine's address, http://HOST:PORT")
    if url is not None:
        from services.security.addresses import check_url

        check_url(url)
    return known
