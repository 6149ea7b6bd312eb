"""vLLM as it is without a weight bus: what our engine's memory is held against in `./dev bench weights`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from rollout_server.engines.vllm import launch
from rollout_server.engines.vllm.core_process import CoreProcess
from rollout_server.engines.vllm.engine import VllmEngine
from weight_bus.vllm.protocol import LIVE_WEIGHTS, Attached


class CoreAlone(CoreProcess):
    """vLLM's own engine core: its packed weights in place of those it loaded, no receiver."""

    async def _make(self) -> tuple[Any, Path]:
        # The plug-in is loaded with vLLM, and leaves it alone.
        os.environ[LIVE_WEIGHTS] = "0"
        from vllm.v1.engine.async_llm import AsyncLLM

        launch.register_architectures(self.plan.model)
        config = launch.configure(self.plan)
        scratch = Path(tempfile.mkdtemp(prefix="rollmesh-vllm-"))
        with launch.forking():
            return AsyncLLM.from_vllm_config(config, disable_log_stats=True), scratch


class VllmAlone(VllmEngine):
    """The same arguments on `CoreAlone`."""

    core_kind = CoreAlone

    async def _attach(self) -> Attached:
        return Attached(tensors=0, total_bytes=0)
