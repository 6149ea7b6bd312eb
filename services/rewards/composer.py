"""Reward of one sample: all components score it at the same time, then the formula makes one reward of them, or none.

judge ──► a component is full ──► CapacityError: nothing was begun
  └─────► scores of all components, each within its deadline ──compose──► Composed | NotComposed
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import structlog

from services.config.rewards import RewardComponent, RewardSettings
from services.policies import rewards
from services.rewards.component import Score, Scorer
from services.rewards.function_component import FunctionScorer
from services.rewards.metrics import RewardMetrics
from services.rewards.model_component import ModelScorer, describe_model
from services.rewards.sandbox.protocol import Sample
from services.security.tls import PUBLIC, Trust
from services.wire.errors import CapacityError

_log = structlog.get_logger()
RETRY_AFTER_S = 1.0


class Judge:
    """All components of one service. `run` keeps them going; `judge` may be called once `not_ready` is empty."""

    def __init__(
        self, settings: RewardSettings, metrics: RewardMetrics, trust: Trust = PUBLIC, hidden: Sequence[Path] = ()
    ) -> None:
        """`hidden`: where this service's keys lie, for no function to read."""
        self._settings, self._trust = settings, trust
        models = (each.model for each in settings.components)
        self._hidden = [*hidden, *(model.key_file for model in models if model is not None and model.key_file)]
        self._metrics = metrics
        self._terms = [
            rewards.Term(each.name, each.weight, each.substitute, each.clip, tuple(each.tasks))
            for each in settings.components
        ]
        self._scorers: Mapping[str, Scorer] = {each.name: self._make(each) for each in settings.components}
        self._deadlines = {each.name: each.deadline_s for each in settings.components}

    def _make(self, component: RewardComponent) -> Scorer:
        waiting = self._settings.max_waiting
        if component.model is not None:
            return ModelScorer(component, waiting, partial(self._metrics.batch_sent, component.name), self._trust)
        must_hold = self._settings.not_confined == "refuse"
        return FunctionScorer(component, waiting, hidden=self._hidden, must_hold=must_hold)

    @property
    def formula(self) -> str:
        return rewards.describe_formula(self._settings.combine, self._terms)

    def components(self) -> list[str]:
        """Each component in words."""
        return [describe_component(each) for each in self._settings.components]

    def not_confined(self) -> list[str]:
        """What cannot be enforced on this machine, a component each."""
        return [f"{name}: {what}" for name, scorer in self._scorers.items() for what in scorer.not_confined]

    def not_ready(self) -> list[str]:
        return [why for scorer in self._scorers.values() for why in scorer.not_ready()]

    async def run(self) -> None:
        """Keep every component going until cancelled. Raises UsageError for one that cannot be."""
        try:
            async with asyncio.TaskGroup() as running:
                for scorer in self._scorers.values():
                    running.create_task(scorer.run())
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from failed

    async def judge(self, sample: Sample) -> rewards.Composed | rewards.NotComposed:
        """Raises CapacityError, with nothing begun, while too many samples wait for a component."""
        terms = [term for term in self._terms if term.judges(sample.task)]
        scorers = {term.name: self._scorers[term.name] for term in terms}
        full = [name for name, scorer in scorers.items() if scorer.full]
        if full:
            self._metrics.refused()
            what = f"{self._settings.max_waiting} samples wait for {full[0]} already"
            raise CapacityError(what, RETRY_AFTER_S)
        # No await until all have it: else another call could fill one of them in between.
        futures = {name: scorer.submit(sample) for name, scorer in scorers.items()}
        scores = await asyncio.gather(*(self._within_deadline(name, future) for name, future in futures.items()))
        if terms:
            judged = rewards.compose(self._settings.combine, terms, dict(zip(futures, scores, strict=True)))
        else:
            judged = _nobodys(self._terms, sample.task)
        self._metrics.count(judged)
        if isinstance(judged, rewards.NotComposed):
            _log.warning(
                "no reward",
                task=sample.task,
                component=judged.component,
                cause=judged.failure.cause,
                why=judged.failure.what,
            )
        for name, cause in ({} if isinstance(judged, rewards.NotComposed) else judged.substituted).items():
            _log.debug("reward component substituted", task=sample.task, component=name, cause=cause)
        return judged

    async def _within_deadline(self, name: str, future: asyncio.Future[Score]) -> Score:
        loop = asyncio.get_running_loop()
        began, deadline_s = loop.time(), self._deadlines[name]
        try:
            async with asyncio.timeout(deadline_s):
                return await future
        except TimeoutError:
            return rewards.Failure(rewards.RewardFailure.LATE, f"no value within {deadline_s:g} s, waiting included")
        finally:
            self._metrics.component_took(name, loop.time() - began)


def _nobodys(terms: Sequence[rewards.Term], task: str) -> rewards.NotComposed:
    what = f"no component judges task {task!r}"
    return rewards.NotComposed(terms[0].name, rewards.Failure(rewards.RewardFailure.SAMPLE, what))


def describe_component(component: RewardComponent) -> str:
    """One line: what it is, what it may take, and what follows when it fails."""
    failing = "fails the reward" if component.substitute is None else f"{component.substitute:g} stands in"
    if component.model is not None:
        what = f"{describe_model(component.model)}, up to {component.model.max_batch} samples a call"
    else:
        allowed = [
            word for word, given in (("network", component.network), ("processes", component.starts_processes)) if given
        ]
        kind = f"verifier {component.verifier}" if component.verifier else f"function {component.function}"
        what = (
            f"{kind}, {component.workers} at once, {component.time_limit_s:g} s, "
            f"{component.memory_mib} MiB, {' and '.join(allowed) or 'no network, no processes'}"
        )
    of = f" of {', '.join(component.tasks)} alone" if component.tasks else ""
    return f"{component.name}{of}: {what}; within {component.deadline_s:g} s; without a value: {failing}"
