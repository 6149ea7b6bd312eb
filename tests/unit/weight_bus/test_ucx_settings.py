"""What UCX is told before it is loaded."""

from __future__ import annotations

import pytest

from weight_bus.transports.nixl_agent import UCX_DEVICE_TRANSPORTS, UCX_TRANSPORTS, ucx_settings

HOOKS = "UCX_MEM_MMAP_HOOK_MODE"


def test_by_default_no_memory_is_pinned_so_that_nobody_need_watch_it() -> None:
    wanted = ucx_settings({})
    assert wanted["UCX_TLS"] == UCX_TRANSPORTS
    assert wanted[HOOKS] == "none"


@pytest.mark.parametrize(
    ("transports", "spared"),
    [("tcp,self", True), ("rc,tcp,self", False), ("all", False), ("^ib", False), ("sm,tcp", False), ("", False)],
)
def test_a_network_cards_memory_is_watched(transports: str, spared: bool) -> None:
    wanted = ucx_settings({"UCX_TLS": transports})
    assert "UCX_TLS" not in wanted
    assert (wanted.get(HOOKS) == "none") == spared


def test_what_the_user_has_set_stays() -> None:
    own = {"UCX_CMA_SEG_SIZE": "1m", HOOKS: "bistro"}
    assert not own.keys() & ucx_settings(own).keys()


def test_where_a_gpus_memory_is_registered_ucx_may_use_what_knows_it() -> None:
    wanted = ucx_settings({}, on_device=True)
    assert wanted["UCX_TLS"] == UCX_DEVICE_TRANSPORTS
    assert {"cuda_copy", "cuda_ipc", "tcp"} <= set(wanted["UCX_TLS"].split(","))
    assert HOOKS not in wanted, "pinned memory is watched"
    assert "UCX_TLS" not in ucx_settings({"UCX_TLS": "rc,cuda_copy"}, on_device=True)
