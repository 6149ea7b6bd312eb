"""The models of one trainer: the policy that learns, the critic, the frozen reference, and the advantage computer.

learner      the policy under training, and its optimizer
advantages   what a token's reward is worth; holds the price of a cost
critic       estimates what is still to be earned (`estimator = gae`)
reference    the run's first policy, frozen, where a divergence from it is asked for; part of learner and advantage computer

With `trainer.offload_idle` the weights of critic and reference are in the host's memory while they are not used.
adapters     what is trained in place of the policy's own weights (`trainer.lora`): with them off it is the reference
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from services.config.settings import RunSettings, TrainerSettings
from services.config.training.lora import LoraSettings
from services.policies.training.memory import keeps_layers
from services.policies.training.model_shape import shape_of
from services.wire.errors import UsageError
from services.wire.trajectory import Trajectory
from trainer.algorithms.advantages.batch import Float64Array
from trainer.algorithms.advantages.compute import AdvantageComputer, Taught
from trainer.algorithms.needs import needs_of
from trainer.data.rows import Rows
from trainer.memory.activations import recompute_activations
from trainer.memory.host_weights import HostWeights
from trainer.memory.options import machine_of, options_of
from trainer.model.adapters import Adapters
from trainer.model.critic import Critic, ValueModel
from trainer.model.forward import PackedForward
from trainer.model.learner import Learner
from trainer.model.logprobs import Reference, measure
from trainer.model.routers import RoutingReplay
from trainer.parallel.orders import Measure, passes_of, tell_shares
from trainer.parallel.ranks import Ranks
from trainer.parallel.sharding import Fill, cut, shard

_log = structlog.get_logger()


@dataclass(frozen=True)
class Roles:
    """Everything that a run's steps change."""

    learner: Learner
    advantage_computer: AdvantageComputer
    critic: Critic | None = None
    ranks: Ranks = field(default_factory=Ranks.alone)
    """Over which all of them are spread."""

    def models(self) -> dict[str, tuple[nn.Module, torch.optim.Optimizer]]:
        """What is trained, by name: `model` is the policy."""
        critic = {} if self.critic is None else {"critic": (self.critic.model, self.critic.optimizer)}
        return {"model": (self.learner.model, self.learner.optimizer), **critic}

    def use(self, trainer: TrainerSettings, run_steps: int) -> None:
        """Take the next steps under these settings, of which only what may change within a run is another than before."""
        self.learner.settings, self.learner.run_steps = trainer, run_steps
        if self.critic is not None:
            self.critic.settings = trainer

    def forget_gradients(self) -> None:
        """After a step that could not be made."""
        self.learner.forget_gradient()
        if self.critic is not None:
            self.critic.forget_gradient()

    @property
    def prepares_ahead(self) -> bool:
        """Whether a batch's advantages do not depend on the step before it, nor on a model that computes them."""
        return self.advantage_computer.independent

    @property
    def skips_idle(self) -> bool:
        """Whether nobody learns from a token whose advantage is 0."""
        return self.critic is None and self.learner.objective.idle_at_zero


