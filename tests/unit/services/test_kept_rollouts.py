"""Kept rollouts: what is read is what was written, whatever became of the writer; the oldest make room."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import numpy as np
import pytest

from services.policies.staleness import staleness
from services.policies.training.recording import SAVED_S, RecordingBudget
from services.run_store.rollouts.database import FORMAT, database_of
from services.run_store.rollouts.record import KeptRollout, SegmentColumns
from services.run_store.rollouts.samples import newest_sample, samples_of_step
from services.run_store.rollouts.search import NoRolloutError, RolloutReader, Search
from services.run_store.rollouts.tokens import break_before, segment_tokens, shared_prefix, texts_of, turns_of
from services.run_store.rollouts.writer import Entry, RolloutWriter
from services.wire.errors import UsageError
from services.wire.packed import pack_logprobs, pack_tokens, unpack_logprobs, unpack_mask, unpack_tokens
from services.wire.trajectory import Segment, VersionSpan
from tests.support.kept_rollouts import PIECES, entry_of, random_agent, write_steps
from tests.support.trajectories import a_rollout, a_segment

EVERYTHING = Search(limit=500, descending=False)


def everything(reader: RolloutReader) -> list[KeptRollout]:
    found, wanted = list[KeptRollout](), EVERYTHING
    while True:
        page = reader.search(wanted)
        found += [reader.kept(each.id) for each in page.rollouts]
        if not page.more:
            return found
        wanted = msgspec.structs.replace(wanted, offset=wanted.offset + len(page.rollouts), up_to=page.up_to)


def test_a_thousand_rollouts_are_read_as_the_stream_had_them(tmp_path: Path) -> None:
    given = write_steps(tmp_path, range(1, 101))
    read = everything(RolloutReader(tmp_path))
    assert len(read) == 1000 and [one.trajectory for one in read] == given, "byte for byte"
    several = 0
    for kept, one in zip(read, given, strict=True):
        assert kept.version == kept.step - 1
        for number, segment in enumerate(one.segments):
            tokens, sampled = segment_tokens(kept, number), unpack_mask(segment.loss_mask) == 1
            assert (tokens.sampled == unpack_mask(segment.loss_mask)).all()
            assert (tokens.ids == unpack_tokens(segment.token_ids)).all()
            assert (tokens.logprob[sampled] == unpack_logprobs(segment.logprobs)[sampled]).all()
            expected = np.full(len(sampled), -1)
            for span in segment.version_spans:
                expected[span.start : span.start + span.length] = span.version
            assert (tokens.version == expected).all()
            old = [version >= 0 and staleness(kept.version, version) > kept.k for version in expected.tolist()]
            assert (tokens.trained == (sampled & ~np.array(old) & kept.trained)).all()
            for column in (tokens.logprob, tokens.current, tokens.advantage, tokens.ratio):
                assert np.isnan(column[~sampled]).all()
            current, advantages = kept.columns[number].spread(int(sampled.sum()))
            assert (tokens.advantage[sampled] == advantages).all()
            if current is not None:
                assert (tokens.ratio[sampled] == np.exp(current - tokens.logprob[sampled])).all()
            several += len(np.unique(expected[sampled])) > 1
    assert several > 100, "tokens of several versions in one segment"


def test_rollouts_are_found_by_step_task_group_reward_length_and_text(tmp_path: Path) -> None:
    given = write_steps(tmp_path, range(1, 31))
    reader = RolloutReader(tmp_path)

    def members(wanted: Search) -> list[tuple[int, int]]:
        return [(each.step, each.member) for each in reader.search(wanted).rollouts]

    steps = {one.trajectory_id: step for step in range(1, 31) for one in given[(step - 1) * 10 : step * 10]}
    extent = reader.extent()
    assert extent is not None
    assert (extent.rollouts, extent.of, extent.first, extent.last, extent.tasks) == (300, 300, 1, 30, ["test"])
    assert members(Search(step=(7, 8), descending=False, limit=99)) == [(s, m) for s in (7, 8) for m in range(10)]
    assert members(Search(limit=3)) == [(30, 9), (30, 8), (30, 7)], "the newest first"
    assert members(Search(text="answer 91-4")) == [(13, 4)]
    assert members(Search(text="prompt 13 of g13", limit=2)) == [(13, 9), (13, 8)]
    assert members(Search(text="' OR 1=1 --")) == []
    assert members(Search(task="another")) == [] and len(members(Search(task="test", limit=500))) == 300
    assert members(Search(group="g5", descending=False)) == [(5, member) for member in range(10)]
    page = reader.search(Search(reward=(1.0, float("inf")), limit=500))
    good = {one.trajectory_id for one in given if one.reward >= 1.0}
    assert page.total == len(page.rollouts) == len(good) and {each.reward for each in page.rollouts} == {1.0}
    longest = reader.search(Search(order="length", limit=5)).rollouts
    assert [each.length for each in longest] == sorted((one.sampled_tokens() for one in given), reverse=True)[:5]
    short = reader.search(Search(length=(0, 20), order="length", descending=False, limit=500)).rollouts
    assert [each.length for each in short] == sorted(n for n in (one.sampled_tokens() for one in given) if n <= 20)
    first = short[0]
    siblings = reader.siblings(first.id)
    assert [each.member for each in siblings] == list(range(10)) and {each.step for each in siblings} == {first.step}
    assert steps[reader.kept(first.id).trajectory.trajectory_id] == first.step
    with pytest.raises(NoRolloutError, match="no rollout 9999 is kept"):
        reader.kept(9999)
    with pytest.raises(NoRolloutError):
        reader.siblings(9999)


def test_pages_of_a_search_stay_while_a_run_goes_on(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 6))
    reader, seen = RolloutReader(tmp_path), list[int]()
    page = reader.search(Search(limit=20))
    seen += [each.id for each in page.rollouts]
    write_steps(tmp_path, range(6, 9))
    while page.more:
        page = reader.search(Search(limit=20, offset=len(seen), up_to=page.up_to))
        seen += [each.id for each in page.rollouts]
    assert len(seen) == len(set(seen)) == 50 and page.total == 50


def test_what_is_not_there_is_nothing_and_what_is_no_such_file_is_said(tmp_path: Path) -> None:
    reader = RolloutReader(tmp_path / "none")
    assert (reader.extent(), reader.search(Search()).total, newest_sample(reader)) == (None, 0, None)
    assert not (tmp_path / "none").exists(), "reading makes nothing"
    database_of(tmp_path).write_bytes(b"no database" * 1000)
    with pytest.raises(UsageError, match=r"rollouts\.sqlite3"):
        RolloutReader(tmp_path).extent()
    write_steps(tmp_path, [1])
    assert RolloutReader(tmp_path).search(Search()).total == 10, "the writer has begun a new one"
    assert database_of(tmp_path).with_suffix(".damaged").exists()
    with sqlite3.connect(database_of(tmp_path)) as connection:
        connection.execute(f"PRAGMA user_version = {FORMAT + 1}")
    for opened in (lambda: RolloutReader(tmp_path).extent(), lambda: RolloutWriter(tmp_path, 1 << 20)):
        with pytest.raises(UsageError, match="format 2"):
            opened()


def test_a_folder_that_may_not_be_written_is_read() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "rollouts"
        write_steps(folder, [1, 2])
        assert [path.name for path in folder.iterdir()] == ["rollouts.sqlite3"], "no log is left"
        Path(place).chmod(0o755)
        database_of(folder).chmod(0o444)
        folder.chmod(0o555)
        command = [sys.executable, "-c", _READ_AS_NOBODY, str(folder)]
        read = subprocess.run(command, capture_output=True, text=True, check=True)
        folder.chmod(0o755)
    assert int(read.stdout) == 20


_READ_AS_NOBODY = """
import os, sys
from pathlib import Path
from services.run_store.rollouts.search import RolloutReader, Search
if os.getuid() == 0:  # who may write anywhere
    os.setuid(65534)
