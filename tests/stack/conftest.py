"""Images built once a session, and stacks of a project of their own each."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.compose_stack import BUILD_DEADLINE_S, Stack, no_engine


@pytest.fixture(scope="session")
def engine() -> None:
    """A Docker engine, or the test is skipped with the reason."""
    if why := no_engine():
        pytest.skip(why)


@pytest.fixture(scope="session")
def images(engine: None) -> None:
    """All images that the stack needs on a CPU, built as a user builds them."""
    Stack("rollmesh-build").compose("build", deadline_s=BUILD_DEADLINE_S)


@pytest.fixture
def stack(images: None, tmp_path: Path) -> Iterator[Stack]:
    """A stack with keys of its own that is not up yet. Whatever is left of it at the end is taken down."""
    made = Stack(f"rollmesh-test-{uuid.uuid4().hex[:8]}", {"ROLLMESH_KEYS": str(tmp_path / "keys")})
    made.compose("run", "--rm", "keys")
    try:
        yield made
    finally:
        made.down()
