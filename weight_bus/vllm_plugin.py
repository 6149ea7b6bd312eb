"""The `vllm.general_plugins` entry point: makes a vLLM's weights replaceable while it serves, if it was asked to.

vLLM loads it in the API, engine-core and worker processes of every vLLM on the machine, so it does nothing unless the
environment variable `ROLLMESH_VLLM_LIVE_WEIGHTS` is 1. Importing this module imports neither torch nor vLLM.
"""

from __future__ import annotations

import os

from weight_bus.vllm_protocol import LIVE_WEIGHTS


def register() -> None:
    """Called by vLLM before a model is loaded, more than once in one process."""
    if os.environ.get(LIVE_WEIGHTS) != "1":
        return
    from weight_bus.vllm_core import install

    install()