print(RolloutReader(Path(sys.argv[1])).search(Search()).total)
"""


def test_steps_that_are_repeated_after_a_kill_are_there_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KILLED, str(tmp_path), str(os.getpid())]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert (tmp_path / "rollouts.sqlite3-wal").stat().st_size > 0, "it was not closed"
    reader = RolloutReader(tmp_path)
    assert {one.step for one in everything(reader)} == {1, 2, 3, 4}, "a step is there whole or not at all"
    given = write_steps(tmp_path, range(3, 8))
    read = everything(reader)
    assert [one.step for one in read] == [step for step in range(1, 8) for _ in range(10)]
    assert [one.trajectory for one in read[40:]] == given[20:]


_KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from services.run_store.rollouts.writer import RolloutWriter
from tests.support.kept_rollouts import PIECES, entry_of, random_agent

writer = RolloutWriter(Path(sys.argv[1]), 1 << 30)
for step in range(1, 6):
    numbers = np.random.default_rng(step)
    made = [
        random_agent(numbers, version=step - 1, group=f"g{step}", ordinal=step, size=10, member=member)
        for member in range(10)
    ]
    entries = [entry_of(step, one, numbers) for one in made]
    if step == 5:
        # In the middle of a step's transaction.
        class Killing(dict):
            def items(self):
                os.kill(os.getpid(), signal.SIGKILL)
        writer.append(step, step - 1, 0.0, 10, entries, Killing())
    writer.append(step, step - 1, 0.0, 10, entries, PIECES)
"""


