"""The engine interface: token ids in, token ids out, each stamped with the policy version that sampled it.

    generate(request) ──► delta ──► delta(finished)          one asynchronous iterator a request
    stage(manifest)   ──► shadow memory                      while requests run
    commit(version)   ──► flip between two decode steps      requests in flight continue under the new version
    rollback(version) ──► flip back, once                    likewise

An engine serves one whole version at a time, never a mixture. Requests in flight at a commit carry two version spans;
what becomes of their keys and values is the engine's KV policy, stamped on each span.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from services.wire.errors import RollmeshError
from services.wire.sampling import SamplingParams
from services.wire.trajectory import ExpertChoices, VersionSpan
from services.wire.weights_api import CommitAnswer, PauseMode, StageAnswer

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class GenerationRequest:
    """Generate `n` continuations of `prompt_token_ids`.

    `stream`: deltas as tokens are sampled; otherwise one delta a sample, when it has finished, or all samples have.
    `top_logprobs`: how many of the likeliest tokens to report at every position, 0 … 20. `cache_salt`: only requests with
    the same one may share cached prefixes; engines without such a cache ignore it. `delta_every`: with `stream`, a delta of
    a sample comes after at least so many new tokens; its last delta always comes. `gather_s`: how long tokens may wait for
    the next ones, as each delta is written down, encoded and passed on; a sample's first and last ones do not wait.

    `resumed`: so many tokens at the end of `prompt_token_ids` were sampled by an earlier attempt of this request. They
    count as output, not as prompt, for the penalties and `min_tokens`, and a seed continues after them. `max_tokens`
    counts from here on. With the torch engine the result equals that of an uninterrupted request. With vLLM it does
    not: presence and frequency penalties ignore resumed tokens, and a seed starts over. `first_index`: with a seed, the
    samples are numbers `first_index`, `first_index + 1` … of the uninterrupted request; deltas are numbered from 0 all
    the same. `background`: it begins after all that wait and are not (evaluations).

    `prompt_logprobs`: tell those of the prompt's own tokens too, all computed anew by one policy version; for `n` = 1.
    `kept`: tell of each token which ones `top_k`, `top_p` and `min_p` left to sample from, where the engine can.
    `experts`: tell which experts a mixture chose, where the engine was started to keep that.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    n: int = 1
    stream: bool = False
    top_logprobs: int = 0
    cache_salt: str | None = None
    delta_every: int = 1
    gather_s: float = 0.010
    resumed: int = 0
    first_index: int = 0
    background: bool = False
    prompt_logprobs: bool = False
    kept: bool = False
    experts: bool = False


@dataclass(frozen=True)
class PromptLogprobs:
    """Logprobs of the second and all later tokens of a prompt, each given those before it: one entry fewer than tokens.

    float32 log-softmax of the model's logits as they are (temperature 1, no penalty), −inf where the model gives no chance.
    `ranks`: 1 for the likeliest token, those as likely counted before it; None where it is not known.
    """

    logprobs: list[float]
    ranks: list[int | None]


@dataclass(frozen=True)
class GenerationDelta:
    """Tokens sampled for sample `index` since its last delta.

    `token_ids`, `logprobs`: equal lengths. `versions` are spans over *this delta's* tokens (start 0 is its first token).
    `finish_reason` is set on the last delta of a sample. `top_logprobs`: for each token the likeliest (id, logprob), best
    first, of the distribution that `logprobs` are of; never one of probability 0; None unless asked for.
    `prompt_logprobs`: where they were asked for, with the first delta that has a token, of the version that sampled it.
    `kept`: for each token the ids, uint32 packed little-endian and ascending, that could have been sampled in its place and
    itself, empty where it is not known; None where it was not asked for. `experts`: where asked for, of the tokens
    computed since the last delta: those of the prompt, and all that were sampled but for the newest; counted from the
    prompt's first.
    """

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[float]
    versions: list[VersionSpan]
    finish_reason: FinishReason | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    kept: list[bytes] | None = None
    experts: ExpertChoices | None = None


@dataclass(frozen=True)
class RequestFailed:
    """A request ends without its samples, for this reason."""

    request_id: str
    error: RollmeshError


Outcome = GenerationDelta | RequestFailed


@dataclass(frozen=True)
class EngineStatus:
    """A snapshot of an engine's state, for readiness, metrics and the live view.

    `stalls_ms`: for each commit of which enough decode steps around it were seen: the longest gap between tokens around
    it less the median undisturbed gap (`timing`). `prefill_tokens`: tokens whose keys and values were computed by
    prefill: of prompts, and of running requests that are recomputed; prefix cache hits are not counted.
    `staged_version`: what a commit would serve. `ranks`: processes that the model is split over. `kv_use`: share of the
    memory for keys and values that running requests hold, 0 … 1; None where the engine does not tell.
    """

    name: str
    policy_version: int
    running: int
    waiting: int
    paused: bool
    tokens_generated: int
    commits: int
    stalls_ms: list[float] = field(default_factory=list)
    failure: str | None = None
    """Why the engine serves nothing any more; None while it does."""
    prefill_tokens: int = 0
    staged_version: int | None = None
    ranks: int = 1
    kv_use: float | None = None


