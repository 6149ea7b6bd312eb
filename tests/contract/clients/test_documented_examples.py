"""The examples in the documents run as they stand: against a real server, with the packages that they name."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from rollout_server.engines.factory import make_engine
from tests.support.chat_policy import save_chat_policy
from tests.support.rollout_host import hosting, small_batch

ROOT = Path(__file__).parents[3]
ADDRESS = "http://127.0.0.1:8100"


@pytest.mark.parametrize("document", ["README.md", "docs/rollout-api.md"])
async def test_the_examples_of_a_document_run_one_after_the_other(
    document: str, redis_url: str, run_id: str, tmp_path: Path
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert blocks
    save_chat_policy(tmp_path / "chat")
    settings = small_batch(batch=16)
    engine = make_engine("torch", tmp_path / "chat", run_id, settings)
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=tmp_path / "chat", settings=settings) as host:
        names: dict[str, Any] = {}
        for block in blocks:
            code = compile(block.replace(ADDRESS, host.url), document, "exec")
            await asyncio.to_thread(exec, code, names)
