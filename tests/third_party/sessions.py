"""A session as a test sees it: opened, spoken in by somebody's client, compared with what the engine sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollout_server.api.trajectories import as_tokens
from services.wire.trajectory import Trajectory
from tests.support.rollout_host import Host
from tests.support.telling_engine import Sampled


@dataclass(frozen=True)
class Opened:
    """An open session of `host`."""

    host: Host
    session_id: str
    base_url: str
    api_key: str

    async def segments(self) -> list[dict[str, Any]]:
        """`GET …/trajectory?format=tokens`."""
        answer = await self.host.http.get(f"/sessions/{self.session_id}/trajectory?format=tokens")
        assert answer.status_code == 200, answer.text
        segments: list[dict[str, Any]] = answer.json()["segments"]
        return segments

    async def finish(self) -> Trajectory:
        """Finish with reward 1; its trajectory as it stands in the stream."""
        answer = await self.host.http.post(f"/sessions/{self.session_id}/finish", json={"reward": 1.0})
        assert answer.status_code == 200, answer.text
        published = {each.trajectory_id: each for each in await self.host.published()}
        return published[self.session_id]

    async def ends_with(self, sampled: Sequence[Sampled], break_reasons: Sequence[str | None] = (None,)) -> Trajectory:
        """Finish, having checked that capture and trajectory hold each of `sampled` once, token for token, and nothing
        else.

        `break_reasons`: of the segments there must be.
        """
        segments = await self.segments()
        check_segments(segments, sampled)
        reasons = [segment["break_reason"] for segment in segments]
        assert reasons == list(break_reasons), f"segments broke for {reasons}"
        trajectory = await self.finish()
        published = [segment.model_dump() for segment in as_tokens(self.session_id, trajectory.segments).segments]
        assert [
            {**each, "version_spans": [list(span) for span in each["version_spans"]]} for each in published
        ] == segments
        return trajectory


async def opened(host: Host, **terms: Any) -> Opened:
    """A new session."""
    answer = await host.http.post("/sessions", json=terms)
    assert answer.status_code == 201, answer.text
    body = answer.json()
    return Opened(host, body["session_id"], body["base_url"], body["api_key"])


def check_segments(segments: Sequence[dict[str, Any]], sampled: Sequence[Sampled]) -> None:
    """Each sample is trained in exactly one segment, behind its own prompt, with its own logprobs; nothing else is."""
    for sample in sampled:
        begin, end = len(sample.prompt), len(sample.prompt) + len(sample.token_ids)
        homes = [
            segment
            for segment in segments
            if segment["token_ids"][:end] == sample.prompt + sample.token_ids
            and segment["loss_mask"][begin:end] == [1] * len(sample.token_ids)
            and segment["logprobs"][begin:end] == sample.logprobs
        ]
        assert len(homes) >= 1, f"{sample.token_ids} after {begin} tokens is in no segment"
    trained = sum(sum(segment["loss_mask"]) for segment in segments)
    assert trained == sum(len(sample.token_ids) for sample in sampled)
    spans = sum(length for segment in segments for _, length, _ in segment["version_spans"])
    assert spans == trained
