"""vLLM plug-in (`vllm.general_plugins`): makes the weights replaceable while vLLM serves, if it was asked to.

vLLM loads it in the API, engine-core and worker processes of every vLLM on the machine, so it does nothing unless the
environment variable `ROLLMESH_VLLM_LIVE_WEIGHTS` is 1. Then a plain `vllm serve` has our weight backend too.

Importing this module imports neither torch nor vLLM.
"""

from __future__ import annotations

import os

from weight_bus.vllm.protocol import BACKEND, LIVE_WEIGHTS


def register() -> None:
    """Called by vLLM before a model is loaded, more than once in one process."""
    if os.environ.get(LIVE_WEIGHTS) != "1":
        return
    from weight_bus.vllm.core import install

    install()
    _offer_backend()


def _offer_backend() -> None:
    """Let `--weight-transfer-config '{"backend": "rollmesh"}'` name ours. vLLM refuses a name that it knows already."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "weight_bus.vllm.backend", "ManifestTransfer")
