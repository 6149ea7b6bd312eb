"""Draws docs/images/dashboard-*.png: the dashboard in a real browser, on runs as tests make them.

python -m tests.support.dashboard_pictures [FOLDER]
"""

from __future__ import annotations

import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from services.dashboard.open_runs import OpenRuns
from tests.conftest import running_valkey
from tests.support.browser import launched, opened
from tests.support.dashboard_runs import LiveRun, dashboard, live_mesh, make_run
from tests.support.kept_rollouts import keep_sums
from tests.support.loop_thread import LoopThread

HERE = Path(__file__).parents[2] / "docs" / "images"
SIZE = {"width": 1280, "height": 860}
VIEWS = {"now": "live", "fleet": "live", "compare": "ended", "rollouts": "ended"}
"""View → on which runs it is drawn."""


@contextmanager
def shown(loop: LoopThread, folder: Path) -> Iterator[dict[str, str]]:
    """A dashboard on a run that runs, and one on three that have ended; name → address."""
    with ExitStack() as stack:
        valkey = stack.enter_context(running_valkey(_made(folder / "valkey")))
        run = LiveRun(valkey.url, uuid.uuid4().hex[:8], _made(folder / "live"))
        stack.enter_context(loop.during(live_mesh(run)))
        loop.call(run.hold_up("s1"))
        live = stack.enter_context(loop.during(dashboard(run.runs)))
        for name, seed, k in (("on-policy", 3, 0), ("two-steps-a", 1, 2), ("two-steps-b", 2, 2)):
            keep_sums(make_run(folder / "ended", name, seed=seed, settings=f"k = {k}\n").rollouts)
        ended = stack.enter_context(loop.during(dashboard(OpenRuns(root=folder / "ended"))))
        yield {"live": live, "ended": ended}


def draw(browser: Any, folder: Path) -> list[Path]:
    """The pictures, in `folder`."""
    drawn = []
    with tempfile.TemporaryDirectory() as scratch, LoopThread() as loop, shown(loop, Path(scratch)) as urls:
        for view, runs in VIEWS.items():
            with opened(browser, urls[runs], size=SIZE) as watched:
                page, path = watched.page, folder / f"dashboard-{view}.png"
                page.goto(f"{urls[runs]}/#/{view}")
                page.locator("#link[data-state]").wait_for()
                if view == "rollouts":
                    open_rollout(page)
                else:
                    page.locator("canvas, section[aria-label='Weight updates'] svg").first.wait_for()
                page.screenshot(path=path, full_page=view == "rollouts")
                drawn.append(path)
    return drawn


def open_rollout(page: Any) -> None:
    """The newest that was not right, beside its siblings."""
    page.get_by_role("textbox", name="Reward").fill("0")
    page.locator(".rollout-facts", has_text="reward 0 ").first.wait_for()
    page.locator(".rollout-facts", has_text="reward 1 ").first.wait_for(state="detached")
    page.locator(".rollout-row a").first.click()
    page.locator(".token.here").wait_for()
    page.get_by_role("button", name="Show side by side").click()
    page.locator(".sibling .token.here").nth(7).wait_for()


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


if __name__ == "__main__":
    with launched() as found:
        for picture in draw(found, Path(sys.argv[1]) if len(sys.argv) > 1 else HERE):
            sys.stdout.write(f"{picture}\n")
