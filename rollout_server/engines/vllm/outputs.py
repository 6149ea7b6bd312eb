"""Deltas out of vLLM's outputs: which version sampled each token, where keys and values were computed anew, experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollout_server.engines.base import GenerationDelta, GenerationRequest
from rollout_server.engines.vllm.convert import asked_kept, chosen_experts, take_rows, to_delta
from services.wire.sampling import KvPolicy
from weight_bus.vllm.protocol import version_in


class OutputReader:
    """`samples`: vLLM's own books of unfinished samples, by its ids of them. `keep_experts`: whether these tell which
    experts were chosen. `slot`: which of the versions in a label is the run's; None: there is one run."""

    def __init__(
        self,
        samples: Callable[[], Mapping[str, Any]],
        kv_policy: KvPolicy,
        *,
        keep_experts: bool,
        slot: int | None = None,
    ) -> None:
        self._samples, self._kv_policy, self._keep_experts, self._slot = samples, kv_policy, keep_experts, slot
        self._computed_anew: dict[str, list[int]] = {}
        """vLLM's id of a sample → how many tokens it had each time that its prefill was done again."""

    def prefilled(self, sample_ids: Iterable[str]) -> None:
        """The prefill of these has just ended, as the next of their outputs will show."""
        for sample_id in sample_ids:
            state = self._samples().get(sample_id)
            sampled = 0 if state is None else state.detokenizer.num_output_tokens()
            if sampled:
                self._computed_anew.setdefault(sample_id, []).append(sampled)

    def forget(self, internal_id: str, n: int) -> None:
        """A request has ended, which had `n` samples."""
        for index in range(n):
            self._computed_anew.pop(_sample_id(internal_id, n, index), None)

    def delta(self, request: GenerationRequest, internal_id: str, completion: Any, begin: int) -> GenerationDelta:
        """Of a sample whose tokens begin at position `begin` of it. `internal_id`: vLLM's of the request."""
        sample_id = _sample_id(internal_id, request.n, completion.index)
        delta = to_delta(
            request.request_id,
            completion,
            self._version_starts(sample_id, completion),
            begin,
            request.top_logprobs,
            self._kv_policy,
            self._computed_anew.get(sample_id, ()),
            request.resumed > 0,
            asked_kept(request),
        )
        if not request.experts or not self._keep_experts:
            return delta
        # The newest token is yet to be computed; so was that of the delta before.
        given = len(request.prompt_token_ids) - 1
        told, computed = given + begin if begin else 0, given + begin + len(delta.token_ids)
        rows = completion.routed_experts
        if rows is None:
            state = self._samples().get(sample_id)
            rows = None if state is None else take_rows(state.routed_experts_chunks, computed - told)
        return delta if rows is None else replace(delta, experts=chosen_experts(rows, computed))

    def _version_starts(self, sample_id: str, completion: Any) -> Sequence[tuple[str, int]]:
        """(label, first token) of each version in a sample so far: on its last output, before that in vLLM's own books."""
        starts: Sequence[tuple[str, int]] = ()
        if completion.weight_versions is not None:
            starts = [(span.version, span.start) for span in completion.weight_versions]
        else:
            state = self._samples().get(sample_id)
            starts = () if state is None else state.weight_version_starts
        return starts if self._slot is None else own_starts(starts, self._slot)


def own_starts(starts: Sequence[tuple[str, int]], slot: int) -> list[tuple[str, int]]:
    """(label, first token) of one run's versions: where another run's alone changed, the token before goes on."""
    found: list[tuple[str, int]] = []
    for label, start in starts:
        version = str(version_in(label, slot))
        if not found or found[-1][0] != version:
            found.append((version, start))
    return found


def _sample_id(internal_id: str, n: int, index: int) -> str:
    """vLLM's name for one sample of a request."""
    return internal_id if n == 1 else f"{index}_{internal_id}"
