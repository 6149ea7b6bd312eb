"""The dashboard's routes of kept rollouts: what they tell equals what the stream had, and is bounded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from services.dashboard.open_runs import OpenRuns
from services.dashboard.rollouts.answers import MOST_TOKENS, MOST_TURNS
from services.dashboard.rollouts.calls import called_tools, role_of
from services.run_store.rollouts.record import KeptRollout, SegmentColumns
from services.run_store.rollouts.writer import Entry, RolloutWriter
from services.wire.packed import pack_logprobs, pack_mask, pack_tokens, unpack_logprobs, unpack_mask, unpack_tokens
from services.wire.trajectory import Segment, VersionSpan
from tests.support.dashboard_runs import dashboard, make_run
from tests.support.kept_rollouts import PIECES, keep_text, write_steps
from tests.support.trajectories import a_rollout

LIST = "/api/runs/run/rollouts"


async def told(http: httpx.AsyncClient, path: str) -> Any:
    answer = await http.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.slow
async def test_a_thousand_rollouts_are_told_as_the_stream_had_them(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", steps=2)
    given = write_steps(folder.rollouts, range(1, 101))
    async with dashboard(OpenRuns(root=tmp_path)) as url, httpx.AsyncClient(base_url=url) as http:
        ids: list[int] = []
        while len(ids) < len(given):
            page = (await told(http, f"{LIST}?descending=false&limit=250&offset={len(ids)}"))["page"]
            assert page["total"] == 1000
            ids += [each["id"] for each in page["rollouts"]]
        for number, one in zip(ids, given, strict=True):
            for place, segment in enumerate(one.segments):
                tokens = await told(http, f"{LIST}/{number}/tokens?segment={place}&count={MOST_TOKENS}")
                mask = unpack_mask(segment.loss_mask)
                assert tokens["ids"] == unpack_tokens(segment.token_ids).tolist()
                assert tokens["sampled"] == mask.tolist()
                versions = [-1] * len(mask)
                for span in segment.version_spans:
                    versions[span.start : span.start + span.length] = [span.version] * span.length
                assert tokens["version"] == versions
                logprobs = unpack_logprobs(segment.logprobs).tolist()
                assert tokens["logprob"] == [
                    value if there else None for value, there in zip(logprobs, mask, strict=True)
                ]
                assert tokens["texts"] == [PIECES[token].decode() for token in tokens["ids"]]


async def test_one_rollout_tells_its_turns_breaks_and_siblings(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", steps=2)
    given = write_steps(folder.rollouts, [1, 2])
    async with dashboard(OpenRuns(root=tmp_path)) as url, httpx.AsyncClient(base_url=url) as http:
        for number, one in enumerate(given, 1):
            shown = await told(http, f"{LIST}/{number}")
            assert (shown["trajectory"], shown["reward"]) == (one.trajectory_id, one.reward)
            assert [each["member"] for each in shown["siblings"]] == list(range(10))
            assert len(shown["segments"]) == shown["of_segments"] == len(one.segments)
            for segment, kept in zip(shown["segments"], one.segments, strict=True):
                turns = [each["turn"] for each in segment["turns"]]
                assert sum(turn["length"] for turn in turns) == segment["tokens"] == len(kept.loss_mask)
                sampled = [turn["sampled"] for turn in turns for _ in range(turn["length"])]
                assert sampled == [each == 1 for each in kept.loss_mask]
            first, *others = shown["segments"]
            assert first["broke"] is None and first["turns"][1]["turn"]["reward"] == 0.25
            for place, segment in enumerate(others, 1):
                broke = segment["broke"]
                own, before = (
                    unpack_tokens(one.segments[each].token_ids) for each in (place, broke["found"]["before"])
                )
                at = broke["found"]["at"]
                assert (own[:at] == before[:at]).all()
                assert at in (len(own), len(before)) or own[at] != before[at]
                assert broke["found"]["reason"] == one.segments[place].break_reason


async def test_an_agents_calls_and_tools_are_told_in_order(tmp_path: Path) -> None:
    asked = "<|im_start|>user\nWhat is 2 * 3?<|im_end|>\n<|im_start|>assistant\n"
    said = '<tool_call>\n{"name": "multiply", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'
    folder = make_run(tmp_path, "run", steps=2).rollouts
    keep_text(folder, 1, asked + said, sampled=len(said), times=(1.25, 1.75))
    keep_text(folder, 2, asked + said, sampled=len(said))
    async with dashboard(OpenRuns(root=tmp_path)) as url, httpx.AsyncClient(base_url=url) as http:
        (segment,) = (await told(http, f"{LIST}/1"))["segments"]
        (untimed,) = (await told(http, f"{LIST}/2"))["segments"]
    times = [
        [(each["turn"]["began_at"], each["turn"]["ended_at"]) for each in one["turns"]] for one in (segment, untimed)
    ]
    assert times == [[(None, None), (1.25, 1.75)], [(None, None)] * 2]
    assert [(each["role"], each["tools"], each["text"]) for each in segment["turns"]] == [
        ("user", [], asked),
        ("assistant", ["multiply"], said),
    ]


async def test_lists_are_found_by_what_the_address_says(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", steps=2)
    write_steps(folder.rollouts, range(1, 21))
    keep_text(folder.rollouts, 21, "what is 12+30? 42", task="sums & more", reward=-1.5)
    async with dashboard(OpenRuns(root=tmp_path)) as url, httpx.AsyncClient(base_url=url) as http:

        async def steps(**parameters: str) -> list[int]:
            answer = await http.get(LIST, params=parameters)
            assert answer.status_code == 200, answer.text
            return [each["step"] for each in answer.json()["page"]["rollouts"]]

        assert await steps(text="12+30") == await steps(task="sums & more") == await steps(reward="..-1") == [21]
        assert await steps(step="3..4", descending="false") == [3] * 10 + [4] * 10
        assert await steps(group="g7", limit="3") == [7] * 3
        assert await steps(server="nobody") == [] and await steps(server="s0", limit="1") == [21]
        extent = (await told(http, LIST))["extent"]
        assert (extent["rollouts"], extent["first"], extent["last"]) == (201, 1, 21)
        assert extent["tasks"] == ["sums & more", "test"]
        for wrong in ({"step": "x"}, {"limit": "501"}, {"offset": "-1"}, {"reward": "nan"}, {"text": "a" * 1001}):
            answer = await http.get(LIST, params=wrong)
            assert answer.status_code == 422, wrong
        assert "write 3, 3..7" in (await http.get(LIST, params={"step": "x"})).json()["error"]["message"]


async def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    make_run(tmp_path, "run", steps=2)
    async with dashboard(OpenRuns(root=tmp_path)) as url, httpx.AsyncClient(base_url=url) as http:
        nothing = await told(http, LIST)
        assert nothing == {"extent": None, "page": {"rollouts": [], "total": 0, "more": False, "up_to": 0}}
        for path in (f"{LIST}/1", f"{LIST}/1/tokens", "/api/runs/none/rollouts"):
            assert (await http.get(path)).status_code == 404
        keep_text(tmp_path / "run" / "rollouts", 1, "1+1=2")
        assert (await told(http, f"{LIST}/1/tokens"))["texts"] == [*"1+1=2"]
        missing = await http.get(f"{LIST}/1/tokens?segment=1")
        assert missing.status_code == 404 and "has no segment 1" in missing.json()["error"]["message"]


async def test_a_rollout_without_end_is_told_in_parts(tmp_path: Path) -> None:
    """A million tokens in one segment, whose calls follow one another; none of them is left out of what is asked for."""
    folder = make_run(tmp_path, "run", steps=2)
    count = 1_000_000
    ids = (np.arange(count) % 50).astype(np.int32)
    mask = (np.arange(count) // 500 % 2).astype(np.uint8)
    spans = [VersionSpan(start, 500, start // 1000) for start in range(500, count, 1000)]
    segment = Segment(pack_tokens(ids), pack_mask(mask), pack_logprobs(-0.5 * mask), spans)
    sampled = int(mask.sum())
    kept = KeptRollout(
        step=1, version=1000, k=1000, trained=True, trajectory=a_rollout([segment], 1.0),
        columns=[SegmentColumns.of(pack_logprobs(np.full(sampled, -0.25)), pack_logprobs(np.full(sampled, 2.0)))],
    )  # fmt: skip
    writer = RolloutWriter(folder.rollouts, 1 << 30)
    writer.append(1, 1000, 0.0, 1, [Entry(kept, "p", "a" * 1_000_000, 0.5)], PIECES)
    writer.close()
    async with dashboard(OpenRuns(root=tmp_path)) as url, httpx.AsyncClient(base_url=url, timeout=30.0) as http:
        page = await http.get(LIST)
        one = await http.get(f"{LIST}/1")
        window = await http.get(f"{LIST}/1/tokens?start=999500&count={MOST_TOKENS}")
        assert all(answer.status_code == 200 and len(answer.content) < 400_000 for answer in (page, one, window))
        shown = one.json()["segments"][0]
        assert (shown["tokens"], shown["of_turns"], len(shown["turns"])) == (count, 2000, MOST_TURNS)
        tokens = window.json()
        assert (tokens["start"], len(tokens["ids"]), tokens["total"]) == (999_500, 500, count)
        assert tokens["ids"] == ids[999_500:].tolist() and set(tokens["version"]) == {999}
        assert tokens["ratio"] == [pytest.approx(math.exp(0.25))] * 500 and set(tokens["advantage"]) == {2.0}
        assert (await http.get(f"{LIST}/1/tokens?count={MOST_TOKENS + 1}")).status_code == 422


def test_who_speaks_and_what_is_called_is_read_from_the_markers_of_templates() -> None:
    assert role_of("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n") == "user"
    assert role_of("<|start_header_id|>system<|end_header_id|>") == "system"
    assert role_of("<|im_end|>\n<|im_start|>user\n<tool_response>\n3") == "tool"
    assert role_of("[INST] hello [/INST]") == "user"
    assert role_of("1+1=") == ""
    said = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><tool_call>{"name":"sub"}</tool_call>'
    assert called_tools(said) == ["add", "sub"]
    assert called_tools("<function=look><parameter=x>1</function>") == ["look"]
    assert called_tools('I would <tool_call> but {"name": no') == []
