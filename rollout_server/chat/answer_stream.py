"""Streaming parser of chat answers: deltas of reasoning, content and tool calls whose sum is the recorded answer.

    tokens    <think>  Hm  ⏎  </think>  It  is  ⏎  <tool_call>  {…}  </tool_call>  <|im_end|>
    deltas              Hm              It is                                       tool call 0
    held back               ⏎                   ⏎   the call until the end

Only markers change what the text after them is. After a marker the grammar reads the tokens so far, with the first new text
and without it, to see where that text went (content, reasoning, or nowhere: inside a call); until the next marker text is
decoded and passed on. Spaces at an end are held back, because a grammar may strip them. Tool calls come at the end, each in
one piece: what follows a call can still turn it into reasoning. Where calls are spelled as text (`chat.text_tools`) content
ends at their opening, of which no beginning is shown. Where a family's grammar is of another kind
(`AnswerGrammar.incremental` is False), all of the answer comes at the end.

What a stream does depends on the tokens alone, not on how they were cut into pieces, so whole answers are made with it too:
of one that is nothing but text the grammar reads all tokens once, at the end, which gives the same. Where a grammar would
take back what has been shown, what has been shown stays. A token costs about 2 µs.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile

from rollout_server.chat.answers import NOTHING, AnswerGrammar, ParsedAnswer, ParsedCall
from rollout_server.chat.detokenizer import StopStrings, TextDecoder
from rollout_server.chat.messages import Tools
from rollout_server.chat.text_tools import OPENING

MOST_UNREAD = 1024
"""Of a whole answer, so many tokens wait for the end: to read many at once would hold up all other calls."""
_FREE_READING = 4096
_READING_A_TOKEN = 4
"""Beyond the free ones, the grammar may read this many tokens for each token sampled, however many markers there are."""


class _Channel(Enum):
    UNKNOWN = 0
    CONTENT = 1
    REASONING = 2
    HIDDEN = 3


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A whole tool call of a stream."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """What is new. Where both texts are, the reasoning comes first."""

    content: str = ""
    reasoning_content: str = ""
    tool_calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning_content or self.tool_calls)


_NOT_PLAIN = ("<", "\ufffd")
"""A marker that is spelled in ordinary tokens, and half a character, which reads otherwise in pieces than at once."""


class _Shown:
    """The text of one channel: what has been shown, and what waits."""

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self._shown: list[str] = []
        self._unsent: list[str] = []

    @property
    def text(self) -> str:
        """What has been shown so far."""
        self._shown = ["".join(self._shown)]
        return self._shown[0]

    def release(self) -> None:
        """Show what waits, but not the spaces at its end."""
        if self.waiting:
            waiting = "".join(self.waiting)
            text = waiting.rstrip()
            self._show(text)
            self.waiting = [waiting[len(text) :]]

    def settle(self, final: str) -> None:
        """The text is complete: `final` if it begins with what has been shown, else what waits is all there is."""
        shown = self.text
        self._show(final[len(shown) :] if final.startswith(shown) else "".join(self.waiting))
        self.waiting = []

    def take(self) -> str:
        """What has been shown since the last call."""
        unsent, self._unsent = "".join(self._unsent), []
        return unsent

    def _show(self, text: str) -> None:
        if text:
            self._shown.append(text)
            self._unsent.append(text)


def new_tool_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class AnswerStream:
    """One answer. `feed` its tokens (stop tokens that only the request named left out), then `finish`."""

    def __init__(
        self,
        grammar: AnswerGrammar,
        prompt_ids: Sequence[int],
        tools: Tools,
        stop: Sequence[str] = (),
        new_call_id: Callable[[], str] = new_tool_call_id,
        *,
        whole: bool = False,
    ) -> None:
        """`stop` strings are looked for in the content, not in reasoning or calls. `new_call_id` names the tool calls.

        `whole`: nobody wants deltas before the end; `finish` tells everything.
        """
        self._grammar = grammar
        self._prompt_ids = prompt_ids
        self._tools = tools
        self._new_call_id = new_call_id
        self._ids: list[int] = []
        self._decoder = TextDecoder(grammar.table)
        self._stops = StopStrings(stop)
        opening = grammar.opening(tools)
        self._calls = StopStrings([] if opening is None else [opening])
        """Finds where content ends because tool calls begin that are spelled as text."""
        self._unread: list[int] | None = [] if whole and not stop and opening is None else None
        """Tokens that wait for the end: None where they are read as they come."""
        self._content, self._reasoning = _Shown(), _Shown()
        self._channel = _Channel.UNKNOWN if grammar.incremental else _Channel.HIDDEN
        self._since_marker: list[str] = []
        self._has_text = False
        """Whether there is more than spaces since the marker."""
        self._marker_end = 0
        """Tokens up to the marker."""
        self._read_tokens = 0
        self._ended = False
        self.consumed = 0
        """Tokens that belong to the answer: all that were read, up to the one that ended it."""

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the answer: generate no more."""
        return self._stops.stopped

    def feed(self, token_ids: Sequence[int]) -> AnswerDelta:
        """What these tokens add to what the client sees."""
        if self._unread is not None:
            self._unread += token_ids
            if len(self._unread) <= MOST_UNREAD:
                return AnswerDelta()
            token_ids, self._unread = self._unread, None
        grammar, decoder = self._grammar, self._decoder
        unseen, stops, breaks = grammar.unseen, grammar.stop_token_ids, grammar.breaks
        at, freely = 0, len(token_ids) > 1 and not self._stops
        while at < len(token_ids) and not self._ended:
            token_id = token_ids[at]
            if freely and token_id not in breaks and self._channel is not _Channel.UNKNOWN:
                # Nothing but text, and nothing in it to look for: as far as that goes, at once.
                run = list(takewhile(lambda each: each not in breaks, token_ids[at:]))
                at += len(run)
                self.consumed += len(run)
                self._ids += run
                self._text(decoder.feed_all(run))
                continue
            at += 1
            self.consumed += 1
            if token_id in stops:
                self._ended = True
            elif token_id in unseen:
                continue
            elif token_id in breaks:
                self._ids.append(token_id)
                # Half a character may yet become a whole one, if the grammar takes the marker out: it will tell.
                decoder.flush()
                self._leave_channel()
            else:
                self._ids.append(token_id)
                self._text(decoder.feed(token_id))
        self._content.release()
        self._reasoning.release()
        return AnswerDelta(self._content.take(), self._reasoning.take())

    def finish(self) -> tuple[AnswerDelta, ParsedAnswer]:
        """What has been held back, and the whole answer: the sum of all deltas."""
        shown = AnswerDelta()
        if self._unread is not None:
            unread, self._unread = self._unread, None
            if (plain := self._plain(unread)) is not None:
                self.consumed = len(unread)
                return AnswerDelta(plain), ParsedAnswer(plain)
            shown = self.feed(unread)
        content, reasoning = self._content, self._reasoning
        content.release()
        reasoning.release()
        read = self._grammar.read(self._prompt_ids, self._ids, self._tools)
        if self.stopped is None:
            content.waiting.append(self._calls.feed(self._stops.finish()) + self._calls.finish())
            content.settle("\n".join([read.content, *read.broken] if read.content else read.broken))
            reasoning.settle(read.reasoning)
        elif self._grammar.incremental:
            content.waiting.append(self._calls.finish())
            content.settle(content.text + "".join(content.waiting))
            reasoning.settle(reasoning.text)
        else:
            content.settle(read.content.partition(self.stopped)[0])
            reasoning.settle(read.reasoning)
        calls = tuple(ParsedCall(own or self._new_call_id(), name, text) for own, name, text in read.calls)
        delta = AnswerDelta(
            shown.content + content.take(),
            shown.reasoning_content + reasoning.take(),
            tuple(CallDelta(index, call.id, call.name, call.arguments_json) for index, call in enumerate(calls)),
        )
        return delta, ParsedAnswer(content.text or (None if calls else ""), reasoning.text or None, calls)

    def _plain(self, token_ids: Sequence[int]) -> str | None:
        """The content of a whole answer that is nothing but text, with no beginning of a marker in it; else None."""
        grammar = self._grammar
        ids = token_ids[:-1] if token_ids and token_ids[-1] in grammar.stop_token_ids else token_ids
        if not grammar.breaks.isdisjoint(ids):
            return None
        text = grammar.table.decode(ids, skip_special=True)
        if any(each in text for each in _NOT_PLAIN):
            return None
        read = grammar.read(self._prompt_ids, ids, self._tools)
        return None if read.reasoning or read.calls or read.broken else read.content

    def _text(self, text: str) -> None:
        """Text that the last token completed, on the way to where it belongs."""
        if not text:
            return
        if self._channel is _Channel.CONTENT:
            self._add_content(text)
        elif self._channel is _Channel.REASONING:
            self._reasoning.waiting.append(text)
        elif self._channel is _Channel.UNKNOWN:
            self._since_marker.append(text)
            self._has_text = self._has_text or not text.isspace()
            if self._has_text and not self._decoder.holds_back and not self._may_be_marker():
                self._find_channel()
        elif not self._grammar.incremental:
            self._stops.feed(text)
            self._ended = self._ended or self.stopped is not None

    def _add_content(self, text: str) -> None:
        if self._calls.stopped is None:
            self._content.waiting.append(self._calls.feed(self._stops.feed(text)))
            self._ended = self._ended or self.stopped is not None

    def _may_be_marker(self) -> bool:
        """Whether the text may become a marker that this vocabulary spells in ordinary tokens."""
        if not self._grammar.spelled:
            return False
        text = "".join(self._since_marker).lstrip()
        return any(marker.startswith(text) and marker != text for marker in self._grammar.spelled)

    def _leave_channel(self) -> None:
        """A marker came: no stop string reaches beyond it, and where text goes from here on is to be found out."""
        if self._grammar.incremental:
            if self._channel is _Channel.CONTENT:
                self._content.waiting.append(self._calls.feed(self._stops.finish()) + self._calls.finish())
            self._channel = _Channel.UNKNOWN
            self._since_marker, self._has_text, self._marker_end = [], False, len(self._ids)

    def _find_channel(self) -> None:
        """Let the grammar read the tokens with and without the text since the marker: what has grown is where it went."""
        ids, start = self._ids, self._marker_end
        if self._read_tokens + start + len(ids) > _FREE_READING + _READING_A_TOKEN * len(ids):
            return
        self._read_tokens += start + len(ids)
        self._content.release()
        self._reasoning.release()
        before = self._grammar.read(self._prompt_ids, ids[:start], self._tools) if start else NOTHING
        now = self._grammar.read(self._prompt_ids, ids, self._tools)
        since = "".join(self._since_marker)
        spaces = since[len(since.rstrip()) :]
        self._channel = _Channel.HIDDEN
        # Where the markers of reasoning are spelled in ordinary tokens, its end would not be seen: all of it waits.
        if _growth(before.reasoning, now.reasoning) and not self._grammar.spelled:
            self._channel = _Channel.REASONING
            self._reasoning.waiting = [_growth(self._reasoning.text, now.reasoning) + spaces]
        if _growth(before.content, now.content):
            self._channel = _Channel.CONTENT
            self._content.waiting = []
            self._add_content(_growth(self._content.text, now.content) + spaces)
            if self._calls and OPENING in since:
                self._channel = _Channel.HIDDEN


def _growth(before: str, now: str) -> str:
    """What `now` has more than `before`, spaces at its end left out; "" where it does not continue that."""
    before, now = before.rstrip(), now.rstrip()
    return now[len(before) :] if now.startswith(before) else ""
