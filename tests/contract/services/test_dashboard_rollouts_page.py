"""The view Rollouts in a real browser: found and opened in three clicks, read by pointer and keyboard."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.dashboard.open_runs import OpenRuns
from services.run_store.rollouts.record import KeptRollout, SegmentColumns
from services.run_store.rollouts.search import RolloutReader, Search
from services.run_store.rollouts.tokens import segment_tokens
from services.run_store.rollouts.writer import Entry, RolloutWriter
from services.wire.packed import pack_logprobs, pack_mask, pack_tokens
from services.wire.trajectory import Segment, VersionSpan
from tests.support.browser import DESKTOP, PHONE, opened, serious_findings
from tests.support.dashboard_runs import HOSTILE, dashboard, make_run
from tests.support.kept_rollouts import keep_text, write_steps
from tests.support.loop_thread import LoopThread
from tests.support.trajectories import a_rollout

# A browser takes seconds for each view.
pytestmark = pytest.mark.slow

MOST_NODES = 15_000
WINDOW_IN_SIGHT = """() => {
  const area = document.querySelector(".tokens").getBoundingClientRect();
  return [...document.querySelectorAll(".window")].some((each) => {
    const { top, bottom } = each.getBoundingClientRect();
    return each.children.length > 0 && top < area.bottom && bottom > area.top;
  });
}"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    write_steps(make_run(place, "a", steps=100).rollouts, range(1, 101))
    return place


@pytest.fixture(scope="module")
def page_url(loop: LoopThread, place: Path) -> Iterator[str]:
    with loop.during(dashboard(OpenRuns(root=place))) as url:
        yield url


def nodes(page: Any) -> int:
    return int(page.evaluate("document.querySelectorAll('*').length"))


def steps_shown(page: Any) -> list[str]:
    return [text.split(" · ")[0] for text in page.locator(".rollout-facts").all_inner_texts()]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_list_and_one_rollout_are_whole_and_have_no_serious_finding(
    browser: Any, page_url: str, dark: bool, size: dict[str, int]
) -> None:
    with opened(browser, page_url, size=size, dark=dark) as watched:
        page = watched.page
        page.goto(f"{page_url}/#/rollouts?run=a")
        page.locator(".rollout-row a").first.wait_for()
        width = "document.documentElement.scrollWidth"
        assert (serious_findings(page), page.evaluate(width) <= size["width"]) == ([], True)
        page.locator(".rollout-row a").first.click()
        page.locator(".token").first.wait_for()
        for kind in ("advantage", "logprob", "ratio", "version", "mask", "none"):
            page.get_by_label("Colour by").select_option(kind)
            assert serious_findings(page) == [], kind
        page.get_by_role("button", name="Show side by side").click()
        page.locator(".sibling .token").first.wait_for()
        assert (serious_findings(page), page.evaluate(width) <= size["width"]) == ([], True)
        assert (watched.errors, watched.elsewhere) == ([], [])


def test_any_rollout_is_three_clicks_away_and_the_address_opens_it(browser: Any, page_url: str, place: Path) -> None:
    reader = RolloutReader(place / "a" / "rollouts")
    with opened(browser, page_url) as watched:
        page = watched.page
        page.goto(f"{page_url}/#/now?run=a")
        page.get_by_role("link", name="Rollouts").click()
        page.get_by_label("Text").fill("answer 301-7")
        page.locator("p[role=status]", has_text="1 found of 1,000").wait_for()
        assert "text=answer+301-7" in page.url
        page.locator(".rollout-row a").click()
        page.get_by_role("heading", name="Step 43, test, member 7 of group 43").wait_for()
        found = reader.search(Search(text="answer 301-7")).rollouts[0].id
        assert f"rollout={found}" in page.url
        address = page.url
        page.go_back()
        page.locator("p[role=status]", has_text="1 found of 1,000").wait_for()
        page.get_by_role("button", name="Clear").click()
        page.locator("p[role=status]", has_text="1,000 found of 1,000").wait_for()
        page.get_by_label("Order").select_option("step-up")
        page.locator(".rollout-facts", has_text="step 1 ·").first.wait_for()
        page.get_by_label("Step").fill("x")
        page.locator("p[role=status]", has_text="is no number and no range").wait_for()
        page.goto("about:blank")
        page.goto(address)
        page.get_by_role("heading", name="Step 43, test, member 7 of group 43").wait_for()
        assert [error for error in watched.errors if "422" not in error] == []


