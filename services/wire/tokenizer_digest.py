"""Which vocabulary token ids are of: two processes that name the same digest mean the same by an id."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping


def vocabulary_digest(vocabulary: Mapping[str, int]) -> str:
    """32 hexadecimal digits, of all tokens with their ids (added ones included), in whatever order they are given.

    Not of the file: a tokenizer that is saved again by another version of its library is the same vocabulary.
    """
    digest = hashlib.blake2b(digest_size=16)
    for token, number in sorted(vocabulary.items(), key=lambda item: (item[1], item[0])):
        written = token.encode("utf-8", "surrogatepass")
        digest.update(b"%d %d " % (number, len(written)) + written)
    return digest.hexdigest()
