"""What no single setting shows: settings that contradict each other, and those that would have no effect.

Of the loss and the advantage: `trainer.algorithms.describe`.
"""

from __future__ import annotations

from services.config.base import changed_fields, idle
from services.config.engines.vllm import MOST_RANK, check_vllm
from services.config.settings import LearnerSettings, RunSettings
from services.config.training.parallel import ParallelSettings
from services.policies.admission import most_updates
from services.policies.training.layout import Layout, layout_of
from services.wire.errors import UsageError


def check(settings: RunSettings) -> None:
    """Raises UsageError for settings under which a run could not go on, or of which one would have no effect."""
    _refuse_idle_task(settings)
    _refuse_judges_of_nobody(settings)
    _refuse_idle_curriculum(settings)
    _refuse_starvation(settings)
    _refuse_epochs(settings)
    check_vllm(settings.rollout.vllm)
    _refuse_idle_broadcasts(settings)
    _refuse_adapters_of_nobody(settings)
    check_learner(settings.trainer)
    asked = settings.trainer.parallel
    check_ranks(settings, layout_asked(asked, ranks_asked(asked)))
    stays = settings.trainer.advantage.critic.pretrain_steps
    if stays >= settings.steps:
        raise UsageError(
            f"trainer.advantage.critic.pretrain_steps={stays} leaves the policy no step of steps={settings.steps}",
            "make it smaller, or steps more",
        )
    check_schedule(settings.trainer, settings.steps - stays)


def _refuse_idle_task(settings: RunSettings) -> None:
    if settings.tasks and settings.task != RunSettings.model_fields["task"].default:
        raise UsageError(
            f"task={settings.task} would have no effect beside tasks", "put it into a section [[tasks]], too"
        )


def _refuse_judges_of_nobody(settings: RunSettings) -> None:
    """Where all tasks are known by name. Without `tasks` the service may be anybody's."""
    names = {each.called for each in settings.tasks}
    if not names or None in names:
        return
    for component in settings.rewards.components:
        for name in component.tasks:
            if name not in names:
                raise UsageError(
                    f"reward component {component.name!r} is for a task {name!r} that is not played",
                    f"there are: {', '.join(sorted(each for each in names if each))}",
                )


def _refuse_idle_curriculum(settings: RunSettings) -> None:
    if not settings.curriculum.enabled:
        for name, value in changed_fields(settings.curriculum).items():
            raise UsageError(
                f"curriculum.{name}={value} would have no effect", "leave it out, or set curriculum.enabled=true"
            )


def check_engine(settings: RunSettings, engine: str) -> None:
    """Raises UsageError for settings that `engine` (torch, vllm, http) does not read, or cannot do.

    Which arguments the installed vLLM has, `services.host.vllm_arguments` says.
    """
    given = settings.rollout.vllm.arguments()
    if given and engine != "vllm":
        raise UsageError(
            f"rollout.vllm.{next(iter(given))} is not read by engine {engine}",
            "leave [rollout.vllm] out, or set engine=vllm",
        )
    if settings.rollout.routing_replay and engine == "http":
        raise UsageError(
            "rollout.routing_replay: engine http does not tell which experts it chose",
            "use engine torch or vllm, or leave it out",
        )
    _refuse_adapters(settings, engine)
    if engine != "torch":
        return
    if settings.rollout.tensor_parallel > 1:
        raise UsageError(
            f"engine torch cannot split a model over {settings.rollout.tensor_parallel} ranks", "use --engine vllm"
        )
    if settings.weights.shadow != "device":
        raise UsageError(
            f"weights.shadow={settings.weights.shadow} is not read by engine torch",
            "leave it out, or use --engine vllm",
        )
    if settings.weights.packed != "auto":
        raise UsageError(
            f"weights.packed={settings.weights.packed} is not read by engine torch",
            "leave it out, or use --engine vllm",
        )


def check_dtype(settings: RunSettings) -> None:
    """Raises UsageError for a serving dtype that cannot be. When `model.dtype` has been chosen for the machine."""
    quantization = settings.rollout.vllm.quantization
    if quantization is not None and settings.model.dtype == "float32":
        raise UsageError(
            f"rollout.vllm.quantization={quantization} cannot be with model.dtype=float32: vLLM quantises bfloat16 weights",
            "set model.dtype=bfloat16",
        )