def test_the_oldest_make_room_and_the_file_stays_within_its_bound(tmp_path: Path) -> None:
    bound = 1 << 20
    writer, sizes = RolloutWriter(tmp_path, bound), list[int]()
    for step in range(1, 301):
        numbers = np.random.default_rng(step)
        made = [random_agent(numbers, version=step - 1, group=f"g{step}", member=member) for member in range(10)]
        assert writer.append(step, step - 1, 0.0, 10, [entry_of(step, one, numbers) for one in made], PIECES) == 10
        sizes.append(database_of(tmp_path).stat().st_size)
    writer.close()
    assert max(sizes) <= bound and database_of(tmp_path).stat().st_size <= bound
    extent = RolloutReader(tmp_path).extent()
    assert extent is not None
    assert extent.last == 300 and extent.first > 100, "the newest stay, and older ones than fit are gone"
    assert extent.rollouts == extent.of == 10 * (301 - extent.first), "no step is there in part"
    assert extent.rollouts * 700 > bound / 3, "room is not made for nothing"
    reader = RolloutReader(tmp_path)
    assert {one.step for one in everything(reader)} == {*range(extent.first, 301)}


def test_a_rollout_that_is_larger_than_a_step_may_be_is_left_out(tmp_path: Path) -> None:
    writer, numbers = RolloutWriter(tmp_path, 1 << 20), np.random.default_rng(1)
    small = entry_of(1, random_agent(numbers, version=0), numbers)
    assert writer.append(1, 0, 0.0, 2, [Entry(small.kept, "p", "a" * (1 << 20), 0.0), small], PIECES) == 1
    writer.close()
    assert [each.prompt for each in RolloutReader(tmp_path).search(Search()).rollouts] == [small.prompt]


def test_a_disk_that_is_full_loses_the_step_and_nothing_else(tmp_path: Path) -> None:
    write_steps(tmp_path, [1])
    writer, numbers = RolloutWriter(tmp_path, 1 << 30), np.random.default_rng(2)
    writer._connection.execute("PRAGMA max_page_count = 1")
    entries = [entry_of(2, random_agent(numbers, version=1), numbers) for _ in range(200)]
    with pytest.raises(sqlite3.OperationalError, match="full"):
        writer.append(2, 1, 0.0, 200, entries, PIECES)
    assert writer.newest_step == 1
    writer._connection.execute("PRAGMA max_page_count = 1000000")
    assert writer.append(2, 1, 0.0, 1, entries[:1], PIECES) == 1
    writer.close()
    assert [one.step for one in everything(RolloutReader(tmp_path))] == [1] * 10 + [2]


