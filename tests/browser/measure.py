"""How long a real browser takes for a refresh of the overview, and whether its memory grows."""

from __future__ import annotations

import statistics
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import waitress
from looking import chromium
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

from traceml_ray.dash_app.server import create_app
from traceml_ray.dash_app.session_pages import SessionPages

_WATCH = """
window.took = [];
let began = null;
const done = () => { window.took.push(performance.now() - began); began = null; };
const apply = window.dash_clientside.traceml.apply;
window.dash_clientside.traceml.apply = (answer) => {
  if (answer && answer.set.heat) began = performance.now();
  return apply(answer);
};
document.querySelector('#heat .js-plotly-plot').on('plotly_afterplot', () => {
  if (began !== null) requestAnimationFrame(done);
});
"""


def measure(pages: SessionPages, play: Callable[[], Any], refreshes: int = 300) -> None:
    """Play and look so many times; print the time from an answer to the picture, and the heap."""
    app = create_app(pages, token=None, hosts=["127.0.0.1"], poll_s=0.25)
    server: Any = waitress.create_server(app.server, host="127.0.0.1", port=0, threads=4)
    threading.Thread(target=server.run, daemon=True).start()
    with tempfile.TemporaryDirectory() as profile:
        browser = chromium(Path(profile))
        try:
            browser.get(f"http://127.0.0.1:{server.effective_port}/")
            drawn = "return document.querySelector('#heat .js-plotly-plot').data.length"
            WebDriverWait(browser, 60, ignored_exceptions=(Exception,)).until(
                lambda b: b.execute_script(drawn)
            )
            browser.execute_script(_WATCH)
            wait = WebDriverWait(browser, 60, 0.05)
            held = {0: _held(browser)}
            for at in range(1, refreshes + 1):
                play()
                wait.until(lambda b, at=at: (pages.poll(), b.execute_script("return took.length") >= at)[1])
                if at % 100 == 0:
                    held[at] = _held(browser)
            took = sorted(browser.execute_script("return took"))
            print(f"\nbrowser: {refreshes} refreshes, from the answer to the picture")
            print(f"median {statistics.median(took):.0f} ms, p95 {took[int(0.95 * len(took))]:.0f} ms")
            print("\n| after refreshes | heap, MB | DOM nodes | listeners |\n|---|---|---|---|")
            for at, (heap, nodes, listeners) in held.items():
                print(f"| {at} | {heap:.1f} | {nodes} | {listeners} |")
        finally:
            browser.quit()
            server.close()


def _held(browser: webdriver.Chrome) -> tuple[float, int, int]:
    """Return what is in use after collections: heap in MB, nodes, listeners."""
    for _ in range(3):
        browser.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
    browser.execute_cdp_cmd("Performance.enable", {})
    found = {m["name"]: m["value"] for m in browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]}
    return found["JSHeapUsedSize"] / 1e6, int(found["Nodes"]), int(found["JSEventListeners"])