def _refuse_adapters_of_nobody(settings: RunSettings) -> None:
    weights, rank = settings.weights, settings.trainer.lora.rank
    if weights.publish != "adapter":
        return
    if not rank:
        raise UsageError("weights.publish=adapter without adapters", "set trainer.lora.rank, or leave it out")
    if weights.transport == "file":
        raise UsageError(
            "weights.publish=adapter cannot be with weights.transport=file: a snapshot is a whole model, which engines "
            "load as it is",
            "use another transport, or weights.publish=merged",
        )


def _refuse_adapters(settings: RunSettings, engine: str) -> None:
    """`engine`: which has to serve them."""
    if settings.weights.publish != "adapter":
        return
    if engine == "http":
        raise UsageError(
            "weights.publish=adapter is not for engine http, whose weights are whole", "use weights.publish=merged"
        )
    rank = settings.trainer.lora.rank
    if engine != "vllm":
        return
    if rank > MOST_RANK:
        raise UsageError(
            f"vLLM serves adapters of rank {MOST_RANK} at most, and trainer.lora.rank={rank}",
            "use a smaller rank, or weights.publish=merged",
        )
    quantization = settings.rollout.vllm.quantization
    if quantization is not None:
        raise UsageError(
            f"weights.publish=adapter cannot be with rollout.vllm.quantization={quantization}: adapters are trained beside "
            "weights that are not rounded so",
            "leave one of them out",
        )
    if settings.weights.shadow != "device":
        raise UsageError(
            f"weights.shadow={settings.weights.shadow} would have no effect with weights.publish=adapter: what is staged "
            "is small",
            "leave it out",
        )


def _refuse_idle_broadcasts(settings: RunSettings) -> None:
    weights = settings.weights
    if "broadcast_host" in changed_fields(weights) and weights.transport != "nccl":
        raise UsageError(
            f"weights.broadcast_host={weights.broadcast_host} would have no effect under weights.transport="
            f"{weights.transport}",
            "leave it out, or set weights.transport=nccl",
        )
    for section, read_by in (("nixl", ("auto", "nixl")), ("nccl", ("nccl",))):
        for name, value in changed_fields(getattr(weights, section)).items():
            if weights.transport not in read_by:
                raise UsageError(
                    f"weights.{section}.{name}={value} would have no effect under weights.transport={weights.transport}",
                    f"leave it out, or set weights.transport={section}",
                )


def _refuse_starvation(settings: RunSettings) -> None:
    shape, most = settings.trainer.shape, most_updates(settings.k)
    if shape.updates > most:
        epochs = f" with trainer.epochs_per_batch={shape.epochs}" if shape.epochs > 1 else ""
        fewer = "fewer minibatches or epochs" if epochs else f"trainer.minibatches_per_batch={most} or less"
        raise UsageError(
            f"trainer.minibatches_per_batch={shape.minibatches}{epochs} cannot be under k={settings.k}: a batch is "
            f"sampled before its first step, so tokens of its last would be {shape.updates - 1} steps old",
            f"set k={shape.updates - 1} or more ({2 * shape.updates - 1} lets engines generate while the trainer "
            f"trains), or {fewer}",
        )


def _refuse_epochs(settings: RunSettings) -> None:
    """Admission counts groups by versions, so with several epochs every batch has all of its steps."""
    trainer, shape = settings.trainer, settings.trainer.shape
    if shape.epochs == 1:
        return
    if settings.steps % shape.updates:
        fewer = settings.steps // shape.updates * shape.updates
        raise UsageError(
            f"steps={settings.steps} would end a run within an epoch: a batch has {shape.updates} steps "
            f"({shape.minibatches} minibatches, {shape.epochs} epochs)",
            f"set steps={fewer} or {fewer + shape.updates}" if fewer else f"set steps={shape.updates}",
        )
    if trainer.on_anomaly == "skip":
        raise UsageError(
            f"trainer.on_anomaly=skip cannot be with trainer.epochs_per_batch={shape.epochs}: a batch that is skipped "
            "in a later epoch is trained already, and cannot be dropped",
            "set trainer.on_anomaly=stop, or trainer.epochs_per_batch=1",
        )


