"""Log-probabilities of tokens under a causal language model: of a micro-batch, of padded rows, of whole trajectories; and
under the reference, the policy that the run began with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.wire.trajectory import Trajectory
from trainer.algorithms.advantages.batch import Float64Array
from trainer.algorithms.advantages.flat import ranges
from trainer.data.packing import MicroBatch, lay_passes, split_shares
from trainer.data.rows import Rows, to_measure
from trainer.model.forward import PackedForward
from trainer.model.head import logit_terms
from trainer.parallel.ranks import Ranks, meeting


def sampled_terms(policy: PackedForward, micro: MicroBatch, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
    """Logprobs, float32 `[M]`, of the sampled tokens of a micro-batch at the temperatures that they were sampled with,
    among the tokens that there were to sample from.

    With `entropy` also that of the distribution that each was sampled from, in nats.
    """
    tokens = micro.row.input_ids[0, micro.places]
    terms = policy.terms(micro.row, micro.places - 1, tokens, micro.temperature, kept=micro.kept, entropy=entropy)
    return terms.logprobs, terms.entropy


def token_logprobs(model: PreTrainedModel, input_ids: Tensor, first: int = 1) -> Tensor:
    """Logprobs of `input_ids[:, first:]`, each given what stands before it.

    `input_ids`: int64 `[B, T]`, padded on the right, where a causal model's earlier positions cannot see it; `first`: ≥ 1,
    so that columns nobody asks for cost no logits. Returns float32 `[B, T − first]`; what stands at padding means nothing.
    """
    wanted = torch.arange(first - 1, input_ids.shape[1] - 1, device=input_ids.device)
    logits = model(input_ids=input_ids, use_cache=False, logits_to_keep=wanted).logits
    return logit_terms(logits, input_ids[:, first:], None).logprobs


class Measuring(Protocol):
    """How rank 0 has the others take part: it calls this, with what it measures for each share, before its own part."""

    def __call__(self, shares: Sequence[Sequence[Rows | None]]) -> None: ...


def measure(
    trajectories: Sequence[Trajectory],
    model: Callable[[MicroBatch], Tensor],
    budget: int,
    stem_width: int | None = None,
    *,
    ranks: Ranks,
    measuring: Measuring,
) -> Float64Array:
    """`[N]`: `model`'s value for every sampled token of some trajectories, whatever its age, before they are trained on.

    trajectories ──► rows ──► micro-batches ──model──► [N] in the order of the trajectories' segments

    `budget`: tokens of a micro-batch; `stem_width`: of the model, as `split_batch` has it. Each of
    `ranks` measures its share (`measure_passes`), and `measuring` tells it to.
    """
    rows = to_measure(trajectories)
    sampled = np.add.reduceat(rows.ages >= 0, rows.begins, dtype=np.int64) if len(rows) else np.zeros(0, dtype=np.int64)
    ends = np.cumsum(sampled)
    found = np.zeros(int(sampled.sum()))
    if not len(rows):
        return found
    split = [
        [np.array(together, dtype=np.int64) for together in passes]
        for passes in split_shares(rows, budget, stem_width, ranks.layout.shares)
    ]
    shares = [[rows.take(chosen) if len(chosen) else None for chosen in passes] for passes in split]
    measuring(shares)
    for said, passes in zip(measure_passes(shares[ranks.share], model, ranks), split, strict=True):
        chosen = np.concatenate(passes)
        found[ranges((ends - sampled)[chosen], sampled[chosen])] = said
    return found


@torch.no_grad()
def measure_passes(
    passes: Sequence[Rows | None], model: Callable[[MicroBatch], Tensor], ranks: Ranks
) -> list[Float64Array]:
    """This rank's part of a measurement: the values of each share, on every rank."""
    with meeting():
        said = [model(micro).double().cpu().numpy() for micro in lay_passes(passes, ranks.device)]
    mine: Float64Array = np.concatenate(said)
    if not ranks.several:
        return [mine]
    return [np.frombuffer(part) for part in ranks.of_shares(ranks.gather(mine.tobytes()))]


class Reference:
    """A frozen model of its own, or the policy under training, which is the first one again while `within` lasts."""

    def __init__(self, policy: PackedForward, within: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._policy = policy
        self.within = within
        """Around all passes: the adapters off, or the weights on the device."""

    @torch.no_grad()
    def logprobs(self, micro: MicroBatch) -> Tensor:
        """float32 `[N]`: of each fresh token, at the temperature that it was sampled with. Call it `within`."""
        return sampled_terms(self._policy, micro)[0][micro.chosen]