@runtime_checkable
class Engine(Protocol):
    """What a rollout server needs of an engine. All methods are called from one event loop; none blocks it."""

    @property
    def policy_version(self) -> int:
        """The version that the next token will be sampled with."""
        ...

    @property
    def max_model_len(self) -> int:
        """Prompt and output tokens together may not exceed this."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    async def start(self) -> None:
        """Load the model and be ready. Raises RollmeshError, saying why, if it cannot."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationDelta]:
        """Yield deltas until each of the `n` samples has had one with a `finish_reason`.

        Closing the iterator early aborts the request. Raises ContextLengthError for a prompt that does not fit and
        UsageError for ids or parameters that no engine can generate with (`request_check`).
        """
        ...

    async def abort(self, request_ids: list[str] | None = None) -> int:
        """Finish the named requests (all, for None) with the tokens so far, `finish_reason` abort; returns how many."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding: `abort` ends requests with what they have, `wait` lets them end, `keep` freezes them.

        When it returns no more deltas come until `resume`.
        """
        ...

    async def resume(self) -> None: ...

    async def stage(self, manifest: bytes) -> StageAnswer:
        """Pull the manifest's buckets into shadow memory while decoding goes on (encoded
        `weight_bus.manifest.manifest.Manifest`).

        Raises weight_bus.errors.StageError (bad hash, wrong layout, …); the old version is served on.
        """
        ...

    async def commit(self, version: int) -> CommitAnswer:
        """Flip to the staged `version` between two decode steps. Raises ConflictError unless exactly it is staged.

        The version that is served already is answered again.
        """
        ...

    async def rollback(self, version: int) -> CommitAnswer:
        """Serve `version` again, as at a commit: the one before the last commit, until the next stage begins to write.

        The version that is served already is answered again. Raises ConflictError for one that is not kept. A newer one
        than the withdrawn can be staged; the withdrawn one only where somebody asks for that.
        """
        ...

    async def weights_digest(self) -> str:
        """Root digest (as in the manifest) of the bytes that are really served."""
        ...

    def status(self) -> EngineStatus: ...

    async def close(self) -> None: ...


async def collect(deltas: AsyncIterator[GenerationDelta]) -> list[GenerationDelta]:
    """Gather an iterator of deltas into one delta a sample, in the samples' order."""
    return sorted(joined([delta async for delta in deltas]), key=lambda delta: delta.index)


def joined(deltas: Sequence[GenerationDelta]) -> list[GenerationDelta]:
    """Those of each sample as one, the samples in the order in which they first come."""
    if len(deltas) == 1:
        return list(deltas)
    samples: dict[int, GenerationDelta] = {}
    for delta in deltas:
        before = samples.get(delta.index)
        samples[delta.index] = delta if before is None else join(before, delta)
    return list(samples.values())


def join(first: GenerationDelta, second: GenerationDelta) -> GenerationDelta:
    """Two deltas of a sample, one right after the other, as one."""
    spans = list(first.versions)
    for span in second.versions:
        shifted = span.over(span.start + len(first.token_ids), span.length)
        if spans and spans[-1].goes_on_as(shifted):
            spans[-1] = shifted.over(spans[-1].start, spans[-1].length + shifted.length)
        else:
            spans.append(shifted)
    return GenerationDelta(
        request_id=first.request_id,
        index=first.index,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        versions=spans,
        finish_reason=second.finish_reason,
        top_logprobs=_join_alternatives(first, second),
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
        kept=join_kept(first, second),
        experts=second.experts if first.experts is None else first.experts.then(second.experts),
    )


def join_kept(first: GenerationDelta, second: GenerationDelta) -> list[bytes] | None:
    """`kept` of two deltas of a sample, one right after the other."""
    if first.kept is None and second.kept is None:
        return None
    return [*kept_of(first), *kept_of(second)]


def kept_of(delta: GenerationDelta) -> list[bytes]:
    """`kept`, one entry a token, empty where it is not known."""
    return [b""] * len(delta.token_ids) if delta.kept is None else delta.kept


def _join_alternatives(first: GenerationDelta, second: GenerationDelta) -> list[list[tuple[int, float]]] | None:
    if first.top_logprobs is None and second.top_logprobs is None:
        return None
    return [*(first.top_logprobs or []), *(second.top_logprobs or [])]


class EngineCrashedError(RollmeshError):
    """The engine's decode thread ended with an error; the engine serves nothing more and must be started anew."""

    status = 503
    code = "engine_crashed"

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"the engine stopped decoding ({type(cause).__name__}: {cause})", "restart the rollout server")


class NonFiniteLogitsError(RollmeshError):
    """The weights being served give logits that are not numbers; requests decoded with them end, the engine goes on."""

    status = 503
    code = "non_finite_logits"

    def __init__(self, version: int) -> None:
        super().__init__(f"policy version {version} gives logits that are not finite", "publish weights that are")
