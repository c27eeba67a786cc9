"""The web app as people use it, in Chromium, against an aggregator with a planted fault."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from looking import (
    FAULTS,
    WIDTH,
    Served,
    answers,
    as_started,
    looks_right,
    loops,
    press,
    screen,
    shift,
    shows,
    text,
    transferred,
    until,
    wear,
)
from played import Played, look
from ray_cluster import is_actor
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from traceml_ray.launchers.cluster import free_port
from traceml_ray.stages import STAGES

pytestmark = pytest.mark.usefixtures("quiet")

EXAMPLE = Path(__file__).parents[2] / "examples/train_gpt.py"
PAGES = {
    "/": "Overview",
    "/node/host-1": "Node host-1",
    "/rank/5": "Rank 5 on host-1",
    "/ranks": "Ranks",
    "/memory": "Memory",
    "/signals": "Signals",
    "/profiles": "Profiles",
    "/step/60": "Step 60",
    "/events": "Events",
    "/sessions": "Sessions",
    "/ledger": "Health of the monitor",
}


BARS = "return document.querySelector('#step-gantt .js-plotly-plot').data.map(bars => bars.x.length)"
OPTIONS = "return [...document.querySelectorAll('#places option')].map(option => option.value)"
OF_HOST_0 = [f"rank {rank} on host-0" for rank in range(4)]


def aggregator(launcher: int) -> psutil.Process:
    """Return the aggregator's process, of that launcher's own Ray."""
    members = psutil.Process(launcher).children(recursive=True)
    return next(one for one in members if is_actor(one, "Aggregator"))


def drawn(browser: webdriver.Chrome) -> None:
    until(
        browser,
        lambda: browser.execute_script("return document.querySelector('#heat .js-plotly-plot').data.length"),
    )


def refresh(browser: webdriver.Chrome, served: Served) -> None:
    """Play a second, and wait until it is shown."""

    def newest() -> str:
        return text(browser, "coverage").rpartition("step ")[2]

    before = newest()
    served.play(1)
    until(browser, lambda: newest() != before)
    drawn = "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(arguments[0], 50)))"
    browser.execute_async_script(drawn)


def point(browser: webdriver.Chrome, row: int, rows: int = 8) -> ActionChains:
    """Point at a row of the heatmap."""
    drawn(browser)
    plot = browser.find_element(By.CSS_SELECTOR, "#heat .nsewdrag")
    down = plot.size["height"] * ((row + 0.5) / rows - 0.5)
    return ActionChains(browser).move_to_element_with_offset(plot, plot.size["width"] // 3, round(down))


def test_page_says_what_it_waits_for_before_the_first_step(browser, served):
    browser.get(served.url + "/")
    shows(browser, "state-badge", "no session")
    shows(browser, "page", "python -m traceml_ray.launch")
    served.poll()
    shows(browser, "state-badge", "starting")
    shows(browser, "verdict-headline", "The run is starting: Ray is up, waiting for the first step (0 s)")
    shows(browser, "page", "updates after the first step")


def test_verdict_names_the_rank_soon_after_the_fault(browser, served):
    served.play(11)
    shows(browser, "verdict-headline", "ealthy")
    shows(browser, "state-badge", "live")
    served.play(10)  # the fault begins at step 60
    shows(browser, "verdict-headline", "rank 5")
    assert "data" in text(browser, "verdict-headline")
    assert "%" in text(browser, "verdict-cost")
    assert browser.find_element(By.CSS_SELECTOR, "[aria-live=polite] #verdict-headline")


@pytest.mark.parametrize("path", PAGES)
def test_page_has_title_verdict_and_data_and_no_fault(browser, served, path):
    browser.get(served.url + path)
    until(
        browser, lambda: browser.find_element(By.TAG_NAME, "h1").get_attribute("textContent") == PAGES[path]
    )
    shows(browser, "verdict-headline", "rank 5")
    refresh(browser, served)
    assert loops(browser, lambda: refresh(browser, served)) < 1.2  # 0.07 to 0.5
    assert shift(browser) < 0.1
    try:
        for width, theme in ((1440, "light"), (1280, "dark"), (414, "light")):
            screen(browser, width)
            wear(browser, theme)
            until(browser, lambda: browser.execute_script(WIDTH) <= 0)  # once the charts have followed
            assert browser.execute_script(FAULTS) == []
    finally:
        as_started(browser)


UNDRAWN = """
return [...document.querySelectorAll("main .graph")].filter((box) => !box.querySelector(".main-svg")).length;
"""
ON_PAPER = """
window.dispatchEvent(new Event("beforeprint"));
const plots = [...document.querySelectorAll("main .main-svg")];
const wide = plots.map((plot) => plot.getBoundingClientRect().right);
window.dispatchEvent(new Event("afterprint"));
const one = document.querySelector("#timeline .js-plotly-plot");
return [Math.max(...wide), one.clientWidth - one.querySelector(".main-svg").getBoundingClientRect().width];
"""
PICTURE = """
const done = arguments[0], { click } = HTMLAnchorElement.prototype;
HTMLAnchorElement.prototype.click = function () {
  HTMLAnchorElement.prototype.click = click;
  const image = new Image();
  image.onload = () => done([this.download, image.naturalWidth, image.naturalHeight]);
  image.src = this.href;
};
document.querySelector("[data-png=timeline]").click();
"""
NARROW = """
const bar = document.querySelector("#nav").getBoundingClientRect();
const tabs = [...document.querySelectorAll("#nav a")].map((tab) => tab.getBoundingClientRect());
const cell = document.querySelector("#event-list tbody tr td:last-child"), row = cell.parentElement;
return [tabs.every(({ right, bottom }) => right <= innerWidth && bottom <= bar.bottom + 1),
  cell.getBoundingClientRect().width / row.getBoundingClientRect().width];
