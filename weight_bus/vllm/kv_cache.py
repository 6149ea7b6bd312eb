"""KV cache policy of a vLLM engine core at a weight commit: keep, salt or recompute.

    policy      prefix cache              running requests          waiting requests
    keep        off                       keep keys and values      start under the new version
    salt        on, keyed by the commit   keep keys and values      get the new key before the lookup
    recompute   on, emptied               recomputed                start under the new version

Requests get their cache key here, on the thread that steps, not in the server that sends them: a request in transit during
a commit would carry the old key. After a commit no old key is looked up: waiting requests have the new one, and running
ones do no further lookup. So blocks that running requests still store under old keys, of mixed versions, are never found.

Where several runs' adapters are served, a commit of one is of that run's requests alone: vLLM's own keys tell adapters
apart. `recompute` then changes the run's key, too, since the cache cannot be emptied beneath the others.

A request that was preempted or has not sampled its first token has no keys and values: they are computed under the next
step's version. Its outputs say so (`prefill_stats`).
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from services.wire.errors import UsageError
from services.wire.sampling import KvPolicy
from weight_bus.vllm.slots.requests import slot_of

TELL_EVERY_S = 0.5
"""Between two steps that say which share of the blocks is in use."""


class KvMemory:
    """KV policy of one engine core. Wraps its scheduler's `schedule`, `_preempt_request` and `make_stats`.

    `shared`: it serves several runs' adapters.
    """

    def __init__(self, core: Any, policy: KvPolicy, *, shared: bool = False) -> None:
        caching = bool(core.scheduler.kv_cache_manager.enable_caching)
        if caching and policy == "keep":
            raise UsageError(
                "with kv_policy keep, prefixes of older versions would be found in this engine's cache",
                "start it without prefix caching, or choose salt or recompute",
            )
        self._scheduler = core.scheduler
        self._policy = policy
        self._empties = policy == "recompute" and not shared
        self._changes_keys = policy == "salt" or (policy == "recompute" and shared)
        self._commits: Counter[int] = Counter()
        """Of each slot."""
        self._put_back: set[str] = set()
        self._preempt = core.scheduler._preempt_request
        self._schedule = core.scheduler.schedule
        core.scheduler._preempt_request = self._preempt_and_note
        core.scheduler.schedule = self._schedule_and_count
        self._make_stats, self._told_at = core.scheduler.make_stats, 0.0
        core.scheduler.make_stats = self._make_stats_seldom
        if self._changes_keys:
            self._add = core.add_request
            core.add_request = self._add_salted

    def apply_policy(self, slot: int = 1) -> None:
        """Call before the weights in `slot` change, between two steps; harmless if they then do not."""
        self._commits[slot] += 1
        if self._empties:
            self._scheduler.reset_prefix_cache(reset_running_requests=True)
            return
        for request in reversed(self.running(slot)):
            if self._policy == "recompute" or request.is_prefill_chunk or not request.num_output_tokens:
                self._take_back(request)
        if self._changes_keys:
            self._change_keys(slot)

    def running(self, slot: int) -> list[Any]:
        """Its requests that run."""
        return [request for request in self._scheduler.running if slot_of(request) == slot]

    def _take_back(self, request: Any) -> None:
        """Preempt a request whose prompt is computed in part: the rest must not come from another version."""
        self._scheduler.running.remove(request)
        self._scheduler._preempt_request(request, 0.0, drop_stale_output=True)
        # As vLLM does where it resets running requests: they may go on in the very next step.
        self._scheduler.prev_step_scheduled_req_ids.discard(request.request_id)

    def _change_keys(self, slot: int) -> None:
        running = {request.request_id for request in self._scheduler.running}
        for request in self._scheduler.requests.values():
            if slot_of(request) != slot:
                continue
            if request.request_id in running:
                request.skip_reading_prefix_cache = True
            else:
                _, _, own = request.cache_salt.partition("/")
                self._give_key(request, own)

    def _add_salted(self, request: Any, *arguments: Any, **named: Any) -> None:
        self._give_key(request, request.cache_salt or "")
        self._add(request, *arguments, **named)

    def _give_key(self, request: Any, own: str) -> None:
        request.cache_salt = f"{self._commits[slot_of(request)]}/{own}"
        request.block_hashes.clear()
        request.update_block_hashes()

    def _preempt_and_note(self, request: Any, *arguments: Any, **named: Any) -> None:
        self._preempt(request, *arguments, **named)
        self._put_back.add(request.request_id)

    def _schedule_and_count(self, *arguments: Any, **named: Any) -> Any:
        """A step's plan; requests that go on in it after a preemption get statistics of this prefill, as at their first."""
        plan = self._schedule(*arguments, **named)
        if self._put_back:
            from vllm.v1.metrics.stats import PrefillStats

            for request_id in list(self._put_back):
                request = self._scheduler.requests.get(request_id)
                planned = plan.num_scheduled_tokens.get(request_id)
                if request is None or planned is not None:
                    self._put_back.discard(request_id)
                if request is not None and planned is not None:
                    request.prefill_stats = PrefillStats()
                    request.prefill_stats.set(request.num_tokens, request.num_computed_tokens - planned, 0)
        return plan

    def _make_stats_seldom(self, *arguments: Any, **named: Any) -> Any:
        """vLLM's statistics of a step; where they are off, every half second those of the cache alone, which cost no loop
        over requests."""
        found = self._make_stats(*arguments, **named)
        now = time.monotonic()
        if found is not None or now - self._told_at < TELL_EVERY_S:
            return found
        from vllm.v1.metrics.stats import SchedulerStats

        self._told_at = now
        return SchedulerStats(kv_cache_usage=self._scheduler.kv_cache_manager.usage)
