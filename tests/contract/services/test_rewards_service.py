"""The reward service on a real socket: composed rewards, causes that are told and counted, keys, batches to a model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.wire.errors import UsageError
from tests.conftest import free_port
from tests.support.mesh_command import run_command
from tests.support.rewards_host import figure, judging
from tests.support.scripted_reward_model import ScriptedRewardModel, scripted_reward_model
from tests.support.until import until

FUNCTIONS = """
import time
def exact(answer, solution): return float(answer == solution)
def words(answer): return len(answer.split())
def raises(answer):
    print("so far so good")
    raise ValueError("no digits")
def waits(answer, metadata):
    time.sleep(metadata.get("s", 0.0))
    return 1.0
def reads(answer): return float(open(answer).read() == "words")
"""
EXACT: dict[str, Any] = {"name": "exact", "function": "judges:exact"}
WORDS: dict[str, Any] = {"name": "words", "function": "judges:words", "weight": 0.5}
RAISES: dict[str, Any] = {"name": "raises", "function": "judges:raises"}
WAITS: dict[str, Any] = {"name": "waits", "function": "judges:waits"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "judges.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def judge(http: httpx.AsyncClient, answer: str, **metadata: Any) -> httpx.Response:
    return await http.post("/v1/rewards", json={"prompt": "p", "answer": answer, "metadata": metadata})


async def metrics(http: httpx.AsyncClient) -> str:
    return (await http.get("/metrics")).text


async def test_named_components_make_one_reward(folder: Path) -> None:
    async with judging(EXACT, WORDS) as http:
        given = await judge(http, "a b", solution="a b")
        assert given.status_code == 200, given.text
        assert given.json() == {"reward": 2.0, "components": {"exact": 1.0, "words": 2.0}, "substituted": {}}
        in_force = (await http.get("/v1/rewards")).json()
        assert in_force["formula"] == "reward = 1·exact + 0.5·words"
        assert [line.partition(":")[0] for line in in_force["components"]] == ["exact", "words"]
        assert figure(await metrics(http), "rollmesh_rewards_given_samples_total") == 1.0
    async with judging(EXACT, WORDS, combine="product") as http:
        assert (await judge(http, "a b c d", solution="a b c d")).json()["reward"] == 2.0


async def test_a_component_may_be_for_some_tasks_alone(folder: Path) -> None:
    async with judging({**EXACT, "tasks": ["math"]}, {**WORDS, "tasks": ["math", "talk"]}) as http:

        async def of(task: str) -> httpx.Response:
            body = {"task": task, "prompt": "p", "answer": "a b", "metadata": {"solution": "a b"}}
            return await http.post("/v1/rewards", json=body)

        assert (await of("math")).json()["components"] == {"exact": 1.0, "words": 2.0}
        assert (await of("talk")).json() == {"reward": 1.0, "components": {"words": 2.0}, "substituted": {}}
        nobodys = await of("code")
        assert nobodys.status_code == 424
        assert "no component judges task 'code'" in nobodys.json()["error"]["message"]
        in_force = (await http.get("/v1/rewards")).json()
        assert in_force["formula"] == "reward = 1·exact[math] + 0.5·words[math, talk]"
        assert in_force["components"][0].startswith("exact of math alone: ")


async def test_a_component_that_fails_fails_the_reward_with_its_cause_and_what_it_wrote(folder: Path) -> None:
    async with judging(EXACT, RAISES) as http:
        failed = await judge(http, "a", solution="a")
        assert failed.status_code == 424
        error = failed.json()["error"]
        assert error["code"] == "reward_failed"
        for words in ("raises", "(raised)", "ValueError: no digits (judges.py:7)", "so far so good"):
            assert words in error["message"]
        told = await metrics(http)
        assert figure(told, "rollmesh_rewards_failed_samples_total", component="raises", cause="raised") == 1.0
        assert figure(told, "rollmesh_rewards_given_samples_total") == 0.0


async def test_a_substitute_stands_in_and_is_told_and_counted(folder: Path) -> None:
    async with judging(EXACT, RAISES | {"substitute": -0.5, "weight": 2.0}) as http:
        given = (await judge(http, "a", solution="a")).json()
        assert given == {
            "reward": 0.0,
            "components": {"exact": 1.0, "raises": -0.5},
            "substituted": {"raises": "raised"},
        }
        told = await metrics(http)
        assert figure(told, "rollmesh_rewards_substituted_components_total", component="raises", cause="raised") == 1.0
        assert figure(told, "rollmesh_rewards_failed_samples_total", component="raises", cause="raised") == 0.0


async def test_a_function_reads_its_folder_and_what_settings_add_but_no_keys(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for name in ("added", "other"):
        (elsewhere / name).write_text("words")
    (folder / "keys").mkdir()
    for name in ("beside", "keys/agent.key"):
        (folder / name).write_text("words")
    reads = {"name": "reads", "function": "judges:reads", "readable": [str(elsewhere / "added")]}
    async with judging(reads, hidden=[folder / "keys"]) as http:
        for path in (elsewhere / "added", folder / "beside"):
            assert (await judge(http, str(path))).status_code == 200
        for path in (elsewhere / "other", folder / "keys/agent.key"):
            refused = await judge(http, str(path))
            assert refused.status_code == 424
            assert "reads has no value (raised)" in refused.json()["error"]["message"]


async def test_what_comes_too_late_is_counted_as_late_and_holds_nobody_up_for_longer(folder: Path) -> None:
    late = WAITS | {"deadline_s": 0.5, "time_limit_s": 30.0}
    async with judging(late, EXACT) as http:
        failed, quick = await asyncio.gather(judge(http, "a", s=30.0, solution="a"), judge(http, "a", solution="a"))
        # The quick one had waited behind the slow one in the same worker until its own deadline.
        assert [failed.status_code, quick.status_code] == [424, 424]
        told = await metrics(http)
        assert figure(told, "rollmesh_rewards_failed_samples_total", component="waits", cause="late") == 2.0
        assert failed.elapsed.total_seconds() < 10.0

        async def judges_again() -> bool:
            return (await judge(http, "a", solution="a")).status_code == 200

        await until(judges_again, 10.0)  # the worker of the call that was given up is replaced


async def test_workers_judge_side_by_side_and_a_full_service_says_when_to_come_back(folder: Path) -> None:
    async with judging(WAITS | {"workers": 3, "time_limit_s": 10.0}, max_waiting=2) as http:
        slow = [asyncio.create_task(judge(http, "a", s=2.0)) for _ in range(3)]
        await asyncio.sleep(0.3)
        waiting = [asyncio.create_task(judge(http, "a")) for _ in range(2)]
        await asyncio.sleep(0.1)
        refused = await judge(http, "a")
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        answers = await asyncio.gather(*slow, *waiting)
        assert [answer.status_code for answer in answers] == [200] * 5
        assert max(answer.elapsed.total_seconds() for answer in answers) < 4.0, "three at once"
        assert figure(await metrics(http), "rollmesh_rewards_refused_calls_total") == 1.0


async def test_every_route_but_the_probes_asks_for_the_key(folder: Path) -> None:
    async with judging(EXACT, key="s" * 20) as http:
        for method, path in (("POST", "/v1/rewards"), ("GET", "/v1/rewards"), ("GET", "/metrics")):
            body = {"prompt": "p", "answer": "a"} if method == "POST" else None
            assert (await http.request(method, path, json=body)).status_code == 401
            wrong = await http.request(method, path, json=body, headers={"authorization": "Bearer nobody"})
            assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "invalid_api_key")
        http.headers["authorization"] = "Bearer " + "s" * 20
        assert (await judge(http, "a", solution="a")).status_code == 200
        assert (await http.get("/metrics")).status_code == 200


async def test_bodies_that_do_not_fit_are_refused(folder: Path) -> None:
    async with judging(EXACT, max_body_mib=1) as http:
        for body in ({"answer": "a"}, {"prompt": "p", "messages": [], "answer": "a"}, {"prompt": "p", "anwser": "a"}):
            assert (await http.post("/v1/rewards", json=body)).status_code == 422
        half = b'{"prompt": "p", "answer": "a", "metadata": {"solution": "\\ud800"}}'
        kind = {"content-type": "application/json"}
        assert (await http.post("/v1/rewards", content=half, headers=kind)).status_code == 422
        assert (await judge(http, "a" * (2 << 20), solution="a")).status_code == 413


def test_the_command_refuses_what_cannot_work_in_one_line(folder: Path) -> None:
    run = folder / "run.toml"
    port = ("--port", str(free_port()))
    cases = {
        '[[rewards.components]]\nname = "a"\nfunction = "judges:nothing"\n': "no attribute 'nothing'",
        "": "no reward component",
    }
    for text, words in cases.items():
        run.write_text(text)
        done = run_command(["rewards", "--config", str(run), *port], cwd=folder)
        assert (done.code, words in done.err) == (UsageError.exit_code, True), done.err
        assert "Traceback" not in done.err
    done = run_command(["rewards", "--config", str(run), "--host", "0.0.0.0", *port], cwd=folder)
    assert done.code == UsageError.exit_code


def scored_by(server: ScriptedRewardModel, **changes: Any) -> dict[str, Any]:
    served = {key: changes.pop(key) for key in list(changes) if key not in ("substitute", "deadline_s", "weight")}
    return {"name": "helpful", "model": {"url": server.url, **served}, **changes}


async def test_samples_go_to_a_model_in_batches_of_bounded_size_and_number() -> None:
    async with scripted_reward_model() as model:
        async with judging(scored_by(model, max_batch=4, linger_ms=20.0, at_once=2)) as http:
            given = await asyncio.gather(*(judge(http, "x" * length) for length in range(1, 22)))
            assert [answer.json()["reward"] for answer in given] == [float(length) for length in range(1, 22)]
            told = await metrics(http)
    sizes = [len(body["text_1"]) for body in model.asked]
    assert sum(sizes) == 21
    assert max(sizes) == 4
    assert len(sizes) <= 12, "most go together"
    assert model.busiest <= 2
    assert figure(told, "rollmesh_rewards_batch_samples_count", component="helpful") == len(sizes)


async def test_a_model_is_asked_as_its_api_wants_it_and_with_its_key(folder: Path) -> None:
    (folder / "key").write_text("m" * 20)
    async with scripted_reward_model() as model:
        how = {"api": "classify", "class_index": 1, "text": "Q{prompt}A{answer}", "model": "rm", "activation": False}
        async with judging(scored_by(model, key_file=folder / "key", **how)) as http:
            assert (await judge(http, "abc")).json()["components"] == {"helpful": 6.0}
    assert model.asked == [{"input": ["QpAabc"], "use_activation": False, "model": "rm"}]
    assert model.keys == ["Bearer " + "m" * 20]


async def test_a_sample_that_the_model_refuses_takes_no_other_with_it() -> None:
    async with scripted_reward_model() as model:
        async with judging(scored_by(model, max_batch=8, linger_ms=50.0)) as http:
            answers = ["a", "bb", "too long", "dddd", "eeeee"]
            given = await asyncio.gather(*(judge(http, answer) for answer in answers))
            assert [answer.status_code for answer in given] == [200, 200, 424, 200, 200]
            assert "maximum context length" in given[2].json()["error"]["message"]
            told = await metrics(http)
    assert figure(told, "rollmesh_rewards_failed_samples_total", component="helpful", cause="refused") == 1.0


async def test_a_model_is_asked_again_while_that_may_help() -> None:
    async with scripted_reward_model() as model:
        model.failing = [503, 429, 500]
        async with judging(scored_by(model)) as http:
            assert (await judge(http, "abc")).json()["reward"] == 3.0
        assert len(model.asked) == 4
        model.failing = [404]
        async with judging(scored_by(model)) as http:
            failed = await judge(http, "abc")
        assert failed.status_code == 424
        assert "(unreachable)" in failed.json()["error"]["message"]
        assert len(model.asked) == 5, "nothing is mended by asking again"


async def test_a_model_that_is_away_or_silent_is_counted_and_never_a_zero() -> None:
    away = {"name": "away", "model": {"url": f"http://127.0.0.1:{free_port()}"}, "deadline_s": 0.6, "substitute": 0.25}
    async with scripted_reward_model() as model:
        async with judging(away, scored_by(model, deadline_s=0.6, max_batch=1, at_once=1)) as http:
            model.answering.clear()
            silent, behind = await asyncio.gather(judge(http, "abc"), judge(http, "abcd"))
            assert [silent.status_code, behind.status_code] == [424, 424]
            model.answering.set()

            async def recovers() -> bool:
                return (await judge(http, "abc")).status_code == 200

            await until(recovers, 10.0)
            given = (await judge(http, "abc")).json()
            assert (given["reward"], set(given["substituted"])) == (3.25, {"away"})
            told = await metrics(http)
    causes = ("late", "unreachable")
    failed = [figure(told, "rollmesh_rewards_failed_samples_total", component="helpful", cause=why) for why in causes]
    assert sum(failed) >= 2.0


async def test_verifiers_judge_in_the_sandbox_with_their_options() -> None:
    components = [
        {"name": "math", "verifier": "math", "options": {"precision": 1}},
        {"name": "form", "verifier": "tags", "options": {"tags": "answer"}, "weight": 0.5},
    ]
    async with judging(*components) as http:
        given = await judge(http, "<answer>$\\boxed{\\frac{1}{3}}$</answer>", solution="0.33")
        assert given.json()["components"] == {"math": 1.0, "form": 1.0}, "one third is 0.33 to one digit"
        wrong = await judge(http, "a third", solution="0.33")
        assert (wrong.status_code, wrong.json()["reward"]) == (200, 0.0)
        unreadable = await judge(http, "<answer>3</answer>", solution="see the book")
        assert unreadable.status_code == 424, "the task is at fault, not the answer"
        assert "(raised)" in unreadable.json()["error"]["message"]
        missing = await judge(http, "3")
        assert "has no 'solution'" in missing.json()["error"]["message"]
        in_force = (await http.get("/v1/rewards")).json()
        assert in_force["components"][0].startswith("math: verifier math, 1 at once")


async def test_code_of_a_policy_is_run_in_processes_that_end_with_the_call() -> None:
    cases = [{"input": "3 4", "output": "7"}]
    async with judging({"name": "code", "verifier": "code", "time_limit_s": 10.0}, not_confined="warn") as http:
        right = await judge(http, "```python\nprint(sum(map(int, input().split())))\n```", cases=cases)
        assert right.json()["reward"] == 1.0, right.text
        for hostile in (
            "while True: pass",
            "import os\nwhile True: os.fork()",
            "x = 'x' * 10**12",
            "import os; os.kill(0, 9)",
        ):
            judged = await judge(http, hostile, cases=cases)
            # Wrong, or a failure with its name: never right, and never a zero for a verifier that died.
            assert judged.status_code == 424 or judged.json()["reward"] == 0.0, judged.text
        again = await judge(http, "print(7)", cases=cases)
        assert again.json()["reward"] == 1.0, "the service has outlived them"


async def test_a_clipped_component_counts_no_more_than_its_bounds() -> None:
    async with judging(WORDS | {"clip": [0.0, 2.0]}) as http:
        given = (await judge(http, "a b c d e")).json()
        assert given["reward"] == 1.0
        assert given["components"] == {"words": 5.0}, "what is recorded is not clipped"
        assert (await http.get("/v1/rewards")).json()["formula"] == "reward = 0.5·clip(words, 0, 2)"
