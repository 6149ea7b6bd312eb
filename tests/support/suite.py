"""How the suite is run: what a plain run leaves out, which tests share a worker process, and which run alone.

    ./dev test            a plain run: everything but the slow tests
    ./dev test --all      everything
    ./dev test PATH …     all tests there, slow ones too; files and single tests run in one process

Tests are spread over worker processes (pytest-xdist), one a core. The tests of a file stay in one worker and in their
order, so that a fixture of module scope is made once; files that share something costlier stand in SHARING.

A test marked `alone` judges times, or needs both cores: it starts when no other worker runs a test, and the others wait
until it has ended.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import inspect
import os
import re
import signal
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tests.support.examples import register_profiles

SLOW_FOLDERS = frozenset({"deploy", "faults", "gpu", "stack", "third_party"})
SLOW_MARKS = frozenset({"gpu", "slow", "stack", "vllm"})
HEAVY_FIRST = ("stack", "faults", "e2e", "deploy", "third_party", "gpu", "contract", "unit")
"""The order of the folders. Long tests start first, so that all workers end at about the same time."""
SHARING = (
    (re.compile(r"tests/contract/rollout_server/engine/.*\[(vllm|torch|http)\b"), r"engine contract: \1"),
    (re.compile(r"tests/stack/"), "images of the stack"),
)
"""Tests whose ids match stay in one worker, whatever their file."""
WORKER_BYTES = 3 << 30
"""Memory that a worker's tests may take at once, engines in processes of their own counted in."""
MOST_WORKERS = 8
ASYNC_TEST_WITHIN_S = 600.0
"""How long the body of an async test may take. It is cancelled where it waits, so that its failure shows the await."""
_SHARED_VARIABLE = "ROLLMESH_TEST_SHARED"
_shared = pytest.StashKey[TemporaryDirectory[str]]()
_left_out = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        help="everything: vLLM, the stack, clusters, faults, other people's clients, TRL's oracles",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Before hypothesis' own, which loads the profile that the command line names."""
    config.stash[_left_out] = 0
    heed_interrupts()
    register_profiles()
    settings.load_profile(config.getoption("--hypothesis-profile") or ("ci" if config.getoption("--all") else "dev"))
    if not _is_worker(config):
        config.stash[_shared] = share_a_folder()


def pytest_unconfigure(config: pytest.Config) -> None:
    if folder := config.stash.get(_shared, None):
        folder.cleanup()


def heed_interrupts() -> None:
    """Also in the background of a shell, where processes that are started to be interrupted would ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def share_a_folder() -> TemporaryDirectory[str]:
    """That of `shared_folder`, for this process and those that it starts."""
    folder = TemporaryDirectory(prefix="rollmesh-tests-")
    os.environ[_SHARED_VARIABLE] = folder.name
    return folder


def shared_folder() -> Path:
    """A folder for all workers of this run; it goes when the run ends."""
    return Path(os.environ[_SHARED_VARIABLE])


@contextmanager
def locked(name: str, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold a lock of this run that all workers know by its name."""
    with (shared_folder() / f"{name}.lock").open("w") as file:
        fcntl.flock(file, how)
        try:
            yield
        finally:
            # A process that was forked meanwhile and lives on, such as an engine's, has the file open too.
            fcntl.flock(file, fcntl.LOCK_UN)


# What is run


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: HEAVY_FIRST.index(_folder(item)))
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = ended_in_time(item.obj)
    if config.getoption("--all") or config.option.markexpr or _is_named(config):
        return
    left_out = [item for item in items if _is_slow(item)]
    if left_out:
        config.stash[_left_out] = len(left_out)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not _is_slow(item)]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _is_worker(session.config):
        session.config.workeroutput["left_out"] = session.config.stash[_left_out]  # type: ignore[attr-defined]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """All workers collect the same tests: any that ended in good order knows how many were left out."""
    if output := getattr(node, "workeroutput", None):
        node.config.stash[_left_out] = output["left_out"]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if count := config.stash[_left_out]:
        terminalreporter.write_line(f"{count} slow tests were left out: ./dev test --all runs everything")


def _is_named(config: pytest.Config) -> bool:
    """Whether the command line names what is to be run."""
    return config.args_source is pytest.Config.ArgsSource.ARGS


def _folder(item: pytest.Item) -> str:
    return item.nodeid.split("/")[1]


def _is_slow(item: pytest.Item) -> bool:
    return _folder(item) in SLOW_FOLDERS or any(mark.name in SLOW_MARKS for mark in item.iter_markers())


def ended_in_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., Coroutine[Any, Any, None]]:
    """`test`, failed after ASYNC_TEST_WITHIN_S. A trace of the thread alone would show the event loop's own wait."""

    @functools.wraps(test)
    async def limited(*arguments: Any, **named: Any) -> None:
        async with asyncio.timeout(ASYNC_TEST_WITHIN_S):
            await test(*arguments, **named)

    return limited


# Where it is run


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker a core that may be used, as far as memory goes; this very process for files and tests that are named."""
    if _is_named(config) and not any(Path(word).is_dir() for word in config.args):
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(cores, psutil.virtual_memory().available // WORKER_BYTES, MOST_WORKERS)
    return workers if workers > 1 else 0


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    config.option.loadscopereorder = False
    return FilesTogether(config, log)


class FilesTogether(LoadScopeScheduling):
    """A worker takes one file after the other, in the order of the collection."""

    def _split_scope(self, nodeid: str) -> str:
        for pattern, name in SHARING:
            if found := pattern.match(nodeid):
                return found.expand(name)
        return nodeid.partition("::")[0]


# When it is run


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if not _is_worker(item.config):
        return (yield)
    alone = item.get_closest_marker("alone") is not None
    with _turn(alone):
        return (yield)


@contextmanager
def _turn(alone: bool) -> Iterator[None]:
    """A readers-writer lock over files. While a test waits to be alone no other may start, or it would wait for ever."""
    with ExitStack() as stack:
        with locked("start"):
            stack.enter_context(locked("running", fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        yield


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")
