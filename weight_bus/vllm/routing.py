"""Which experts a mixture chose for each token, told by vLLM's runner on a CPU, which does not tell it by itself.

    router ── hook of vLLM's own ──► rows of a step [tokens, layers, top] ──► by slots of the KV cache
    runner ── rows of a request's slots ──► its answer ──► scheduler ──► vLLM's own field of a sample's last output

vLLM's runner for GPUs (its second) tells it too, in the same fields, but only with a prefix cache, and needs Triton.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.wire.errors import UsageError
from services.wire.packed import expert_dtype

Rows = npt.NDArray[Any]
Slots = npt.NDArray[np.int64]
_SETTING = "rollout.routing_replay"


class SlotRows:
    """Rows by the slots of the KV cache, where keys and values of the same computation lie: a cached prefix has its own.

    `slots`: of the cache. For a runner's thread.
    """

    def __init__(self, slots: int, layers: int, top: int, experts: int) -> None:
        self._dtype = expert_dtype(experts)
        # The largest number is none.
        self._rows: Rows = np.full((slots, layers, top), np.iinfo(self._dtype).max, self._dtype)
        self._step: list[Rows | None] = [None] * layers
        self._told: dict[str, int] = {}
        """Request → the number of its first token that is not told yet."""

    def chose(self, layer: int, chosen: Rows) -> None:
        """What layer number `layer` of a mixture chose in this step: `[tokens, top]`."""
        self._step[layer] = chosen

    def computed(self, slots: Slots) -> None:
        """A step is over; `slots`: of its tokens, in their order."""
        for layer, chosen in enumerate(self._step):
            if chosen is not None:
                self._rows[slots, layer] = chosen[: len(slots)]

    def tell(self, name: str, slots: Slots) -> tuple[int, Rows]:
        """The number of the first token, and the rows, of what is not told yet. `slots`: of all tokens of the request."""
        first = self._told.get(name, 0)
        self._told[name] = len(slots)
        return first, self._rows[slots[first:]]

    def forget(self, name: str) -> None:
        self._told.pop(name, None)


def tell_experts(runner: Any) -> None:
    """Have a worker's runner say which experts its layers choose. Once for each runner.

    Raises UsageError for a model without such layers, and for a runner that is not known here.
    """
    if torch.device(runner.device).type != "cpu" or runner.speculative_config is not None:
        raise UsageError(
            f"{_SETTING}: vLLM tells which experts it chose here on a CPU, without speculative decoding",
            "use engine torch, or leave it out",
        )
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    mixtures = [module for module in runner.get_model().modules() if isinstance(module, MoERunner)]
    if not mixtures or not all(isinstance(module.router, BaseRouter) for module in mixtures):
        raise UsageError(f"{_SETTING}: vLLM does not tell which experts a model of this type chooses", "leave it out")
    table, slots = _full_attention(runner)
    router = mixtures[0].router
    rows = SlotRows(slots, len(mixtures), router.top_k, router.global_num_experts)
    for number, module in enumerate(mixtures):
        module.router.set_capture_fn(partial(_note, rows, number))
    _follow(runner, table, rows)


def _full_attention(runner: Any) -> tuple[Any, int]:
    """The table of blocks in which a token has its slot as long as its request runs, and how many slots there are."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    config = runner.kv_cache_config
    for group, table in zip(config.kv_cache_groups, runner.input_batch.block_table.block_tables, strict=True):
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            return table, config.num_blocks * group.kv_cache_spec.block_size
    raise UsageError(f"{_SETTING}: no layer of this model keeps keys and values of all tokens", "leave it out")


def _note(rows: SlotRows, layer: int, chosen: torch.Tensor) -> None:
    rows.chose(layer, chosen.numpy())


def _follow(runner: Any, table: Any, rows: SlotRows) -> None:
    """Have the runner's answers carry the rows, as vLLM's other runner has them."""
    execute, sample = runner.execute_model, runner.sample_tokens
    ends: list[int] = []

    def slots(place: int, first: int, end: int) -> Slots:
        numbers = np.arange(first, end)
        blocks: Slots = table.get_numpy_array()[place, numbers // table.block_size].astype(np.int64)
        size = int(table.block_size)
        return blocks * size + numbers % size

    def execute_model(scheduled: Any, *arguments: Any, **named: Any) -> Any:
        for name in scheduled.finished_req_ids:
            rows.forget(name)
        answer = execute(scheduled, *arguments, **named)
        batch, counts = runner.input_batch, scheduled.num_scheduled_tokens
        if counts:
            firsts = [int(each) for each in batch.num_computed_tokens_cpu[: batch.num_reqs]]
            names = batch.req_ids[: batch.num_reqs]
            ends[:] = [first + counts[name] for first, name in zip(firsts, names, strict=True)]
            each = [slots(place, *bounds) for place, bounds in enumerate(zip(firsts, ends, strict=True))]
            rows.computed(np.concatenate(each))
        return answer

    def sample_tokens(*arguments: Any, **named: Any) -> Any:
        from vllm.distributed.aux_output_connector.connector import AuxRequestOutput

        batch = runner.input_batch
        # Of prompts that are read in part nothing is sampled, and nothing told.
        unfinished = runner.discard_request_mask.np
        sampled = [place for place in range(batch.num_reqs) if not unfinished[place]]
        told = {
            batch.req_ids[place]: AuxRequestOutput(*rows.tell(batch.req_ids[place], slots(place, 0, ends[place])))
            for place in sampled
        }
        answer = sample(*arguments, **named)
        if answer is not None and told:
            answer.aux_output_connector_output = told
        return answer

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens


def take_experts(scheduler: Any) -> None:
    """Have vLLM's scheduler hand on what runners tell."""
    from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector

    scheduler.aux_output_connector = AuxOutputSchedulerConnector()