def layout_asked(parallel: ParallelSettings, started: int) -> Layout:
    """The layout of so many ranks. Raises UsageError, with the sum, where the settings ask for others."""
    try:
        return layout_of(started, **parallel.model_dump(exclude={"reshard_after_forward"}))
    except ValueError as error:
        raise UsageError(
            f"trainer.parallel: {error}", "start as many ranks as the settings make, or set trainer.parallel.data=auto"
        ) from error


def ranks_asked(parallel: ParallelSettings) -> int:
    """How many ranks the settings ask for, where nobody has started any. Raises UsageError where they cannot be."""
    asked = parallel.model_copy(update={"data": parallel.least_data})
    return layout_asked(asked, parallel.least_ranks).ranks


def layout_in_force(settings: RunSettings, started: int) -> Layout:
    """The layout of so many ranks. Raises UsageError where the settings ask for others, or do not go with several."""
    parallel = settings.trainer.parallel
    layout = layout_asked(parallel, started)
    if layout.ranks == 1 and parallel.reshard_after_forward != "auto":
        raise idle(
            "parallel.reshard_after_forward",
            str(parallel.reshard_after_forward).lower(),
            "one rank, which has all weights",
            "leave it out, or train on several ranks",
        )
    check_ranks(settings, layout)
    return layout


def check_ranks(settings: RunSettings, layout: Layout) -> None:
    """Raises UsageError for settings that training on the ranks of `layout` does not know."""
    if layout.ranks == 1:
        return
    trainer = settings.trainer
    refused = {
        f"trainer.optimizer.kind={trainer.optimizer.kind}": trainer.optimizer.kind != "adamw",
        f"trainer.optimizer.state_bits={trainer.optimizer.state_bits}": trainer.optimizer.state_bits != 32,
        "trainer.optimizer.offload=true": trainer.optimizer.offload,
        "trainer.offload_idle=true": trainer.offload_idle,
        "trainer.compile=true": trainer.compile,
        f"weights.transport={settings.weights.transport}": settings.weights.transport in ("file", "nccl"),
    }
    for setting, wanted in refused.items():
        if wanted:
            raise UsageError(
                f"{setting} does not go with several ranks yet ({layout})", "leave it out, or train on one rank"
            )


def check_learner(trainer: LearnerSettings) -> None:
    """Raises UsageError for settings of the optimizer and its schedule of which one would have no effect."""
    optimizer = trainer.optimizer
    if optimizer.kind != "muon":
        for name, value in changed_fields(optimizer.muon).items():
            raise idle(
                f"optimizer.muon.{name}",
                value,
                f"optimizer.kind={optimizer.kind}",
                "leave it out, or set trainer.optimizer.kind=muon",
            )
    if optimizer.decay_norms_and_biases and not trainer.weight_decay:
        raise idle("optimizer.decay_norms_and_biases", True, "weight_decay=0", "set trainer.weight_decay")
    schedule = trainer.schedule
    changed = changed_fields(schedule)
    if "decay_share" in changed and schedule.kind != "wsd":
        under = f"schedule.kind={schedule.kind}"
        raise idle(
            "schedule.decay_share", schedule.decay_share, under, "leave it out, or set trainer.schedule.kind=wsd"
        )
    if "floor" in changed and schedule.kind == "constant":
        remedy = "leave it out, or set trainer.schedule.kind=linear, cosine or wsd"
        raise idle("schedule.floor", schedule.floor, "schedule.kind=constant", remedy)


def check_schedule(trainer: LearnerSettings, steps: int) -> None:
    """Raises UsageError where the schedule cannot be that of so many optimizer steps."""
    schedule = trainer.schedule
    try:
        schedule.of_run(trainer.warmup_steps, steps)
    except ValueError as error:
        raise UsageError(
            f"trainer.{error}",
            "make trainer.warmup_steps smaller, or steps more"
            + (", or trainer.schedule.decay_share smaller" if schedule.kind == "wsd" else ""),
        ) from error
