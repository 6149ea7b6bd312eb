"""What the tests of the dashboard's pages share: a browser, and a loop that serves while the browser blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.browser import launched
from tests.support.loop_thread import LoopThread


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as found:
        yield found


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    with LoopThread() as found:
        yield found
