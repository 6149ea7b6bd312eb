"""`GET /api/runs/{run}/rollouts…`: a run's kept rollouts, found, and one of them token by token.

All read files of the run's folder, on a thread.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Response

from services.dashboard.plan import DashboardPlan
from services.dashboard.rollouts.answers import (
    MOST_TOKENS,
    RolloutPage,
    ShownRollout,
    TokenWindow,
    distinct,
    shown_rollout,
    token_window,
    wanted_tokens,
    window_of,
)
from services.http.auth import Authorizer
from services.http.struct_answer import answers, struct_answer
from services.run_store.rollouts.search import MOST_A_PAGE, RolloutReader, Search, range_of
from services.wire.errors import NotFoundError

_MOST_OFFSET = 10**9
_MOST_TEXT = 1000
Text = Annotated[str | None, Query(max_length=_MOST_TEXT)]
Number = Annotated[int, Path(ge=0, le=2**62, description="Of the rollout, as a list has it")]


def rollout_routes(plan: DashboardPlan, authorizer: Authorizer) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["rollouts"])
    reading = authorizer.of("reading")

    def reader(run: str) -> RolloutReader:
        found = plan.runs.named(run)
        if found.folder is None:
            raise NotFoundError(f"the run {run[:100]} has no folder on this machine", "open it where its folder is")
        return RolloutReader(found.folder.rollouts)

    @router.get("/api/runs/{run}/rollouts", dependencies=reading, responses=answers(RolloutPage))
    def find(
        run: str,
        step: Text = None,
        reward: Text = None,
        length: Text = None,
        task: Text = None,
        group: Text = None,
        server: Text = None,
        text: Text = None,
        order: Literal["step", "reward", "length"] = "step",
        descending: bool = True,
        offset: Annotated[int, Query(ge=0, le=_MOST_OFFSET)] = 0,
        limit: Annotated[int, Query(ge=1, le=MOST_A_PAGE)] = 50,
        up_to: Annotated[int | None, Query(ge=0, le=2**62)] = None,
    ) -> Response:
        """Rollouts that fit, a page of them. `step`, `reward`, `length`: `3`, `3..7`, `3..` or `..7`; `text`: letter for
        letter in prompt or answer; `up_to`: as the first page of a search said."""
        found = reader(run)
        wanted = Search(
            step=range_of("step", step),
            reward=range_of("reward", reward),
            length=range_of("length", length),
            task=task or None,
            group=group or None,
            server=server or None,
            text=text or None,
            order=order,
            descending=descending,
            offset=offset,
            limit=limit,
            up_to=up_to,
        )
        return struct_answer(RolloutPage(extent=found.extent(), page=found.search(wanted)))

    @router.get("/api/runs/{run}/rollouts/{rollout}", dependencies=reading, responses=answers(ShownRollout))
    def read(run: str, rollout: Number) -> Response:
        """One rollout: its facts, turns, where its prefixes broke, and its siblings."""
        found = reader(run)
        kept = found.kept(rollout)
        pieces = found.pieces(wanted_tokens(kept))
        return struct_answer(shown_rollout(rollout, kept, found.siblings(rollout), pieces))

    @router.get("/api/runs/{run}/rollouts/{rollout}/tokens", dependencies=reading, responses=answers(TokenWindow))
    def tokens(
        run: str,
        rollout: Number,
        segment: Annotated[int, Query(ge=0, le=10**6)] = 0,
        start: Annotated[int, Query(ge=0, le=_MOST_OFFSET)] = 0,
        count: Annotated[int, Query(ge=1, le=MOST_TOKENS)] = 512,
    ) -> Response:
        """Some tokens of a segment, with what is known of each."""
        found = reader(run)
        kept = found.kept(rollout)
        if segment >= len(kept.trajectory.segments):
            there = len(kept.trajectory.segments)
            raise NotFoundError(f"rollout {rollout} has no segment {segment}", f"it has {there}, from 0 on")
        near, _, _ = window_of(kept, segment, start, count)
        return struct_answer(token_window(kept, segment, start, count, found.pieces(distinct(near))))

    return router
