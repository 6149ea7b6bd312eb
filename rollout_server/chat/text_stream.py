"""Plain text of an answer as it is drawn: no grammar, special tokens left out."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_server.chat.stop_strings import StopStrings
from rollout_server.chat.text_decoder import TextDecoder, TokenTable


class TextStream:
    """What /v1/completions gives. `feed` the tokens, then `finish`; how they are cut into pieces changes nothing."""

    def __init__(self, table: TokenTable, stop: Sequence[str] = ()) -> None:
        self._table = table
        self._decoder = TextDecoder(table)
        self._stops = StopStrings(stop)
        self._parts: list[str] = []
        self.consumed = 0
        """Tokens that belong to the answer: all that were fed, up to the one that completed a stop string."""

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the answer: draw no more."""
        return self._stops.stopped

    def feed(self, token_ids: Sequence[int]) -> str:
        """What these tokens add to the text."""
        special, decoder, stops = self._table.special, self._decoder, self._stops
        start = len(self._parts)
        for token_id in token_ids:
            if stops.stopped is not None:
                break
            self.consumed += 1
            if token_id not in special:
                self._parts.append(stops.feed(decoder.feed(token_id)))
        return "".join(self._parts[start:])

    def finish(self) -> tuple[str, str]:
        """What has been held back, and the whole text."""
        rest = ""
        if self.stopped is None:
            rest = self._stops.feed(self._decoder.flush())
        if self.stopped is None:
            rest += self._stops.finish()
        self._parts.append(rest)
        return rest, "".join(self._parts)
