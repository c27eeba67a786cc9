"""The web app as people use it, in Chromium, against an aggregator with a planted fault."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from looking import Served
from played import Played, look
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from traceml_ray.launchers.cluster import free_port
from traceml_ray.stages import STAGES
from traceml_ray.text import words

EXAMPLE = Path(__file__).parents[2] / "examples/train_gpt.py"
PAGES = {
    "/": "Overview",
    "/node/host-1": "Node host-1",
    "/rank/5": "Rank 5 on host-1",
    "/events": "Events",
    "/sessions": "Sessions",
    "/ledger": "Health of the monitor",
}


@pytest.fixture(autouse=True)
def quiet(browser: webdriver.Chrome) -> Iterator[None]:
    """The console says nothing bad, of whatever a test does: no error, nothing that the policy forbids."""
    browser.get_log("browser")
    yield
    bad = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert bad == []


def until(browser: webdriver.Chrome, seen: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Return what `seen` does, once that is true."""
    wait = WebDriverWait(browser, seconds, 0.05, ignored_exceptions=(Exception,))
    return wait.until(lambda _: seen())


def answers(port: int) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
        return bool(answer.status == 200)


def aggregator(launcher: int) -> psutil.Process:
    """Return the aggregator's process, of that launcher's own Ray."""
    members = psutil.Process(launcher).children(recursive=True)
    return next(
        one for one in members if one.cmdline()[:1] and one.cmdline()[0].startswith("ray::Aggregator")
    )


def text(browser: webdriver.Chrome, id: str) -> str:
    return browser.find_element(By.ID, id).get_attribute("textContent") or ""


def shows(browser: webdriver.Chrome, id: str, what: str, seconds: float = 20.0) -> None:
    until(browser, lambda: what in text(browser, id), seconds)


def drawn(browser: webdriver.Chrome) -> None:
    until(
        browser,
        lambda: browser.execute_script("return document.querySelector('#heat .js-plotly-plot').data.length"),
    )


