"""The variables by which `rollmesh up` gives each process its devices and its cores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from services.config.load import load_settings
from services.config.settings import RunSettings
from services.host.devices import Device
from services.host.run_folder import RunFolder
from services.policies.placement.place import Placement, Wanted, place
from services.policies.training.memory import Estimate
from services.supervisor.devices import environments, in_words, share_of_engines
from services.supervisor.launch_plan import MeshPorts, plan_launch

SMALL = Estimate("step", {"weights": 1})
NODES = [(0, 1, 2, 3, 4, 5), (6, 7, 8, 9)]


def resolved(*overrides: str) -> RunSettings:
    return load_settings(None, list(overrides)).with_threads(4, tiny=True)


def eight() -> list[Device]:
    return [
        Device(str(number), 80 << 30, numa=number // 4, cores=NODES[0] if number < 4 else NODES[1])
        for number in range(8)
    ]


def placed(settings: RunSettings, devices: list[Device], *, shared: bool = False) -> Placement:
    ranks = settings.trainer.parallel.least_ranks
    engines = [
        Wanted(f"rollout-server-{number}", settings.rollout.tensor_parallel, SMALL)
        for number in range(settings.servers)
    ]
    found = place(Wanted("trainer", ranks, SMALL, together=False), engines, devices, shared=shared)
    # As it comes from the command that places.
    return msgspec.json.decode(msgspec.json.encode(found), type=Placement)


def test_processes_see_their_own_devices_and_keep_near_them() -> None:
    settings = resolved("engine=vllm", "servers=2", "rollout.tensor_parallel=2", "trainer.parallel.data=3")
    found = placed(settings, eight())
    cores = [core for node in NODES for core in node]
    given = environments(settings, found, cores, NODES)
    assert given["trainer"] == {
        "CUDA_VISIBLE_DEVICES": "0,1,2",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "ROLLMESH_CORES": "0-5;0-5;0-5",
    }
    assert given["rollout-server-0"]["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert given["rollout-server-1"]["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert given["rollout-server-1"]["ROLLMESH_CORES"] == "6-9"
    assert given["gateway"] == {"CUDA_VISIBLE_DEVICES": ""}
    assert "environment" not in given and "rewards" not in given
    assert in_words(found) == "GPUs: trainer 0,1,2; rollout-server-0 4,5; rollout-server-1 6,7; not used: 3"

    ports = MeshPorts(redis=9001, bus=9002, gateway=9003, rewards=9004, servers=(9100, 9101), teacher=9005, dashboard=7)
    launch = plan_launch(settings, RunFolder(Path("/runs/a")), "run-1", ports, devices=given)
    for spec in launch.servers:
        assert spec.environment["CUDA_VISIBLE_DEVICES"] == given[spec.name]["CUDA_VISIBLE_DEVICES"]
        # On a GPU they are vLLM's own.
        assert "OMP_NUM_THREADS" not in spec.environment
    assert launch.trainer.environment["OMP_NUM_THREADS"] == "1"
    assert launch.bus.environment["CUDA_VISIBLE_DEVICES"] == ""
    assert launch.gateway is not None
    assert launch.gateway.environment["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in launch.environment.environment


def test_without_gpus_processes_keep_to_a_numa_node_each_where_they_have_room() -> None:
    settings = resolved("engine=torch", "trainer.threads=4")
    given = environments(settings, Placement(), range(10), NODES)
    assert given == {"trainer": {"ROLLMESH_CORES": "0-5"}, "rollout-server-0": {"ROLLMESH_CORES": "6-9"}}
    assert environments(settings, Placement(), range(6), NODES[:1]) == {}
    crowded = resolved("engine=torch", "trainer.threads=4", "servers=4")
    assert environments(crowded, Placement(), range(10), NODES) == {}


def test_an_engine_that_shares_its_gpu_is_told_its_share() -> None:
    settings = resolved("engine=vllm")
    (one,) = [replace(device, cores=()) for device in eight()[:1]]
    found = placed(settings, [one], shared=True)
    share = share_of_engines(settings, found)
    assert share is not None
    assert 0.9 < share <= 0.92
    told = resolved("engine=vllm", "rollout.vllm.gpu_memory_utilization=0.3")
    assert share_of_engines(told, found) is None
    assert share_of_engines(settings, placed(settings, eight())) is None
    assert environments(settings, found, [0, 1], [(0, 1)])["rollout-server-0"]["CUDA_VISIBLE_DEVICES"] == "0"
