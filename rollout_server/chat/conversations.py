"""Matching a client's messages to the captured call that they continue, and why they continue none.

    remembered   S U1 A1         ──► node 1        (A: answers of the policy, each ends a remembered conversation)
                 S U1 A1 U2 A2   ──► node 2
    asked        S U1 A1 U2 A2 U3   continues node 2, new from U3
                 S U1 A1 U9         continues node 1: a tree, in whatever order calls come
                 S U1 B1 U2         continues nothing: somebody rewrote A1 (compaction)

Of a message 16 bytes are kept, its digest, and of each of them only once however often it is asked again. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Generic, TypeVar

from rollout_server.chat.messages import (
    DIGEST_BYTES,
    Message,
    Tools,
    message_digest,
    reasoning_digest,
    role_of,
    tools_digest,
)
from services.wire.trajectory import BreakReason

Node = TypeVar("Node")
_START = bytes(DIGEST_BYTES)


@dataclass(frozen=True, slots=True)
class Match(Generic[Node]):
    """What the messages continue: `node` with the messages from `new_from` on, or nothing for `reason`."""

    node: Node | None
    new_from: int
    """Index of the first message that is not captured yet; 0 where there is no node."""
    reason: BreakReason | None
    """None where there is a node, and where nothing has been remembered at all."""


@dataclass(frozen=True, slots=True)
class _Turn(Generic[Node]):
    """One remembered call: messages `start … end − 1` of its conversation are its own, the last one is its answer."""

    node: Node
    parent: _Turn[Node] | None
    start: int
    digests: bytes
    chain: bytes
    """Digest of the whole conversation; where nothing comes before, `_START`."""
    tools: bytes
    reasoning: bytes | None

    @property
    def end(self) -> int:
        return self.start + len(self.digests) // DIGEST_BYTES


class Conversations(Generic[Node]):
    """The conversations of one session."""

    def __init__(self) -> None:
        self._turns: dict[bytes, tuple[_Turn[Node], ...]] = {}
        """By chain. Turns of the same text, in the order they were remembered."""

    def remember(self, messages: Sequence[bytes], tools: bytes, node: Node, *, reasoning: bytes | None = None) -> None:
        """Keep that `node` captured the call whose messages, its answer the last of them, have these digests.

        `reasoning` is the answer's `reasoning_digest`. Costs 2 µs a message.
        """
        chains = _chains(messages)
        start, parent = 0, None
        for end in range(len(messages) - 1, 0, -1):
            turns = self._turns.get(chains[end])
            if turns is not None:
                start, parent = end, turns[0]
                break
        turn = _Turn(node, parent, start, b"".join(messages[start:]), chains[-1], tools, reasoning)
        self._turns[turn.chain] = (*self._turns.get(turn.chain, ()), turn)

    def match(self, messages: Sequence[Message], tools: Tools, digests: Sequence[bytes] | None = None) -> Match[Node]:
        """What `messages`, with their `digests` if these are known, continue. Raises UsageError for what is no message.

        Of calls that said the same the first remembered is continued, unless the client sends the reasoning of another;
        reasoning that nobody gave it is a rewritten history. Costs O(messages), and O(remembered calls) more to say why
        nothing matches.
        """
        digests = [message_digest(message) for message in messages] if digests is None else digests
        wanted_tools = tools_digest(tools)
        if not self._turns:
            return Match(None, 0, None)
        chains = _chains(digests)
        answers = [index for index, message in enumerate(messages) if role_of(message) == "assistant"]
        if answers:
            new_from = answers[-1] + 1
            same_text = self._turns.get(chains[new_from], ())
            if same_text and self._reasoning_fits(messages, answers, chains):
                wanted = reasoning_digest(messages[answers[-1]])
                alike = [turn for turn in same_text if wanted is None or turn.reasoning == wanted]
                for turn in alike:
                    if turn.tools == wanted_tools:
                        return Match(turn.node, new_from, None)
                return Match(None, 0, "tools_changed")
        lead = _length_of_lead(messages)
        return Match(None, 0, self._why(digests, chains, answers, lead))

    def _reasoning_fits(self, messages: Sequence[Message], answers: Sequence[int], chains: Sequence[bytes]) -> bool:
        """Whether each reasoning that the client sent with a remembered answer is one that was given with that text."""
        for index in answers:
            turns = self._turns.get(chains[index + 1])
            wanted = reasoning_digest(messages[index]) if turns else None
            if turns and wanted is not None and all(turn.reasoning != wanted for turn in turns):
                return False
        return True

    def _why(self, digests: Sequence[bytes], chains: Sequence[bytes], answers: Sequence[int], lead: int) -> BreakReason:
        """`lead`: how many messages are the system's and the developer's, at the beginning."""
        turns = [turn for alike in self._turns.values() for turn in alike]
        if answers and any(_ends_with(turn, digests[lead : answers[-1] + 1], lead) for turn in turns):
            return "truncated"
        if any(_begins_with(turn, digests, chains) for turn in turns):
            return "branch"
        first = min(lead + 1, len(digests))
        shared = any(_begins_with(turn, digests[:first], chains) for turn in turns)
        given = {turn.digests[-DIGEST_BYTES:] for turn in turns}
        return "compaction" if shared or any(digests[index] in given for index in answers) else "branch"


def _chains(digests: Sequence[bytes]) -> list[bytes]:
    """Digest of each prefix: element `i` stands for the first `i` messages."""
    chains = [_START]
    for digest in digests:
        chains.append(blake2b(chains[-1] + digest, digest_size=DIGEST_BYTES).digest())
    return chains


def _length_of_lead(messages: Sequence[Message]) -> int:
    for index, message in enumerate(messages):
        if role_of(message) not in ("system", "developer"):
            return index
    return len(messages)


def _begins_with(turn: _Turn[Node], digests: Sequence[bytes], chains: Sequence[bytes]) -> bool:
    """Whether the turn's conversation begins with the messages, and they reach into the turn itself."""
    if not turn.start < len(digests) <= turn.end:
        return False
    before = _START if turn.parent is None else turn.parent.chain
    return before == chains[turn.start] and turn.digests.startswith(b"".join(digests[turn.start :]))


def _ends_with(turn: _Turn[Node], digests: Sequence[bytes], lead: int) -> bool:
    """Whether the turn's conversation ends with the messages and has something else, after `lead` messages, before them."""
    if not digests or not lead + len(digests) < turn.end:
        return False
    left, at = len(digests), turn
    while left > 0:
        own = at.digests[-left * DIGEST_BYTES :]
        mine = len(own) // DIGEST_BYTES
        if own != b"".join(digests[left - mine : left]):
            return False
        left -= mine
        if left and at.parent is None:
            return False
        at = at.parent or at
    return True