def point(browser: webdriver.Chrome, row: int, of: int = 8) -> ActionChains:
    """Point at a row of the heatmap."""
    drawn(browser)
    plot = browser.find_element(By.CSS_SELECTOR, "#heat .nsewdrag")
    down = plot.size["height"] * ((row + 0.5) / of - 0.5)
    return ActionChains(browser).move_to_element_with_offset(plot, plot.size["width"] // 3, round(down))


def test_page_says_what_it_waits_for_before_the_first_step(browser, served):
    browser.get(served.url + "/")
    shows(browser, "state-badge", "no session")
    shows(browser, "page", "python -m traceml_ray.launch")
    served.pages.poll()
    shows(browser, "state-badge", "starting")
    shows(browser, "verdict-headline", "The run is starting: Ray is up, waiting for the first step (0 s)")
    shows(browser, "page", "fills by itself with the first step")


def test_verdict_names_the_rank_soon_after_the_fault(browser, served):
    served.play(11)
    shows(browser, "verdict-headline", "ealthy")
    shows(browser, "state-badge", "live")
    served.play(10)  # the fault begins at step 60
    shows(browser, "verdict-headline", "rank 5", 5.0)
    assert "data" in text(browser, "verdict-headline")
    assert "%" in text(browser, "verdict-cost")
    assert browser.find_element(By.CSS_SELECTOR, "[aria-live=polite] #verdict-headline")


@pytest.mark.parametrize("path", PAGES)
def test_pages_render_with_title_verdict_and_data(browser, served, path):
    browser.get(served.url + path)
    until(
        browser, lambda: browser.find_element(By.TAG_NAME, "h1").get_attribute("textContent") == PAGES[path]
    )
    shows(browser, "verdict-headline", "rank 5")
    empty = browser.execute_script(
        "return [...document.querySelectorAll('main .js-plotly-plot')].filter("
        "plot => !plot.data.length && !plot.layout.annotations[0].text).map(plot => plot.parentElement.id)"
    )
    assert empty == []
    assert "Traceback" not in browser.page_source
    wide = browser.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
    assert wide <= 0


def test_rank_page_draws_the_rows_of_gpu_and_host_under_each_other(browser, tmp_path):
    served = Served(Played(tmp_path / "device", 4, per_node=2, device=True, late=3))
    served.play(6)
    bars = "return document.querySelector('#rank-rows .js-plotly-plot').data.map(bar => [bar.name, ...bar.y])"
    try:
        for width, height in ((1440, 900), (390, 844)):
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            browser.get(served.url + "/rank/3")
            stages = until(browser, lambda: browser.execute_script(bars))
            assert [name for name, *_ in stages] == [words(stage) for stage in STAGES]
            assert all(host.startswith("host, ") and gpu.startswith("GPU, ") for _, host, gpu in stages)
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.get("about:blank")
        served.close()


def test_tooltip_of_the_heatmap_has_the_exact_time(browser, served):
    browser.get(served.url + "/?span=recent")
    point(browser, 5).perform()
    shows(browser, "heat-tip", "rank 5 (host-1)")
    shows(browser, "heat-tip", "the median rank 19.")


def test_click_on_the_heatmap_opens_the_rank_and_a_reload_keeps_it(browser, served):
    browser.get(served.url + "/?stage=data")
    point(browser, 5).click().perform()
    shows(browser, "rank-title", "Rank 5 on host-1")
    assert browser.current_url == served.url + "/rank/5"
    browser.refresh()
    shows(browser, "rank-title", "Rank 5 on host-1")
    browser.back()
    until(browser, lambda: "on" in browser.find_element(By.LINK_TEXT, "data").get_attribute("class").split())


def test_card_opens_the_node_by_keyboard(browser, served):
    browser.get(served.url + "/")
    card = until(browser, lambda: browser.find_element(By.CSS_SELECTOR, "#node-cards a[href='/node/node-1']"))
    browser.execute_script("arguments[0].focus()", card)
    card.send_keys("\n")
    shows(browser, "node-title", "Node host-1")


@pytest.mark.parametrize("chart", ["timeline", "heat"])
def test_zoom_survives_new_steps(browser, served, chart):
    browser.get(served.url + "/")
    drawn(browser)
    plot = browser.find_element(By.CSS_SELECTOR, f"#{chart} .nsewdrag")
    drag = (
        ActionChains(browser).move_to_element_with_offset(plot, -plot.size["width"] // 4, 0).click_and_hold()
    )
    drag.move_by_offset(plot.size["width"] // 4, 0).release().perform()
    axis = f"return document.querySelector('#{chart} .js-plotly-plot').layout.xaxis.range.map(Math.round)"
    zoomed = until(browser, lambda: browser.execute_script(axis))
    assert zoomed[1] - zoomed[0] < 0.5 * look(served.pages, "header")["step"]
    before = text(browser, "coverage")
    served.play(1)
    until(browser, lambda: text(browser, "coverage") != before)
    assert browser.execute_script(axis) == zoomed
    if chart == "heat":  # a double click would open a rank
        browser.find_element(By.ID, "heat-whole").click()
        until(browser, lambda: browser.execute_script(axis)[0] <= 1)


def test_links_lead_from_page_to_page_without_a_reload(browser, served):
    browser.get(served.url + "/rank/5")
    shows(browser, "rank-title", "Rank 5")
    browser.execute_script("window.kept = true")
    browser.find_element(By.LINK_TEXT, "next →").click()
    shows(browser, "rank-title", "Rank 6")
    shows(browser, "rank-facts", "last step")
    browser.find_element(By.LINK_TEXT, "host-1").click()
    shows(browser, "node-ranks", "forward")
    for page, id in (("Events", "event-table"), ("Overview", "event-list"), ("Health", "health-ledger")):
        browser.find_element(By.LINK_TEXT, page).click()
        until(browser, lambda id=id: text(browser, id))
    browser.back()
    shows(browser, "event-list", "rank 5")
    field = browser.find_element(By.ID, "goto")
    field.send_keys("3\n")
    shows(browser, "rank-title", "Rank 3")
    assert browser.execute_script("return window.kept")


def test_heatmap_as_a_table(browser, served):
    browser.get(served.url + "/")
    drawn(browser)
    browser.find_element(By.CSS_SELECTOR, "#heat-details summary").click()
    rows = until(browser, lambda: browser.find_elements(By.CSS_SELECTOR, "#heat-table tr"))
    assert len(rows) == 9
    assert rows[1].text.startswith("rank 5 (host-1) ≥ 1.50×")  # the worst first


def test_pause_and_theme_buttons_work_and_the_theme_is_kept(browser, served):
    browser.get(served.url + "/")
    shows(browser, "state-badge", "live")
    browser.find_element(By.ID, "pause").click()
    shows(browser, "paused", "paused at")
    before = text(browser, "coverage")
    served.play(1)
    browser.find_element(By.ID, "pause").click()
    until(browser, lambda: text(browser, "coverage") != before)
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = browser.execute_script(ground)
    browser.find_element(By.ID, "theme").click()
    until(browser, lambda: browser.execute_script(ground) != light)
    browser.refresh()
    assert browser.execute_script(ground) != light
    browser.execute_script("localStorage.clear()")


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
            until(browser, lambda: answers(port), 60.0)
            browser.get(f"http://127.0.0.1:{port}/")
            shows(browser, "verdict-headline", "traggler: rank 1", 60.0)
            shows(browser, "state-badge", "live")
            point(browser, 1, of=2).click().perform()
            shows(browser, "rank-title", "Rank 1")
            judge = aggregator(job.pid)
            judge.suspend()  # killed at once it could be back before anyone has waited for an answer
            shows(browser, "state-badge", "stale", 20.0)
            judge.kill()
            shows(browser, "state-badge", "live", 40.0)  # Ray has started another
            shows(browser, "verdict-headline", "rank 1")
        finally:
            job.terminate()
            job.wait(60)
    shows(browser, "state-badge", "stored file")
    shows(browser, "lost", "traceml-ray dashboard seen", 60.0)
    browser.get_log("browser")  # the server is gone, and the console may say so
