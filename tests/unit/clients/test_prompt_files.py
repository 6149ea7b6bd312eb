"""Data as it comes: columns by name, solutions within texts, splits in files of their own, every kind of table."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from clients.environments.adapters.prompt_rows import PromptRow
from clients.environments.adapters.prompts import Prompts
from clients.environments.base import FiniteEnvironment, Problem, split_of
from clients.environments.registry import make_task
from services.rewards.verifiers import math
from services.supervisor.preflight import find_task
from services.wire.errors import UsageError
from services.wire.tasks.name import parse_task

GSM8K = [
    {
        "question": f"Ann has {n} apples and buys 3. How many has she?",
        "answer": f"She has {n} + 3 = <<{n}+3>>{n + 3}.\n#### {n + 3}",
    }
    for n in range(80)
]
OPTIONS = "?prompt=question&solution=answer&extract=#### (.+)&instruction=Write the result behind ####."


def write(file: Path, rows: Sequence[dict[str, Any]]) -> Path:
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return file


def prompts(file: Path, options: str = "") -> Prompts:
    made = make_task(f"prompts:{file}{options}").environment
    assert isinstance(made, Prompts) and isinstance(made, FiniteEnvironment)
    return made


def row_of(problem: Problem) -> PromptRow:
    assert isinstance(problem.details, PromptRow)
    return problem.details


def all_of(environment: Prompts) -> list[PromptRow]:
    splits = ("train", "held_out")
    return [row_of(environment.numbered(split, n)) for split in splits for n in range(environment.count(split))]  # type: ignore[arg-type]


def test_gsm8k_is_played_as_it_is(tmp_path: Path) -> None:
    environment = prompts(write(tmp_path / "gsm8k.jsonl", GSM8K), OPTIONS)
    assert environment.name == "prompts:gsm8k"
    by_key = {row.key: row for row in all_of(environment)}
    assert by_key.keys() == {row["question"] for row in GSM8K}
    for asked in GSM8K:
        row = by_key[asked["question"]]
        solution = str(row.metadata["solution"])
        assert row.prompt == f"{asked['question']} Write the result behind ####."
        assert row.metadata == {"solution": asked["answer"].rpartition("#### ")[2]}
        assert math.judge(f"That makes\n#### {solution}", solution) == 1.0
        assert math.judge(f"That makes\n#### {int(solution) + 1}", solution) == 0.0
        assert math.judge("#### 8", asked["answer"]) == math.judge("#### 8", solution), (
            "the verifier reads #### by itself"
        )


def test_every_kind_of_table_gives_the_same_problems(tmp_path: Path) -> None:
    import pyarrow
    from datasets import Dataset
    from pyarrow import parquet

    write(tmp_path / "gsm8k.jsonl", GSM8K)
    parquet.write_table(pyarrow.Table.from_pylist(GSM8K), tmp_path / "gsm8k.parquet")
    Dataset.from_list(GSM8K).save_to_disk(tmp_path / "gsm8k")
    first, *others = (prompts(tmp_path / name, OPTIONS) for name in ("gsm8k.jsonl", "gsm8k.parquet", "gsm8k"))
    for other in others:
        assert other.name == first.name
        assert [other.problem("train", n, 3) for n in range(100)] == [first.problem("train", n, 3) for n in range(100)]


def test_an_instruction_moves_no_problem_to_the_other_split(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [{"prompt": f"{n}"} for n in range(64)])
    plain, told = prompts(file), prompts(file, "?instruction=%0AThink first.")
    for split in ("train", "held_out"):
        keys = [row_of(plain.numbered(split, n)).key for n in range(plain.count(split))]  # type: ignore[arg-type]
        assert keys == [row_of(told.numbered(split, n)).key for n in range(told.count(split))]  # type: ignore[arg-type]
        assert {split_of(key) for key in keys} == {split}
    assert told.numbered("train", 0).prompt == f"{plain.numbered('train', 0).prompt}\nThink first."


def test_a_held_out_file_is_the_whole_split_and_is_never_trained_on(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [{"prompt": f"{n}"} for n in range(40)])
    test = write(tmp_path / "test.jsonl", [{"prompt": f"{n}"} for n in range(30, 50)])
    environment = prompts(train, f"?held_out={test}")
    held_out = {environment.problem("held_out", n, 1).prompt for n in range(20)}
    assert held_out == {f"{n}" for n in range(30, 50)}
    assert {environment.problem("train", n, 1).prompt for n in range(30)} == {f"{n}" for n in range(30)}
    assert environment.count("train") == 30
    with pytest.raises(UsageError, match="every prompt is held out, too"):
        prompts(train, f"?held_out={train}")


def test_both_files_mean_the_same_wherever_the_name_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = parse_task(find_task("prompts:a b.jsonl?held_out=c.jsonl&extract=a+%26&instruction=%0Anow"))
    assert found.rest == str(tmp_path / "a b.jsonl")
    assert dict(found.options) == {
        "held_out": str(tmp_path / "c.jsonl"),
        "extract": "a+&",
        "instruction": "\nnow",
    }
    assert parse_task(str(found)) == found


def test_messages_open_the_conversation(tmp_path: Path) -> None:
    said = [{"role": "system", "content": "Be brief.", "name": None}, {"role": "user", "content": "2 + 3?"}]
    file = write(tmp_path / "rows.jsonl", [{"chat": said, "solution": 5, "source": "me"}])
    environment = prompts(
        file, f"?prompt=chat&instruction=Please.&held_out={write(tmp_path / 'o.jsonl', [{'chat': 'hi'}])}"
    )
    problem = environment.problem("train", 7, 1)
    assert problem.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 3? Please."},
    )
    assert row_of(problem).metadata == {"solution": 5, "source": "me"}
    assert environment.problem("held_out", 0, 1).messages is None
    assert environment.speaks_chat


async def test_what_a_table_holds_reaches_the_judge_as_json(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    from services.wire.reward_api import JudgeSample

    rows = [{"prompt": f"{n}", "at": datetime.date(2026, 1, 2), "image": b"\xff\x00", "tests": None} for n in range(30)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    judged: list[JudgeSample] = []

    class Client:
        def judging(self, sample: JudgeSample, succeeded: object) -> None:
            judged.append(sample)

    from clients.environments.adapters.prompts import PromptEpisode
    from clients.environments.base import Answer

    problem = prompts(tmp_path / "rows.parquet").problem("train", 0, 1)
    PromptEpisode(problem, "t", Client(), 1.0).respond(Answer("x", True))  # type: ignore[arg-type]
    assert judged[0].metadata == {"at": "2026-01-02", "image": "/wA=", "tests": None}
    assert json.loads(judged[0].model_dump_json())["metadata"] == judged[0].metadata
