"""Seeded requests on a CPU whose prompts vLLM computes in parts.

    step 1   [ prompt …        draws a token that is thrown away ─ its seed must not have moved
    step 2     … rest of it ]  draws the first token

vLLM 0.32 takes the seed back afterwards by an offset, which generators of a CPU do not have: one seeded prompt that did not
fit into a step with others ended the engine core ("CPU Generator does not use offset"). Here such a seed is laid aside
while that step draws.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def keep_seeds_of_unfinished_prompts(runner: Any) -> None:
    """Change how this model runner draws, where it draws on a CPU; elsewhere vLLM's own way works. Once for each runner."""
    if torch.device(runner.device).type != "cpu":
        return
    sample_tokens = runner.sample_tokens

    def sample(*arguments: Any, **named: Any) -> Any:
        seeds: dict[int, torch.Generator] = runner.input_batch.generators
        unfinished = np.flatnonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs])
        aside = {int(row): seeds.pop(int(row)) for row in unfinished if int(row) in seeds}
        try:
            return sample_tokens(*arguments, **named)
        finally:
            seeds.update(aside)

    runner.sample_tokens = sample
