"""The pure parts between rollmesh and vLLM: version spans, the meter, replies, and what an import costs."""

from __future__ import annotations

import math
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from rollout_server.engines.base import GenerationDelta, join
from rollout_server.engines.request_check import eos_token_ids
from rollout_server.engines.vllm.convert import (
    kept_tokens,
    likeliest,
    sampled_logprobs,
    spans_between,
    to_delta,
    version_number,
)
from rollout_server.engines.vllm.stats import StepMeter
from services.wire.errors import ConflictError, RollmeshError, UsageError, WireError
from services.wire.packed import pack_kept
from services.wire.sampling import KvPolicy
from services.wire.trajectory import VersionSpan
from services.wire.weights_api import CommitAnswer, DigestAnswer
from weight_bus.errors import StageError
from weight_bus.vllm.core import attach, commit
from weight_bus.vllm.protocol import Attached, Committed, Digest, decode_reply, encode_reply, failure


@dataclass
class Output:
    """The fields of vLLM's CompletionOutput that are read."""

    token_ids: list[int]
    index: int = 0
    finish_reason: str | None = None
    logprobs: object = None


@dataclass
class StepOutput:
    new_token_ids: list[int]
    request_id: str = "r"
    prefill_stats: object = None


@dataclass
class Step:
    """The fields of vLLM's EngineCoreOutputs that are read."""

    timestamp: float
    outputs: list[StepOutput] = field(default_factory=list)
    scheduler_stats: object = None


def test_vllms_first_label_is_version_0() -> None:
    assert version_number("default") == 0
    assert version_number("17") == 17


@pytest.mark.parametrize(
    ("starts", "begin", "end", "expected"),
    [
        ([("default", 0)], 0, 3, [(0, 3, 0)]),
        ([("default", 0), ("5", 2), ("6", 3)], 0, 4, [(0, 2, 0), (2, 1, 5), (3, 1, 6)]),
        ([("default", 0), ("5", 2), ("6", 3)], 2, 4, [(0, 1, 5), (1, 1, 6)]),
        ([("default", 0), ("5", 2)], 3, 5, [(0, 2, 5)]),
        ([("4", 0)], 2, 2, []),
        ([], 0, 0, []),
    ],
)
def test_spans_are_cut_to_the_delta(
    starts: list[tuple[str, int]], begin: int, end: int, expected: list[tuple[int, int, int]]
) -> None:
    assert spans_between(starts, begin, end) == [VersionSpan(*span) for span in expected]


@pytest.mark.parametrize(
    ("anew", "expected"),
    [
        ([], [(0, 3, 4, "salt"), (3, 4, 5, "salt")]),
        ([1], [(0, 3, 4, "salt"), (3, 4, 5, "salt")]),
        ([3], [(0, 3, 4, "salt"), (3, 4, 5, "recompute")]),
        ([5, 6], [(0, 3, 4, "salt"), (3, 2, 5, "salt"), (5, 2, 5, "recompute")]),
        ([6, 9], [(0, 3, 4, "salt"), (3, 3, 5, "salt"), (6, 1, 5, "recompute")]),
    ],
)
def test_spans_say_where_a_later_version_computed_everything_anew(
    anew: list[int], expected: list[tuple[int, int, int, KvPolicy]]
) -> None:
    starts = [("4", 0), ("5", 3)]
    told = spans_between(starts, 0, 7, "salt", anew, resumed=True)
    assert [span.kv for span in told] == ["recompute", *(kv for _, _, _, kv in expected[1:])]
    whole = [VersionSpan(start, length, version, kv=kv) for start, length, version, kv in expected]
    assert spans_between(starts, 0, 7, "salt", anew) == whole
    # Handed out in two parts, they join to the same.
    for cut in range(1, 7):
        parts = [
            GenerationDelta("r", 0, [0] * (end - begin), [0.0] * (end - begin), spans)
            for begin, end in ((0, cut), (cut, 7))
            for spans in [spans_between(starts, begin, end, "salt", anew)]
        ]
        assert join(*parts).versions == whole


def test_a_token_without_a_version_is_an_error_and_never_a_guess() -> None:
    with pytest.raises(RollmeshError, match="named no version"):
        to_delta("r", Output([1, 2]), [], 0)
    with pytest.raises(RollmeshError, match="ended request r with 'error'"):
        to_delta("r", Output([], finish_reason="error"), [], 0)


