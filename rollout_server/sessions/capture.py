"""Token capture: what one session's engine saw and sampled, exactly, as a tree of prefixes, and the segments it makes.

    root ─ prompt ─ sampled ─┬─ prompt ─ sampled            a node is one answer: what came before it, and what was sampled
                             └─ prompt ─ sampled            two calls that extend the same tokens are two children

    segments     root ─ child 1      all sampled tokens trained
                 root ─ child 2      the root's are context here, they are trained above; break_reason `branch`

A node's path, from its root to its last sampled token, is a context that some later prompt may extend. Every path from a
root to a leaf is one segment. Every sampled token is captured once, with the id that the engine sampled (no text is
ever encoded again), and its mask is 1 in exactly one segment. Which one follows from the tree alone and not from the
order in which branches came: the longest path is laid out first. What no agent ever saw is left out, unless something that
an agent did see follows it. Pure.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right, insort
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Generic, TypeVar

from services.wire.errors import RollmeshError
from services.wire.packed import pack_kept, pack_logprobs, pack_tokens
from services.wire.sampling import SamplingParams
from services.wire.trajectory import BreakReason, ExpertChoices, Segment, SegmentChoices, VersionSpan


class CaptureError(RollmeshError):
    """An engine's answer contradicts itself: its tokens cannot be trained on."""

    code = "capture"


@dataclass(slots=True, eq=False)
class Node:
    """One answer. `spans` lie over `sampled` alone; `end` is the length of the path up to and with the last sampled token.

    `number`: its place in the order of recording, from 0. `kept`: for each sampled token the ids that the cuts left, as
    `engines.base.GenerationDelta` has them; `experts`: of the tokens from the parent's last one on, but for its own last
    one. None where nobody asked. `times`: when its generation began and ended, Unix seconds, where that is known.
    """

    number: int
    parent: Node | None
    prompt: array[int]
    sampled: array[int]
    logprobs: array[float]
    spans: tuple[VersionSpan, ...]
    break_reason: BreakReason | None
    end: int
    kept: list[bytes] | None = None
    experts: ExpertChoices | None = None
    times: tuple[float, float] | None = None
    children: list[Node] = field(default_factory=list)


@dataclass(frozen=True)
class Layout:
    """`positions`: of each node, the segment that trains its sampled tokens, and where in it they begin."""

    segments: list[Segment]
    positions: dict[Node, tuple[int, int]]


