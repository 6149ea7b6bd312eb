"""Signs that a run cannot learn, from the metrics of its last two optimizer steps. Pure.

| kind               | seen                                                                         | steps |
|--------------------|------------------------------------------------------------------------------|-------|
| `no_signal`        | in every group all rewards are equal, the task not solved, and no teacher    | 2     |
| `truncated`        | more than 20 % of the trajectories end at the token limit                    | 2     |
| `unknown_tokens`   | prompts hold tokens that stand for text that the vocabulary has not          | 1     |
| `unrendered_tools` | tools were offered that the chat template leaves out                         | 1     |
| `entropy`          | answers are all but certain (below 0.02 nats a token), and the task unsolved | 2     |
| `ratios`           | the policy is far from the one that sampled: see RATIO_MEAN, EFFECTIVE       | 2     |
| `gradient`         | the gradient's norm is above 100 times what it is clipped to                 | 2     |
| `disagreement`     | engine and trainer give a token other logprobs: above 0.1 in the mean        | 1     |

What a healthy run may show by chance must be seen in two steps on end. A solved task has no signal left either: that is
no fault.
"""

from __future__ import annotations

from services.wire.run_metrics import StepMetrics

SOLVED = 0.9
TRUNCATED = 0.2
ENTROPY = 0.02
RATIO_MEAN = (0.5, 2.0)
EFFECTIVE = 0.2
GRADIENT = 100.0
GAP = 0.1


def signs(before: StepMetrics | None, now: StepMetrics, clip_grad_norm: float) -> dict[str, str]:
    """Kind → what was seen and what to do, in words. `before`: the step before; `clip_grad_norm`: the setting."""
    found = _at_once(now)
    if before is not None:
        earlier = _in_two(before, clip_grad_norm)
        found |= {kind: words for kind, words in _in_two(now, clip_grad_norm).items() if kind in earlier}
    return found


def _at_once(line: StepMetrics) -> dict[str, str]:
    found = {}
    if line.unknown_tokens:
        found["unknown_tokens"] = (
            f"{line.unknown_tokens} tokens of prompts are the vocabulary's unknown token: the model cannot read them; "
            "write prompts in its alphabet, or take another tokenizer"
        )
    if line.unrendered_tools:
        found["unrendered_tools"] = (
            f"{line.unrendered_tools} trajectories were offered tools that the chat template leaves out: the model does "
            "not hear of them; describe them in a message, or take a template that renders them"
        )
    if line.logprob_gap_mean is not None and line.logprob_gap_mean > GAP:
        found["disagreement"] = (
            f"engine and trainer differ by {line.logprob_gap_mean:.2g} in a token's logprob: they do not compute the same "
            "policy; compare their dtypes, sampling and model folders"
        )
    return found


def _in_two(line: StepMetrics, clip_grad_norm: float) -> dict[str, str]:
    found = {}
    solved = line.success >= SOLVED
    if line.equal_groups == 1.0 and not solved and line.teacher_kl is None:
        found["no_signal"] = (
            f"all rewards of each group are equal (mean {line.reward:.3g}): there is nothing to learn from; give rewards "
            "in parts, easier problems, larger groups or a higher temperature"
        )
    if line.truncated > TRUNCATED:
        found["truncated"] = (
            f"{line.truncated:.0%} of the trajectories end at the token limit: raise rollout.max_tokens, or ask for "
            "shorter answers"
        )
    if line.entropy is not None and line.entropy < ENTROPY and not solved:
        found["entropy"] = (
            f"entropy is {line.entropy:.2g} nats a token: siblings hardly differ; lower trainer.learning_rate, or raise "
            "rollout.temperature"
        )
    mean, effective = line.ratio_mean, line.effective_samples
    low, high = RATIO_MEAN
    if (mean is not None and not low < mean < high) or (effective is not None and effective < EFFECTIVE):
        shown = ", ".join(
            f"{name} {value:.2g}"
            for name, value in (("mean", mean), ("effective samples", effective))
            if value is not None
        )
        found["ratios"] = (
            f"importance ratios run away ({shown}): the policy moves faster than its samples follow; lower "
            "trainer.learning_rate or k"
        )
    if line.grad_norm is not None and line.grad_norm > GRADIENT * clip_grad_norm:
        found["gradient"] = (
            f"the gradient's norm is {line.grad_norm:.3g}, clipped to {clip_grad_norm:g}: lower trainer.learning_rate, or "
            "look for outliers among rewards"
        )
    return found