def test_rows_out_of_sight_do_not_exist_however_far_one_scrolls(browser: Any, page_url: str) -> None:
    with opened(browser, page_url) as watched:
        page = watched.page
        page.goto(f"{page_url}/#/rollouts?run=a&sort=step-up")
        page.locator(".rollout-row a").first.wait_for()
        most = nodes(page)
        scroller = page.locator(".rollout-scroller")
        for step in range(4, 101, 4):
            scroller.evaluate("(node, top) => (node.scrollTop = top)", (step - 1) * 10 * 64)
            page.locator(".rollout-facts", has_text=f"step {step} ·").first.wait_for()
            most = max(most, nodes(page))
        assert most < 500
        scroller.evaluate("(node) => (node.scrollTop = 1e9)")
        page.locator(".rollout-facts", has_text="step 100 ·").last.wait_for()
        # By keyboard, from row to row.
        page.locator(".rollout-row a").last.focus()
        for _ in range(12):
            page.keyboard.press("ArrowUp")
        assert "step 99 " in page.evaluate("document.activeElement.textContent").partition("·")[0] + " "
        page.keyboard.press("Enter")
        page.locator(".token").first.wait_for()
        assert watched.errors == []


def test_a_token_is_read_by_pointer_and_by_keyboard(browser: Any, page_url: str, place: Path) -> None:
    reader = RolloutReader(place / "a" / "rollouts")
    with opened(browser, page_url) as watched:
        page = watched.page
        for number in (3, 404, 998):
            tokens = segment_tokens(reader.kept(number), 0)
            page.goto(f"{page_url}/#/rollouts?run=a&rollout={number}")
            page.locator(f".window .token >> nth={len(tokens.ids) - 1}").wait_for()
            readout = page.locator(".readout").first
            page.locator(".tokens").first.focus()
            page.keyboard.press("Home")
            for place_ in range(len(tokens.ids)):
                page.locator(".window .token").nth(place_).hover()
                hovered = said(readout.inner_text())
                if place_:
                    page.keyboard.press("ArrowRight")
                assert said(readout.inner_text()) == hovered, "the keyboard reads the same"
                assert hovered["token"] == str(place_) and hovered["id"] == str(tokens.ids[place_])
                if not tokens.sampled[place_]:
                    assert "not sampled" in hovered
                    continue
                assert hovered["version"] == str(tokens.version[place_])
                assert float(hovered["logprob"]) == pytest.approx(float(tokens.logprob[place_]), rel=1e-6)
                assert float(hovered["advantage"]) == pytest.approx(float(tokens.advantage[place_]), rel=1e-6)
                if np.isnan(tokens.current[place_]):
                    assert "no ratio" in hovered
                else:
                    assert float(hovered["ratio"]) == pytest.approx(float(tokens.ratio[place_]), rel=1e-6)
                assert ("trained" in hovered) == bool(tokens.trained[place_])
        assert watched.errors == []


def said(text: str) -> dict[str, str]:
    """Fact → value, of what is read out of a token."""
    facts = [fact for fact in text.split(" · ") if not fact.startswith("“")]
    parted = [fact.rpartition(" ") if fact[-1].isdigit() else (fact, "", "") for fact in facts]
    return {name: value for name, _, value in parted}


def test_turns_are_shown_over_seconds_where_these_are_known_else_over_tokens(
    browser: Any, loop: LoopThread, tmp_path: Path
) -> None:
    folder = make_run(tmp_path, "run", steps=2).rollouts
    keep_text(folder, 1, "asked and answered", sampled=8, times=(1.25, 1.75))
    keep_text(folder, 2, "asked and answered", sampled=8)
    with loop.during(dashboard(OpenRuns(root=tmp_path))) as url, opened(browser, url) as watched:
        page = watched.page
        turns = page.locator("section[aria-label='Timeline']")
        page.goto(f"{url}/#/rollouts?run=run&rollout=1")
        turns.locator(".turn").first.wait_for()
        assert turns.locator(".turn-time").all_inner_texts() == ["0.0 s to 0.3 s", "0.3 s to 0.8 s"]
        assert turns.locator(".time-axis").inner_text().split("\n") == ["0.0 s", "0.3 s", "0.5 s", "0.8 s", "1.0 s"]
        bars = "(each) => [...each.querySelectorAll('.turn-bar')].map((bar) => bar.style.getPropertyValue('--from'))"
        assert turns.evaluate(bars) == ["0%", "25%"]
        assert serious_findings(page) == []
        page.goto(f"{url}/#/rollouts?run=run&rollout=2")
        turns.get_by_text("is not known, or there was one alone").wait_for()
        assert turns.locator(".turn-time, .time-axis").count() == 0
        assert watched.errors == []


