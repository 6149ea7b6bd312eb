"""Engine statistics from vLLM's step outputs: tokens, prefill, commits and stalls.

vLLM's own statistics loop over all requests in each step; this needs only the time stamp that each step carries. Steps
and commits are ordered by the engine core's clock, since they arrive here on different channels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from rollout_server.engines.step_timing import StepTiming


class StepMeter:
    """Feed it every message of the engine core (`observe`) and the time of every commit; times in seconds."""

    def __init__(self) -> None:
        self._timing = StepTiming()
        self._commits: deque[float] = deque()
        self.commits = 0
        self.generating = 0
        """Samples that got a token in the last step."""
        self.prefill_tokens = 0
        self.kv_use: float | None = None
        """Share of the blocks in use, as the core last told (`weight_bus.vllm.kv_cache`)."""

    @property
    def tokens(self) -> int:
        return self._timing.tokens

    def stalls_ms(self) -> list[float]:
        return self._timing.stalls_ms()

    def observe(self, outputs: Any, own: Callable[[str], bool] | None = None) -> list[str]:
        """One EngineCoreOutputs message; returns the ids of the requests whose prefill has just ended. `own`: which
        requests count; None: all."""
        if outputs.scheduler_stats is not None:
            self.kv_use = outputs.scheduler_stats.kv_cache_usage
        tokens = generating = 0
        prefilled = []
        for output in outputs.outputs:
            if own is not None and not own(output.request_id):
                continue
            sampled = len(output.new_token_ids)
            tokens += sampled
            generating += sampled > 0
            if output.prefill_stats is not None:
                self.prefill_tokens += output.prefill_stats.num_computed_tokens
                prefilled.append(output.request_id)
        if tokens:
            self._step(outputs.timestamp, tokens, generating)
        return prefilled

    def _step(self, timestamp: float, tokens: int, generating: int) -> None:
        while self._commits and self._commits[0] <= timestamp:
            self._commits.popleft()
            self._timing.commit()
        self._timing.step(timestamp, tokens)
        self.generating = generating

    def committed(self, at: float) -> None:
        """The engine core flipped at `at`, on the clock that its steps are stamped with."""
        self.commits += 1
        self._commits.append(at)

    def break_off(self) -> None:
        """Nothing is left to decode, or decoding was paused."""
        while self._commits:
            self._commits.popleft()
            self._timing.commit()
        self._timing.break_off()
