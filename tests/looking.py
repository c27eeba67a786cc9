"""A browser that views the web app, and a server with a session that is played into it."""

from __future__ import annotations

import shutil
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import waitress
from flask import request
from played import Played
from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from traceml_ray.dash_app.server import create_app
from traceml_ray.dash_app.session_pages import SessionPages

FAULTS = Path(__file__).with_name("browser").joinpath("faults.js").read_text()
WIDTH = "return document.documentElement.scrollWidth - window.innerWidth"
WAIT_S = 120.0
"""Time to wait for a page, in s. It is long because other tests run at the same time."""
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1440,900",
)


def chromium(profile: Path) -> webdriver.Chrome:
    """Return a browser that keeps its console messages."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_script_timeout(WAIT_S)
    return driver


_SHIFT = """
const done = arguments[0];
let most = 0, sum = 0, first = 0, last = 0;
new PerformanceObserver((list) => {
  for (const { hadRecentInput, startTime, value } of list.getEntries()) {
    if (hadRecentInput) continue;
    if (startTime - last > 1000 || startTime - first > 5000) [sum, first] = [0, startTime];
    [sum, last] = [sum + value, startTime];
    most = Math.max(most, sum);
  }
}).observe({ type: "layout-shift", buffered: true });
requestAnimationFrame(() => setTimeout(() => done(most), 50));
"""


def transferred(browser: webdriver.Chrome) -> int:
    """
    Return the number of bytes, with headers, that the open page has received over the network. For repeated
    requests only the first answer counts: on a slow machine several ticks pass before that answer is drawn.
    """
    entries = "['navigation', 'resource'].flatMap((type) => performance.getEntriesByType(type))"
    first = ".filter((one, index, all) => all.findIndex((other) => other.name === one.name) === index)"
    total = f"return {entries}{first}.reduce((sum, one) => sum + one.transferSize, 0)"
    return int(browser.execute_script(total))


def shift(browser: webdriver.Chrome) -> float:
    """
    Return the CLS (cumulative layout shift) of the page since it was opened, as browsers report it: the
    largest shift of content without user input, within 5 s and without a pause of 1 s.
    """
    return float(browser.execute_async_script(_SHIFT))


_LOOP = "let sum = 0; for (let i = 0; i < 3e8; i++) sum += i % 7; return sum"


def metrics(browser: webdriver.Chrome) -> dict[str, float]:
    """Return Chrome's metrics, in s of CPU time. `TaskDuration` covers the whole main thread."""
    browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    return {m["name"]: m["value"] for m in browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]}


def loops(browser: webdriver.Chrome, act: Callable[[], Any]) -> float:
    """
    Return the cost of `act` on the page's main thread, in units of a loop that takes about a third of a
    second. The units do not depend on the speed of the machine.
    """
    durations = [metrics(browser)["TaskDuration"]]
    for what in (act, lambda: browser.execute_script(_LOOP)):
        what()
        durations.append(metrics(browser)["TaskDuration"])
    return (durations[1] - durations[0]) / (durations[2] - durations[1])


def answers(port: int) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
        return bool(answer.status == 200)


def until(browser: webdriver.Chrome, seen: Callable[[], Any], seconds: float = WAIT_S) -> Any:
    """Wait until the result of `seen` is true, and return it."""
    wait = WebDriverWait(browser, seconds, 0.05, ignored_exceptions=(Exception,))
    return wait.until(lambda _: seen())


def press(browser: webdriver.Chrome, by: str, what: str) -> None:
    """
    Click an element as soon as it is there. A page that is made again between the search and the click has
    another one.
    """

    def pressed() -> bool:
        try:
            browser.find_element(by, what).click()
        except (StaleElementReferenceException, NoSuchElementException):
            return False
        return True

    until(browser, pressed)


def text(browser: webdriver.Chrome, id: str) -> str:
    return browser.find_element(By.ID, id).get_attribute("textContent") or ""


def shows(browser: webdriver.Chrome, id: str, what: str, seconds: float = WAIT_S) -> None:
    until(browser, lambda: what in text(browser, id), seconds)


def screen(browser: webdriver.Chrome, width: int, height: int = 900) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def wear(browser: webdriver.Chrome, theme: str) -> None:
    """Switch the page to a theme, light or dark, without transitions between colours."""
    wanted = {"prefers-color-scheme": theme, "prefers-reduced-motion": "reduce"}
    features = [{"name": name, "value": value} for name, value in wanted.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def as_started(browser: webdriver.Chrome) -> None:
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def looks_right(browser: webdriver.Chrome, url: str, *shown: str) -> None:
    """Check that a page shows the given words, without errors, at all widths, in light and dark."""
    browser.get(url)
    try:
        for what in shown:
            shows(browser, "react-entry-point", what)
        for theme, width in ((theme, width) for theme in ("light", "dark") for width in (1440, 1280, 414)):
            screen(browser, width)
            wear(browser, theme)
            until(browser, lambda: browser.execute_script(WIDTH) <= 0)
            assert (faults := browser.execute_script(FAULTS)) == [], faults
    finally:
        as_started(browser)


def end(server: Any) -> None:
    """
    Stop a waitress server. Its handlers are ended first: a remaining handler would write to a file descriptor
    that may belong to another file by then.
    """
    server.task_dispatcher.shutdown()
    server.close()


class Served:
    """A played session behind a server. As the session is played on, the page follows."""

    def __init__(self, played: Played) -> None:
        self.played = played
        self.pages = SessionPages(played.source, clock=played.clock)
        self.late_s = 0.0
        """Time that each answer is held back, in s."""
        app = create_app(self.pages, token=None, hosts=["127.0.0.1"], poll_s=0.25)
        app.server.before_request(self._hold)
        self._server = waitress.create_server(app.server, host="127.0.0.1", port=0, threads=4)
        self.url = f"http://127.0.0.1:{self._server.effective_port}"
        threading.Thread(target=self._server.run, daemon=True).start()

    def play(self, seconds: int, *, down: bool = False) -> None:
        """Play `seconds` seconds of 5 steps each, and poll. `down`: the poll is not answered."""
        self.played.source.down = down
        for _ in range(seconds):
            self.played.play(5)
        self.poll()

    def poll(self) -> None:
        """
        Read everything that is new. A poll after slow ones is left out, and one that is slow reads a part: a
        real server, which polls each second, reads it later.
        """
        for _ in range(5):
            self.pages._rest_until = 0.0
            if not self.pages.poll():
                break

    def _hold(self) -> None:
        if self.late_s and request.path.endswith("/_dash-update-component"):
            time.sleep(self.late_s)

    def close(self) -> None:
        """Stop serving."""
        end(self._server)