"""


def test_page_is_whole_on_paper_on_a_phone_and_as_pictures(browser, served):
    browser.get(served.url + "/node/host-1")
    drawn_all = lambda: browser.execute_script(UNDRAWN) == 0  # noqa: E731
    until(browser, lambda: browser.find_elements(By.CSS_SELECTOR, "main .graph"))
    until(browser, drawn_all)  # without scrolling to them
    browser.get(served.url + "/")
    drawn(browser)
    until(browser, drawn_all)
    sheet = 190 / 25.4 * 96  # mm of A4 without margins, px
    right, left_over = browser.execute_script(ON_PAPER)
    assert right <= sheet + 1 and abs(left_over) < 2
    name, width, height = browser.execute_async_script(PICTURE)
    assert name == "played-overview-timeline.png" and width > 400 and height > 300
    try:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        gone = "return getComputedStyle(document.querySelector(arguments[0])).display"
        assert [browser.execute_script(gone, one) for one in ("#nav", "#theme", "[data-png]")] == ["none"] * 3
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
        screen(browser, 390)
        until(browser, lambda: browser.execute_script(WIDTH) <= 0)
        within, share = browser.execute_script(NARROW)
        assert within and share > 0.9
    finally:
        as_started(browser)


def test_first_visit_and_reload_are_light(browser, served):
    served.play(4)  # the page has what it shows, also where this test is the first
    browser.execute_cdp_cmd("Network.clearBrowserCache", {})
    for most in (1_000_000, 50_000):
        browser.get(served.url + "/")
        drawn(browser)
        assert 1_000 < transferred(browser) < most


def test_rank_page_draws_the_rows_of_gpu_and_host_under_each_other(browser, tmp_path):
    served = Served(Played(tmp_path / "device", 4, per_node=2, device=True, late=3))
    served.play(6)
    bars = "return document.querySelector('#rank-rows .js-plotly-plot').data.map(bar => [bar.name, ...bar.y])"
    try:
        for width, height in ((1440, 900), (390, 844)):
            screen(browser, width, height)
            browser.get(served.url + "/rank/3")
            stages = until(browser, lambda: browser.execute_script(bars))
            assert [name for name, *_ in stages] == [*STAGES]
            assert all(host.startswith("host, ") and gpu.startswith("GPU, ") for _, host, gpu in stages)
            until(browser, lambda: browser.execute_script(WIDTH) <= 0)  # once the chart has followed
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.get("about:blank")
        served.close()


def test_trouble_is_said_where_a_person_looks(browser, tmp_path):
    """A rank is killed, then all are dead; a session's file is deleted; two sessions beside each other."""
    for name, onset in (("before", 20), ("gone", 20)):
        earlier = Played(tmp_path / name, onset=onset)
        earlier.play(60)
        earlier.end()
    served = Served(Played(tmp_path / "job", onset=40))
    try:
        served.play(16)
        served.played.dies(5, -9)
        served.poll()
        killed = "Killed by SIGKILL at ", ", after step 79, in forward"
        looks_right(browser, served.url + "/", "Rank lost", "ending", "Rank 5 has ended")
        looks_right(browser, served.url + "/rank/5", *killed, "It ended first")
        looks_right(browser, served.url + "/node/node-1", *killed)
        for rank in (0, 1, 2, 3, 4, 6, 7):
            served.played.dies(rank, 1, "RuntimeError: connection closed by peer")
        served.played.end(1)
        served.poll()
        looks_right(browser, served.url + "/events", "First cause", "What followed", "connection closed")
        (tmp_path / "gone/session.sqlite").unlink()
        missing = "Session 'gone' cannot be read: ", "before"
        looks_right(browser, served.url + "/rank/5?session=gone", *missing)
        assert "Rank lost" not in text(browser, "react-entry-point")
        both = "A: before", "B: job", "median step"
        looks_right(browser, served.url + "/sessions?a=before&b=job", *both)
    finally:
        browser.get("about:blank")
        served.close()


