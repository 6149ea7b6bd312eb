"""Which build of NIXL is used, and which the images hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weight_bus.transports.nixl_wheel import choose, cuda_of, package_for

DEPLOY = Path(__file__).parents[3] / "deploy"
BOTH = ["nixl_cu12", "nixl_cu13"]


@pytest.mark.parametrize(
    ("installed", "cuda", "chosen"),
    [
        (BOTH, 12, "nixl_cu12"),
        (BOTH, 13, "nixl_cu13"),
        (BOTH, None, "nixl_cu12"),
        (["nixl_cu13"], None, "nixl_cu13"),
        (["nixl_cu12"], 13, "nixl_cu12"),
        ([], 13, None),
    ],
)
def test_the_build_for_torchs_cuda_is_used_where_there_is_a_choice(
    installed: list[str], cuda: int | None, chosen: str | None
) -> None:
    assert choose(installed, cuda) == chosen


def test_torchs_cuda_is_read_from_its_version_file() -> None:
    assert cuda_of("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n") == 13
    assert cuda_of("cuda = '12.8'\n") == 12
    assert cuda_of("cuda: Optional[str] = None\nxpu: Optional[str] = '20.1'\n") is None
    assert (package_for(13), package_for(None)) == ("nixl-cu13>=1.5,<2", "nixl-cu12>=1.5,<2")


def test_the_gpu_images_nixl_is_for_the_cuda_of_its_torch() -> None:
    pins = dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", (DEPLOY / "constraints-gpu.txt").read_text(), re.MULTILINE))
    cuda = pins["cuda-toolkit"].partition(".")[0]
    assert [name for name in pins if name.startswith("nixl")] == [f"nixl-cu{cuda}"]
