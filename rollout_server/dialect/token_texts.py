"""What single tokens say, for logprob entries: text and bytes, as OpenAI's clients expect them."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_server.chat.text_decoder import TokenTable
from rollout_server.dialect.chunks import LogprobPart, TopPart
from rollout_server.dialect.drawing import TopLogprobs


class TokenTexts:
    """`as_ids`: tokens are written `token_id:N`, for clients that must know them exactly."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table

    def text(self, token_id: int, *, as_ids: bool = False) -> str:
        """A token's text; U+FFFD stands for a part of a character."""
        return f"token_id:{token_id}" if as_ids else self._bytes(token_id).decode("utf-8", "replace")

    def entries(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        top: Sequence[TopLogprobs],
        *,
        as_ids: bool,
    ) -> list[LogprobPart]:
        """One entry a token. `top`: alternatives of each token; empty where none were asked for."""
        return [
            LogprobPart(
                token=self.text(token_id, as_ids=as_ids),
                logprob=logprob,
                bytes=list(self._bytes(token_id)),
                top_logprobs=[
                    TopPart(self.text(other, as_ids=as_ids), value, list(self._bytes(other)))
                    for other, value in (top[position] if top else ())
                ],
            )
            for position, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True))
        ]

    def _bytes(self, token_id: int) -> bytes:
        if self._table.bytewise:
            return self._table.bytes_of(token_id)
        return self._table.decode([token_id], skip_special=False).encode()