def test_tooltip_of_the_heatmap_has_the_exact_time(browser, served):
    browser.get(served.url + "/")
    drawn(browser)

    def pointed() -> bool:
        """A chart that was drawn anew meanwhile says nothing before the mouse moves again."""
        point(browser, 5).perform()
        return "rank 5 (host-1)" in text(browser, "heat-tip")

    until(browser, pointed)
    shows(browser, "heat-tip", "the median rank 19.")


def test_click_on_the_heatmap_opens_the_rank_and_a_reload_keeps_it(browser, served):
    browser.get(served.url + "/?stage=data")
    point(browser, 5).click().perform()
    shows(browser, "rank-title", "Rank 5 on host-1")
    assert browser.current_url.startswith(served.url + "/rank/5?step=")
    browser.refresh()
    shows(browser, "rank-title", "Rank 5 on host-1")
    step = browser.current_url.partition("step=")[2]
    press(browser, By.LINK_TEXT, f"step {step} of all ranks")
    shows(browser, "step-title", f"Step {step}")
    shows(browser, "trail", f"Clusterhost-1rank 5step {step}")
    until(browser, lambda: browser.execute_script(BARS) == 7 * [8])
    shows(browser, "step-facts", "rank 5 (host-1), 1")
    press(browser, By.LINK_TEXT, "← previous")
    shows(browser, "step-title", f"Step {int(step) - 1}")
    browser.back()
    browser.back()
    browser.back()
    until(browser, lambda: "on" in browser.find_element(By.LINK_TEXT, "data").get_attribute("class").split())


def test_card_opens_the_node_by_keyboard(browser, served):
    browser.get(served.url + "/")
    card = "#node-cards a[href='/node/node-1']"
    until(browser, lambda: browser.find_element(By.CSS_SELECTOR, card).send_keys("\n") is None)
    shows(browser, "node-title", "Node host-1")


RANGES = """return Object.fromEntries(["heat", "timeline", "exposed", "skew"].map((id) => {
    const { xaxis } = document.querySelector(`#${id} .js-plotly-plot`)._fullLayout;
    return [id, [...xaxis.range, xaxis._offset, xaxis._length]];
}))"""


def drag(browser: webdriver.Chrome, chart: str, begin: float, end: float) -> None:
    """Draw a range, in shares of the chart's width."""
    plot = browser.find_element(By.CSS_SELECTOR, f"#{chart} .nsewdrag")
    wide = plot.size["width"]
    press = ActionChains(browser).move_to_element_with_offset(plot, round(wide * (begin - 0.5)), 0)
    press.click_and_hold().move_by_offset(round(wide * (end - begin)), 0).release().perform()


