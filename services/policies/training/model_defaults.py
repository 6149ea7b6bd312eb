"""Settings that suit a model by its size, where nobody set them. Pure.

Defaults suit the policies of built-in tasks: a tenth of a million parameters, answers of a dozen tokens. From SMALL on
these take their place:

| setting                    | value                                                                       |
|----------------------------|-----------------------------------------------------------------------------|
| `trainer.learning_rate`    | 2e-5 at 135 million parameters, less by √size, 1e-6 at the least; × 10 with LoRA |
| `rollout.max_tokens`       | a quarter of the context, at most 1024                                      |
| `model.dtype`              | bfloat16 on a GPU                                                           |
| `trainer.batch_timeout_s`, `rollout.group_timeout_s` | half an hour                                       |
| `weights.stage_timeout_s`  | 30 s and 10 s for each GB                                                   |
| `rollout.start_timeout_s`  | half an hour and 30 s for each GB                                           |

Rates: 2e-5 is what SmolLM2-135M was seen to learn with here; 1e-6 to 2e-6 is what the field takes at 7 to 8 billion
parameters. LoRA: ten times as much (https://thinkingmachines.ai/blog/lora/).
"""

from __future__ import annotations

from dataclasses import dataclass

FITTED = (
    "trainer.learning_rate",
    "trainer.batch_timeout_s",
    "rollout.group_timeout_s",
    "rollout.max_tokens",
    "weights.stage_timeout_s",
    "rollout.start_timeout_s",
    "model.dtype",
)
"""The settings that there are values for."""
SMALL = 16_000_000
"""Parameters below which a model is like those that defaults are for."""
_KNOWN_SIZE, _KNOWN_RATE, _LEAST_RATE = 135e6, 2e-5, 1e-6
_MOST_TOKENS = 1024
_PATIENCE_S = 1800.0


@dataclass(frozen=True)
class ModelFacts:
    """`parameters`: of all its weights; `context`: tokens, None where its configuration does not say."""

    parameters: int
    context: int | None = None

    @property
    def small(self) -> bool:
        return self.parameters < SMALL


@dataclass(frozen=True)
class Fitting:
    value: float | int | str
    why: str


def fitting(facts: ModelFacts, *, adapters: bool, gpu: bool) -> dict[str, Fitting]:
    """Dotted name → what suits the model; nothing for a small one. `adapters`: LoRA."""
    if facts.small:
        return {}
    size = f"{facts.parameters / 1e6:,.0f} million parameters"
    rate = max(_LEAST_RATE, _KNOWN_RATE * (_KNOWN_SIZE / facts.parameters) ** 0.5)
    gigabytes = facts.parameters * 4 / 1e9
    found = {
        "trainer.learning_rate": Fitting(
            float(f"{rate * (10 if adapters else 1):.2g}"), f"for {size}{' and LoRA' if adapters else ''}"
        ),
        "trainer.batch_timeout_s": Fitting(_PATIENCE_S, f"for {size}"),
        "rollout.group_timeout_s": Fitting(_PATIENCE_S, f"for {size}"),
        "weights.stage_timeout_s": Fitting(float(30 + round(10 * gigabytes)), f"for {size}"),
        "rollout.start_timeout_s": Fitting(_PATIENCE_S + round(30 * gigabytes), f"for {size}"),
    }
    if facts.context is not None:
        tokens = max(1, min(_MOST_TOKENS, facts.context // 4))
        found["rollout.max_tokens"] = Fitting(tokens, f"for a context of {facts.context} tokens")
    if gpu:
        found["model.dtype"] = Fitting("bfloat16", "for a GPU")
    return found
