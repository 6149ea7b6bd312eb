"""What all tests share: a real Valkey, free ports, a tiny policy on disk."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog

from services.supervisor.launch_plan import ValkeyPlan
from tests.support.rank_pool import RankPool

# Many processes share two cores; torch's default of one thread a core makes each of them wait for the others.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The keys and certificates of a mesh of the developer's own are not for those of tests.
for _name in ("ROLLMESH_KEYS_DIR", "ROLLMESH_REDIS_PASSWORD_FILE", "ROLLMESH_TLS_DIR"):
    os.environ.pop(_name, None)


# As processes of the mesh write it: structlog's default draws every local of every frame, seconds for an exception.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ]
)


@pytest.fixture(autouse=True)
def logging_stays() -> Iterator[None]:
    """A command that is called in this process must not set up logging: loggers keep its stream, which is closed later, and
    code under test ends at its next line to the log."""
    yield
    if structlog.get_config()["cache_logger_on_first_use"]:
        structlog.configure(cache_logger_on_first_use=False)
        pytest.fail("logging was set up for the whole process: replace services.cli.configure_logging in this test")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes], deadline_s: float = 10.0) -> None:
    """Wait until something listens on `port`; fail when the process ends first or the deadline passes."""
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the process that should listen on {port} ended with {process.returncode}")
        with socket.socket() as probe:
            probe.settimeout(0.2)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.01)
    raise TimeoutError(f"nothing listens on port {port} after {deadline_s} s")


@contextmanager
def running_valkey(folder: Path) -> Iterator[ValkeyPlan]:
    """A real Valkey that keeps its data in `folder`."""
    plan = ValkeyPlan(data_dir=folder, port=free_port())
    process = subprocess.Popen(plan.command(), stdout=subprocess.DEVNULL)
    try:
        wait_for_port(plan.port, process)
        yield plan
    finally:
        process.terminate()
        process.wait(timeout=10)


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyPlan]:
    """One real Valkey for the whole test session; tests keep apart by run id."""
    with running_valkey(tmp_path_factory.mktemp("valkey")) as plan:
        yield plan


@pytest.fixture
def redis_url(valkey: ValkeyPlan) -> str:
    return valkey.url


@pytest.fixture
def run_id() -> str:
    """A fresh run id: keys of two tests never meet."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with an untrained tiny policy, seed 0."""
    pytest.importorskip("torch")
    from trainer.sft.tiny_model import build_model, save_policy

    folder = tmp_path_factory.mktemp("policy") / "model"
    save_policy(build_model(seed=0), folder)
    return folder


@pytest.fixture(scope="session")
def chat_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a chat template."""
    pytest.importorskip("torch")
    from tests.support.chat_policy import save_chat_policy

    folder = tmp_path_factory.mktemp("chat") / "chat-policy"
    save_chat_policy(folder)
    return folder


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Processes in which functions run as ranks of a process group."""
    with RankPool() as pool:
        yield pool
