"""All estimators by name: where its function is, its formula as text, and which settings it reads. No torch here.

An estimator of your own needs no line here: set `trainer.advantage.estimator = "your_package.your_module:yours"`, a
function of `(RewardBatch, AdvantageSettings)` with an attribute `entry`, an `AdvantageEntry`. With settings of its own it
gets them third.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.config.base import Section
from services.config.training.algorithm import (
    DISTILLATION,
    GREEDY_BASELINE,
    AdvantageSettings,
    GaeSettings,
    GrpoSettings,
    ReinforcePpSettings,
)
from trainer.algorithms.columns import ADVANTAGE_COLUMNS, AdvantageColumn, check_columns
from trainer.algorithms.plugins import bound, find_entry, load_function, own_settings

if TYPE_CHECKING:
    from trainer.algorithms.advantages.batch import RewardBatch, TokenAdvantages

Estimator = Callable[["RewardBatch", AdvantageSettings], "TokenAdvantages"]
_WHAT = "trainer.advantage.estimator"


@dataclass(frozen=True)
class AdvantageEntry:
    """`term`: what the advantage is, as text with `{setting}` in it. `uses`: which of the estimators' settings it reads.

    `compares`: it compares siblings, so that a group of equal rewards gives no gradient, and a group of one no advantage.
    `critic`: it needs a critic's values, and returns their targets. `rewards`: it reads them. `columns`: what it reads
    beyond (`trainer.algorithms.columns`). `settings`: its own, under `trainer.advantage.own`.
    """

    target: str
    term: str
    uses: tuple[str, ...] = ()
    compares: bool = False
    critic: bool = False
    rewards: bool = True
    columns: tuple[AdvantageColumn, ...] = ()
    settings: type[Section] | None = None


_BATCH = "(x − mean)/(std + 1e-8) over the batch's tokens"

ADVANTAGES: Mapping[str, AdvantageEntry] = {
    "grpo": AdvantageEntry(
        "trainer.algorithms.advantages.grpo:grpo",
        "(R − mean)/(std + 1e-4) over the group",
        tuple(GrpoSettings.model_fields),
        compares=True,
    ),
    "rloo": AdvantageEntry(
        "trainer.algorithms.advantages.rloo:rloo", "R − mean over the other siblings", compares=True
    ),
    GREEDY_BASELINE: AdvantageEntry("trainer.algorithms.advantages.remax:remax", "R − R of the greedy sibling"),
    "reinforce_pp": AdvantageEntry(
        "trainer.algorithms.advantages.reinforce_pp:reinforce_pp",
        f"{_BATCH} with x = Σ_u≥t {{discount:g}}^(u−t)·r_u",
        tuple(ReinforcePpSettings.model_fields),
    ),
    "reinforce_pp_baseline": AdvantageEntry(
        "trainer.algorithms.advantages.reinforce_pp:reinforce_pp_baseline",
        f"{_BATCH} with x = R − mean over the group",
        compares=True,
    ),
    "gae": AdvantageEntry(
        "trainer.algorithms.advantages.gae:gae",
        "Σ_l ({discount:g}·{trace:g})^l·(r + {discount:g}·V_next − V)",
        tuple(GaeSettings.model_fields),
        critic=True,
    ),
    # Its term is the teacher's, which others may have, too.
    DISTILLATION: AdvantageEntry(
        "trainer.algorithms.advantages.opd:opd", "", rewards=False, columns=("behaviour", "teacher")
    ),
}


def find_estimator(name: str) -> AdvantageEntry:
    """The entry of an estimator by name, or of a function `module:function`. Raises UsageError where there is none."""
    entry = find_entry(name, ADVANTAGES, AdvantageEntry, _WHAT)
    check_columns(entry.columns, ADVANTAGE_COLUMNS, f"estimator {name}")
    return entry


def load_estimator(name: str) -> Callable[..., TokenAdvantages]:
    """The function itself. Raises UsageError as `find_estimator` does."""
    function: Callable[..., TokenAdvantages] = load_function(name if ":" in name else find_estimator(name).target)
    return function


def own_of(advantage: AdvantageSettings) -> Section | None:
    """The settings of an estimator of the user's own; None where it has none. Raises UsageError for keys it has not."""
    chosen = f"advantage.estimator={advantage.estimator}"
    return own_settings(find_estimator(advantage.estimator).settings, advantage.own, "advantage", chosen)


def make_estimator(advantage: AdvantageSettings) -> Estimator:
    """The function that is chosen, with its own settings. Raises UsageError as `own_of` does."""
    return bound(load_estimator(advantage.estimator), own_of(advantage))