def make_roles(
    load: Callable[[], PreTrainedModel],
    settings: RunSettings,
    version: int,
    teacher: Taught | None = None,
    ranks: Ranks | None = None,
    adapt: Callable[[PreTrainedModel, LoraSettings, int], Adapters] = Adapters,
    fill: Fill | None = None,
) -> Roles:
    """The roles that `settings` ask for. `load`: a fresh copy of the run's first policy, which has made `version` steps;
    `teacher`: tells its logprobs, where they are read; `ranks`: over which they are spread. Made by all ranks alike.
    `adapt`: puts adapters into a model, by the run's seed. `fill`: reads the weights of what `load` gives on meta, once it
    is sharded.

    Raises UsageError for settings of which one would have no effect, or which do not fit the model.
    """
    trainer, reference = settings.trainer, None
    needs, policy = needs_of(trainer), load()
    ranks = Ranks.alone(policy.device) if ranks is None else ranks
    _check_offload(trainer, ranks.device)
    trainer = _with_resharding(settings, policy.config, ranks)
    replays = settings.rollout.routing_replay
    if replays:
        _check_replay(trainer)
    if not trainer.lora.rank and needs.reference:
        first = load().eval().requires_grad_(False)
        cut(first, ranks)
        replay = RoutingReplay(first) if replays else None
        shard(first, ranks)
        if fill is not None:
            fill(first, ranks.device)
        packed = PackedForward(first, trainer.dtype, ranks.context, replay=replay)
        reference = Reference(packed, HostWeights(first).used) if trainer.offload_idle else Reference(packed)
    critic = Critic(_value_model(load(), trainer, ranks, fill), trainer, ranks=ranks) if needs.critic else None
    adapters = adapt(policy, trainer.lora, settings.seed) if trainer.lora.rank else None
    learner = Learner(policy, trainer, version, reference, settings.steps, adapters, ranks, fill, replays)

    def measuring(shares: Sequence[Sequence[Rows | None]]) -> None:
        tell_shares(ranks, lambda share: Measure("reference", passes_of(shares[share])))

    def of_reference(trajectories: Sequence[Trajectory]) -> Float64Array:
        assert learner.reference is not None
        budget = learner.settings.micro_batch_tokens
        with learner.reference.within():
            return measure(
                trajectories, learner.reference.logprobs, budget, learner.stem_width, ranks=ranks, measuring=measuring
            )

    advantage_computer = AdvantageComputer(
        trainer.advantage,
        settings.seed,
        reference=None if learner.reference is None else of_reference,
        critic=None if critic is None else critic.values,
        teacher=teacher,
    )
    return Roles(learner, advantage_computer, critic, ranks)


def _with_resharding(settings: RunSettings, config: PretrainedConfig, ranks: Ranks) -> TrainerSettings:
    """The trainer's settings, with what `trainer.parallel.reshard_after_forward=auto` is for this model: the same on all
    ranks, layers stay collected where each has the memory."""
    trainer = settings.trainer
    if not ranks.several or trainer.parallel.reshard_after_forward != "auto":
        return trainer
    try:
        options = options_of(settings, machine_of(ranks.device, ranks.layout.ranks))
        kept = keeps_layers(shape_of(config.to_dict()), options)
    except ValueError as error:
        _log.info("layers' weights are collected twice a pass: what keeping them takes is not known", why=str(error))
        kept = False
    kept = all(int(told) for told in ranks.gather(str(int(kept)).encode()))
    _log.info("weights that ranks collect", reshard_after_forward=not kept)
    parallel = trainer.parallel.model_copy(update={"reshard_after_forward": not kept})
    return trainer.model_copy(update={"parallel": parallel})


def _check_offload(trainer: TrainerSettings, device: torch.device) -> None:
    if not trainer.offload_idle:
        return
    if device.type == "cpu":
        raise UsageError("trainer.offload_idle without a GPU has no effect", "leave it out")
    needs = needs_of(trainer)
    if (trainer.lora.rank or not needs.reference) and not needs.critic:
        raise UsageError(
            "trainer.offload_idle would have no effect: there is no reference of its own, and no critic", "leave it out"
        )


def _check_replay(trainer: TrainerSettings) -> None:
    """What sends tokens by the routers' outputs, or compiles them, is not made for outputs that are given."""
    parallel = trainer.parallel
    for name, set_so in (
        (f"trainer.parallel.tensor={parallel.tensor}", parallel.tensor > 1),
        (f"trainer.parallel.expert={parallel.expert}", parallel.expert > 1),
        ("trainer.compile", trainer.compile),
    ):
        if set_so:
            raise UsageError(f"rollout.routing_replay does not go together with {name}", "leave one of them out")


def _value_model(policy: PreTrainedModel, settings: TrainerSettings, ranks: Ranks, fill: Fill | None) -> ValueModel:
    cut(policy, ranks)
    model = ValueModel(
        policy, settings.dtype, ranks.context, ranks, fill, reshard=settings.parallel.reshard_after_forward is not False
    )
    recompute_activations(policy, settings.activation_checkpointing, offload=settings.activation_offload)
    return model