def shown(browser: webdriver.Chrome) -> tuple[float, float]:
    """The steps that all charts show, with their edges at the same pixels where they are under each other."""
    ranges = browser.execute_script(RANGES)
    assert len({tuple(axis_range[:2]) for axis_range in ranges.values()}) == 1, ranges
    assert len({tuple(axis_range[2:]) for name, axis_range in ranges.items() if name != "skew"}) == 1, ranges
    return ranges["heat"][0], ranges["heat"][1]


def test_one_range_drives_every_chart_and_the_url(browser, served):
    """A brush on the spine, a zoom in a chart, a lane: charts stay aligned to the pixel."""
    screen(browser, 1440, 1800)  # charts that are out of sight follow when they are seen
    try:
        browser.get(served.url + "/")
        drawn(browser)
        newest = look(served.pages, "header")["step"]
        until(browser, lambda: shown(browser) == (0.5, newest + 0.5))  # once all are drawn
        drag(browser, "spine", 0.25, 0.75)
        until(browser, lambda: "to=" in browser.current_url)
        low, high = until(browser, lambda: (axis_range := shown(browser))[1] < newest and axis_range)
        assert newest * 0.2 < low < newest * 0.3 and newest * 0.7 < high < newest * 0.8
        for chart in ("timeline", "heat"):
            before = browser.current_url
            drag(browser, chart, 0.3, 0.8)
            until(browser, lambda before=before: browser.current_url != before)
            inner = until(browser, lambda high=high: (axis_range := shown(browser))[1] < high and axis_range)
            assert low < inner[0] < inner[1] < high
            low, high = inner
        served.play(1)
        shows(browser, "coverage", f"step {newest + 5}")
        assert shown(browser) == (low, high)
        press(browser, By.CSS_SELECTOR, "#node-cards a")  # the range goes along
        shows(browser, "node-title", "Node")
        assert f"from={low + 0.5:.0f}" in browser.current_url
        browser.back()
        drawn(browser)
        crosses = (
            "return ['spine', 'heat', 'skew'].map((id) => document.getElementById(id).closest('.graph')"
            ".style.getPropertyValue('--cross')).filter((left) => parseFloat(left) > 50).length"
        )
        moved = ActionChains.move_to_element
        on_chart(browser, "timeline", moved, lambda: browser.execute_script(crosses) == 3)
        double = ActionChains.double_click  # where a machine makes the two clicks too slowly they are none
        on_chart(browser, "timeline", double, lambda: browser.current_url == served.url + "/")
        lane = browser.find_element(By.CSS_SELECTOR, "#lanes a").get_attribute("textContent")
        assert "rank 5" in lane
        until(browser, lambda: browser.find_element(By.CSS_SELECTOR, "#lanes a").send_keys("\n") is None)
        until(browser, lambda: "from=" in browser.current_url and shown(browser)[0] > 0.5)
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def on_chart(
    browser: webdriver.Chrome, chart: str, act: Callable[..., ActionChains], seen: Callable[[], Any]
) -> Any:
    """
    Do with the mouse what is done to a chart, until `seen` returns something true, and return that: a chart
    may be drawn anew at any time, and then knows of nothing that was done before.
    """

    def done() -> Any:
        act(ActionChains(browser), browser.find_element(By.CSS_SELECTOR, f"#{chart} .nsewdrag")).perform()
        return seen()

    return until(browser, done)


def touch(browser: webdriver.Chrome, *points: tuple[float, float]) -> None:
    """Put a finger down, move it, and lift it."""
    for index, (x, y) in enumerate(points):
        event = {"type": "touchMove" if index else "touchStart", "touchPoints": [{"x": x, "y": y}]}
        browser.execute_cdp_cmd("Input.dispatchTouchEvent", event)
    browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


RESTS = "const [tell] = arguments, before = scrollY; setTimeout(() => tell(scrollY === before), 150)"


def box(browser: webdriver.Chrome, selector: str) -> tuple[float, float, float, float]:
    """Where the middle of an element is that has been scrolled to, and how large it is."""
    rect = "arguments[0].scrollIntoView({ block: 'center' }); const { x, y, width, height } ="
    rect += " arguments[0].getBoundingClientRect(); return [x + width / 2, y + height / 2, width, height]"
    element = until(browser, lambda: browser.find_element(By.CSS_SELECTOR, selector))
    return tuple(browser.execute_script(rect, element))


