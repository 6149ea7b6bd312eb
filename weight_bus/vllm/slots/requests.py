"""Which slot's adapter a request of vLLM's scheduler asks for, and how a run's requests are paused alone.

    step's plan ◄── vLLM's schedule ◄── running, waiting    less those of paused runs, which are put back afterwards

vLLM pauses all requests or none. Here those of a paused run stay in its queues, where an abort finds them, and are left out
while a step is planned. They keep the blocks that they have: the other runs have that much less memory.
"""

from __future__ import annotations

from typing import Any


def slot_of(request: Any) -> int:
    """1 where versions are whole weights, or there is one run."""
    return 1 if request.lora_request is None else int(request.lora_request.lora_int_id)


class PausedRuns:
    """Of one scheduler; wraps its `schedule` and `get_num_unfinished_requests`. For the thread that steps."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._frozen: dict[int, bool] = {}
        """Slots whose requests do not begin; whether those that run stand still, too."""
        self._schedule, self._unfinished = scheduler.schedule, scheduler.get_num_unfinished_requests
        scheduler.schedule = self._schedule_others
        scheduler.get_num_unfinished_requests = self._count_others

    def pause(self, slot: int, *, running: bool) -> int:
        """Let no request of `slot` begin; `running`: nor go on. How many of them go on."""
        self._frozen[slot] = running
        return 0 if running else sum(slot_of(request) == slot for request in self._scheduler.running)

    def resume(self, slot: int) -> None:
        self._frozen.pop(slot, None)

    def _held(self) -> tuple[list[Any], list[Any]]:
        """Of those that run and of those that wait."""
        scheduler, frozen = self._scheduler, self._frozen
        running = [request for request in scheduler.running if frozen.get(slot_of(request))]
        return running, [request for request in scheduler.waiting if slot_of(request) in frozen]

    def _count_others(self) -> int:
        count: int = self._unfinished()
        if self._frozen:
            count -= sum(map(len, self._held()))
        return count

    def _schedule_others(self, *arguments: Any, **named: Any) -> Any:
        if not self._frozen:
            return self._schedule(*arguments, **named)
        scheduler, (running, waiting) = self._scheduler, self._held()
        left_out = set(running)
        scheduler.running = [request for request in scheduler.running if request not in left_out]
        scheduler.waiting.remove_requests(waiting)
        # They have places in the runner's batch when they go on.
        scheduler.max_num_active_reqs -= len(running)
        try:
            return self._schedule(*arguments, **named)
        finally:
            scheduler.max_num_active_reqs += len(running)
            scheduler.running = running + scheduler.running
            for request in waiting:
                scheduler.waiting.add_request(request)
