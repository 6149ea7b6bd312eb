"""A mesh for a trainer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.trainer_process import TrainerMesh


@pytest.fixture
def one_thread() -> Iterator[None]:
    """With torch's sums in the order that the trainer's process makes them in."""
    from tests.support.trainer_process import in_one_thread

    with in_one_thread():
        yield


@pytest.fixture
async def mesh(redis_url: str, run_id: str, tmp_path: Path, tiny_policy: Path) -> AsyncIterator[TrainerMesh]:
    from services.config.load import dump_settings
    from services.host.files import remove_shm_files
    from services.run_store.client import connect
    from tests.support.trainer_process import SETTINGS, TrainerMesh

    redis = connect(redis_url)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.toml").write_text(dump_settings(SETTINGS))
    async with AsyncExitStack() as stack:
        # What a trainer that was killed leaves in shared memory is the supervisor's to remove; there is none here.
        stack.callback(remove_shm_files, run_id)
        stack.push_async_callback(redis.aclose)
        mesh = TrainerMesh(run_id, redis, redis_url, run_dir, tiny_policy)
        await mesh.start(stack)
        yield mesh