def test_where_a_prefix_broke_and_what_was_sampled_in_one_go() -> None:
    first = a_segment([1, 2, 3], [4, 5], [-1.0, -2.0], [7, 7])
    longer = Segment(
        pack_tokens([1, 2, 3, 4, 5, 6, 7, 8, 9]),
        bytes([0, 0, 0, 0, 0, 0, 0, 1, 1]),
        pack_logprobs([0.0] * 7 + [-1.0] * 2),
        [VersionSpan(7, 2, 8)],
    )
    broken = Segment(
        pack_tokens([1, 2, 3, 4, 9, 9]), bytes([0] * 5 + [1]), pack_logprobs([0.0] * 5 + [-1.0]), [VersionSpan(5, 1, 9)],
        "retokenization",
    )  # fmt: skip
    one = a_rollout([first, longer, broken], 1.0)
    columns = [SegmentColumns.of(b"", pack_logprobs([0.5] * n)) for n in (2, 2, 1)]
    kept = KeptRollout(step=10, version=9, k=2, trained=True, trajectory=one, columns=columns)
    assert break_before(kept, 0) is None
    at_end = break_before(kept, 1)
    assert at_end is not None and (at_end.before, at_end.at, at_end.token, at_end.token_before) == (0, 5, 6, None)
    found = break_before(kept, 2)
    assert found is not None
    assert (found.before, found.reason, found.at, found.token, found.token_before) == (1, "retokenization", 4, 9, 5)
    assert [(turn.start, turn.length, turn.sampled, turn.repeated) for turn in turns_of(kept, 1, 5)] == [
        (0, 5, False, True),
        (5, 2, False, False),
        (7, 2, True, False),
    ]
    assert shared_prefix(unpack_tokens(b""), unpack_tokens(b"")) == 0


def test_a_character_of_several_tokens_is_shown_once_and_bytes_that_are_none_are_marked() -> None:
    ids = np.array([0, 1, 2, 3, 9, 4], dtype=np.int32)
    pieces = {0: b"a", 1: b"\xf0\x9f", 2: b"\x99\x82", 3: b"\xff", 4: b"\xe6\xbc"}
    assert texts_of(ids, pieces) == ["a", "", "\U0001f642", "�", "�", "�"]


def test_samples_have_the_texts_of_their_tokens(tmp_path: Path) -> None:
    given = write_steps(tmp_path, [1, 2])
    reader = RolloutReader(tmp_path)
    newest = newest_sample(reader)
    assert newest is not None and (newest.step, newest.member) == (2, 9)
    for sample, one in zip(samples_of_step(reader, 1, 2), given, strict=False):
        assert (sample.member, sample.tokens, sample.reward) == (one.member, one.sampled_tokens(), one.reward)
        for told, segment in zip(sample.segments, one.segments, strict=True):
            texts = [PIECES[token].decode() for token in unpack_tokens(segment.token_ids).tolist()]
            assert told.text == "".join(texts) and told.break_reason == segment.break_reason
            assert [(span.version, span.text) for span in told.spans] == [
                (span.version, "".join(texts[span.start : span.start + span.length])) for span in segment.version_spans
            ]


def test_keeping_costs_no_more_of_a_core_than_it_may() -> None:
    """Steps of 40 ms, of which a group costs a quarter: all are wanted, and what they cost is bounded."""
    budget, kept, cost = RecordingBudget(1.0, 0.005, 0.0), 0, 0.00025
    for step in range(1, 2001):
        chosen = budget.choose(16, 0.04 * step)
        kept += len(chosen)
        budget.spent(len(chosen), cost * len(chosen))
    assert 0.9 < kept * cost / (0.005 * 0.04 * 2000) <= 1.1
    slow = RecordingBudget(1.0, 0.005, 0.0)
    slow.spent(1, 0.002)
    assert slow.choose(16, 30.0) == [*range(16)], "long steps keep all"
    dear = RecordingBudget(1.0, 0.005, 0.0)
    dear.choose(4, 0.0)
    dear.spent(1, 2.0)
    assert dear.choose(4, SAVED_S) == [] and len(dear.choose(4, 500.0)) == 1, "one at a time, however dear"


def test_a_share_of_the_groups_is_kept_spread_over_them() -> None:
    budget = RecordingBudget(0.25, 1.0, 0.0)
    assert budget.choose(16, 0.0) == [2, 6, 10, 14]
    assert [len(budget.choose(2, 0.0)) for _ in range(8)] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert RecordingBudget(1.0, 1.0, 0.0).choose(3, 0.0) == [0, 1, 2]
