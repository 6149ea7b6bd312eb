"""Versions after a restart: a published version is one set of bytes, and no number is used for two of them.

A restarted trainer repeats the logged steps. Where that gives other bytes (kernels of a GPU that add in another order,
another library, another device), the version that it comes back to may be known already, by the bytes of before:

    repeated weights of v ──► v > highest announced                 ──► published as v: nobody has heard of it
                          ──► v = highest, the digests are the same ──► published as v, as ever
                          ──► else                                  ──► published as one above it: a skip from v

Engines that serve the announced bytes of v stay sound: their tokens are of v, which is below. Skipped versions count in
staleness (tokens never look younger than they are), and in nothing that counts optimizer steps:

    optimizer steps = version − skipped versions
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

UNKNOWN = ""


@dataclass(frozen=True)
class Announced:
    """A version that was announced, and the digest of its bytes; UNKNOWN where nobody can tell."""

    version: int
    digest: str = UNKNOWN


def highest(*known: Announced | None) -> Announced | None:
    """The newest version that any source knows; its digest, where those that know one agree."""
    found = [each for each in known if each is not None]
    if not found:
        return None
    version = max(each.version for each in found)
    digests = {each.digest for each in found if each.version == version} - {UNKNOWN}
    return Announced(version, digests.pop() if len(digests) == 1 else UNKNOWN)


def version_to_publish(version: int, digest: str, newest: Announced | None, updates: int = 1) -> int:
    """Under which version the bytes of `digest`, which steps have brought to `version`, may be published.

    `newest`: the highest version ever announced; None where none was. `updates`: optimizer steps of a batch; whole batches
    are skipped, so that the next one begins where admission counts that one does.
    """
    if newest is None or version > newest.version:
        return version
    if version == newest.version and digest == newest.digest != UNKNOWN:
        return version
    batches = (newest.version - version) // updates + 1
    return version + batches * updates


def after_skips(version: int, skips: Mapping[int, int]) -> int:
    """Where `version` leads by the skips (from → to), one after the other. Each leads upwards, so that it ends."""
    while version in skips:
        version = skips[version]
    return version
