"""A teacher's server as the trainer sees one: vLLM's two routes, with logprobs that transformers computes."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from services.wire.packed import unpack_mask, unpack_tokens
from services.wire.trajectory import Trajectory
from trainer.algorithms.advantages.rewards import Batch


def logprobs_of(model: PreTrainedModel, prompt: list[int]) -> list[float]:
    """Of each token but the first."""
    with torch.inference_mode():
        found = model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
    return [float(found[place, token]) for place, token in enumerate(prompt[1:])]


def told_of(model: PreTrainedModel, trajectory: Trajectory) -> list[float]:
    """Of its sampled tokens, in the order of its segments."""
    found = []
    for segment in trajectory.segments:
        mask, tokens = unpack_mask(segment.loss_mask), unpack_tokens(segment.token_ids)
        # As the trainer asks: what stands behind the last sampled token may change the last bits.
        prompt = tokens[: int(np.flatnonzero(mask)[-1]) + 1].tolist() if mask.any() else []
        found += [value for value, sampled in zip(logprobs_of(model, prompt), mask[1:], strict=False) if sampled]
    return found


def taught(model: PreTrainedModel, batch: Batch) -> npt.NDArray[np.float64]:
    """What the trainer hears of a batch."""
    return np.array([value for one in batch.trajectories for value in told_of(model, one)])


class TeacherStandIn:
    """`statuses`: what the next calls are answered instead; `hold`: nobody is answered while it is not set."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, key: str | None = None) -> None:
        self.model, self.tokenizer, self.key = model, tokenizer, key
        self.prompts: list[list[int]] = []
        self.statuses: list[int] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.tells, self.tells_ids, self.reads_text = True, True, True
        self.max_model_len: int | None = 256
        self.in_flight = self.most_in_flight = 0
        self.down = False

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/models")
        async def models() -> JSONResponse:
            if self.down:
                return JSONResponse({"error": {"message": "still loading"}}, 503)
            return JSONResponse({"data": [{"id": "big", "max_model_len": self.max_model_len}, {"id": "adapter"}]})

        @app.post("/v1/completions")
        async def completions(request: Request) -> JSONResponse:
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            try:
                await self.hold.wait()
                # So that several are in flight.
                await asyncio.sleep(0.002)
                return self._answer(await request.json(), request.headers.get("authorization"))
            finally:
                self.in_flight -= 1

        return app

    def _answer(self, call: dict[str, Any], shown: str | None) -> JSONResponse:
        if self.statuses or self.down:
            return JSONResponse({"error": {"message": "not now"}}, self.statuses.pop(0) if self.statuses else 503)
        if self.key is not None and shown != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "no key"}}, 401)
        assert (call["max_tokens"], call["temperature"], call["prompt_logprobs"]) == (1, 1.0, 0)
        assert call["model"] == "big"
        prompt = call["prompt"]
        if isinstance(prompt, str):
            if not self.reads_text:
                return JSONResponse({"error": {"message": "token ids alone"}}, 400)
            prompt = self.tokenizer.encode(prompt, add_special_tokens=False)
        else:
            self.prompts.append(prompt)
        if max(prompt) >= self.model.config.vocab_size:
            return JSONResponse({"error": {"message": f"token id {max(prompt)} is out of vocabulary"}}, 400)
        choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": "length"}
        if self.tells:
            told = zip(prompt[1:], logprobs_of(self.model, prompt), strict=True)
            choice["prompt_logprobs"] = [None, *({str(token): {"logprob": value, "rank": 1}} for token, value in told)]
        if call.get("return_token_ids") and self.tells_ids:
            choice["prompt_token_ids"] = prompt
        return JSONResponse({"choices": [choice]})
