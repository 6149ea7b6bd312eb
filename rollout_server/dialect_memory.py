"""What a session remembers of the calls that agents made in it, beside the captured tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout_server.answers import Answers
from rollout_server.capture import Node
from rollout_server.chat.conversations import Conversations
from rollout_server.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True)
class Said:
    """A chat answer with the messages that came before it and are new: `new`, a JSON list. `total` messages in all."""

    total: int
    new: bytes


@dataclass(slots=True)
class DialectMemory:
    """`texts`: captured nodes by the whole text that a completions client saw. `calls`: an answer's id → its nodes."""

    conversations: Conversations[Node] = field(default_factory=Conversations)
    texts: PrefixIndex[Node] = field(default_factory=PrefixIndex)
    said: dict[Node, Said] = field(default_factory=dict)
    calls: dict[str, list[Node]] = field(default_factory=dict)
    answers: Answers = field(default_factory=Answers)
