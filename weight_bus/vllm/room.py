"""Room for weight updates, kept before vLLM gives the rest of a GPU's memory to keys and values.

    gpu_memory_utilization · memory − weights − a step      what vLLM would take for its KV cache
                                    − sets of an update     what it gets here

The sets are allocated when the engine is attached, after the KV cache.
"""

from __future__ import annotations

from typing import Any

_WRAPPED = "rollmesh_original_available"
_GIB = 1 << 30


def leave_room_for_updates(executor_kind: type[Any]) -> None:
    """Have executors of this class size the KV cache by what updates leave. Idempotent."""
    if hasattr(executor_kind, _WRAPPED):
        return
    setattr(executor_kind, _WRAPPED, executor_kind.determine_available_memory)
    executor_kind.determine_available_memory = available_beside_updates


def available_beside_updates(executor: Any) -> list[int]:
    """Bytes for keys and values of each rank. What the user sized by kv_cache_memory_bytes stays as it is.

    Raises ValueError, with the sum, where updates leave none.
    """
    # Imported here: it brings torch.
    from weight_bus.vllm.worker import extend_worker

    available: list[int] = getattr(executor, _WRAPPED)()
    if executor.vllm_config.cache_config.kv_cache_memory_bytes:
        return available
    executor.collective_rpc(extend_worker)
    kept: list[int] = executor.collective_rpc("rollmesh_update_bytes")
    found = [there - room for there, room in zip(available, kept, strict=True)]
    for rank, left in enumerate(found):
        if left <= 0:
            raise ValueError(
                f"rank {rank} has {available[rank] / _GIB:.2f} GiB beside its weights, and an update of them takes "
                f"{kept[rank] / _GIB:.2f}: none is left for keys and values. More ranks (rollout.tensor_parallel) or a "
                "larger rollout.vllm.gpu_memory_utilization give some"
            )
    return found
