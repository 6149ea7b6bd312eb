"""Refusing what cannot fit the model while it is still bytes: before its JSON becomes objects, and long before tokens.

Of a large body only the places of its prompts are found. A prompt of token ids has one more than commas; of a text its
pieces are read until they prove enough (`rollout_server.chat.length_bound`); a chat has a token a message at least. What
passes is looked at again, exactly, where it is tokenised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from rollout_server.api.routes import Ready
from rollout_server.chat.length_bound import PIECE
from rollout_server.chat.tokenizer import Renderer
from rollout_server.completions.text import MOST_ANSWERS
from services.wire.errors import UNDECODABLE, ContextLengthError

LARGE_BODY = 1 << 18
"""Bytes below which a body is no matter."""
_SLACK = 3
"""What was sampled before is not tokenised again: a byte that is no text counts as the three of U+FFFD in what is sent."""
_LONGEST_ESCAPE = 12
"""Bytes of a character at most: two escapes, for one beyond 16 bits."""


def _nothing() -> msgspec.Raw:
    return msgspec.Raw()


class _Turn(msgspec.Struct):
    text: msgspec.Raw = msgspec.field(default_factory=_nothing)
    token_ids: msgspec.Raw = msgspec.field(default_factory=_nothing)


class _Prompts(msgspec.Struct):
    """The parts of a body that hold prompts, whichever route it is for."""

    prompt: msgspec.Raw = msgspec.field(default_factory=_nothing)
    token_ids: msgspec.Raw = msgspec.field(default_factory=_nothing)
    messages: list[msgspec.Raw] = []
    turns: list[_Turn] = []


_prompts = msgspec.json.Decoder(_Prompts)


class PromptSize:
    """`check` is for `routes.checked`. `longest`: tokens that the model takes; 0 where that is not known yet."""

    def __init__(self, renderer: Ready[Renderer], longest: Callable[[], int]) -> None:
        self._renderer = renderer
        self._longest = longest

    def check(self, body: bytes) -> None:
        """Raise ContextLengthError for a body with a prompt that leaves no room for an answer whatever else it says.

        A body that is not what any route takes passes: its route says what is wrong with it.
        """
        longest = self._longest()
        if len(body) < LARGE_BODY or longest < 1:
            return
        try:
            said = _prompts.decode(body)
        except UNDECODABLE:
            return
        if len(said.messages) >= longest:
            raise ContextLengthError(len(said.messages), longest, at_least=True)
        for raw in (
            said.prompt,
            said.token_ids,
            *(part for turn in said.turns for part in (turn.text, turn.token_ids)),
        ):
            self._check(memoryview(raw), longest)

    def _check(self, raw: memoryview, longest: int) -> None:
        opening = bytes(raw[:1])
        if opening == b'"':
            self._renderer().encoder.check(texts_of(raw[1:-1]), _SLACK)
        elif opening == b"[":
            inner = bytes(raw[1:PIECE]).lstrip()[:1]
            # Of several prompts a call takes no more than it takes answers.
            most = MOST_ANSWERS if inner in (b'"', b"[") else 1
            values = 1 + sum(bytes(raw[start : start + PIECE]).count(b",") for start in range(0, len(raw), PIECE))
            if inner != b'"' and values >= most * longest:
                raise ContextLengthError(values // most, longest, at_least=most > 1)


def texts_of(raw: memoryview) -> Iterator[str]:
    """A JSON string's text in pieces; `raw`: what stands between its quotes. It ends where it is not well formed."""
    start = 0
    while start < len(raw):
        for end in range(start + PIECE, start + PIECE + _LONGEST_ESCAPE):
            try:
                piece = msgspec.json.decode(b'"%b"' % bytes(raw[start:end]), type=str)
                break
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue  # cut in the middle of a character
        else:
            return
        yield piece
        start = end
