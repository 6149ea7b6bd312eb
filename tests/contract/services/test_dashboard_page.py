"""The dashboard's page in a real browser: every view, at both widths, light and dark; by keyboard; with hostile text."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.dashboard.open_runs import OpenRuns
from services.security.permissions import Keys
from services.supervisor.launch_plan import ValkeyPlan
from services.wire.run_metrics import StepMetrics, decode_step_metrics
from tests.support.browser import DESKTOP, PHONE, opened, serious_findings
from tests.support.dashboard_pictures import draw
from tests.support.dashboard_runs import HOSTILE, LiveRun, dashboard, learning_step, live_mesh, make_run
from tests.support.loop_thread import LoopThread
from tests.support.mesh_command import run_command

# A browser takes seconds for each view.
pytestmark = pytest.mark.slow

VIEWS = ("now", "compare", "fleet")
KEYS = Keys(agent="the-agent-key-of-this-test", admin="the-admin-key-of-this-test")
FIRST_VIEW_BYTES = 300 << 10


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs: `a` and `b` differ in the seed, `c` in K."""
    place = tmp_path_factory.mktemp("runs")
    make_run(place, "c", steps=40, settings="k = 0\n", done=False)
    make_run(place, "b", seed=2)
    make_run(place, "a", seed=1)
    return place


@pytest.fixture(scope="module")
def page_url(loop: LoopThread, place: Path) -> Iterator[str]:
    with loop.during(dashboard(OpenRuns(root=place))) as url:
        yield url


def open_view(watched: Any, view: str, run: str = "a") -> None:
    watched.page.goto(f"{watched.origin}/#/{view}?run={run}")
    watched.page.locator("main h1").wait_for(state="attached")
    watched.page.locator("#link[data-state]").wait_for()
    if view != "fleet":
        watched.page.locator("canvas").first.wait_for()


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_view_is_whole_and_has_no_serious_finding(
    browser: Any, page_url: str, view: str, dark: bool, size: dict[str, int]
) -> None:
    with opened(browser, page_url, size=size, dark=dark) as watched:
        open_view(watched, view)
        assert watched.page.evaluate("document.documentElement.dataset.theme") == ("dark" if dark else "light")
        assert watched.page.evaluate("document.documentElement.scrollWidth") <= size["width"], "nothing is cut off"
        assert serious_findings(watched.page) == []
        assert (watched.errors, watched.elsewhere) == ([], [])


def test_the_first_view_is_small(browser: Any, page_url: str) -> None:
    with opened(browser, page_url) as watched:
        open_view(watched, "now")
        watched.page.locator("canvas").nth(7).wait_for()
        assert 50_000 < watched.received <= FIRST_VIEW_BYTES


def test_the_numbers_of_now_are_those_of_the_file(browser: Any, page_url: str, place: Path) -> None:
    line = last_line(place / "a" / "metrics.jsonl")
    with opened(browser, page_url) as watched:
        open_view(watched, "now")
        shown = figures(watched.page)
    of_line = {name.removeprefix("line."): value for name, value in shown.items() if name.startswith("line.")}
    assert len(of_line) > 25
    assert of_line == {name: getattr(line, name) for name in of_line}


def test_every_view_is_reached_and_used_by_keyboard(browser: Any, page_url: str) -> None:
    with opened(browser, page_url) as watched:
        open_view(watched, "now")
        page = watched.page
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        reached = []
        for _ in range(12):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.textContent.trim() || document.activeElement.id"))
        assert [name for name in ("Now", "Rollouts", "Compare", "Fleet") if name in reached[:4]] == reached[:4]
        page.locator("nav a", has_text="Compare").focus()
        page.keyboard.press("Enter")
        page.locator("fieldset.runs input").first.wait_for()
        page.locator("fieldset.runs input").first.focus()
        page.keyboard.press("Space")
        page.locator("#theme").focus()
        page.keyboard.press("Enter")
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
        page.keyboard.press("Enter")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert watched.errors == []


