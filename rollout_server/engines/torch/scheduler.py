"""Continuous batching: a queue of waiting requests, and a batch of samples that each step extends by one token.

    add ──► waiting ──► prefill (once a request, copied to its siblings) ──► running ──► finished
                                      └── one step: decode running rows, prefill newcomers, generate for all ──┘

Synchronous and bound to one thread; `decode_loop` drives it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from rollout_server.engines.base import (
    FinishReason,
    GenerationDelta,
    GenerationRequest,
    NonFiniteLogitsError,
    Outcome,
    PromptLogprobs,
    RequestFailed,
)
from rollout_server.engines.request_check import reachable_stops
from rollout_server.engines.torch.forward import PolicyForward
from rollout_server.engines.torch.kv_cache import KvCache, on_device
from rollout_server.engines.torch.prefill import (
    Newcomer,
    Prefill,
    Prefilled,
    PrefixCache,
    Tokens,
    as_tokens,
)
from rollout_server.engines.torch.prompt_scores import undefined
from rollout_server.engines.torch.sampler import (
    LogitShaping,
    RowParameters,
    Sampled,
    Sampler,
    ShapedRow,
    UniformSource,
    seeded_source,
)
from services.wire.errors import RollmeshError
from services.wire.packed import expert_dtype
from services.wire.sampling import KvPolicy
from services.wire.trajectory import ExpertChoices, VersionSpan


@dataclass(slots=True)
class _Ticket:
    """A queued request, and how many of its samples have been started. `ended`: the deltas of those that have ended,
    where its reader takes all at once."""

    request: GenerationRequest
    limit: int
    stops: frozenset[int]
    started: int = 0
    ended: list[GenerationDelta] = field(default_factory=list)


@dataclass(slots=True)
class _Sample:
    """A running sample. `spans`: (first token, version, `kv`) of each version span. `sent`: tokens already in deltas.

    `prompt`: the logprobs of its prompt's tokens, where they were asked for: they go out with its first delta.
    """

    ticket: _Ticket
    index: int
    source: UniformSource | None
    spans: list[tuple[int, int, KvPolicy]]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    likeliest: list[list[tuple[int, float]]] = field(default_factory=list)
    kept: list[bytes] = field(default_factory=list)
    sent: int = 0
    prompt: PromptLogprobs | None = None

    def cached(self) -> list[int]:
        """The tokens whose keys and values are in its row: all but the newest."""
        return self.ticket.request.prompt_token_ids + self.tokens[:-1]


class Scheduler:
    """Continuous batching scheduler. `outbox`: deltas and failures since they were last taken, in order."""

    def __init__(
        self,
        forward: PolicyForward,
        slots: KvCache,
        sampler: Sampler,
        *,
        max_running: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        vocabulary: int,
        device: torch.device,
        kv_policy: KvPolicy = "keep",
        experts: int = 0,
    ) -> None:
        """`experts`: of how many a mixture's layers choose, where `slots` keeps their choices; 0 else."""
        self._experts = experts
        self._forward = forward
        self._slots = slots
        self._kv_policy = kv_policy
        self._shares = kv_policy != "keep"
        self._prefill = Prefill(forward, slots, device, PrefixCache() if self._shares else None)
        self._sampler = sampler
        self._max_running = max_running
        self._max_model_len = max_model_len
        self._eos = tuple(eos_token_ids)
        self._vocabulary = vocabulary
        self._device = device
        self._waiting: deque[_Ticket] = deque()
        self._samples: list[_Sample] = []
        self._newest: list[int] = []
        self._rows: RowParameters | None = None
        self._shaping: LogitShaping | None = None
        self._seeded: list[tuple[int, UniformSource]] = []
        self.outbox: list[Outcome] = []

    @property
    def running(self) -> int:
        """Samples with a row of their own."""
        return len(self._samples)

    @property
    def waiting(self) -> int:
        """Requests of which a sample has not been started."""
        return len(self._waiting)

    @property
    def prefill_tokens(self) -> int:
        """Tokens whose keys and values were computed by prefill."""
        return self._prefill.computed

    @property
    def kv_use(self) -> float:
        """See `KvCache.use`."""
        return self._slots.use

    def add(self, request: GenerationRequest) -> None:
        """Queue a request; first come, first served, but for those in the background."""
        sampling = request.sampling
        limit = min(sampling.max_tokens, self._max_model_len - len(request.prompt_token_ids))
        ticket = _Ticket(request, limit, reachable_stops(sampling, self._vocabulary, self._eos))
        place = len(self._waiting)
        if not request.background:
            while place and self._waiting[place - 1].request.background:
                place -= 1
        self._waiting.insert(place, ticket)

    def step(self, version: int, *, admit: bool, before_forward: Callable[[], None] = lambda: None) -> int:
        """Extend every running sample by one token, start waiting ones if `admit`; returns how many tokens were sampled.

        `before_forward` is called when the forward of the running samples is about to leave the interpreter's lock alone.
        """
        parts = []
        scored: list[PromptLogprobs] = []
        if self._samples:
            ids = on_device(np.array(self._newest, dtype=np.int64)[:, None], self._device)
            window = self._slots.window()
            before_forward()
            parts.append(self._forward(ids, window))
            self._slots.tick()
        if admit and self._waiting and len(self._samples) < self._max_running:
            admitted = self._admit(version)
            parts.append(admitted.logits)
            scored = list(admitted.scores.values())
        if not parts:
            return 0
        rows = self._rows or self._describe_rows()
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self._shaping is not None:
            self._shaping.apply(logits)
        sampled = self._sampler.sample(logits, rows, self._seeded)
        if not math.isfinite(sum(sampled.logprobs)) or any(map(undefined, scored)):
            self.fail_running(NonFiniteLogitsError(version))
            return 0
        if self._shaping is not None:
            self._shaping.after_sampling(sampled.tokens)
        count = len(sampled.tokens)  # before `_record`, which drops finished rows from the list
        self._record(sampled)
        return count

    def mark_version(self, version: int) -> None:
        """Tokens sampled from now on are `version`'s. Applies the KV policy to what older versions computed."""
        self._prefill.forget()
        for sample in self._samples:
            sample.spans.append((len(sample.tokens), version, self._kv_policy))
        if self._samples and self._kv_policy == "recompute":
            self._prefill.again([sample.cached() for sample in self._samples])

    def abort(self, request_ids: Sequence[str] | None) -> int:
        """Finish these requests (None: all) with what was sampled; returns how many were there."""
        chosen = None if request_ids is None else set(request_ids)
        touched = set()
        rows = []
        for row, sample in enumerate(self._samples):
            if chosen is None or sample.ticket.request.request_id in chosen:
                touched.add(sample.ticket.request.request_id)
                rows.append(row)
        self._finish([(row, "abort") for row in rows])
        kept: deque[_Ticket] = deque()
        for ticket in self._waiting:
            request = ticket.request
            if chosen is None or request.request_id in chosen:
                touched.add(request.request_id)
                for index in range(ticket.started, request.n):
                    likeliest: list[list[tuple[int, float]]] | None = [] if request.top_logprobs else None
                    self._end(ticket, GenerationDelta(request.request_id, index, [], [], [], "abort", likeliest))
            else:
                kept.append(ticket)
        self._waiting = kept
        return len(touched)

    def fail_running(self, error: RollmeshError) -> None:
        """End every request that has a running sample with `error` and wipe its memory; waiting ones stay."""
        failed = dict.fromkeys(sample.ticket.request.request_id for sample in self._samples)
        self.outbox += [RequestFailed(request_id, error) for request_id in failed]
        self._waiting = deque(ticket for ticket in self._waiting if ticket.request.request_id not in failed)
        self._samples.clear()
        self._newest.clear()
        self._rows = None
        self._slots.clear()
        self._prefill.forget()

    def take_outbox(self) -> list[Outcome]:
        outcomes, self.outbox = self.outbox, []
        return outcomes

    def _describe_rows(self) -> RowParameters:
        """Sampling parameters of the current rows."""
        requests = [sample.ticket.request for sample in self._samples]
        self._rows = RowParameters(
            [request.sampling for request in requests],
            self._vocabulary,
            self._device,
            [request.top_logprobs for request in requests],
            [request.kept for request in requests],
        )
        self._seeded = [(row, s.source) for row, s in enumerate(self._samples) if s.source is not None]
        shaped = [
            _shaped_row(row, sample)
            for row, sample in enumerate(self._samples)
            if sample.ticket.request.sampling.shifts
        ]
        self._shaping = LogitShaping(shaped, self._vocabulary, self._device) if shaped else None
        return self._rows

    def _admit(self, version: int) -> Prefilled:
        """Start as many waiting samples as fit.

        Equal prompts are prefilled once, whether they are samples of one request or of several.
        """
        alike: dict[tuple[str | None, bytes, bool], tuple[Tokens, list[_Sample]]] = {}
        free = self._max_running - len(self._samples)
        width = 0
        while self._waiting and free > 0:
            ticket = self._waiting[0]
            request = ticket.request
            prompt = as_tokens(request.prompt_token_ids)
            kind = request.cache_salt, prompt.tobytes(), request.prompt_logprobs
            width = max(width, len(prompt))
            if alike and kind not in alike and width * (len(alike) + 1) > self._prefill.most_at_once:
                break
            count = min(free, request.n - ticket.started)
            samples = alike.setdefault(kind, (prompt, []))[1]
            for index in range(ticket.started, ticket.started + count):
                # What an earlier try sampled, under whichever versions, is prefilled under this one.
                kv: KvPolicy = "recompute" if request.resumed else self._kv_policy
                spans: list[tuple[int, int, KvPolicy]] = [(0, version, kv)]
                samples.append(_Sample(ticket, index, _source(request, index), spans))
            free -= count
            ticket.started += count
            if ticket.started == request.n:
                self._waiting.popleft()
        self._rows = None
        together = list(alike.values())
        newcomers = [
            Newcomer(prompt, salt, len(samples), scored)
            for (salt, _, scored), (prompt, samples) in zip(alike, together, strict=True)
        ]
        prefilled = self._prefill.start(newcomers)
        for number in prefilled.order:
            for sample in together[number][1]:
                sample.prompt = prefilled.scores.get(number)
                self._samples.append(sample)
        return prefilled

    def _record(self, sampled: Sampled) -> None:
        finished: list[tuple[int, FinishReason]] = []
        self._newest = sampled.tokens
        if sampled.likeliest is not None:
            for sample, told in zip(self._samples, sampled.likeliest, strict=True):
                if sample.ticket.request.top_logprobs:
                    sample.likeliest.append(told)
        if sampled.kept is not None:
            for sample, ids in zip(self._samples, sampled.kept, strict=True):
                if ids:
                    sample.kept.append(ids)
        for row, (sample, token, logprob) in enumerate(
            zip(self._samples, sampled.tokens, sampled.logprobs, strict=True)
        ):
            sample.tokens.append(token)
            sample.logprobs.append(logprob)
            ticket = sample.ticket
            if token in ticket.stops:
                finished.append((row, "stop"))
            elif len(sample.tokens) >= ticket.limit:
                finished.append((row, "length"))
            elif ticket.request.stream and len(sample.tokens) - sample.sent >= ticket.request.delta_every:
                self.outbox.append(self._delta(row, None))
        self._finish(finished)

    def _end(self, ticket: _Ticket, delta: GenerationDelta) -> None:
        """The last delta of a sample. A request that is not streamed is told of all its samples in one go: handing each
        one over by itself would wake its reader at nearly every step, for nothing."""
        if ticket.request.stream:
            self.outbox.append(delta)
            return
        ticket.ended.append(delta)
        if len(ticket.ended) == ticket.request.n:
            self.outbox += ticket.ended

    def _delta(self, row: int, reason: FinishReason | None) -> GenerationDelta:
        sample = self._samples[row]
        sent, request = sample.sent, sample.ticket.request
        delta = _delta(sample, reason)
        if not self._experts or not request.experts:
            return delta
        # The newest token is yet to be computed; so was that of the delta before.
        begin = len(request.prompt_token_ids) + sent - 1 if sent else 0
        return replace(delta, experts=self._chosen(row, begin))

    def _chosen(self, row: int, begin: int) -> ExpertChoices:
        """Of the tokens that the row has computed, from number `begin` on."""
        chosen = self._slots.experts_of(row)[begin:].cpu().numpy()
        dtype = expert_dtype(self._experts)
        return ExpertChoices(chosen.shape[1], chosen.shape[2], dtype.itemsize, chosen.astype(dtype).tobytes(), begin)

    def _finish(self, finished: Sequence[tuple[int, FinishReason]]) -> None:
        if not finished:
            return
        for row, reason in finished:
            sample = self._samples[row]
            self._end(sample.ticket, self._delta(row, reason))
            if self._shares and (len(sample.spans) == 1 or self._kv_policy == "recompute"):
                self._prefill.remember(row, as_tokens(sample.cached()), sample.ticket.request.cache_salt)
        moves = self._slots.remove([row for row, _ in finished])
        for to, source in moves:
            self._samples[to] = self._samples[source]
            self._newest[to] = self._newest[source]
        del self._samples[self._slots.rows :]
        del self._newest[self._slots.rows :]
        self._rows = None


