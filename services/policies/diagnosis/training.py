"""Findings of a run's training, from its steps: signs that it cannot learn, slower steps, reward that is lost again. Pure.

| finding           | seen                                                                                            |
|-------------------|-------------------------------------------------------------------------------------------------|
| signs             | those that the trainer saw (`services.policies.training.health`), in the last step or half of 10|
| `throughput-drop` | the last steps take three times as long as those before, at under half the tokens a second      |
| `reward-collapse` | success under half of its peak (0.2 or more); without success, two spreads of reward below it    |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import mean, median

from services.policies.diagnosis.finding import Finding, FindingId, error, warning
from services.wire.run_metrics import StepMetrics

LATELY = 5
"""Steps that are compared with those before."""
_SIGNS_OF = 10
_FIRST = 3
"""Steps that are slow because they are the first."""
SLOWER = 3.0
LEAST_MS = 500.0
"""By which a step must be longer: below it, another process on the machine is as likely."""
FEWER_TOKENS = 0.5
PEAK_SUCCESS = 0.2
LOST = 0.5
SPREADS = 2.0

_OF_SIGNS: dict[str, FindingId] = {"no_signal": "equal-rewards", "disagreement": "logprob-gap"}
_STAGES = {
    "wait_ms": ("waiting for a batch", "rollout servers, environments or rewards are slower: see `rollmesh status`"),
    "pack_ms": ("packing rows", "trajectories are longer, or other work takes the trainer's cores"),
    "train_ms": (
        "the optimizer step",
        "trajectories are longer, the device is shared or throttled, or memory is swapped",
    ),
    "publish_ms": ("publishing weights", "an engine holds an old version's memory: see `rollmesh weights status`"),
}


def of_steps(lines: Sequence[StepMetrics]) -> Iterator[Finding]:
    """`lines`: of metrics.jsonl, the oldest first."""
    yield from _signs(lines)
    yield from _throughput(lines)
    yield from _reward(lines)


def _signs(lines: Sequence[StepMetrics]) -> Iterator[Finding]:
    if not lines:
        return
    last = lines[-1]
    lately = lines[-_SIGNS_OF:]
    often = Counter(kind for line in lately for kind in line.warnings)
    for kind, times in sorted(often.items()):
        if kind in last.warnings or 2 * times >= _SIGNS_OF:
            words = next(line.warnings[kind] for line in reversed(lately) if kind in line.warnings)
            seen, remedy = _apart(words)
            which = _OF_SIGNS.get(kind, "cannot-learn")
            where = f"sign {kind} in {times} of the last {len(lately)} steps"
            yield (error if kind == "disagreement" else warning)(which, seen, where, remedy)


def _apart(words: str) -> tuple[str, str]:
    """What was seen and what to do, of the words of a sign."""
    seen, behind, remedy = words.rpartition("; ")
    if not behind:
        seen, _, remedy = words.rpartition(": ")
    return seen, remedy


def _throughput(lines: Sequence[StepMetrics]) -> Iterator[Finding]:
    before, lately = lines[_FIRST:-LATELY], lines[-LATELY:]
    if len(before) < 2 * LATELY:
        return
    usual, now = _middle(before, "step_ms"), _middle(lately, "step_ms")
    rate_before, rate = _middle(before, "tokens_per_s"), _middle(lately, "tokens_per_s")
    if now < SLOWER * usual or now - usual < LEAST_MS or rate > FEWER_TOKENS * rate_before:
        return
    stage = max(_STAGES, key=lambda name: _middle(lately, name) - _middle(before, name))
    what, remedy = _STAGES[stage]
    yield warning(
        "throughput-drop",
        f"steps take {now / usual:.1f} times as long as before; most of it is {what}",
        f"{stage} {_middle(before, stage):.0f} → {_middle(lately, stage):.0f}, step_ms {usual:.0f} → {now:.0f}, tokens a "
        f"second {rate_before:.0f} → {rate:.0f} (medians, the last {LATELY} steps)",
        remedy,
    )


def _middle(lines: Sequence[StepMetrics], name: str) -> float:
    return float(median(getattr(line, name) for line in lines))


def _reward(lines: Sequence[StepMetrics]) -> Iterator[Finding]:
    if len(lines) < 2 * LATELY:
        return
    windows = [lines[at : at + LATELY] for at in range(len(lines) - LATELY + 1)]
    best = max(windows, key=lambda window: (mean(_success(window)), mean(line.reward for line in window)))
    peak, now = mean(_success(best)), mean(_success(windows[-1]))
    remedy = "lower trainer.learning_rate or k, bound the ratios (docs/algorithms.md); `rollmesh export --at best`"
    if peak >= PEAK_SUCCESS:
        if now < LOST * peak:
            seen = f"mean of {LATELY} steps, step {best[-1].step} against step {lines[-1].step}"
            yield error("reward-collapse", f"success has fallen from {peak:.2f} to {now:.2f}", seen, remedy)
        return
    best = max(windows, key=lambda window: mean(line.reward for line in window))
    top, last = (mean(line.reward for line in window) for window in (best, windows[-1]))
    spread = mean(line.reward_spread for line in best)
    if spread > 0.0 and top - last > SPREADS * spread:
        seen = f"mean of {LATELY} steps, step {best[-1].step} against step {lines[-1].step}; spread {spread:.3g}"
        yield error("reward-collapse", f"reward has fallen from {top:.3g} to {last:.3g}", seen, remedy)


def _success(lines: Sequence[StepMetrics]) -> list[float]:
    return [line.success for line in lines]
