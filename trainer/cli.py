"""`rollmesh train`: the trainer of a run. `rollmesh export`: its policy as a Hugging Face folder, in the serving dtype.
`rollmesh formula`: the loss and the advantage that settings compute."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from services.config import options
from services.wire.errors import UsageError

if TYPE_CHECKING:
    from services.config.settings import RunSettings
    from services.http.startup import ProcessContext
    from trainer.data.teacher_client import TeacherServer
    from trainer.parallel.start import Started

app = typer.Typer(add_completion=False, rich_markup_mode=None)
export_app = typer.Typer(add_completion=False, rich_markup_mode=None)
formula_app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    epilog="Example: rollmesh train --run-id r1 --config runs/r1/config.toml --redis-url redis://127.0.0.1:6379/0 "
    "--bus-url http://127.0.0.1:7000 --model runs/r1/model --run-dir runs/r1"
)
def train(
    run_id: options.RunId,
    config: options.Config,
    redis_url: options.RedisUrl,
    bus_url: Annotated[str, typer.Option(help="Where the weight bus is")],
    model: Annotated[
        Path, typer.Option(help="Hugging Face folder to start from, which may still be made, or smollm2-135m")
    ],
    run_dir: Annotated[
        Path, typer.Option(help="Run folder: metrics, samples, checkpoints; an interrupted run goes on")
    ],
    teacher_url: Annotated[
        str | None,
        typer.Option(help="A rollout server of this mesh that serves trainer.teacher.model; else trainer.teacher.url"),
    ] = None,
    weights_key_file: options.WeightsKeyFile = None,
    bus_key_file: options.BusKeyFile = None,
    keys_dir: options.KeysDir = None,
    redis_password_file: options.RedisPasswordFile = None,
    tls_dir: options.TlsDir = None,
) -> None:
    """Train on the trajectories of a run and publish every version of the policy."""
    from services.host.process import begin_again_with_tunables

    # Publishing is one copy of all weights, for which training waits.
    begin_again_with_tunables()

    from services.config.fitting import threads_of
    from services.host.models import folder_meant
    from services.host.process import heavy_imports, usable_cores
    from services.http.startup import read_context
    from services.security.keys import read_key
    from trainer.algorithms.describe import describe
    from weight_bus.transports.environment import set_wire

    context = read_context(
        "trainer",
        run_id,
        "trainer",
        config=config,
        keys_dir=keys_dir,
        key_files={"weights": weights_key_file, "redis": redis_password_file},
        tls_dir=tls_dir,
    )
    describe(context.settings.trainer)
    model = folder_meant(model)
    # Before other ranks are started, which inherit it.
    set_wire(context.settings.weights)
    started = _started(context.settings)

    bus_key = context.keys.peer if bus_key_file is None else read_key(bus_key_file)
    bus_url = context.tls.trust.address(bus_url)
    redis_url = context.redis_url(redis_url)
    teacher = _teacher_of(context, teacher_url, tls_dir)

    with heavy_imports():
        from trainer.assembly import TrainerArguments
        from trainer.run import train as run_trainer

    arguments = TrainerArguments(
        run_id=run_id,
        settings=threads_of(context.settings, model, usable_cores()),
        redis_url=redis_url,
        bus_url=bus_url,
        model=model,
        run_dir=run_dir,
        weights_key=context.keys.weights,
        bus_key=bus_key,
        metrics_key=context.keys.metrics,
        tls=context.tls,
        tracing=context.tracing,
        teacher=teacher,
        started=started,
    )
    with context.tracing:
        code = run_trainer(arguments)
    if started is not None:
        started.close()
    if code:
        raise typer.Exit(code)


def _started(settings: RunSettings) -> Started | None:
    """The ranks beside this one, started here where the settings ask for some and nobody has started any."""
    from services.config.checks import ranks_asked
    from trainer.parallel.start import end_with_parent, ranks_started, start_others

    if ranks_started() is not None:
        end_with_parent()
        return None
    asked = ranks_asked(settings.trainer.parallel)
    return start_others(asked) if asked > 1 else None


def _teacher_of(context: ProcessContext, url: str | None, tls_dir: Path | None) -> TeacherServer | None:
    """Who is asked for a teacher's logprobs: a server of this mesh at `url`, or that of the settings.

    Raises UsageError where both are named, or a model that nobody serves.
    """
    from services.security.keys import read_key
    from services.security.tls import read_trust
    from trainer.data.teacher_client import TeacherServer

    settings = context.settings.trainer.teacher
    if settings.url is not None:
        if url is not None:
            raise UsageError("--teacher-url and trainer.teacher.url both say where the teacher is", "give one of them")
        key = None if settings.key_file is None else read_key(settings.key_file, shortest=1)
        # It may be anybody's.
        return TeacherServer(settings.url, settings.model, key, read_trust(tls_dir, public=True))
    if settings.model is None:
        if url is not None:
            raise UsageError("--teacher-url is where trainer.teacher.model is served", "set that, or leave it out")
        return None
    if url is None:
        raise UsageError(
            f"trainer.teacher.model={settings.model} is served by `rollmesh up`",
            "start a rollout server of it and give --teacher-url, or set trainer.teacher.url",
        )
    trust = context.tls.trust
    return TeacherServer(trust.address(url), None, context.keys.peer, trust)


@formula_app.command(
    help="Print the loss and the advantage that settings compute, as formulas, and refuse settings without effect. "
    "Algorithms of your own are imported, their settings are checked and told with their defaults.\n\n"
    "Example: rollmesh formula trainer.loss.policy=cispo trainer.loss.clip_high=0.3"
)
def formula(
    config: options.OptionalConfig = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text")] = False,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]…", help="Settings, such as trainer.loss.kl=0.1")
    ] = None,
) -> None:
    import msgspec

    from services.config.load import load_settings
    from services.config.training.algorithm import Formula
    from trainer.algorithms.describe import describe, own_tables

    trainer = load_settings(config, overrides or []).trainer
    loss, advantage = own_tables(trainer)
    found = Formula(describe(trainer), loss, advantage)
    if as_json:
        typer.echo(msgspec.json.encode(found).decode())
        return
    for part in found.formula.split(";  "):
        typer.echo(part)
    for section, own in (("loss", loss), ("advantage", advantage)):
        for key, value in own.items():
            typer.echo(f"trainer.{section}.own.{key} = {msgspec.json.encode(value).decode()}")


@export_app.command(
    help="Write the policy of a run as a Hugging Face folder: safetensors in the serving dtype, configuration, tokenizer, "
    "chat template. Adapters are merged. Prints the folder.\n\n"
    "Example: rollmesh export runs/mine --at 40"
)
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder")],
    at: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="Of a checkpoint, or `best`: the best evaluated (default: the newest)"),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: RUN/export-VERSION")] = None,
    dtype: Annotated[Literal["float32", "bfloat16"] | None, typer.Option(help="Default: the run's model.dtype")] = None,
    shard_mib: Annotated[int, typer.Option(min=1, help="Largest file of weights")] = 4096,
) -> None:
    from services.config.load import load_settings
    from services.host.files import writing
    from services.host.process import heavy_imports
    from services.host.run_folder import RunFolder

    folder = RunFolder(run.expanduser().absolute())
    if not folder.config.exists():
        raise UsageError(f"{folder.root} is no run folder", "name one that has a config.toml")
    settings = load_settings(folder.config, [])
    with heavy_imports():
        import torch
        from transformers.utils import logging as transformers_logging

        from trainer.checkpoint import checkpoint, evaluated
        from trainer.checkpoint.model_folder import load_policy, save_model
        from trainer.model.adapters import Adapters

    transformers_logging.disable_progress_bar()
    there = checkpoint.good_versions(folder.checkpoints)
    final, ended = folder.checkpoints / "final", evaluated.final_version(folder)
    version = max(there, default=None) if ended is None else ended
    if at == "best":
        version = evaluated.best_checkpoint(folder, settings.evaluation.every)
    elif at is not None:
        if not at.isdecimal():
            raise UsageError(f"{at!r} is no version", "write a number, or best")
        version = int(at)
    if version is None:
        raise UsageError(
            f"{folder.checkpoints} has no checkpoint yet", "wait for one, or interrupt the run: it writes one"
        )
    target = (out or folder.root / f"export-{version}").expanduser().absolute()
    if target.exists():
        raise UsageError(f"{target} is there already", "name another --out, or remove it")
    base = settings.model.path or folder.model
    adapters, code = None, settings.model.trust_remote_code
    if version == ended:
        model = load_policy(final, trust_remote_code=code)
    else:
        model = load_policy(base, trust_remote_code=code)
        lora = settings.trainer.lora
        adapters = Adapters(model, lora, settings.seed) if lora.rank else None
        checkpoint.load_weights(evaluated.find(folder.checkpoints, version), model)
    wanted = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype or settings.model.dtype]
    with writing(target):
        save_model(target, model, base, adapters, wanted, shard_mib << 20)
    typer.echo(str(target))