class Capture:
    """The tokens of one session so far."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        """All answers, in the order of their recording."""
        self.roots: list[Node] = []
        """Answers that extend no other."""
        self._index: PrefixIndex[Node] | None = None
        self._unindexed: list[Node] = []
        """Answers since the last look-up: most sessions never need one."""
        self.samplings: list[SamplingParams] = []
        """How tokens were sampled; spans name them by their place here."""
        self.tip: Node | None = None
        """The newest answer: what a turn that names no context extends."""
        self.sampled = 0
        """Tokens sampled so far."""
        self.left_out: frozenset[Node] = frozenset()
        """Answers that are in no segment."""

    @property
    def answers(self) -> int:
        return len(self.nodes) - len(self.left_out)

    @property
    def trained(self) -> int:
        """Tokens sampled so far that are in a segment."""
        if not self.left_out:
            return self.sampled
        return self.sampled - sum(len(node.sampled) for node in self.left_out)

    def leave_out(self, unseen: Collection[Node]) -> None:
        """Lay out no answer of `unseen`, but those that another one extends: somebody must have seen them.

        In place of what was said before.
        """
        if not unseen:
            self.left_out = frozenset()
            return
        left_out: set[Node] = set()
        for node in reversed(self.nodes):  # what extends a node is newer than it
            if node in unseen and left_out.issuperset(node.children):
                left_out.add(node)
        self.left_out = frozenset(left_out)

    @property
    def context(self) -> list[int]:
        """The path of the newest answer."""
        return [] if self.tip is None else path(self.tip)

    def find(self, prompt: Sequence[int]) -> Node | None:
        """The node with the longest path that `prompt` begins with."""
        if self._index is None:
            self._index = PrefixIndex()
        for node in self._unindexed:
            self._index.add(array("i", path(node)).tobytes(), node)
        self._unindexed.clear()
        found = self._index.longest(array("i", prompt).tobytes())
        return None if found is None else found[0]

    def record(
        self,
        parent: Node | None,
        prompt: Sequence[int],
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[VersionSpan],
        sampling: SamplingParams,
        break_reason: BreakReason | None = None,
        kept: list[bytes] | None = None,
        experts: ExpertChoices | None = None,
    ) -> Node:
        """Add one answer. `prompt`: the tokens between `parent`'s path (nothing, for a root) and the first sampled one.

        `versions` are spans over these sampled tokens alone. Raises CaptureError, and records nothing, for lengths that
        differ, spans that do not cover the tokens, or a logprob that is not finite.
        """
        if kept is not None and len(kept) != len(token_ids):
            raise CaptureError(f"the engine gave {len(token_ids)} tokens, and what it kept of {len(kept)}")
        computed = len(prompt) + len(token_ids) - (parent is None)
        if experts is not None and len(experts.packed) != computed * experts.token_bytes:
            raise CaptureError(f"the engine gave {len(experts.packed)} bytes of experts of {computed} tokens")
        check_sampled(token_ids, logprobs, versions)
        index = self._sampling_index(sampling)
        spans: list[VersionSpan] = []
        first = True
        for span in versions:
            # What an answer's first version computed anew (a call that was resumed) is what it had been.
            first = first and span.version == versions[0].version
            kv = versions[0].kv if first else span.kv
            _append_merged(spans, VersionSpan(span.start, span.length, span.version, index, kv))
        node = Node(
            len(self.nodes),
            parent,
            array("i", prompt),
            array("i", token_ids),
            array("f", logprobs),
            tuple(spans),
            break_reason if parent is None else None,
            (0 if parent is None else parent.end) + len(prompt) + len(token_ids),
            kept,
            experts,
        )
        self.nodes.append(node)
        (self.roots if parent is None else parent.children).append(node)
        self._unindexed.append(node)
        self.tip = node
        self.sampled += len(token_ids)
        return node

    def segments(self) -> list[Segment]:
        """The segments so far, packed. Empty before the first sampled token."""
        return self.layout().segments

    def layout(self) -> Layout:
        """Segments, and where in them each node's sampled tokens are trained."""

        def kept(nodes: Sequence[Node]) -> Sequence[Node]:
            return [node for node in nodes if node not in self.left_out] if self.left_out else nodes

        positions: dict[Node, tuple[int, int]] = {}
        if (single := _single_path(kept(self.roots), kept)) is not None:
            only = _segment_along(single, 0, positions)
            return Layout([] if only is None else [only], positions)
        sizes, digests = _measure(kept(self.roots), kept)

        def order(node: Node) -> tuple[bool, int, bytes]:
            # What began on its own comes before what broke off; then the longest path; then anything that is not chance.
            return node.break_reason is not None, -sizes[node], digests[node]

        segments: list[Segment] = []
        waiting = sorted(kept(self.roots), key=order, reverse=True)
        while waiting:
            node = waiting.pop()
            if children := kept(node.children):
                waiting += sorted(children, key=order, reverse=True)
                continue
            segment = _segment_along(_ancestry(node), len(segments), positions)
            if segment is not None:
                segments.append(segment)
        return Layout(segments, positions)

    def _sampling_index(self, sampling: SamplingParams) -> int:
        for index, known in enumerate(self.samplings):
            if known is sampling or known == sampling:
                return index
        self.samplings.append(sampling)
        return len(self.samplings) - 1


def leaves(capture: Capture) -> list[list[Node]]:
    """Every path through the tree, as its nodes from root to leaf, in the order of their recording."""
    waiting, paths = list(reversed(capture.roots)), []
    while waiting:
        node = waiting.pop()
        waiting += reversed(node.children)
        if not node.children:
            paths.append(_ancestry(node))
    return paths


def path(node: Node) -> list[int]:
    """All tokens from the root up to and with the last sampled token of `node`."""
    tokens: list[int] = []
    for each in _ancestry(node):
        tokens += each.prompt
        tokens += each.sampled
    return tokens


def check_sampled(token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[VersionSpan]) -> None:
    """Raise CaptureError unless logprobs are finite, one a token, and `versions` cover the tokens without a gap."""
    if len(token_ids) != len(logprobs):
        raise CaptureError(f"the engine gave {len(token_ids)} tokens and {len(logprobs)} logprobs")
    if not all(map(math.isfinite, logprobs)):
        raise CaptureError("the engine gave a logprob that is not finite")
    position = 0
    for span in versions:
        if span.start != position or span.length <= 0:
            raise CaptureError(
                f"the engine gave a version span at {span.start} of length {span.length}, not {position}"
            )
        position += span.length
    if position != len(token_ids):
        raise CaptureError(f"the engine's version spans cover {position} of {len(token_ids)} tokens")


def _ancestry(node: Node) -> list[Node]:
    """The nodes from the root to `node`."""
    nodes = [node]
    while (parent := nodes[-1].parent) is not None:
        nodes.append(parent)
    nodes.reverse()
    return nodes


def _single_path(roots: Sequence[Node], kept: Callable[[Sequence[Node]], Sequence[Node]]) -> list[Node] | None:
    """All nodes, where each is extended by one other at most: there is nothing to order. None where they branch."""
    nodes: list[Node] = []
    after = roots
    while after:
        if len(after) > 1:
            return None
        nodes.append(after[0])
        after = kept(after[0].children)
    return nodes


