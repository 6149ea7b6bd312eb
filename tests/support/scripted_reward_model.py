"""A reward model's server that scores by a rule: an answer is worth its length; what it is asked is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from tests.support.served_app import served


@dataclass
class ScriptedRewardModel:
    """`/score` and `/classify`. An answer with `too long` in it is refused, as vLLM refuses a prompt that does not fit."""

    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    failing: list[int] = field(default_factory=list)
    """Statuses that the next calls are answered with."""
    answering: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared, calls are left waiting."""
    busiest: int = 0
    _busy: int = 0
    url: str = ""

    def __post_init__(self) -> None:
        self.answering.set()

    async def answer(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.asked.append(body)
        self.keys.append(request.headers.get("authorization"))
        self._busy += 1
        self.busiest = max(self.busiest, self._busy)
        try:
            await self.answering.wait()
        finally:
            self._busy -= 1
        if self.failing:
            return JSONResponse({"error": {"message": "busy", "code": 1}}, self.failing.pop(0))
        texts = body["text_2"] if "text_2" in body else body["input"]
        if any("too long" in text for text in texts):
            return JSONResponse({"error": {"message": "maximum context length", "code": 400}}, 400)
        if "text_2" in body:
            return JSONResponse({"data": [{"index": i, "score": float(len(text))} for i, text in enumerate(texts)]})
        probs = [{"index": i, "probs": [0.0, float(len(text))]} for i, text in enumerate(texts)]
        return JSONResponse({"data": probs})


@asynccontextmanager
async def scripted_reward_model() -> AsyncIterator[ScriptedRewardModel]:
    """Serve one until the block ends."""
    model = ScriptedRewardModel()
    app = FastAPI()
    app.add_route("/score", model.answer, methods=["POST"])
    app.add_route("/classify", model.answer, methods=["POST"])
    async with served(app) as url:
        model.url = url
        yield model
        model.answering.set()
