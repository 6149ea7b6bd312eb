"""Token statistics of an optimizer step (loss, ratio, KL, logprob gap), summed on the device and read once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import torch
from torch import Tensor

from services.wire.packed import Float32Array, pack_logprobs, unpack_logprobs
from services.wire.run_metrics import TokenStatistics
from trainer.algorithms.losses.objective import Judged
from trainer.data.packing import MicroBatch
from trainer.parallel.ranks import Ranks


class StepSums:
    """Adds micro-batches up. Everything stays a tensor until `read`."""

    _OF_SAMPLED = ("gap_all", "gap", "current")
    """The last two of those that are current."""
    _OF_FRESH = ("ratio", "ratio_squared", "kl", "clipped", "left_out", "weight", "teacher_kl")

    def __init__(self, device: torch.device, *, keeps_logprobs: bool = False) -> None:
        """`keeps_logprobs`: those of the sampled tokens can be asked for afterwards."""
        self.logprobs: list[Float32Array] = []
        """Of each share of the ranks once they were read, current and in the order of its passes; empty unless kept."""
        self._kept: list[Tensor] | None = [] if keeps_logprobs else None
        self._loss = torch.zeros(1, device=device)
        self._sampled, self._largest = (torch.zeros(len(self._OF_SAMPLED), device=device) for _ in range(2))
        self._fresh, self._largest_ratio = (
            torch.zeros(len(self._OF_FRESH), device=device),
            torch.zeros(1, device=device),
        )
        self._counts = {"sampled": 0, "fresh": 0, "weighed": 0, "taught": 0, "replayed": 0}
        self._figures: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, micro: MicroBatch, logprobs: Tensor, loss: Tensor, judged: Judged) -> None:
        """`logprobs`: current, of the sampled tokens, `[M]`, without gradient; `loss`: this micro-batch's share."""
        if self._kept is not None:
            self._kept.append(logprobs)
        difference = logprobs - micro.behaviour
        log_ratio = difference[micro.chosen]
        ratio, gap, current = log_ratio.exp(), difference.abs(), micro.current.to(difference.dtype)
        of_sampled = torch.stack([gap, gap * current, current])
        nothing = torch.zeros((), device=ratio.device).expand_as(ratio)
        of_fresh = torch.stack(
            [
                ratio,
                ratio.square(),
                ratio - 1.0 - log_ratio,
                nothing if judged.clipped is None else judged.clipped.to(ratio.dtype),
                nothing if judged.kept is None else (~judged.kept).to(ratio.dtype),
                nothing if judged.weight is None else judged.weight,
                nothing if micro.teacher is None else micro.behaviour[micro.chosen] - micro.teacher,
            ]
        )
        self._loss += loss
        self._sampled += of_sampled.sum(1)
        self._fresh += of_fresh.sum(1)
        self._largest = torch.maximum(self._largest, of_sampled.amax(1))
        self._largest_ratio = torch.maximum(self._largest_ratio, ratio.max())
        self._counts["sampled"] += len(gap)
        self._counts["fresh"] += len(ratio)
        self._counts["replayed"] += micro.replayed
        self._counts["weighed"] += 0 if judged.weight is None else len(ratio)
        self._counts["taught"] += 0 if micro.teacher is None else len(ratio)
        for name, figure in judged.figures.items():
            before = self._figures.get(name, torch.zeros(1, device=ratio.device))
            self._figures[name] = before + figure.detach().sum().to(before)

    def read(self, grad_norm: Tensor, ranks: Ranks | None = None) -> TokenStatistics:
        """Of all `ranks`, on each. The one synchronisation of a step; before the weights change, so that what is not finite
        never reaches them.

        `grad_norm`: of the gradient of all ranks.
        """
        norm = grad_norm.detach().reshape(1).to(self._loss)
        parts = [self._loss, norm, self._largest_ratio, self._sampled, self._fresh, self._largest]
        values = torch.cat([*parts, *self._figures.values()]).tolist()
        loss, norm_value, largest_ratio = values[:3]
        names = (*self._OF_SAMPLED, *self._OF_FRESH)
        sums = _Sums(
            loss=loss,
            largest_ratio=largest_ratio,
            total=dict(zip(names, values[3:], strict=False)),
            peak=dict(zip(self._OF_SAMPLED, values[3 + len(names) :], strict=False)),
            figures=dict(zip(self._figures, values[len(values) - len(self._figures) :], strict=True)),
            counts=self._counts,
            logprobs=self._read_logprobs(),
        )
        told = [sums]
        if ranks is not None and ranks.several:
            gathered = ranks.of_shares(ranks.gather(msgspec.msgpack.encode(sums)))
            told = [msgspec.msgpack.decode(each, type=_Sums) for each in gathered]
            sums = _added(told)
        if self._kept is not None:
            self.logprobs = [unpack_logprobs(each.logprobs) for each in told]
        total, peak = sums.total, sums.peak
        sampled, fresh, current = sums.counts["sampled"], sums.counts["fresh"], int(total["current"])
        return TokenStatistics(
            loss=sums.loss,
            grad_norm=norm_value,
            logprob_gap_mean=_mean(total["gap"], current),
            logprob_gap_max=peak["gap"] if current else None,
            gap_tokens=current,
            logprob_gap_mean_all=_mean(total["gap_all"], sampled),
            logprob_gap_max_all=peak["gap_all"] if sampled else None,
            ratio_mean=_mean(total["ratio"], fresh),
            ratio_max=sums.largest_ratio if fresh else None,
            clip_fraction=_mean(total["clipped"], fresh),
            masked_by_correction=_mean(total["left_out"], fresh),
            correction_weight=_mean(total["weight"], sums.counts["weighed"]),
            # Squares of ratios that are nearly 0 are 0.
            effective_samples=_mean(total["ratio"] ** 2 / (total["ratio_squared"] or math.nan), fresh),
            kl=_mean(total["kl"], fresh),
            teacher_kl=_mean(total["teacher_kl"], sums.counts["taught"]),
            routing_replayed=sums.counts["replayed"] / sampled if sums.counts["replayed"] else None,
            figures={name: _mean(figure, fresh) for name, figure in sums.figures.items()},
        )

    def _read_logprobs(self) -> bytes:
        """The device has computed them by now."""
        return pack_logprobs(torch.cat(self._kept).float().cpu().numpy()) if self._kept else b""


class _Sums(msgspec.Struct):
    """What one rank added up, by name. `logprobs`: packed, of its sampled tokens; empty unless kept."""

    loss: float
    largest_ratio: float
    total: dict[str, float]
    peak: dict[str, float]
    figures: dict[str, float]
    counts: dict[str, int]
    logprobs: bytes = b""


def _added(parts: Sequence[_Sums]) -> _Sums:
    figures = {name for part in parts for name in part.figures}
    return _Sums(
        loss=sum(part.loss for part in parts),
        largest_ratio=_largest(part.largest_ratio for part in parts),
        total={name: sum(part.total[name] for part in parts) for name in parts[0].total},
        peak={name: _largest(part.peak[name] for part in parts) for name in parts[0].peak},
        # A rank without a row has none.
        figures={name: sum(part.figures.get(name, 0.0) for part in parts) for name in sorted(figures)},
        counts={name: sum(part.counts[name] for part in parts) for name in parts[0].counts},
    )


def _largest(values: Iterable[float]) -> float:
    """NaN where one is, as torch has it."""
    found = [*values]
    return math.nan if any(map(math.isnan, found)) else max(found)


def _mean(total: float, count: int) -> float | None:
    return total / count if count and math.isfinite(total) else None
