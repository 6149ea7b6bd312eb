"""The lower bound on a text's tokens is one: no tokenizer of any family ever makes fewer, however the text is cut."""

from __future__ import annotations

import unicodedata
from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from rollout_server.chat.length_bound import LengthBound, bound_of, pieces_of
from rollout_server.chat.tokenizer import LONG_TEXT, Encoder
from services.wire.errors import ContextLengthError
from tests.support.chat_policy import build_chat_tokenizer
from tests.support.examples import examples

ENOUGH = 1 << 30
LESSONS = [
    "the weather in the city is fine today",
    "int main(void) { return 0; }    \n\n\n",
    "aaaa aaaa ---- ====",
    "Äpfel é é 東京都の天気",
]
GPT = r"'s|'t| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def learned(normalizer: normalizers.Normalizer | None, added: list[AddedToken]) -> Tokenizer:
    """BPE over bytes, as most models have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GPT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False, min_frequency=1)
    tokenizer.train_from_iterator(LESSONS * 4, trainer)
    tokenizer.add_tokens(added)
    return tokenizer


def with_byte_fallback(*, metaspace: bool) -> Tokenizer:
    """BPE over characters with bytes to fall back on, as Llama's and Gemma's first ones."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    merges = []
    for word in ("▁the", "▁weather", "▁▁▁▁", "aaaa", "の天"):
        for end in range(1, len(word) + 1):
            for part in (word[end - 1], word[:end]):
                vocabulary.setdefault(part, len(vocabulary))
            if end > 1 and (word[: end - 1], word[end - 1]) not in merges:
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def one_a_character() -> Tokenizer:
    """As the built-in tasks have it."""
    from trainer.sft.tiny_model import build_tokenizer

    return build_tokenizer().backend_tokenizer


GREEDY = [AddedToken("<mask>", lstrip=True, rstrip=True), AddedToken("<|a long one of 36 characters, see|>")]
FAMILIES = {
    "chat policy": lambda: build_chat_tokenizer().backend_tokenizer,
    "bytes": lambda: learned(None, []),
    "bytes, NFC": lambda: learned(normalizers.NFC(), [AddedToken("<|x|>")]),
    "bytes, NFKC": lambda: learned(normalizers.Sequence([normalizers.NFKC()]), [AddedToken("é", normalized=True)]),
    "bytes, NFD": lambda: learned(normalizers.NFD(), []),
    "bytes, tokens that eat spaces": lambda: learned(None, GREEDY),
    "fallback": lambda: with_byte_fallback(metaspace=False),
    "fallback, metaspace": lambda: with_byte_fallback(metaspace=True),
    "characters": one_a_character,
}


@cache
def family(name: str) -> tuple[Tokenizer, LengthBound]:
    tokenizer = FAMILIES[name]()
    bound = bound_of(tokenizer)
    assert bound is not None
    return tokenizer, bound


WORDS = [
    "the",
    "weather",
    " ",
    "  ",
    "\n",
    "\t",
    "a" * 40,
    "=" * 40,
    " " * 90,
    "東京都の天気",
    "▁▁▁▁",
    "<mask>",
    "<|x|>",
]
WORDS += [
    "<|a long one of 36 characters, see|>",
    "e\u0301",
    "A\u030a\u0323",
    "\u0301" * 9,
    "\u1100\u1161\u11a8",
    "ﷺ",
    "①",
    "Ａ",
]
WORDS += [
    "0x1234",
    "12345678",
    "\u212a",
    "\U0001d400",
    "🙂",
    "\u2581",
    "\u3000",
    "\u00a0",
    ">\u0338",
    "\U000105d2\u0307",
]
TEXTS = st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=8)), max_size=30).map("".join)


@pytest.mark.parametrize("name", FAMILIES)
@examples(200)
@given(pieces=st.lists(TEXTS, max_size=4))
@example(pieces=["e", "\u0301" * 3, "", "e\u0301"])
@example(pieces=[" " * 500 + "<mask>" + " " * 500])
@example(pieces=["\u1fa7".encode().decode(), unicodedata.normalize("NFD", "\u1fa7") * 20])
def test_no_text_has_fewer_tokens(name: str, pieces: list[str]) -> None:
    tokenizer, bound = family(name)
    text = "".join(pieces)
    tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert bound.at_least(pieces, ENOUGH) <= tokens
    assert bound.at_least(pieces_of(text), ENOUGH) <= tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_plain_language_is_known_to_be_long_after_its_beginning(name: str) -> None:
    _, bound = family(name)
    read = 0

    def pieces() -> object:
        nonlocal read
        for piece in pieces_of("the weather in the city is fine\n" * 300_000):
            read += 1
            yield piece

    assert bound.at_least(pieces(), 8192) > 8192  # type: ignore[arg-type]
    assert read < 25, "the whole text was read"


def spaced_out() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def half_an_alphabet() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    return tokenizer


def cut() -> Tokenizer:
    tokenizer = learned(None, [])
    tokenizer.enable_truncation(16)
    return tokenizer


NO_BOUND = {
    "words, unknown ones of any length": spaced_out,
    "characters that are dropped": half_an_alphabet,
    "accents that are dropped": lambda: learned(normalizers.StripAccents(), []),
    "spaces that are put together": lambda: learned(normalizers.Replace(Regex(r"\s+"), " "), []),
    "pieces": lambda: Tokenizer(models.Unigram([("a", 0.0)], unk_id=0)),
    "texts that are cut": cut,
}


@pytest.mark.parametrize("name", NO_BOUND)
def test_nothing_is_claimed_of_tokenizers_that_may_leave_text_out(name: str) -> None:
    assert bound_of(NO_BOUND[name]()) is None


def test_what_passes_is_tokenised_to_the_same_ids_and_what_cannot_fit_is_refused() -> None:
    tokenizer, _ = family("bytes, NFC")
    text = "the weather in the city é is fine\n" * 2000
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(text) > LONG_TEXT
    assert Encoder(tokenizer).encode(text) == ids
    assert Encoder(tokenizer, lambda: len(ids) + 1).encode(text) == ids
    with pytest.raises(ContextLengthError, match="maximum context length is 2000 tokens, and the prompt has at least"):
        Encoder(tokenizer, lambda: 2000).encode(text)
    with pytest.raises(UnicodeEncodeError):
        Encoder(tokenizer).encode(text + "\ud800")