def test_the_sampled_tokens_logprob_is_taken_also_where_more_were_asked_for() -> None:
    @dataclass
    class Flat:
        logprobs: list[float]
        start_indices: list[int]

    assert sampled_logprobs(Flat([-1.0, -2.0], [0, 1]), 2) == [-1.0, -2.0]
    assert sampled_logprobs(Flat([-1.0, -9.0, -2.0, -9.0], [0, 2]), 2) == [-1.0, -2.0]


def test_alternatives_are_the_same_whether_vllm_names_the_sampled_token_twice_or_once() -> None:
    @dataclass
    class Flat:
        token_ids: list[int]
        logprobs: list[float]
        start_indices: list[int]
        end_indices: list[int]

    twice = Flat([7, 4, 7], [-1.0, -0.5, -1.0], [0], [3])
    once = Flat([7, 4], [-1.0, -0.5], [0], [2])
    outside = Flat([9, 4, 7], [-3.0, -0.5, -1.0], [0], [3])
    for flat in (twice, once, outside):
        assert likeliest(flat, 1, 2) == [[(4, -0.5), (7, -1.0)]]
    assert likeliest(Flat([4, 4, 8], [0.0, 0.0, -math.inf], [0], [3]), 1, 2) == [[(4, 0.0)]]


def test_what_the_cuts_left_is_known_where_fewer_tokens_have_a_chance_than_were_asked_for() -> None:
    @dataclass
    class Flat:
        token_ids: list[int]
        logprobs: list[float]
        start_indices: list[int]
        end_indices: list[int]

    cut = [7, 4, 7, 9], [-1.0, -0.5, -1.0, -math.inf]
    full = [7, 4, 7, 9], [-2.0, -1.0, -2.0, -2.5]
    flat = Flat(cut[0] + full[0], cut[1] + full[1], [0, 4], [4, 8])
    assert kept_tokens(flat, 2, 3) == [pack_kept([4, 7]), b""]


def test_the_meter_puts_a_commit_between_the_steps_it_fell_between() -> None:
    meter = StepMeter()
    for step in range(40):
        # The commit is told early, before the step that precedes it is seen here.
        if step == 19:
            meter.committed(2.0051)
        late = 0.03 if step > 20 else 0.0
        meter.observe(Step(step / 10 + late, [StepOutput([1]), StepOutput([2])]))
    assert meter.commits == 1
    assert meter.tokens == 80
    assert meter.generating == 2
    assert meter.stalls_ms() == [pytest.approx(30.0)]


def test_the_meter_counts_what_was_prefilled_and_names_whose_prefill_ended() -> None:
    meter = StepMeter()
    stats = SimpleNamespace(num_computed_tokens=7)
    outputs = [StepOutput([1], "new", stats), StepOutput([2], "old"), StepOutput([3], "back", stats)]
    assert meter.observe(Step(1.0, outputs)) == ["new", "back"]
    assert meter.prefill_tokens == 14


def test_the_meter_keeps_what_was_last_told_of_the_cache() -> None:
    meter = StepMeter()
    assert meter.kv_use is None
    meter.observe(Step(1.0, [StepOutput([1])], SimpleNamespace(kv_cache_usage=0.25)))
    meter.observe(Step(1.1, [StepOutput([1])]))
    assert meter.kv_use == 0.25


def test_the_meter_counts_a_commit_while_nothing_runs_and_reports_no_stall() -> None:
    meter = StepMeter()
    meter.committed(1.0)
    meter.break_off()
    meter.observe(Step(2.0, [StepOutput([1])]))
    assert (meter.commits, meter.stalls_ms()) == (1, [])


@pytest.mark.parametrize("error", [StageError("bad hash", "publish again"), ConflictError("no"), WireError("junk")])
def test_an_error_keeps_its_kind_on_the_way(error: RollmeshError) -> None:
    with pytest.raises(type(error)) as raised:
        decode_reply(encode_reply(failure(error)))
    assert (raised.value.what, raised.value.remedy) == (error.what, error.remedy)


def test_what_is_not_ours_becomes_an_error_with_its_name() -> None:
    with pytest.raises(RollmeshError, match="ZeroDivisionError: by zero"):
        decode_reply(encode_reply(failure(ZeroDivisionError("by zero"))))


