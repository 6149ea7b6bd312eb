"""Which devices trainer ranks and engines get: none twice, nothing too large, everything placed or refused with the sum."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.host.devices import Device
from services.policies.placement.cores import near, nodes_for
from services.policies.placement.engine_memory import EngineOptions, engine_estimate
from services.policies.placement.place import MOST, Placement, PlacementError, Wanted, place
from services.policies.placement.propose import propose
from services.policies.training.memory import Estimate, MemoryOptions
from services.policies.training.model_shape import ModelShape

GIB = 1 << 30
QWEN3_06B = ModelShape(1024, 28, 16, 8, 128, 3072, 151_936, True, head_norms=True)
QWEN3_8B = ModelShape(4096, 36, 32, 8, 128, 12_288, 151_936, head_norms=True)
LLAMA3_70B = ModelShape(8192, 80, 64, 8, 128, 28_672, 128_256)
SHAPES = {
    "Qwen3-0.6B": QWEN3_06B,
    "Qwen3-8B": QWEN3_8B,
    "Qwen3-32B": ModelShape(5120, 64, 64, 8, 128, 25_600, 151_936, head_norms=True),
    "Qwen3-30B-A3B": ModelShape(2048, 48, 32, 4, 128, 6144, 151_936, False, 128, 8, 768, head_norms=True),
    "Llama-3-70B": LLAMA3_70B,
}


def gpus(count: int, gib: float = 80.0, hosts: int = 1) -> list[Device]:
    return [Device(str(number), int(gib * GIB), host) for host in range(hosts) for number in range(count)]


def takes(gib: float) -> Estimate:
    return Estimate("step", {"weights": int(gib * GIB)})


def engines(count: int, ranks: int, gib: float) -> list[Wanted]:
    return [Wanted(f"rollout-server-{number}", ranks, takes(gib)) for number in range(count)]


@given(
    hosts=st.lists(st.lists(st.sampled_from([16, 24, 40, 80]), max_size=9), min_size=1, max_size=3),
    ranks=st.integers(1, 9),
    of_trainer=st.integers(1, 90),
    servers=st.integers(1, 6),
    tensor=st.sampled_from([1, 2, 4]),
    of_engine=st.integers(1, 90),
)
def test_no_device_stands_twice_and_everything_is_placed_or_refused(
    hosts: list[list[int]], ranks: int, of_trainer: int, servers: int, tensor: int, of_engine: int
) -> None:
    devices = [Device(str(n), gib * GIB, host) for host, its in enumerate(hosts) for n, gib in enumerate(its)]
    trainer = Wanted("trainer", ranks, takes(of_trainer), together=False)
    wanted = [trainer, *engines(servers, tensor, of_engine)]
    try:
        found = place(trainer, wanted[1:], devices, shared=False)
    except PlacementError as error:
        assert str(len(devices)) in str(error) or "GiB" in str(error) or "machine" in str(error)
        alike = {device.nbytes for device in devices}
        if len(alike) == 1 and len(hosts) == 1:
            # On one machine of devices that are alike there is no other way to place them.
            asked = sum(each.devices for each in wanted)
            assert asked > len(devices) or max(of_trainer, of_engine) * GIB > MOST * alike.pop()
        return
    assert [(each.name, len(each.devices)) for each in found.places] == [(each.name, each.devices) for each in wanted]
    check(found, devices)


def check(found: Placement, devices: list[Device]) -> None:
    """Every device once, what stands on each at most 0.92 of it, an engine on one machine."""
    stand = [(device.host, device.name) for each in found.places for device in each.devices]
    free = [(device.host, device.name) for device in found.unused]
    assert sorted(stand + free) == sorted((device.host, device.name) for device in devices)
    for each in found.places:
        assert all(each.nbytes <= MOST * device.nbytes for device in each.devices)
        assert each.name == "trainer" or len({device.host for device in each.devices}) == 1


@given(
    gib=st.sampled_from([16, 24, 40, 80]),
    of_trainer=st.integers(1, 80),
    servers=st.integers(1, 4),
    of_engine=st.integers(1, 80),
)
def test_all_that_share_a_device_take_no_more_than_one_may(
    gib: int, of_trainer: int, servers: int, of_engine: int
) -> None:
    trainer, wanted = Wanted("trainer", 1, takes(of_trainer), together=False), engines(servers, 1, of_engine)
    try:
        found = place(trainer, wanted, gpus(1, gib), shared=True)
    except PlacementError as error:
        assert of_trainer + servers * of_engine > MOST * gib
        assert f"{of_trainer + servers * of_engine:.1f} GiB are more than" in str(error)
        return
    shares = [each.share for each in found.places if each.share is not None]
    assert len(shares) == servers
    # What vLLM is told is room for the least that it takes, and leaves the trainer its own.
    assert all(share * gib >= of_engine - 0.002 * gib for share in shares)
    assert of_trainer + sum(shares) * gib <= MOST * gib + 1e-9


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["Qwen3-0.6B", "Qwen3-8B", "Qwen3-32B", "Qwen3-30B-A3B"]),
    count=st.integers(1, 8),
    hosts=st.integers(1, 2),
    gib=st.sampled_from([24, 40, 80, 140]),
    context=st.sampled_from([4096, 32_768]),
)
def test_what_is_proposed_is_placed_whole(name: str, count: int, hosts: int, gib: int, context: int) -> None:
    devices = gpus(count, gib, hosts)
    asked = MemoryOptions(tokens=4096, half=True, gpu=True, serving_bytes=2)
    try:
        found = propose(SHAPES[name], asked, EngineOptions(context=context), devices)
    except PlacementError as error:
        assert "GiB" in str(error) or "GPUs" in str(error)
        return
    places = found.placement.places
    assert [each.name for each in places] == ["trainer", *(f"rollout-server-{n}" for n in range(found.engines))]
    assert [len(each.devices) for each in places] == [
        found.trainer.options.layout.ranks,
        *[found.ranks] * found.engines,
    ]
    if len(devices) == 1:
        assert sum(each.nbytes for each in places) <= MOST * devices[0].nbytes
    else:
        check(found.placement, devices)


def test_ranks_come_first_in_their_order_and_an_engine_stays_on_one_numa_node() -> None:
    devices = [replace(device, numa=int(device.name) // 4) for device in gpus(8)]
    found = place(Wanted("trainer", 3, takes(8), together=False), engines(2, 2, 8), devices, shared=False)
    assert [[device.name for device in each.devices] for each in found.places] == [
        ["0", "1", "2"],
        ["4", "5"],
        ["6", "7"],
    ]
    assert [device.name for device in found.unused] == ["3"]


def test_a_trainer_takes_the_larger_devices_where_engines_would_leave_it_none() -> None:
    devices = [*gpus(1, 80), *[Device("1", 24 * GIB), Device("2", 24 * GIB)]]
    found = place(Wanted("trainer", 1, takes(70), together=False), engines(2, 1, 20), devices, shared=False)
    assert [[device.name for device in each.devices] for each in found.places] == [["0"], ["1"], ["2"]]


@pytest.mark.parametrize(
    ("trainer", "servers", "said"),
    [
        (4, engines(5, 1, 8), "trainer 4 + 5 engines of 1 = 9 GPUs, and there are 8"),
        (2, engines(1, 2, 74), "rollout-server-0 takes 74.0 GiB of a GPU, more than 0.92 of 80.0"),
    ],
)
def test_what_cannot_be_placed_is_refused_with_the_sum(trainer: int, servers: list[Wanted], said: str) -> None:
    with pytest.raises(PlacementError, match=said.replace("+", r"\+")):
        place(Wanted("trainer", trainer, takes(8), together=False), servers, gpus(8), shared=False)


def test_engines_of_a_shared_device_get_what_the_trainer_leaves() -> None:
    found = place(Wanted("trainer", 1, takes(30), together=False), engines(2, 1, 15), gpus(1), shared=True)
    shares = [each.share for each in found.places]
    assert shares[0] is None
    assert shares[1] == shares[2]
    assert shares[1] is not None
    assert 15 <= shares[1] * 80 <= (MOST * 80 - 30) / 2
    with pytest.raises(
        PlacementError, match=r"75\.0 GiB are more than 0\.92 of 80\.0 on one shared GPU: trainer 45\.0"
    ):
        place(Wanted("trainer", 1, takes(45), together=False), engines(2, 1, 15), gpus(1), shared=True)
    with pytest.raises(PlacementError, match="trainer wants 2"):
        place(Wanted("trainer", 2, takes(1), together=False), engines(1, 1, 1), gpus(1), shared=True)


def test_an_engine_holds_its_weights_and_those_of_an_update() -> None:
    options = EngineOptions(context=40_960)
    alone = engine_estimate(QWEN3_8B, options)
    assert alone.parts["weights"] == 2 * QWEN3_8B.parameters
    assert alone.parts["update"] == options.sets * alone.parts["weights"]
    # 2 · 36 layers · 8 heads · 128 numbers of 2 bytes, a token.
    assert alone.parts["keys"] == 147_456 * 40_960
    # As it starts by default on one GPU of 80 GB (tests/gpu/test_vllm_server.py).
    assert alone.total <= MOST * 80e9
    # Adapters published alone: the slot that is served and one that is staged, in place of a set of weights.
    slots = engine_estimate(QWEN3_8B, replace(options, adapter_rank=16))
    assert slots.parts["update"] == 2 * 2 * 36 * QWEN3_8B.adapters(16) < 0.02 * alone.parts["update"]
    split = engine_estimate(QWEN3_8B, replace(options, ranks=2))
    assert (split.parts["weights"], split.parts["keys"]) == (QWEN3_8B.parameters, alone.parts["keys"] // 2)


def test_a_proposal_fits_by_the_policy_that_places() -> None:
    trainer, engine = MemoryOptions(tokens=4096, half=True, gpu=True, serving_bytes=2), EngineOptions(context=32_768)
    found = propose(QWEN3_8B, trainer, engine, gpus(8))
    assert found.trainer.options.layout.ranks + found.ranks * found.engines <= 8
    assert len(found.placement.places) == found.engines + 1
    assert not found.trainer.options.optimizer_offload
    small = propose(QWEN3_06B, trainer, engine, gpus(1))
    assert small.placement.places[1].share is not None
    with pytest.raises(PlacementError, match=r"no number of 8 GPUs holds the trainer"):
        propose(LLAMA3_70B, trainer, engine, gpus(8))


def test_the_table_of_the_docs_is_what_is_proposed() -> None:
    text = (Path(__file__).parents[3] / "docs" / "placement.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([A-Z][\w.-]+B|Qwen3-30B-A3B) \| (.+) \| (.+) \| (.+) \|$", text, flags=re.MULTILINE)
    assert [name for name, *_ in rows] == list(SHAPES)
    trainer, engine = MemoryOptions(tokens=4096, half=True, gpu=True, serving_bytes=2), EngineOptions(context=32_768)
    for name, *cells in rows:
        for cell, (count, hosts) in zip(cells, ((1, 1), (8, 1), (8, 2)), strict=True):
            try:
                found = propose(SHAPES[name], trainer, engine, gpus(count, hosts=hosts))
            except PlacementError:
                assert cell == "refused", (name, count, hosts)
                continue
            ranks = found.trainer.options.layout.ranks
            engines_of = f"{found.engines} engines of {found.ranks}"
            shared = found.placement.places[1].share is not None
            assert cell == ("shared, 1 engine" if shared else f"trainer {ranks}, {engines_of}"), (name, count, hosts)


def test_processes_without_devices_keep_to_a_node_each_or_none_does() -> None:
    nodes = [tuple(range(8)), tuple(range(8, 16))]
    assert nodes_for({"trainer": 6, "a": 4, "b": 3}, nodes) == {"trainer": nodes[0], "a": nodes[1], "b": nodes[1]}
    assert nodes_for({"trainer": 6, "a": 4, "b": 5}, nodes) == {}
    assert nodes_for({"trainer": 1, "a": 1}, [(0, 1)]) == {}


def test_who_has_devices_keeps_to_the_cores_near_them() -> None:
    near_them = [replace(device, cores=(0, 1) if device.name < "2" else (2, 3)) for device in gpus(4)]
    stands = place(Wanted("trainer", 3, takes(1), together=False), [], near_them, shared=False).places[0]
    assert near(stands, [0, 1, 2, 3], by_device=True) == [(0, 1), (0, 1), (2, 3)]
    assert near(stands, [0, 1, 2, 3], by_device=False) == []
    assert near(stands, [0, 1], by_device=True) == []
    nobody_says = place(Wanted("trainer", 1, takes(1)), [], gpus(1), shared=False).places[0]
    assert near(nobody_says, [0, 1], by_device=True) == []


def test_a_process_that_is_not_placed_stands_nowhere() -> None:
    assert Placement().of("trainer") is None
