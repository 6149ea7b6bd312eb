"""A taskset of verifiers with a harness of its own: two questions a task, asked one after the other, no program started."""

from __future__ import annotations

from collections.abc import Iterable

import httpx
import verifiers.v1 as vf

__all__ = ["AskTwice", "TwoQuestions"]


class Question(vf.Task):
    @vf.reward
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class QuestionsConfig(vf.TasksetConfig):
    count: int = 40


class TwoQuestions(vf.Taskset[Question, QuestionsConfig]):
    def load(self) -> Iterable[Question]:
        for number in range(self.config.count):
            yield Question(vf.TaskData(prompt=f"what is {number}"))


class AskTwice(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:  # type: ignore[no-untyped-def]
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=30.0) as http:
            for follow_up in ("and now?", None):
                body = {"model": ctx.model, "messages": messages}
                answer = await http.post(f"{endpoint}/chat/completions", json=body)
                answer.raise_for_status()
                messages.append(answer.json()["choices"][0]["message"])
                if follow_up is not None:
                    messages.append({"role": "user", "content": follow_up})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
