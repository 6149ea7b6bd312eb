"""Text as it comes, token by token: never half a character, nothing of a stop string, the same however it is cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from rollout_server.chat.detokenizer import StopStrings, TextDecoder, TextStream, TokenTable
from tests.support.chat_policy import TURN_END, build_chat_tokenizer
from trainer.sft.tiny_model import build_tokenizer


def with_byte_fallback() -> Tokenizer:
    """Like Llama 2's: pieces with ▁ for a space, and a token a byte for what has no piece."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "a", "b", "é", "▁▁"]
    model = models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


CHAT = build_chat_tokenizer().backend_tokenizer
TOKENIZERS = {"byte-level": CHAT, "characters": build_tokenizer().backend_tokenizer, "pieces": with_byte_fallback()}
TABLES = {name: TokenTable(tokenizer) for name, tokenizer in TOKENIZERS.items()}
CHAT_IDS = st.lists(st.integers(0, CHAT.get_vocab_size() + 3), max_size=40)


def cut(items: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    places = sorted({0, len(items), *(place % (len(items) + 1) for place in cuts)})
    return [items[start:end] for start, end in itertools.pairwise(places)]


@given(CHAT_IDS, st.lists(st.integers(0, 40), max_size=8))
def test_the_text_is_that_of_the_whole_sequence_however_it_is_cut(ids: list[int], cuts: list[int]) -> None:
    stream = TextStream(TABLES["byte-level"])
    fed = [stream.feed(piece) for piece in cut(ids, cuts)]
    rest, whole = stream.finish()
    assert "".join(fed) + rest == whole == CHAT.decode(ids, skip_special_tokens=True)
    assert stream.consumed == len(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(alphabet="the ab é€😀\n0+=", max_size=30))
def test_every_text_comes_out_whole_in_every_kind_of_vocabulary(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    stream = TextStream(TABLES[name])
    fed = [stream.feed([token]) for token in ids]
    rest, whole = stream.finish()
    assert "".join(fed) + rest == whole == tokenizer.decode(ids, skip_special_tokens=True)
    assert not any("�" in piece for piece in fed)


@given(st.lists(st.integers(1, 262), max_size=40))
def test_bytes_that_are_no_text_do_not_hold_a_stream_back_for_ever(ids: list[int]) -> None:
    decoder = TextDecoder(TABLES["pieces"])
    shown = [bool(decoder.feed(token)) for token in [*ids, 0x81]]
    for start in range(len(shown) - 8):
        assert any(shown[start : start + 9])


def test_half_a_character_is_held_back_until_it_is_whole() -> None:
    first, second = CHAT.encode("é").ids
    stream = TextStream(TABLES["byte-level"])
    assert [stream.feed([first]), stream.feed([second])] == ["", "é"]
    assert stream.feed([first]) == ""
    assert stream.finish() == ("�", "é�")


def test_special_tokens_do_not_show_and_other_markers_do() -> None:
    ids = CHAT.encode(f"a<think>b{TURN_END}").ids
    assert TextStream(TABLES["byte-level"]).feed(ids) == "a<think>b"


stops = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=3)


def by_character(text: str, wanted: Sequence[str]) -> tuple[str, str | None]:
    """What is shown of a text and the stop string that ends it, found one character at a time."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in wanted if text[:end].endswith(stop)]
        if met:
            longest = max(met, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(st.text(alphabet="ab\n ", max_size=30), stops, st.lists(st.integers(0, 30), max_size=8))
def test_stop_strings_are_found_wherever_the_text_is_cut(text: str, wanted: list[str], cuts: list[int]) -> None:
    watch = StopStrings(wanted)
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in cuts)})
    shown = ""
    for start, end in itertools.pairwise(places):
        shown += watch.feed(text[start:end])
        expected, _ = by_character(text[:end], wanted)
        assert expected.startswith(shown)
        if watch.stopped is None:
            # Only what may yet become a stop string is held back.
            held = expected[len(shown) :]
            assert not held or any(stop.startswith(held) for stop in wanted)
    if watch.stopped is None:
        shown += watch.finish()
    assert (shown, watch.stopped) == by_character(text, wanted)


@given(CHAT_IDS, stops)
def test_a_stop_string_ends_the_stream_at_the_token_that_completes_it(ids: list[int], wanted: list[str]) -> None:
    stream = TextStream(TABLES["byte-level"], wanted)
    stream.feed(ids)
    _, whole = stream.finish()
    assert (whole, stream.stopped) == by_character(CHAT.decode(ids, skip_special_tokens=True), wanted)
    if stream.stopped is not None:
        seen = CHAT.decode(ids[: stream.consumed], skip_special_tokens=True)
        before = CHAT.decode(ids[: stream.consumed - 1], skip_special_tokens=True)
        assert by_character(seen, wanted)[1] == stream.stopped
        assert by_character(before.rstrip("�"), wanted)[1] is None


def test_nothing_shows_after_a_stop_string() -> None:
    stream = TextStream(TABLES["byte-level"], ["END"])
    ids = CHAT.encode("the END of it").ids
    assert stream.feed(ids) == "the "
    assert stream.stopped == "END"
    assert stream.feed(ids) == ""
    assert stream.finish() == ("", "the ")
    assert CHAT.decode(ids[: stream.consumed]) == "the END"
