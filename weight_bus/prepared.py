"""When an engine counts as prepared: every rank of it holds the version, and all hold the same bytes. Pure."""

from __future__ import annotations

from weight_bus.bus_api import StageAnswer


def why_not_prepared(answer: StageAnswer, version: int, root_digest: str, ranks: int) -> str | None:
    """What is wrong with an engine's answer to a stage; None for a sound one.

    An engine of several ranks may answer for all of them at once, or list what each staged: then none may be missing.
    """
    if (answer.version, answer.root_digest) != (version, root_digest):
        return f"it staged version {answer.version}, digest {answer.root_digest[:16]}…, not {root_digest[:16]}…"
    if answer.rank_digests is None:
        return None
    if len(answer.rank_digests) != ranks:
        return f"{len(answer.rank_digests)} of {ranks} ranks staged version {version}"
    for rank, digest in enumerate(answer.rank_digests):
        if digest != root_digest:
            return f"rank {rank} staged digest {digest[:16]}…, not {root_digest[:16]}…"
    return None