def _measure(
    roots: Sequence[Node], kept: Callable[[Sequence[Node]], Sequence[Node]]
) -> tuple[dict[Node, int], dict[Node, bytes]]:
    """Of every node: the sampled tokens of the longest path down from it, and a digest of all that lies below it.

    `kept`: those of some nodes that count.
    """
    downwards = list(roots)
    for node in downwards:  # grows while it is walked, so long conversations need no recursion
        downwards += kept(node.children)
    sizes: dict[Node, int] = {}
    digests: dict[Node, bytes] = {}
    for node in reversed(downwards):
        children = kept(node.children)
        sizes[node] = len(node.sampled) + max((sizes[child] for child in children), default=0)
        hasher = blake2b(repr((node.break_reason, node.spans, len(node.prompt))).encode(), digest_size=16)
        for part in (node.prompt, node.sampled, node.logprobs):
            hasher.update(part)
        for below in sorted(digests[child] for child in children):
            hasher.update(below)
        digests[node] = hasher.digest()
    return sizes, digests


def _segment_along(nodes: Sequence[Node], number: int, positions: dict[Node, tuple[int, int]]) -> Segment | None:
    """Segment `number` along `nodes`: sampled tokens that have no position yet get theirs here. None if none lacked one."""
    tokens, mask, logprobs = array("i"), bytearray(), array("f")
    spans: list[VersionSpan] = []
    kept: list[bytes] = []
    masked = any(node.kept is not None for node in nodes)
    shared = False
    for node in nodes:
        tokens += node.prompt
        tokens += node.sampled
        mask += bytes(len(node.prompt))
        logprobs.frombytes(bytes(logprobs.itemsize * len(node.prompt)))
        sampled = len(node.sampled)
        if node in positions:
            shared = True
            mask += bytes(sampled)
            logprobs.frombytes(bytes(logprobs.itemsize * sampled))
            continue
        positions[node] = number, len(mask)
        for span in node.spans:
            _append_merged(spans, span.over(len(mask) + span.start, span.length))
        mask += b"\x01" * sampled
        logprobs += node.logprobs
        if masked:
            kept += [b""] * sampled if node.kept is None else node.kept
    if not spans:
        return None
    reason = "branch" if shared else nodes[0].break_reason or ("branch" if number else None)
    experts = _experts_along(nodes)
    choices = None if experts is None else SegmentChoices(experts=experts)
    if any(kept):
        counts = array("I", [len(ids) // 4 for ids in kept])
        choices = SegmentChoices(kept_counts=pack_kept(counts), kept_ids=b"".join(kept), experts=experts)
    return Segment(pack_tokens(tokens), bytes(mask), pack_logprobs(logprobs), spans, reason, choices)


def _experts_along(nodes: Sequence[Node]) -> ExpertChoices | None:
    """Of all tokens of the path, each as it was computed first: that of a last token by what follows it."""
    like = next((node.experts for node in nodes if node.experts is not None), None)
    if like is None:
        return None
    unknown, packed, before = b"\xff" * like.token_bytes, [], 0
    for node in nodes:
        alike = node.experts is not None and node.experts.token_bytes == like.token_bytes
        computed = node.end - before - (node.parent is None)
        packed.append(node.experts.packed if node.experts is not None and alike else unknown * computed)
        before = node.end
    return ExpertChoices(like.layers, like.top, like.itemsize, b"".join([*packed, unknown]))


def _append_merged(spans: list[VersionSpan], span: VersionSpan) -> None:
    if spans and spans[-1].goes_on_as(span):
        spans[-1] = span.over(spans[-1].start, spans[-1].length + span.length)
    else:
        spans.append(span)


Value = TypeVar("Value")
_DIGEST_BYTES = 16


def digest_of(sequence: bytes) -> bytes:
    return blake2b(sequence, digest_size=_DIGEST_BYTES).digest()


class PrefixIndex(Generic[Value]):
    """Longest-prefix look-up of byte strings, of which only digests are kept. Pure.

        added        p q r            digest(p q r) ──► value
                     p q r s t        digest(p q r s t) ──► value
        longest(p q r s u v) = the value of `p q r`, and 3

    A look-up costs one hash over the new sequence and a digest at each known length. Of two values for the same bytes the
    first is kept, so that look-ups stay stable.
    """

    def __init__(self) -> None:
        self._values: dict[bytes, Value] = {}
        self._lengths: list[int] = []

    def add(self, sequence: bytes, value: Value) -> None:
        self.add_digest(digest_of(sequence), len(sequence), value)

    def add_digest(self, digest: bytes, length: int, value: Value) -> None:
        """`add` for a sequence of which only the digest and the length are known."""
        if digest in self._values:
            return
        self._values[digest] = value
        at = bisect_right(self._lengths, length)
        if at == 0 or self._lengths[at - 1] != length:
            insort(self._lengths, length)

    def longest(self, sequence: bytes) -> tuple[Value, int] | None:
        """The value of the longest remembered byte string that `sequence` begins with, and its length in bytes."""
        hasher, hashed, found = blake2b(digest_size=_DIGEST_BYTES), 0, None
        view = memoryview(sequence)
        for length in self._lengths[: bisect_right(self._lengths, len(sequence))]:
            hasher.update(view[hashed:length])
            hashed = length
            value = self._values.get(hasher.copy().digest())
            if value is not None:
                found = value, length
        return found