def test_replies_come_back_as_they_were() -> None:
    for reply in (Digest(result=DigestAnswer(0, "ab")), Committed(result=CommitAnswer(3, 0.1, 2), at=1.5)):
        assert decode_reply(encode_reply(reply)) == reply


def test_the_plug_in_does_nothing_in_a_vllm_that_did_not_ask_for_it() -> None:
    code = (
        "import sys, weight_bus.vllm.plugin as plugin\n"
        "plugin.register()\n"
        "heavy = {'torch', 'vllm', 'transformers', 'weight_bus.vllm.core'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30, env={"PATH": ""})


class Core:
    """What of vLLM's engine core and scheduler a commit touches when nothing runs."""

    batch_queue = None
    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))

    def __init__(self, *, caching: bool) -> None:
        self.called: list[str] = []
        self.scheduler = self.model_executor = self
        self.kv_cache_manager = SimpleNamespace(enable_caching=caching)
        self.running: list[object] = []
        self.requests: dict[str, object] = {}

    def _preempt_request(self) -> None: ...

    def schedule(self) -> None: ...

    def make_stats(self) -> None: ...

    def get_request_counts(self) -> tuple[int, int]:
        return 0, 0

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> None:
        raise RuntimeError("blocks are not freed yet")

    def collective_rpc(self, method: str, args: object = ()) -> list[bytes]:
        self.called.append(method)
        return [encode_reply(Attached(tensors=1, total_bytes=4))]


def test_a_cache_that_knows_no_versions_is_refused_under_keep() -> None:
    core = Core(caching=True)
    with pytest.raises(UsageError, match="prefixes of older versions"):
        decode_reply(attach(core, "run", "shm", "keep"))
    assert core.called == []
    assert isinstance(decode_reply(attach(Core(caching=False), "run", "shm", "keep")), Attached)


def test_a_cache_that_cannot_be_emptied_leaves_the_old_weights_serving() -> None:
    core = Core(caching=True)
    attach(core, "run", "shm", "recompute")
    with pytest.raises(RollmeshError, match="blocks are not freed yet"):
        decode_reply(commit(core, 3))
    assert core.called == ["rollmesh_attach"]


def test_end_tokens_come_from_both_configurations(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    assert eos_token_ids(tmp_path) == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert eos_token_ids(tmp_path) == (7, 2)


def test_a_missing_model_folder_is_a_usage_error(tmp_path) -> None:  # type: ignore[no-untyped-def]
    import asyncio

    from rollout_server.engines.vllm.engine import VllmEngine

    engine = VllmEngine(tmp_path, run_id="r", dtype="float32", max_running=4, threads=1, transport="shm", seed=0)
    with pytest.raises(UsageError, match=r"no config\.json"):
        asyncio.run(engine.start())


class CoreProcess:
    """An engine core with one worker: as vLLM has it, a `multiprocessing.Process`."""

    def __init__(self) -> None:
        self.popen = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
        assert self.popen.stdout is not None
        self.worker = psutil.Process(int(self.popen.stdout.readline()))

    @property
    def pid(self) -> int:
        return self.popen.pid

    def is_alive(self) -> bool:
        return self.popen.poll() is None

    def kill(self) -> None:
        self.popen.kill()

    def join(self, within_s: float) -> None:
        self.popen.wait(within_s)


def test_where_vllm_stumbles_over_a_worker_that_has_just_ended_all_are_ended(tmp_path: Path) -> None:
    from rollout_server.engines.vllm.launch import end

    core, scratch = CoreProcess(), tmp_path / "scratch"
    scratch.mkdir()

    def shutdown(timeout: float) -> None:
        raise psutil.NoSuchProcess(1 << 30)  # of its `kill_process_tree`

    manager = SimpleNamespace(processes=[core])
    try:
        end(
            SimpleNamespace(
                engine_core=SimpleNamespace(resources=SimpleNamespace(engine_manager=manager)), shutdown=shutdown
            ),
            scratch,
            1.0,
        )
        assert not core.is_alive()
        psutil.wait_procs([core.worker], timeout=10.0)
        assert not core.worker.is_running() or core.worker.status() == psutil.STATUS_ZOMBIE
        assert not scratch.exists()
    finally:
        with suppress(psutil.NoSuchProcess):
            core.worker.kill()
        core.kill()
        core.join(10.0)
        assert core.popen.stdout is not None
        core.popen.stdout.close()
