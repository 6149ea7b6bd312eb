"""From a peer's chunks to the deltas of one request: samples counted, versions judged, steps as large as asked. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from rollout_server.engines.base import GenerationDelta, GenerationRequest, join
from rollout_server.engines.http_wire import PeerChoice, PeerChunk, to_delta
from rollout_server.engines.vllm_outputs import version_number
from services.wire.errors import NotReadyError, WireError


class OtherWeightsError(NotReadyError):
    """The engine drew with weights that nobody committed through this server."""

    code = "other_weights"


class Flow:
    """One request's samples. `version`: what its tokens are drawn with, where the peer does not say.

    `known`: the versions that may be seen; it grows while requests run. `older`: those among them that the engine was told
    to go back to; any other that is older than `version` is a surprise.
    """

    def __init__(
        self, request: GenerationRequest, version: int, known: Collection[int], older: Collection[int] = ()
    ) -> None:
        self._request = request
        self._version = version
        self._known = known
        self._older = older
        # Greedy samples are drawn once (`generate_body`).
        self._copies = request.n if request.sampling.temperature == 0.0 else 1
        self._drawn = [0] * (request.n // self._copies)
        self._held: dict[int, GenerationDelta] = {}
        self._open = set(range(request.n))
        self.tokens = 0
        """Drawn so far, over all samples."""

    @property
    def ended(self) -> bool:
        """Every sample has its last delta."""
        return not self._open

    @property
    def begun(self) -> int:
        """Samples that drew something and go on."""
        drawing = [index for index, count in enumerate(self._drawn) if count]
        return min(len(drawing) * self._copies, len(self._open))

    def take(self, chunk: PeerChunk) -> list[GenerationDelta]:
        """The deltas that are due. Raises OtherWeightsError and WireError."""
        return [delta for choice in chunk.choices for delta in self._choice(choice)]

    def abort(self) -> list[GenerationDelta]:
        """The last delta of every sample that has none yet: what was held back, and `abort`."""
        return [self._end(index) for index in sorted(self._open)]

    def _choice(self, choice: PeerChoice) -> list[GenerationDelta]:
        if not 0 <= choice.index < len(self._drawn) or choice.index * self._copies not in self._open:
            raise WireError(f"request {self._request.request_id}: the engine answered a sample {choice.index} too much")
        self._check_versions(choice)
        drawn = to_delta(self._request, choice, self._version)
        self._drawn[choice.index] += len(drawn.token_ids)
        copies = range(choice.index, choice.index + 1) if self._copies == 1 else range(self._copies)
        self.tokens += len(drawn.token_ids) * len(copies)
        return [due for index in copies if (due := self._hold(replace(drawn, index=index))) is not None]

    def _hold(self, delta: GenerationDelta) -> GenerationDelta | None:
        """Add to what is held back of a sample; all of it once it is due."""
        held = self._held.pop(delta.index, None)
        whole = delta if held is None else join(held, delta)
        if whole.finish_reason is not None:
            self._open.discard(whole.index)
            return whole
        if self._request.stream and whole.token_ids and len(whole.token_ids) >= self._request.delta_every:
            return whole
        self._held[whole.index] = whole
        return None

    def _end(self, index: int) -> GenerationDelta:
        self._open.discard(index)
        held = self._held.pop(index, None)
        if held is not None:
            return replace(held, finish_reason="abort")
        nothing: list[list[tuple[int, float]]] | None = [] if self._request.top_logprobs else None
        return GenerationDelta(self._request.request_id, index, [], [], [], "abort", nothing)

    def _check_versions(self, choice: PeerChoice) -> None:
        """What the peer says about versions must agree with what was committed there."""
        if choice.version_spans is not None:
            seen = {span.version for span in choice.version_spans}
            strange = {str(version) for version in seen if not self._expected(version)}
        else:
            labels = {span.version for span in choice.weight_versions or ()}
            strange = {label for label in labels if not _is(label, self._version)}
        if strange:
            raise OtherWeightsError(
                f"the engine drew with version {', '.join(sorted(strange))} where {self._version} was committed",
                "send the request to another server; this one takes none until a commit",
            )

    def _expected(self, version: int) -> bool:
        return version in self._known and (version >= self._version or version in self._older)


def _is(label: str, version: int) -> bool:
    try:
        return version_number(label) == version
    except ValueError:
        return False