def test_compare_shows_what_differs_and_one_band_for_seeds(browser: Any, page_url: str) -> None:
    with opened(browser, page_url) as watched:
        watched.page.goto(f"{page_url}/#/compare?run=a&with=a,b,c")
        watched.page.locator("canvas").first.wait_for()
        rows = watched.page.locator("div[aria-label^='Settings that differ'] tbody tr").all_inner_texts()
        assert [row.split() for row in rows] == [
            ["k", "2", "2", "0"],
            ["seed", "1", "2", "1"],
            ["steps", "60", "60", "40"],
        ]
        panel = watched.page.locator("section[aria-label='success of the batch']")
        entries = panel.locator(".legend .entry").all_inner_texts()
        assert len(entries) == 2
        assert entries[0].startswith("a and 1 of other seeds, lowest to highest")
        watched.page.select_option("#by", "tokens")
        watched.page.locator(".legend", has_text="trained tokens").first.wait_for()
        assert "by=tokens" in watched.page.url
        assert watched.errors == []


def test_hostile_text_is_shown_as_text(browser: Any, loop: LoopThread, tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", steps=3, settings=f"k = 2\n[tracking]\nproject = {json.dumps(HOSTILE)}\n")
    make_run(tmp_path, "<b>bold<script>", steps=3)
    million = "A" * 1_000_000 + HOSTILE
    last = learning_step(4, 4, warnings={HOSTILE: HOSTILE, "long": million}, update_state=HOSTILE)
    with folder.metrics.open("ab") as file:
        file.write(msgspec.json.encode(last) + b"\n")
    with loop.during(dashboard(OpenRuns(root=tmp_path))) as url, opened(browser, url) as watched:
        open_view(watched, "now", "run")
        banner = watched.page.locator(".banner")
        assert "<script>document.title='owned'</script>" in banner.inner_text()
        assert "⟨202E⟩esrever␛[2J⟨200B⟩" in banner.inner_text()
        assert len(banner.inner_text()) < 3_000, "a text without end is shortened"
        assert watched.page.locator("img, main script").count() == 0
        open_view(watched, "compare", "run")
        watched.page.locator("fieldset.runs label", has_text="<b>bold<script>").wait_for()
        assert watched.page.title() == "Compare · run"
        assert watched.errors == []


def test_a_run_whose_settings_cannot_be_read_says_why(browser: Any, loop: LoopThread, tmp_path: Path) -> None:
    make_run(tmp_path, "run", steps=3).config.write_text("steps = [")
    with loop.during(dashboard(OpenRuns(root=tmp_path))) as url, opened(browser, url) as watched:
        open_view(watched, "now", "run")
        watched.page.locator(".banner .bad", has_text="Shown without its settings").wait_for()


def test_without_a_key_there_is_the_login_alone(browser: Any, loop: LoopThread, place: Path) -> None:
    assert KEYS.agent is not None and KEYS.admin is not None
    with loop.during(dashboard(OpenRuns(root=place), KEYS)) as url, opened(browser, url) as watched:
        page = watched.page
        page.goto(f"{url}/")
        assert page.url == f"{url}/login"
        page.fill("#key", "a-key-that-opens-nothing")
        page.keyboard.press("Enter")
        page.locator("#refused", has_text="opens nothing").wait_for()
        assert serious_findings(page) == []
        page.fill("#key", KEYS.agent)
        page.keyboard.press("Enter")
        page.locator("canvas").first.wait_for()
        assert KEYS.agent not in page.content()
        assert page.evaluate("document.cookie") == "", "no script reads the login"
        page.locator("#logout").click()
        page.wait_for_url(f"{url}/login")
        page.goto(f"{url}/#/fleet")
        assert page.url.partition("#")[0] == f"{url}/login"


def last_line(path: Path) -> StepMetrics:
    line = decode_step_metrics(path.read_bytes().splitlines()[-1])
    assert line is not None
    return line


def figures(page: Any) -> dict[str, Any]:
    """Path in the state → the value behind what is shown."""
    found = page.evaluate(
        "[...document.querySelectorAll('[data-figure]')].map((each) => [each.dataset.figure, each.dataset.value])"
    )
    return {name: json.loads(value) for name, value in found}


@pytest.fixture(scope="module")
def live(
    loop: LoopThread, valkey: ValkeyPlan, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, LiveRun]]:
    """The dashboard on a run that runs."""
    run = LiveRun(valkey.url, f"test-{uuid.uuid4().hex[:12]}", tmp_path_factory.mktemp("live"))
    with loop.during(live_mesh(run)), loop.during(dashboard(run.runs)) as url:
        loop.call(run.hold_up("s1"))
        yield url, run