def _source(request: GenerationRequest, index: int) -> UniformSource | None:
    seed = request.sampling.seed
    if seed is None or seed == -1:
        return None
    return seeded_source(seed, request.first_index + index, request.resumed)


def _shaped_row(row: int, sample: _Sample) -> ShapedRow:
    """Tokens of an earlier attempt are part of the prompt, but count as output for the penalties."""
    request = sample.ticket.request
    split = len(request.prompt_token_ids) - request.resumed
    prompt, resumed = request.prompt_token_ids[:split], request.prompt_token_ids[split:]
    return ShapedRow(row, request.sampling, prompt, resumed + sample.tokens, sample.ticket.stops)


def _delta(sample: _Sample, reason: FinishReason | None) -> GenerationDelta:
    """What was sampled since the sample's last delta."""
    sent = sample.sent
    total = sample.sent = len(sample.tokens)
    found = []
    ends = [start for start, _, _ in sample.spans[1:]] + [total]
    for (start, version, kv), end in zip(sample.spans, ends, strict=True):
        start = max(start, sent)
        if start < end:
            found.append(VersionSpan(start - sent, end - start, version, kv=kv))
    tokens, logprobs = (sample.tokens, sample.logprobs) if sent == 0 else (sample.tokens[sent:], sample.logprobs[sent:])
    if reason is None:
        tokens, logprobs = list(tokens), list(logprobs)
    request = sample.ticket.request
    likeliest = sample.likeliest[sent:] if request.top_logprobs else None
    prompt = sample.prompt if sent == 0 else None
    kept = sample.kept[sent:] if sample.kept else None
    return GenerationDelta(request.request_id, sample.index, tokens, logprobs, found, reason, likeliest, prompt, kept)