def test_rollouts_of_newer_steps_are_offered(browser: Any, loop: LoopThread, tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", steps=4)
    write_steps(folder.rollouts, range(1, 4))
    with loop.during(dashboard(OpenRuns(root=tmp_path))) as url, opened(browser, url) as watched:
        page = watched.page
        page.goto(f"{url}/#/rollouts?run=run")
        newer = page.get_by_role("button", name="Show newer rollouts")
        newer.wait_for()
        assert steps_shown(page)[0] == "step 3"
        write_steps(folder.rollouts, [4])
        newer.click()
        page.locator(".rollout-facts", has_text="step 4 ·").first.wait_for()
        assert not newer.is_visible() and watched.errors == []


def test_hostile_text_is_shown_as_text(browser: Any, loop: LoopThread, tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", steps=3)
    keep_text(folder.rollouts, 1, f"{HOSTILE}\n{HOSTILE}", sampled=len(HOSTILE), task=HOSTILE)
    with loop.during(dashboard(OpenRuns(root=tmp_path))) as url, opened(browser, url) as watched:
        page = watched.page
        page.goto(f"{url}/#/rollouts?run=run")
        row = page.locator(".rollout-row")
        row.locator("a").wait_for()
        assert "<script>document.title='owned'</script>" in row.inner_text()
        assert "⟨202E⟩esrever␛[2J⟨200B⟩" in row.inner_text()
        row.locator("a").click()
        page.locator(".token").first.wait_for()
        shown = page.locator(".tokens").first.inner_text()
        assert "<img src=x onerror=" in shown and "⟨202E⟩esrever␛[2J⟨200B⟩⏎" in shown
        page.get_by_role("button", name="Show side by side").count()
        assert page.locator("main img, main script").count() == 0
        assert page.title() == "Rollouts · run"
        assert (watched.errors, watched.elsewhere) == ([], [])


def test_a_rollout_of_a_million_characters_in_one_line_is_read_in_windows(
    browser: Any, loop: LoopThread, tmp_path: Path
) -> None:
    folder = make_run(tmp_path, "run", steps=3)
    count = 200_000
    ids = (np.arange(count) % 40).astype(np.int32)
    mask = np.repeat([0, 1], [100, count - 100])
    segment = Segment(pack_tokens(ids), pack_mask(mask), pack_logprobs(-0.5 * mask), [VersionSpan(100, count - 100, 3)])
    kept = KeptRollout(
        step=1, version=3, k=2, trained=True, trajectory=a_rollout([segment], 1.0),
        columns=[SegmentColumns.of(b"", pack_logprobs(np.linspace(-1, 1, count - 100)))],
    )  # fmt: skip
    pieces = {token: b"word%02d" % token for token in range(40)}
    writer = RolloutWriter(folder.rollouts, 1 << 30)
    line = "".join(pieces[token].decode() for token in ids.tolist())
    writer.append(1, 3, 0.0, 1, [Entry(kept, line[:600], line[600:], 0.0)], pieces)
    writer.close()
    with loop.during(dashboard(OpenRuns(root=tmp_path))) as url, opened(browser, url) as watched:
        page, began = watched.page, time.monotonic()
        page.goto(f"{url}/#/rollouts?run=run&rollout=1")
        page.locator(".token.here").wait_for()
        area = page.locator(".tokens").first
        area.focus()
        most = nodes(page)
        for index in range(10_000, count, 10_000):
            area.evaluate("(node, share) => (node.scrollTop = share * node.scrollHeight)", index / count)
            page.wait_for_function(WINDOW_IN_SIGHT)
            most = max(most, nodes(page))
        page.keyboard.press("End")
        page.locator(".readout", has_text=f"token {count - 1} ").wait_for()
        page.keyboard.press("Home")
        page.locator(".readout", has_text="token 0 ").wait_for()
        assert max(most, nodes(page)) < MOST_NODES, "far less than its tokens"
        assert time.monotonic() - began < 60
        assert watched.errors == []
