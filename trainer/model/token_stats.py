"""Token statistics of an optimizer step (loss, ratio, KL, logprob gap), summed on the device and read once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from services.wire.run_metrics import TokenStatistics
from trainer.algorithms.losses.objective import Judged
from trainer.data.packing import MicroBatch


class StepSums:
    """Adds micro-batches up. Everything stays a tensor until `read`."""

    _SUMS = (
        *("loss", "gap", "current", "gap_all", "sampled", "ratio", "ratio_squared", "kl"),
        *("clipped", "left_out", "weight", "weighed", "fresh"),
    )
    _PEAKS = ("gap", "gap_all", "ratio")

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(self._SUMS), device=device)
        self._peaks = torch.zeros(len(self._PEAKS), device=device)

    @torch.no_grad()
    def add(self, micro: MicroBatch, logprobs: Tensor, loss: Tensor, judged: Judged) -> None:
        """`logprobs`: current, of the sampled tokens, `[M]`, without gradient; `loss`: this micro-batch's share."""
        difference = logprobs - micro.behaviour
        log_ratio = difference[micro.chosen]
        ratio = log_ratio.exp()
        gap = difference.abs()
        gap_current = gap * micro.current
        nothing = torch.zeros((), device=loss.device)
        bound = nothing if judged.clipped is None else judged.clipped.sum()
        left_out = nothing if judged.kept is None else (~judged.kept).sum()
        weight = nothing if judged.weight is None else judged.weight.sum()
        weighed = nothing if judged.weight is None else torch.full_like(loss, len(ratio))
        self._sums += torch.stack(
            [
                loss,
                gap_current.sum(),
                micro.current.sum(),
                gap.sum(),
                torch.full_like(loss, len(gap)),
                ratio.sum(),
                ratio.square().sum(),
                (ratio - 1.0 - log_ratio).sum(),
                bound,
                left_out,
                weight,
                weighed,
                torch.full_like(loss, len(ratio)),
            ]
        )
        self._peaks = torch.maximum(self._peaks, torch.stack([gap_current.max(), gap.max(), ratio.max()]))

    def read(self, grad_norm: Tensor) -> TokenStatistics:
        """The one synchronisation of a step; before the weights change, so that what is not finite never reaches them."""
        values = torch.cat([self._sums, self._peaks, grad_norm.detach().reshape(1).to(self._sums)]).tolist()
        total = dict(zip(self._SUMS, values, strict=False))
        peak = dict(zip(self._PEAKS, values[len(self._SUMS) :], strict=False))
        current, sampled, fresh = (int(total[name]) for name in ("current", "sampled", "fresh"))
        return TokenStatistics(
            loss=total["loss"],
            grad_norm=values[-1],
            logprob_gap_mean=_mean(total["gap"], current),
            logprob_gap_max=peak["gap"] if current else None,
            gap_tokens=current,
            logprob_gap_mean_all=_mean(total["gap_all"], sampled),
            logprob_gap_max_all=peak["gap_all"] if sampled else None,
            ratio_mean=_mean(total["ratio"], fresh),
            ratio_max=peak["ratio"] if fresh else None,
            clip_fraction=_mean(total["clipped"], fresh),
            masked_by_correction=_mean(total["left_out"], fresh),
            correction_weight=_mean(total["weight"], int(total["weighed"])),
            # Squares of ratios that are nearly 0 are 0.
            effective_samples=_mean(total["ratio"] ** 2 / (total["ratio_squared"] or math.nan), fresh),
            kl=_mean(total["kl"], fresh),
        )


def _mean(total: float, count: int) -> float | None:
    return total / count if count and math.isfinite(total) else None
