"""The formulas of the loss and of the advantage as text, and validation: settings without effect are refused. No torch.

    L = −(1/N) Σ over fresh sampled tokens of [weight ·] term [− kl·D] [+ entropy·H] [+ router_aux·ℓ_experts]
    A = estimator(R)          R = (shaped reward [+ length penalty] [− λ·cost])[/(1 + λ)] [− β·D]

Terms: `trainer.algorithms.losses.registry`; weights and masks: `trainer.algorithms.losses.correction`. Decoupled PPO
(Hilton et al. 2022, arXiv:2110.00641) is ppo_clip with anchor = proximal and a token weight; DAPO (arXiv:2503.14476)
ppo_clip with a higher clip_high and the mean over tokens; Dr. GRPO (arXiv:2503.20783) mean = fixed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from services.config.base import Section, changed_fields, idle
from services.config.settings import TrainerSettings
from services.config.training import algorithm
from services.config.training.lora import ALL_LINEAR, LoraSettings
from services.wire.errors import UsageError
from trainer.algorithms.advantages import registry as advantages
from trainer.algorithms.advantages.registry import AdvantageEntry, find_estimator
from trainer.algorithms.losses import registry as losses
from trainer.algorithms.losses.registry import LossEntry, find_loss
from trainer.algorithms.needs import check_columns
from trainer.algorithms.plugins import term_of

_ANCHORS = {"behaviour": "π_beh", "proximal": "π_prox", "interpolated": "π_prox"}
_RATIOS = {"token": "ρ", "sequence": "Πρ", "geometric": "(Πρ)^(1/n)"}
_BOUNDS = tuple(algorithm.PpoClipSettings.model_fields)
_OF_SOME_ESTIMATOR = (*algorithm.GrpoSettings.model_fields, *algorithm.GaeSettings.model_fields)
_MEANS = {
    "tokens": ("(1/N) Σ", "N = fresh sampled tokens of the step"),
    "segments": ("(1/S) Σ_segments (1/n) Σ", "S = segments of the step, n = fresh sampled tokens of the segment"),
    "fixed": ("(1/(S·{length})) Σ", "S = segments of the step"),
}


def describe(trainer: TrainerSettings) -> str:
    """Loss, advantage and what is trained. Raises UsageError as `describe_loss` and `describe_advantage` do.

    Also for bounds of a ratio that one optimizer step a batch leaves at 1, for adapters of rank 0, and for columns that
    there cannot be.
    """
    check_columns(trainer)
    updates, changed = trainer.updates_per_batch, changed_fields(trainer.loss)
    remedy = "set trainer.minibatches_per_batch or epochs_per_batch, or leave it out"
    for name in _BOUNDS:
        if name in changed and trainer.loss.anchor == "proximal" and updates == 1:
            under = (
                "loss.anchor=proximal with one optimizer step a batch: the ratio to the policy before the batch is 1"
            )
            raise idle(f"loss.{name}", changed[name], under, remedy)
    if "clip" in changed_fields(trainer.advantage.critic) and trainer.updates_per_batch == 1:
        raise UsageError(
            f"trainer.advantage.critic.clip={trainer.advantage.critic.clip} would have no effect with one optimizer step "
            "a batch: at a batch's first step the values are those before it",
            remedy,
        )
    epochs = f", {trainer.epochs_per_batch} epochs" if trainer.epochs_per_batch > 1 else ""
    steps = f";  {updates} optimizer steps a batch{epochs}" if updates > 1 else ""
    adapters = _describe_adapters(trainer.lora)
    return f"{describe_loss(trainer.loss)};  {describe_advantage(trainer.advantage)}{steps}{adapters}"


def own_tables(trainer: TrainerSettings) -> tuple[dict[str, Any], dict[str, Any]]:
    """`loss.own` and `advantage.own` with the defaults of their classes. Raises UsageError for keys that there are not."""
    loss, advantage = losses.own_of(trainer.loss), advantages.own_of(trainer.advantage)
    return _table(loss), _table(advantage)


def _table(own: Section | None) -> dict[str, Any]:
    return {} if own is None else own.model_dump(mode="json", exclude_none=True)


def _describe_adapters(lora: LoraSettings) -> str:
    if not lora.rank:
        for name, value in changed_fields(lora).items():
            raise idle(f"lora.{name}", value, "lora.rank=0", "set trainer.lora.rank, or leave it out")
        return ""
    targets = "all linear layers" if lora.targets == ALL_LINEAR else ", ".join(lora.targets)
    return f";  W = W_0 + {lora.alpha / lora.rank:g}·B·A of rank {lora.rank} in {targets}, all other weights frozen"


def describe_loss(loss: algorithm.LossSettings) -> str:
    """One line with the exact formula in force. Raises UsageError for choices of which one would have no effect."""
    entry = find_loss(loss.policy)
    _refuse_idle_loss(loss, entry)
    factor, meaning = _MEANS[loss.mean]
    built_in = loss.model_dump(exclude={"correction", "own"})
    term = term_of(entry.term, built_in, losses.own_of(loss), loss.policy)
    gain = f"{_weight(loss.correction)}{term}"
    if loss.kl or loss.entropy:
        kl = f" − {loss.kl:g}·{loss.kl_estimator}(π, π_ref)" if loss.kl else ""
        gain = f"[{gain}{kl}{f' + {loss.entropy:g}·H(π)' if loss.entropy else ''}]"
    legend = [*_ratio_legend(loss, entry), meaning]
    legend += [*_correction_legend(loss), "π_beh = the engine's own logprobs", *_columns_legend(entry.columns)]
    if loss.kl or "reference" in entry.columns:
        legend.append("π_ref = the policy that the run began with")
    balance = f" + {loss.router_aux:g}·ℓ_experts" if loss.router_aux else ""
    if loss.positive:
        balance = f" − ({loss.positive:g}/N⁺) Σ⁺ log π{balance}"
        legend.append("Σ⁺ over the N⁺ fresh tokens of answers whose success is at least ½")
    if loss.router_aux:
        legend.append("ℓ_experts = the experts' load-balancing loss over all tokens of a pass")
    return f"L = −{factor.format(length=loss.fixed_length)} {gain}{balance};  {', '.join(legend)}"


def _columns_legend(columns: Sequence[str]) -> Iterable[str]:
    if columns:
        yield f"it reads {', '.join(columns)} of each token"


def _ratio_legend(loss: algorithm.LossSettings, entry: LossEntry) -> Iterable[str]:
    anchor = _ANCHORS[loss.anchor]
    if entry.ratio == "segment":
        yield f"s = (Π π/{anchor})^(1/n) over a segment's n tokens"
    elif entry.ratio == "token":
        yield f"r = π/{anchor}"
    if loss.dual_clip is not None:
        yield f"not below {loss.dual_clip:g}·A where A < 0"
    if loss.anchor == "interpolated":
        yield "log π_prox = log π_beh + d/(d+1)·(log π − log π_beh), d = the token's staleness"
    elif loss.anchor == "proximal":
        yield "π_prox = the policy before the batch"
    elif _corrects(loss.correction):
        yield "π_prox = the policy before the step"


def _weight(correction: algorithm.CorrectionSettings) -> str:
    if correction.weight == "none":
        return ""
    ratio = _RATIOS[correction.weight]
    return f"{ratio}·" if math.isinf(correction.cap) else f"min({ratio}, {correction.cap:g})·"


def _correction_legend(loss: algorithm.LossSettings) -> Iterable[str]:
    correction = loss.correction
    if _corrects(correction):
        yield "ρ = π_prox/π_beh"
    if correction.mask != "none":
        yield f"only where {correction.mask_low:g} ≤ {_RATIOS[correction.mask]} ≤ {correction.mask_high:g}"
    if correction.veto is not None:
        yield f"no segment with a ρ < {correction.veto:g}"


def _corrects(correction: algorithm.CorrectionSettings) -> bool:
    return correction.weight != "none" or correction.mask != "none" or correction.veto is not None


def _refuse_idle_loss(loss: algorithm.LossSettings, entry: LossEntry) -> None:
    changed, correction = changed_fields(loss), changed_fields(loss.correction)
    for name in _BOUNDS:
        if name in changed and name not in entry.uses:
            raise idle(
                f"loss.{name}", changed[name], f"loss.policy={loss.policy}, which does not read it", "leave it out"
            )
    if "anchor" in changed and entry.ratio is None:
        under = f"loss.policy={loss.policy}, which has no ratio"
        raise idle("loss.anchor", loss.anchor, under, "leave it out, or use ppo_clip")
    if "fixed_length" in changed and loss.mean != "fixed":
        raise idle("loss.fixed_length", loss.fixed_length, f"loss.mean={loss.mean}", "set loss.mean=fixed")
    if "kl_estimator" in changed and not loss.kl:
        raise idle("loss.kl_estimator", loss.kl_estimator, "loss.kl=0", "set loss.kl")
    for name, needs in (("cap", "weight"), ("mask_low", "mask"), ("mask_high", "mask")):
        if name in correction and getattr(loss.correction, needs) == "none":
            raise idle(
                f"loss.correction.{name}",
                correction[name],
                f"loss.correction.{needs}=none",
                f"set it, or leave {name} out",
            )
    if loss.correction.weight != "none" and entry.ratio is not None and loss.anchor == "behaviour":
        raise UsageError(
            f"trainer.loss.correction.weight={loss.correction.weight} with loss.anchor=behaviour would correct twice: the "
            "ratio is taken against the behaviour policy already",
            "set loss.anchor=proximal, or loss.correction.weight=none",
        )
    if loss.correction.mask != "none" and loss.correction.mask_low > loss.correction.mask_high:
        raise UsageError(
            f"trainer.loss.correction.mask_low={loss.correction.mask_low} lies above mask_high={loss.correction.mask_high}",
            "turn them round: every token would be left out",
        )


_KEPT = {
    "best": "only the best of each group is trained",
    "best_worst": "only the best and the worst of each group are trained",
    "best_random": "only the best of each group and one more, chosen at random, are trained",
}


def describe_advantage(advantage: algorithm.AdvantageSettings) -> str:
    """One line with the exact formula in force. Raises UsageError for choices of which one would have no effect."""
    entry = find_estimator(advantage.estimator)
    _refuse_idle_advantage(advantage, entry)
    built_in = advantage.model_dump(exclude={"reward", "critic", "cost", "own"})
    term = term_of(entry.term, built_in, advantages.own_of(advantage), advantage.estimator)
    if advantage.estimator == "grpo" and not advantage.std:
        term = "R − mean over the group"
    if advantage.estimator == algorithm.DISTILLATION:
        term = f"−{_teacher_term(advantage)}"
    if advantage.estimator == "gae" and advantage.trace_alpha is not None:
        discount, alpha = advantage.discount, advantage.trace_alpha
        term = (
            f"Σ_l ({discount:g}·λ)^l·(r + {discount:g}·V_next − V) with λ = max(0, 1 − 1/({alpha:g}·|y|)), |y| = the "
            "trajectory's sampled tokens"
        )
    if "whiten" in entry.uses and advantage.whiten:
        term = f"(x − mean)/(std + 1e-8) over the batch's tokens with x = {term}"
    distils = advantage.estimator == algorithm.DISTILLATION
    whole = f"[{term}] − {_teacher_term(advantage)}" if advantage.distil is not None and not distils else term
    legend = [f"A = {whole}", *_reward_legend(advantage)]
    if distils or advantage.distil is not None:
        legend += ["π_beh = the engine's own logprobs", "π_T = the teacher, at temperature 1"]
    legend += [] if distils else _columns_legend(entry.columns)
    if entry.critic:
        legend += _critic_legend(advantage)
    if advantage.keep != "all":
        legend.append(_KEPT[advantage.keep])
    if advantage.dynamic_sampling:
        legend.append(
            f"groups of equal rewards are dropped and made up for, at most {advantage.dynamic_sampling_most} a batch"
        )
    return ", ".join(legend)


def _critic_legend(advantage: algorithm.AdvantageSettings) -> Iterable[str]:
    critic = advantage.critic
    goal, meaning = ("A_V", "A_V = x + V_old") if advantage.whiten else ("A − V_old", "")
    if critic.trace is not None:
        goal, meaning = (
            "A_V",
            f"A_V = V_old + Σ_l ({advantage.discount:g}·{critic.trace:g})^l·(r + {advantage.discount:g}·V_next − V)",
        )
    bounded = f"(clip(V, V_old ± {critic.clip:g}) − {goal})²"
    yield f"V = the critic, loss ½·max((V − {goal})², {bounded})"
    if meaning:
        yield meaning
    if critic.pretrain_steps:
        yield f"in the first {critic.pretrain_steps} steps the critic learns alone"


def _teacher_term(advantage: algorithm.AdvantageSettings) -> str:
    gap, discount = "(log π_beh − log π_T)", advantage.distil_discount
    summed = f"Σ_u≥t {discount:g}^(u−t)·{gap}_u" if discount else gap
    return f"{advantage.distil_coefficient:g}·{summed}"


def _reward_legend(advantage: algorithm.AdvantageSettings) -> list[str]:
    parts = []
    reward = _shaped(advantage.reward)
    if advantage.reward.normalise:
        parts.append("μ, σ = mean and standard deviation of the task's rewards so far")
    if advantage.overlong_length is not None:
        expected = advantage.overlong_length - advantage.overlong_buffer
        reward += f" + clip(({expected} − |y|)/{advantage.overlong_buffer}, −1, 0)"
    if advantage.cost.component is not None:
        reward = f"({reward} − λ·{advantage.cost.component})/(1 + λ)"
        cost = advantage.cost
        parts.append(f"ln λ += {cost.learning_rate:g}·λ·(mean {cost.component} − {cost.limit:g})")
    if advantage.kl:
        reward += f" − {advantage.kl:g}·Σ {advantage.kl_estimator}(π_beh, π_ref)"
    return [f"R = {reward}", *parts] if reward != "reward" else []


def _shaped(shaping: algorithm.RewardShaping) -> str:
    reward = "reward"
    if shaping.clip is not None:
        reward = f"clip(reward, {shaping.clip[0]:g}, {shaping.clip[1]:g})"
    if shaping.normalise:
        reward = f"({reward} − μ)/(σ + 1e-8)"
    return reward if shaping.scale == 1.0 else f"{shaping.scale:g}·{reward}"


def _refuse_idle_advantage(advantage: algorithm.AdvantageSettings, entry: AdvantageEntry) -> None:
    changed = changed_fields(advantage)
    for name in _OF_SOME_ESTIMATOR:
        if name in changed and name not in entry.uses:
            under = f"advantage.estimator={advantage.estimator}, which does not read it"
            raise idle(f"advantage.{name}", changed[name], under, "leave it out")
    if advantage.trace_alpha is not None and "trace" in changed:
        under = f"advantage.trace_alpha={advantage.trace_alpha:g}"
        raise idle("advantage.trace", advantage.trace, under, "leave one of them out")
    for name, value in changed_fields(advantage.critic).items():
        if not entry.critic:
            under = f"advantage.estimator={advantage.estimator}, which has no critic"
            raise idle(f"advantage.critic.{name}", value, under, "leave it out, or set advantage.estimator=gae")
    _refuse_idle_distillation(advantage, entry)
    if "kl_estimator" in changed and not advantage.kl:
        raise idle("advantage.kl_estimator", advantage.kl_estimator, "advantage.kl=0", "set advantage.kl")
    if "overlong_buffer" in changed and advantage.overlong_length is None:
        raise idle(
            "advantage.overlong_buffer",
            advantage.overlong_buffer,
            "no overlong_length",
            "set advantage.overlong_length",
        )
    if advantage.overlong_length is not None and advantage.overlong_buffer > advantage.overlong_length:
        raise UsageError(
            f"trainer.advantage.overlong_buffer={advantage.overlong_buffer} is more than "
            f"overlong_length={advantage.overlong_length}",
            "every answer would get a penalty: make it smaller",
        )
    _refuse_idle_groups(advantage, entry)
    _refuse_idle_shaping(advantage)
    for name, value in changed_fields(advantage.cost).items():
        if advantage.cost.component is None:
            raise idle(
                f"advantage.cost.{name}", value, "no cost.component", "name the reward component that is the cost"
            )
    if advantage.cost.price > advantage.cost.largest:
        raise UsageError(
            f"trainer.advantage.cost.price={advantage.cost.price} lies above largest={advantage.cost.largest}",
            "begin with less, or allow more",
        )


def _refuse_idle_shaping(advantage: algorithm.AdvantageSettings) -> None:
    """What is divided by its own standard deviation, of the group or of the batch, does not change with its scale."""
    shaping = changed_fields(advantage.reward)
    if advantage.kl or advantage.overlong_length is not None or advantage.cost.component is not None:
        return
    idle_ones: tuple[str, ...] = ()
    if advantage.estimator == "grpo" and advantage.std:
        idle_ones, under = ("scale", "normalise"), "grpo with std, which divides by the group's own standard deviation"
    elif advantage.estimator in ("reinforce_pp", "reinforce_pp_baseline"):
        idle_ones, under = ("scale",), f"{advantage.estimator}, which divides by the batch's own standard deviation"
    for name in idle_ones:
        if name in shaping:
            under = f"advantage.estimator={under}"
            raise idle(f"advantage.reward.{name}", shaping[name], under, "leave it out")


def _refuse_idle_distillation(advantage: algorithm.AdvantageSettings, entry: AdvantageEntry) -> None:
    if advantage.distil_discount and advantage.distil is None and advantage.estimator != algorithm.DISTILLATION:
        under = f"advantage.estimator={advantage.estimator} without advantage.distil"
        raise idle("advantage.distil_discount", advantage.distil_discount, under, "set trainer.advantage.distil")
    changed = changed_fields(advantage)
    for section in ("cost", "reward"):
        of = changed_fields(getattr(advantage, section))
        changed |= {f"{section}.{name}": value for name, value in of.items()}
    shaping = [f"reward.{name}" for name in algorithm.RewardShaping.model_fields]
    for name in () if entry.rewards else ("kl", "overlong_length", "cost.component", "keep", *shaping):
        if name in changed:
            under = f"advantage.estimator={advantage.estimator}, which reads no rewards"
            raise idle(
                f"advantage.{name}", changed[name], under, "set trainer.advantage.distil beside another estimator"
            )


def _refuse_idle_groups(advantage: algorithm.AdvantageSettings, entry: AdvantageEntry) -> None:
    if advantage.dynamic_sampling and not entry.compares:
        under = f"advantage.estimator={advantage.estimator}: a group of equal rewards has something to say there"
        raise idle("advantage.dynamic_sampling", True, under, "leave it out, or compare siblings (grpo, rloo …)")
    if "dynamic_sampling_most" in changed_fields(advantage) and not advantage.dynamic_sampling:
        value = advantage.dynamic_sampling_most
        raise idle("advantage.dynamic_sampling_most", value, "dynamic_sampling=false", "set advantage.dynamic_sampling")
