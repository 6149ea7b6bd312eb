"""Which memory weights lie in on the wire: chosen at each end, and refused by name where it cannot be."""

from __future__ import annotations

import pytest
import torch

from services.config.load import load_settings
from services.policies.placement.wire_memory import WireMemory, fits, on_device, what_is_missing
from services.policies.training.memory import Estimate, MemoryOptions, estimate
from services.policies.training.model_shape import ModelShape
from services.wire.errors import UsageError
from tests.support.host_as_device import HostAsDevice
from weight_bus.transports.device_choice import publishing_memory, reading_memory
from weight_bus.transports.environment import NIXL_MEMORY, wire_environment

CUDA = torch.device("cuda", 2)
GIB = 1 << 30


def made(number: int) -> HostAsDevice:
    return HostAsDevice("VRAM", number)


@pytest.mark.parametrize(
    ("transport", "device", "ucx", "missing"),
    [
        ("nixl", "cuda:0", None, None),
        ("nixl", "cuda:0", "rc,cuda_copy,self", None),
        ("nixl", "cuda:0", "all", None),
        ("nixl", "cuda:0", "^ib", None),
        ("nixl", "cuda:0", "^cuda", "do not know a GPU's memory"),
        ("nixl", "cuda:0", "rc,tcp,self", "do not know a GPU's memory"),
        ("nixl", "cpu", None, "the weights are on cpu"),
        ("shm", "cuda:0", None, "weights.transport=shm reads the host's memory"),
    ],
)
def test_device_memory_is_used_where_nothing_is_missing_and_else_refused_with_what_is(
    transport: str, device: str, ucx: str | None, missing: str | None
) -> None:
    found, remedy = what_is_missing(transport, device, ucx)
    choices: tuple[WireMemory, ...] = ("auto", "device")
    assert not on_device("host", found, remedy)
    if missing is None:
        assert all(on_device(wanted, found, remedy) for wanted in choices)
        return
    assert not on_device("auto", found, remedy)
    with pytest.raises(UsageError, match=rf"weights\.nixl\.memory=device cannot be: .*{missing}") as refused:
        on_device("device", found, remedy)
    assert refused.value.remedy


def test_a_word_in_the_environment_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UsageError, match=f"{NIXL_MEMORY}=dvice is not known"):
        reading_memory("nixl", torch.device("cpu"), {NIXL_MEMORY: "dvice"}, made)


def test_another_plug_in_of_nixl_does_not_read_ucxs_variables() -> None:
    assert what_is_missing("nixl", "cuda:0", "rc", backend="LIBFABRIC")[0] is None


def test_two_versions_go_on_a_gpu_only_beside_a_step() -> None:
    step = Estimate("backward", {"weights": 40 * GIB}, {"publishing": 16 * GIB})
    assert fits(61 * GIB, step, 0)
    assert not fits(59 * GIB, step, 0), "the formula is within 10 %"
    assert fits(21 * GIB, step, 40 * GIB), "what the weights take is taken already"
    assert not fits(80 * GIB, None, 0), "a model that the formula does not know"


def test_the_setting_reaches_both_ends_and_each_sees_to_its_own_device() -> None:
    settings = load_settings(None, ["weights.nixl.memory=device"]).weights
    environment = wire_environment(settings)
    assert environment == {NIXL_MEMORY: "device"}
    assert wire_environment(load_settings(None, ["weights.nixl.memory=auto"]).weights) == {}
    found = reading_memory("nixl", CUDA, environment, made)
    assert found is not None and (found.kind, found.number) == ("VRAM", 2)
    assert publishing_memory("nixl", CUDA, None, environment, made) is not None, "asked for: it has to fit"
    assert reading_memory("nixl", CUDA, {NIXL_MEMORY: "host"}, made) is None
    assert reading_memory("nixl", torch.device("cpu"), {}, made) is None
    assert reading_memory("shm", CUDA, {}, made) is None
    here, said = torch.device("cpu"), r"weights\.nixl\.memory=device cannot be: the weights are on cpu"
    with pytest.raises(UsageError, match=said):
        reading_memory("nixl", here, environment, made)
    with pytest.raises(UsageError, match=said):
        publishing_memory("nixl", here, None, environment, made)


def test_the_setting_is_refused_where_the_transport_does_not_read_it() -> None:
    with pytest.raises(UsageError, match=r"weights\.nixl\.memory=device would have no effect under .*=shm"):
        load_settings(None, ["weights.transport=shm", "weights.nixl.memory=device"])
    with pytest.raises(UsageError, match=r"weights\.nixl\.memory"):
        load_settings(None, ["weights.nixl.memory=vram"])


def test_what_versions_are_published_from_is_in_the_sum_of_where_it_lies() -> None:
    shape = ModelShape(4096, 36, 32, 8, 128, 12_288, 151_936, head_norms=True)
    host, device = (
        estimate(shape, MemoryOptions(tokens=4096, half=True, gpu=True, serving_bytes=2, publish_on_device=on))
        for on in (False, True)
    )
    assert device.total - host.total == host.host["publishing"] == device.parts["publishing"]
    assert "publishing" not in device.host and "publishing" not in host.parts
    one = estimate(shape, MemoryOptions(tokens=4096, half=True, gpu=True, serving_bytes=2, arenas=1))
    assert one.total == host.total and one.host["publishing"] == host.host["publishing"] // 2
