"""Several runs on one vLLM engine: the base is loaded once, and each run's adapters have a slot of their own.

    app of run a ── SharedEngine, slot 1 ─┐
                                          ├─► CoreProcess ── one base, a step's batch of all runs' requests
    app of run b ── SharedEngine, slot 2 ─┘

To its run an engine is as one that it has alone: versions, requests, pause and figures are its own. What it shares is the
step, its time, and the memory for keys and values.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from rollout_server.engines.vllm.core_process import CoreProcess, Seat, closing
from rollout_server.engines.vllm.engine import RunEngine
from rollout_server.engines.vllm.outputs import OutputReader
from services.wire.errors import RollmeshError
from services.wire.weights_api import PauseMode
from weight_bus.vllm.protocol import Done

_POLL_S = 0.02
_DETACH_WITHIN_S = 5.0


class SharedEngine(RunEngine):
    """`rollout_server.engines.base.Engine` of one run of several: started and closed by itself.

    The first start loads the model, the last close ends the core.
    """

    def __init__(self, core: CoreProcess, seat: Seat) -> None:
        super().__init__(core, seat)
        core.users += 1
        self._left = False

    async def pause(self, mode: PauseMode) -> None:
        """As of an engine of its own; the requests of other runs go on."""
        llm = self._running()
        self._paused.set()
        while True:
            paused = await self.core.call(Done, "rollmesh_pause", self._seat.slot, mode == "keep")
            if mode != "wait" or not paused.running:
                break
            await asyncio.sleep(_POLL_S)
        if mode == "abort":
            await self.abort()
        await self._settle(llm)

    async def resume(self) -> None:
        await self.core.call(Done, "rollmesh_resume", self._seat.slot)
        self._paused.clear()

    async def close(self) -> None:
        """End this run's requests. The others' go on; with the last one the engine core ends."""
        if self._left:
            return
        self._left = True
        if self.core.users > 1 and self.core.is_open:
            for sample in self._own_samples():
                sample.queue.put(closing())
            # A core that has died serves nobody.
            with suppress(RollmeshError):
                await self.abort()
                await self.core.call(Done, "rollmesh_detach", self._seat.slot, deadline_s=_DETACH_WITHIN_S)
        await self.core.leave(self._observe)

    def _make_reader(self) -> OutputReader:
        seat = self._seat
        return OutputReader(self.core.samples, self.core.plan.kv_policy, keep_experts=seat.keep_experts, slot=seat.slot)

    def _running(self) -> Any:
        if self._left:
            raise closing()
        return super()._running()

    def _name(self, request_id: str) -> str:
        return f"{self._seat.slot}/{request_id}"

    def _observe(self, outputs: Any) -> None:
        self._outputs.prefilled(self._meter.observe(outputs, self._is_own))

    def _is_own(self, sample_id: str) -> bool:
        sample = self.core.samples().get(sample_id)
        return sample is not None and self._asked_for is not None and sample.lora_name == self._asked_for.lora_name

    def _own_samples(self) -> list[Any]:
        return [sample for sample_id, sample in self.core.samples().items() if self._is_own(sample_id)]

    def _unfinished(self) -> int:
        return len(self._own_samples())
