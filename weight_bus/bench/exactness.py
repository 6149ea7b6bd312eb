"""What an updated engine draws, beside what a freshly loaded one draws. Pure."""

from __future__ import annotations

from weight_bus.bench.messages import Drawn
from weight_bus.bench.report import Exactness


def compare(updates: int, found: Drawn, expected: Drawn) -> Exactness:
    """Token by token. Logprobs count as far as the tokens agree; of streams of other lengths, nothing agrees."""
    errors = [0.0]
    for tokens, logprobs, others, their_logprobs in zip(
        found.token_ids, found.logprobs, expected.token_ids, expected.logprobs, strict=True
    ):
        for ours, logprob, theirs, their_logprob in zip(tokens, logprobs, others, their_logprobs, strict=False):
            errors.append(abs(logprob - their_logprob))
            if ours != theirs:
                break
    return Exactness(
        updates=updates,
        tokens=sum(len(tokens) for tokens in expected.token_ids),
        tokens_equal=found.token_ids == expected.token_ids,
        max_logprob_error=max(errors),
    )