def test_finger_scrolls_over_charts_draws_a_range_and_opens_a_rank(browser, served):
    size = {"width": 414, "height": 900, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
    try:
        browser.get(served.url + "/")
        drawn(browser)
        x, y, _, height = box(browser, "#heat .nsewdrag")
        before = browser.execute_script("return scrollY")
        touch(browser, *((x, y + height / 3 - 10 * way) for way in range(8)))
        until(browser, lambda: browser.execute_script("return scrollY") > before + 20)
        until(browser, lambda: browser.execute_async_script(RESTS))  # a browser lets nobody end a scroll
        assert browser.current_url == served.url + "/"
        x, y, width, _ = box(browser, "#spine .nsewdrag")
        touch(browser, *((x + width * way / 40, y) for way in range(-10, 11)))
        until(browser, lambda: "from=" in browser.current_url and "to=" in browser.current_url)
        drawn(browser)
        x, y, _, height = box(browser, "#heat .nsewdrag")
        touch(browser, (x, y + height * (5.5 / 8 - 0.5)))
        shows(browser, "rank-title", "Rank 5")
        x, y, _, _ = box(browser, "#nav a[href^='/sessions']")
        touch(browser, (x, y))
        until(browser, lambda: "/sessions" in browser.current_url)
    finally:
        browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


STOPS = """return [...document.querySelectorAll("a, button, input, summary, [tabindex]")]
    .filter((one) => one.tabIndex === 0 && one.getClientRects().length).map((one) => one.textContent)"""
NAMED = {
    "link",
    "button",
    "combobox",
    "searchbox",
    "textbox",
    "table",
    "image",
    "region",
    "navigation",
    "form",
}


def spoken(browser: webdriver.Chrome) -> list[tuple[str, str, dict[str, Any]]]:
    """What a screen reader has of the page: role, name and properties."""
    nodes = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    return [
        (
            node["role"]["value"],
            node.get("name", {}).get("value", "").strip(),
            {property["name"]: property["value"].get("value") for property in node.get("properties", ())},
        )
        for node in nodes
        if not node["ignored"]
    ]


def test_screen_reader_has_names_headers_and_the_verdict_as_it_changes(browser, served):
    browser.get(served.url + "/?table=heat")
    drawn(browser)
    shows(browser, "heat-table", "rank 5 (host-1)")
    nodes = spoken(browser)
    assert [role for role, name, _ in nodes if role in NAMED and not name] == []
    assert [role for role, _, properties in nodes if properties.get("focusable") and role == "generic"] == []
    assert {properties["live"] for _, _, properties in nodes if properties.get("live")} >= {"polite"}
    tables = [name for role, name, _ in nodes if role == "table"]
    assert "Busy time over the median, the worst rows first" in tables
    assert {"row", "mean", "severity", "what"} <= {name for role, name, _ in nodes if role == "columnheader"}
    assert not any("graphics" in role for role, _, _ in nodes)  # a chart is a picture, and a table behind it
    stops = browser.execute_script(STOPS)
    assert stops[:4] == ["Skip to the page", "traceml-ray", "Overview", "Ranks"]
    assert (
        stops.index("Pause") < stops.index("Open rank 5") < stops.index("whole run") < stops.index("by cost")
    )


def test_keys_move_the_cursor_of_the_heatmap_and_open_a_rank(browser, served):
    browser.get(served.url + "/?order=cost")
    drawn(browser)
    box = browser.find_element(By.CSS_SELECTOR, ".heat-box")
    browser.execute_script("arguments[0].focus()", box)
    box.send_keys(Keys.ARROW_LEFT)
    shows(browser, "heat-tip", "rank 5 (host-1), step ")
    shows(browser, "heat-tip", "× the median: busy 31.")
    box.send_keys(Keys.ARROW_DOWN, Keys.ARROW_UP, Keys.ENTER)
    shows(browser, "rank-title", "Rank 5 on host-1")


def test_links_lead_from_page_to_page_without_a_reload(browser, served):
    browser.get(served.url + "/rank/5")
    shows(browser, "rank-title", "Rank 5")
    browser.execute_script("window.kept = true")
    press(browser, By.LINK_TEXT, "next →")
    shows(browser, "rank-title", "Rank 6")
    shows(browser, "rank-facts", "last step")
    press(browser, By.LINK_TEXT, "host-1")
    shows(browser, "node-ranks", "forward")
    for page, id in (("Events", "event-table"), ("Overview", "event-list"), ("Health", "health-ledger")):
        press(browser, By.LINK_TEXT, page)
        until(browser, lambda id=id: text(browser, id))
    browser.back()
    shows(browser, "event-list", "rank 5")
    field = browser.find_element(By.ID, "goto")
    field.send_keys("3\n")
    shows(browser, "rank-title", "Rank 3")
    field.send_keys("host-0")
    until(browser, lambda: browser.execute_script(OPTIONS) == ["node host-0", *OF_HOST_0])
    field.send_keys("\n")
    shows(browser, "node-title", "Node host-0")
    field.send_keys("fast\n")  # nothing is called so: the list of ranks says it
    shows(browser, "rank-table", "No rank matches.")
    search = browser.find_element(By.ID, "find")
    assert search.get_attribute("value") == "fast"
    search.send_keys(Keys.CONTROL, "a", Keys.NULL, "host-0")
    until(browser, lambda: text(browser, "rank-table").endswith("4 of 8 ranks"))
    press(browser, By.LINK_TEXT, "rank")
    until(browser, lambda: browser.current_url.endswith("/ranks?q=host-0&sort=-rank"))
    until(browser, lambda: browser.find_element(By.CSS_SELECTOR, "#rank-table td").text == "3")
    assert browser.execute_script("return window.kept")


def test_heatmap_as_a_table(browser, served):
    browser.get(served.url + "/")
    drawn(browser)
    press(browser, By.CSS_SELECTOR, "#heat-table > a")
    rows = until(browser, lambda: browser.find_elements(By.CSS_SELECTOR, "#heat-table tr"))
    assert len(rows) == 9
    assert rows[1].text.startswith("rank 5 (host-1)") and " 1.6" in rows[1].text  # the worst first


UNDER_WAY = """
const { fetch } = window;
[window.sent, window.underWay] = [0, 0];
window.fetch = (...given) => {
  [sent, underWay] = [sent + 1, underWay + 1];
  return fetch(...given).finally(() => setTimeout(() => underWay--, 100));
};
"""
"""Counts the requests, and those that are not answered and drawn yet."""


def test_pause_and_theme_buttons_work_and_the_theme_is_kept(browser, served):
    browser.get(served.url + "/")
    shows(browser, "state-badge", "live")
    until(browser, lambda: browser.title == "▲ straggler: rank 5 (host-1) in data · played")
    assert "%23d9731a" in browser.find_element(By.CSS_SELECTOR, "link[rel=icon]").get_attribute("href")
    browser.execute_script(UNDER_WAY)
    until(browser, lambda: browser.execute_script("return sent"))  # so the one before it is answered
    press(browser, By.ID, "pause")
    shows(browser, "paused", "paused at")
    until(browser, lambda: browser.execute_script("return underWay") == 0)  # what was requested before
    before = text(browser, "coverage")
    served.play(1)
    assert text(browser, "coverage") == before
    press(browser, By.ID, "pause")
    until(browser, lambda: text(browser, "coverage") != before)
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = browser.execute_script(ground)
    press(browser, By.ID, "theme")
    until(browser, lambda: browser.execute_script(ground) != light)
    browser.refresh()
    assert browser.execute_script(ground) != light
    browser.delete_all_cookies()


def test_events_are_searched_and_have_the_time_of_the_reader(browser, served):
    browser.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": "Asia/Kolkata"})
    try:
        browser.get(served.url + "/events")
        shows(browser, "event-table", "time (IST)")
        moment = browser.find_element(By.CSS_SELECTOR, "#event-table time")
        here, there = moment.text, moment.get_attribute("title").removesuffix(" UTC")
        assert datetime.fromisoformat(here) - datetime.fromisoformat(there) == timedelta(hours=5.5)
        browser.find_element(By.ID, "find").send_keys("straggler")
        until(browser, lambda: browser.current_url.endswith("/events?q=straggler"))
        until(browser, lambda: "of" in browser.find_element(By.CSS_SELECTOR, ".pages").text)
        browser.get(served.url + "/node/host-1")
        axis = "return document.querySelector('#node-cpu_pct .js-plotly-plot')?._fullLayout?.xaxis"
        drawn = f"const axis = (() => {{ {axis} }})(); return axis && [axis.title.text, axis.range[0]]"
        title, begin = until(browser, lambda: browser.execute_script(drawn))
        assert (title, begin[:13]) == ("time (IST)", "2023-11-15 03")
        browser.get(served.url + "/")
        shows(browser, "range-text", "times in Asia/")  # Chrome may say Calcutta
        ticks = (
            "return [...document.querySelectorAll('#exposed .xtick text')].map((tick) => tick.textContent)"
        )
        first, *_ = until(browser, lambda: browser.execute_script(ticks))
        assert "03:4" in first and first.count(":") == 2, first
        under = "return document.getElementById('exposed').closest('.graph').dataset.time"
        moved = ActionChains.move_to_element
        under_it = on_chart(browser, "exposed", moved, lambda: browser.execute_script(under))
        assert under_it.startswith("03:4")
    finally:
        browser.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": ""})


def test_page_is_stale_while_the_aggregator_does_not_answer(browser, served):
    browser.get(served.url + "/")
    shows(browser, "state-badge", "live")
    served.play(0, down=True)
    shows(browser, "state-badge", "stale")
    shows(browser, "problem", "not answering since")
    shows(browser, "verdict-headline", "rank 5")  # what was known stays
    served.play(1)
    shows(browser, "state-badge", "live")
    until(browser, lambda: text(browser, "problem") == "")


def test_page_says_when_the_server_does_not_answer(browser, served):
    """Not before 10 ticks of a clock, which is quicker here."""
    browser.get(served.url + "/")
    shows(browser, "state-badge", "live")
    until(browser, lambda: text(browser, "lost") == "")  # it is written each second
    network = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    clock = "window.dash_clientside.set_props('clock', { interval: arguments[0] })"
    try:
        browser.execute_cdp_cmd("Network.emulateNetworkConditions", {**network, "offline": True})
        browser.execute_async_script("setTimeout(arguments[0], 500)")  # an answer may be under way
        browser.execute_script(clock, 20)
        shows(browser, "lost", "The dashboard's server has not answered since ")
        shows(browser, "lost", "this opens it again: traceml-ray dashboard played")
        shows(browser, "verdict-headline", "rank 5")  # what was known stays
    finally:
        browser.execute_cdp_cmd("Network.emulateNetworkConditions", {**network, "offline": False})
        browser.execute_script(clock, 1000)
    until(browser, lambda: text(browser, "lost") == "")
    browser.get_log("browser")  # the console may say that there was no network


@pytest.mark.long
def test_dashboard_of_the_launcher_names_the_slow_rank_and_outlives_the_aggregator(browser, tmp_path):
    port = free_port()
    script = [str(EXAMPLE), "--steps", "100000", "--slow", "data:1:60@20"]
    ours = ["--nproc-per-node", "2", "--session", "seen", "--out", str(tmp_path), f"--dashboard={port}"]
    ours.append("--dashboard-linger=20")
    command = [sys.executable, "-m", "traceml_ray.launch", *ours, *script]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
        try:
            until(browser, lambda: answers(port))
            browser.get(f"http://127.0.0.1:{port}/")
            shows(browser, "verdict-headline", "traggler: rank 1")
            shows(browser, "state-badge", "live")
            point(browser, 1, rows=2).click().perform()
            shows(browser, "rank-title", "Rank 1")
            judge = aggregator(job.pid)
            judge.suspend()  # killed at once it could be back before anyone has waited for an answer
            shows(browser, "state-badge", "stale")
            judge.kill()
            shows(browser, "state-badge", "live")  # Ray has started another
            shows(browser, "verdict-headline", "rank 1")
        finally:
            job.terminate()
            job.wait(240)
    shows(browser, "state-badge", "stored file")
    shows(browser, "lost", "traceml-ray dashboard seen")
    browser.get_log("browser")  # the server is gone, and the console may say so