def test_the_numbers_of_now_are_those_of_status_and_of_the_file(browser: Any, live: tuple[str, LiveRun]) -> None:
    url, run = live
    status = run_command(["status", "--json", "--run-id", run.run_id, "--redis-url", run.redis_url])
    state = {**json.loads(status.out), "line": json.loads(run.folder.metrics.read_bytes().splitlines()[-1])}
    with opened(browser, url) as watched:
        open_view(watched, "now", "live")
        shown = figures(watched.page)
        of_state = {name: value for name, value in shown.items() if name.split(".")[0] in state}
        assert {name.split(".")[0] for name in of_state} == {"line", "trainer", "queue", "store"}
        told = ("line.success", "line.reward", "line.response_length", "line.tokens_per_s", "line.staleness_mean")
        assert {*told, "trainer.busy_share", "queue.in_stream", "queue.dropped", "line.commit_ms"} <= set(of_state)
        for name, value in of_state.items():
            found: Any = state
            for part in name.split("."):
                found = found[part]
            assert value == found, name
        assert shown["stall_ms"] == 6.5
        waits = watched.page.locator("section[aria-label='Why the trainer waits']")
        assert "15 of 16 groups are complete" in waits.inner_text()
        assert "group 17 on s1, 5 siblings finished" in waits.inner_text()
        assert (waits.locator("a").get_attribute("href") or "").endswith("group=g-17")
        assert watched.errors == []


@pytest.mark.parametrize("view", ["now", "fleet"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_live_view_has_no_serious_finding(
    browser: Any, live: tuple[str, LiveRun], view: str, size: dict[str, int]
) -> None:
    with opened(browser, live[0], size=size, dark=size is PHONE) as watched:
        open_view(watched, view, "live")
        watched.page.locator("section[aria-label='Weight updates'] svg, canvas").first.wait_for()
        assert watched.page.evaluate("document.documentElement.scrollWidth") <= size["width"], "nothing is cut off"
        assert serious_findings(watched.page) == []
        assert (watched.errors, watched.elsewhere) == ([], [])


def test_an_action_is_asked_for_and_confirmed(browser: Any, live: tuple[str, LiveRun]) -> None:
    with opened(browser, live[0]) as watched:
        open_view(watched, "fleet", "live")
        page = watched.page
        servers = page.locator("section[aria-label='Rollout servers'] tbody tr")
        assert "38 %" in servers.first.inner_text(), "what it holds of its memory for keys and values"
        page.get_by_role("button", name="Verify weights").click()
        assert serious_findings(page) == []
        page.get_by_role("button", name="Leave it").click()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url) if request.method == "POST" else None)
        page.get_by_role("button", name="Hold decoding").click()
        page.keyboard.press("Escape")
        assert asked == []
        page.get_by_role("button", name="Hold decoding").click()
        page.locator("dialog .primary").click()
        # This bus has no such route: what it says is shown.
        page.locator(".answer .bad").wait_for()
        assert asked == [f"{live[0]}/api/runs/live/actions/hold"]


def test_a_page_tells_of_a_dashboard_that_is_gone(browser: Any, loop: LoopThread, place: Path) -> None:
    with opened(browser, "") as watched:
        with loop.during(dashboard(OpenRuns(root=place))) as url:
            watched.origin = url
            open_view(watched, "now")
        watched.page.locator("#link[data-state='away']").wait_for(timeout=3000)


def test_the_pictures_of_the_documentation_can_be_drawn_anew(browser: Any, tmp_path: Path) -> None:
    drawn = draw(browser, tmp_path)
    kept = Path(__file__).parents[3] / "docs" / "images"
    assert {path.name for path in drawn} <= {path.name for path in kept.glob("dashboard-*.png")}
    for path in drawn:
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert path.stat().st_size > 40_000, "it shows something"
