"""The advantage in force, as text; choices that would silently have no effect are refused. No torch is imported.

A = estimator(R)          R = (reward [+ fine for length] [− λ·cost])[/(1 + λ)] [− β·D]
"""

from __future__ import annotations

from services.config.algorithm import AdvantageSettings
from services.config.base import changed_fields
from services.wire.errors import UsageError
from trainer.advantages.registry import AdvantageEntry, find_estimator

_KEPT = {
    "best": "only the best of each group is trained",
    "best_worst": "only the best and the worst of each group are trained",
    "best_random": "only the best of each group and one more, drawn at random, are trained",
}


def describe_advantage(advantage: AdvantageSettings) -> str:
    """One line with the exact formula in force. Raises UsageError for choices of which one would have no effect."""
    entry = find_estimator(advantage.estimator)
    _refuse_idle_choices(advantage, entry)
    term = entry.term.format(**advantage.model_dump(exclude={"critic", "cost"}))
    if advantage.estimator == "grpo" and not advantage.std:
        term = "R − mean over the group"
    if "whiten" in entry.uses and advantage.whiten:
        term = f"(x − mean)/(std + 1e-8) over the batch's tokens with x = {term}"
    legend = [f"A = {term}", *_reward_legend(advantage)]
    if entry.critic:
        legend.append(
            f"V = the critic, loss ½·max((V − A_V)², (clip(V, V_old ± {advantage.critic.clip:g}) − A_V)²), A_V = x + V_old"
            if advantage.whiten
            else f"V = the critic, loss ½·max((V − A − V_old)², (clip(V, V_old ± {advantage.critic.clip:g}) − A − V_old)²)"
        )
    if advantage.keep != "all":
        legend.append(_KEPT[advantage.keep])
    if advantage.dynamic_sampling:
        legend.append(
            f"groups of equal rewards are dropped and made up for, at most {advantage.dynamic_sampling_most} a batch"
        )
    return ", ".join(legend)


def _reward_legend(advantage: AdvantageSettings) -> list[str]:
    reward = "reward"
    if advantage.overlong_length is not None:
        expected = advantage.overlong_length - advantage.overlong_buffer
        reward += f" + clip(({expected} − |y|)/{advantage.overlong_buffer}, −1, 0)"
    parts = []
    if advantage.cost.component is not None:
        reward = f"({reward} − λ·{advantage.cost.component})/(1 + λ)"
        cost = advantage.cost
        parts.append(f"ln λ += {cost.learning_rate:g}·λ·(mean {cost.component} − {cost.limit:g})")
    if advantage.kl:
        reward += f" − {advantage.kl:g}·Σ {advantage.kl_estimator}(π_beh, π_ref)"
    return [f"R = {reward}", *parts] if reward != "reward" else []


def _refuse_idle_choices(advantage: AdvantageSettings, entry: AdvantageEntry) -> None:
    changed = changed_fields(advantage)
    for name in ("std", "discount", "trace", "whiten"):
        if name in changed and name not in entry.uses:
            under = f"advantage.estimator={advantage.estimator}, which does not read it"
            raise _idle(name, changed[name], under, "leave it out")
    for name, value in changed_fields(advantage.critic).items():
        if not entry.critic:
            under = f"advantage.estimator={advantage.estimator}, which has no critic"
            raise _idle(f"critic.{name}", value, under, "leave it out, or set advantage.estimator=gae")
    if "kl_estimator" in changed and not advantage.kl:
        raise _idle("kl_estimator", advantage.kl_estimator, "advantage.kl=0", "set advantage.kl")
    if "overlong_buffer" in changed and advantage.overlong_length is None:
        raise _idle("overlong_buffer", advantage.overlong_buffer, "no overlong_length", "set advantage.overlong_length")
    if advantage.overlong_length is not None and advantage.overlong_buffer > advantage.overlong_length:
        raise UsageError(
            f"trainer.advantage.overlong_buffer={advantage.overlong_buffer} is more than "
            f"overlong_length={advantage.overlong_length}",
            "every answer would be fined: make it smaller",
        )
    _refuse_idle_groups(advantage, entry)
    for name, value in changed_fields(advantage.cost).items():
        if advantage.cost.component is None:
            raise _idle(f"cost.{name}", value, "no cost.component", "name the reward component that is the cost")
    if advantage.cost.price > advantage.cost.largest:
        raise UsageError(
            f"trainer.advantage.cost.price={advantage.cost.price} lies above largest={advantage.cost.largest}",
            "begin with less, or allow more",
        )


def _refuse_idle_groups(advantage: AdvantageSettings, entry: AdvantageEntry) -> None:
    if advantage.dynamic_sampling and not entry.compares:
        under = f"advantage.estimator={advantage.estimator}: a group of equal rewards has something to say there"
        raise _idle("dynamic_sampling", True, under, "leave it out, or compare siblings (grpo, rloo …)")
    if "dynamic_sampling_most" in changed_fields(advantage) and not advantage.dynamic_sampling:
        value = advantage.dynamic_sampling_most
        raise _idle("dynamic_sampling_most", value, "dynamic_sampling=false", "set advantage.dynamic_sampling")


def _idle(name: str, value: object, under: str, remedy: str) -> UsageError:
    return UsageError(f"trainer.advantage.{name}={value} would have no effect under {under}", remedy)
