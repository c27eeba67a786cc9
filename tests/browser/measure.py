"""What the web app costs a real browser: bytes, time of the main thread, layout shift, memory."""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import waitress
from looking import chromium, metrics, shift, transferred
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

from traceml_ray.dash_app.server import create_app
from traceml_ray.dash_app.session_pages import SessionPages

_WATCH = """
window.took = [];
window.long = [];
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) long.push(entry.duration);
}).observe({ type: "longtask" });
const apply = window.dash_clientside.traceml.apply;
window.dash_clientside.traceml.apply = (answer) => {
  const began = performance.now();
  if (answer?.set && Object.keys(answer.set).length)
    requestAnimationFrame(() => requestAnimationFrame(() => took.push(performance.now() - began)));
  return apply(answer);
};
for (const timer of ["tick", "clock"]) window.dash_clientside.set_props(timer, { disabled: true });
"""
_REFRESH = """
const done = arguments[0], before = took.length;
window.ticks = (window.ticks ?? 1e6) + 1;
window.dash_clientside.set_props("due", { data: ticks });
const look = () => took.length > before ? done() : setTimeout(look, 20);
look();
"""
"""Asks once, and waits for what is drawn: what is between two refreshes is no part of either."""
_MEMORY = 100
"""Refreshes between two looks at the heap."""


_SETTLED = """
const done = arguments[0], began = performance.now();
let last = began;
const drawn = ({ attributeName }) => attributeName !== "data-dash-is-loading"; // that is of every question
const watch = new MutationObserver((found) => { if (found.some(drawn)) last = performance.now(); });
const all = { subtree: true, childList: true, attributes: true, characterData: true };
watch.observe(document.getElementById("page"), all);
const mouse = (id) => plot(id).dispatchEvent(new MouseEvent("mousemove", { bubbles: true }));
const plot = (id) => document.querySelector(`#${id} .js-plotly-plot`);
const click = (selector) => [...document.querySelectorAll(selector)].at(-1).click();
const heat = document.querySelector(".heat-box");
const key = (key) => heat.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const share = (at, [low, high]) => low + (high - low) * at;
const within = (id) => [0.3, 0.6].map((at) => share(at, plot(id)._fullLayout.xaxis.range));
ACT;
setTimeout(() => { watch.disconnect(); done(last - began); }, 1500);
"""
_ACTS = {
    "brush on the spine": "mouse('spine');"
    " plot('spine').emit('plotly_selected', { points: [], range: { x: within('spine') } })",
    "zoom in a chart": "mouse('timeline');"
    " const [low, high] = within('timeline');"
    " Plotly.relayout(plot('timeline'), { 'xaxis.range[0]': low, 'xaxis.range[1]': high })",
    "an episode": "click('#lanes .bar-link')",
    "whole run": "click('#range [title=\"All steps\"]')",
    "a stage": "click('#heat-stage a')",
    "all stages": "document.querySelector('#heat-stage a').click()",
    "order by cost": "click('#heat-order a')",
    "order by node": "document.querySelector('#heat-order a').click()",
    "open a node": "click('#heat-rows .toggle')",
    "legend": "click('#timeline-legend a')",
    "table": "click('#heat-table > a')",
    "cursor": "key('ArrowLeft')",
    "open a rank": "key('Enter')",
    "back": "history.back()",
    "open a node's page": "click('#node-cards a')",
}
"""What a person does, on the page that the one before has left."""


def interactions(pages: SessionPages, times: int = 5) -> list[tuple[str, float, float]]:
    """
    Do what a person does on the overview of a session that is over; print how long until nothing moves, and
    return it: the interaction, its median, the slowest (ms).
    """
    with opened(pages) as (browser, url):
        screen(browser, 1800)  # the whole overview is in sight, and drawn
        took: dict[str, list[float]] = {name: [] for name in _ACTS}
        for _ in range(times):
            browser.get(url)
            WebDriverWait(browser, 60).until(lambda b: b.find_elements("css selector", "#heat .nsewdrag"))
            browser.execute_async_script("setTimeout(arguments[0], 2000)")
            for name, act in _ACTS.items():
                if name.endswith("'s page"):
                    screen(browser, 900)
                took[name].append(browser.execute_async_script(_SETTLED.replace("ACT", act)))
            screen(browser, 1800)
    print("\n| interaction | p50 | most |\n|---|---|---|")
    rows = [(name, statistics.median(all_ms), max(all_ms)) for name, all_ms in took.items()]
    print("\n".join(f"| {name} | {p50:.0f} ms | {most:.0f} ms |" for name, p50, most in rows))
    return rows


def screen(browser: webdriver.Chrome, height: int) -> None:
    """Give the page so much room: 900 px are a person's screen."""
    browser.set_window_size(1440, height)
    browser.execute_async_script("setTimeout(arguments[0], 500)")


@contextmanager
def opened(pages: SessionPages) -> Iterator[tuple[webdriver.Chrome, str]]:
    """Give a browser, and where the pages are served."""
    app = create_app(pages, token=None, hosts=["127.0.0.1"], poll_s=0.25)
    server: Any = waitress.create_server(app.server, host="127.0.0.1", port=0, threads=4)
    threading.Thread(target=server.run, daemon=True).start()
    with tempfile.TemporaryDirectory() as profile:
        browser = chromium(Path(profile))
        try:
            yield browser, f"http://127.0.0.1:{server.effective_port}/"
        finally:
            browser.quit()
            server.close()


def measure(
    pages: SessionPages, play: Callable[[], Any], refreshes: int, paths: Sequence[str]
) -> list[tuple[str, ...]]:
    """
    Open each page twice, and play `refreshes` times. Print what that took, and return for each page the
    layout shift, the main thread of a refresh, the longest task, and the median until a refresh is seen.
    """
    rows: list[tuple[str, ...]] = []
    with opened(pages) as (browser, url):
        wait = WebDriverWait(browser, 60, 0.02, ignored_exceptions=(Exception,))

        def load(path: str) -> int:
            browser.get(url + path.lstrip("/"))
            wait.until(lambda b: b.execute_script("return document.querySelector('h1, #verdict-why')"))
            browser.execute_async_script("setTimeout(arguments[0], 1000)")
            return transferred(browser)

        def refresh(count: int) -> None:
            for _ in range(count):
                play()
                while not pages.poll():  # it rests where a machine is slow
                    time.sleep(0.05)
                browser.execute_async_script(_REFRESH)

        print(
            "\n| page | first visit | reload | layout shift | main thread a refresh | script | layout |",
            end="",
        )
        print(" longest task | seen after p50 | p95 |\n|" + "---|" * 10)
        for path in paths:
            browser.execute_cdp_cmd("Network.clearBrowserCache", {})
            first, again = load(path), load(path)
            browser.execute_script(_WATCH)
            refresh(3)
            before, seen = metrics(browser), browser.execute_script("return took.length")
            refresh(refreshes)
            after, took = metrics(browser), browser.execute_script("return took")[seen:]
            kinds = ("TaskDuration", "ScriptDuration", "LayoutDuration")
            spent = [f"{1e3 * (after[kind] - before[kind]) / len(took):.0f} ms" for kind in kinds]
            longest = max(browser.execute_script("return long"), default=0)
            p50, p95 = statistics.median(took), sorted(took)[int(0.95 * len(took))]
            cells = [
                path,
                f"{first / 1e3:.0f} kB",
                f"{again / 1e3:.1f} kB",
                f"{shift(browser):.3f}",
                *spent,
            ]
            print(
                "|",
                " | ".join([*cells, *(f"{ms:.0f} ms" for ms in (longest, p50, p95))]),
                "|",
                flush=True,
            )
            rows.append((path, f"{shift(browser):.3f}", spent[0], f"{longest:.0f} ms", f"{p50:.0f} ms"))
        print("\n| after refreshes of the last page | heap, MB | DOM nodes | listeners |\n|---|---|---|---|")
        for number in (0, 1, 2):
            refresh(_MEMORY if number else 0)
            heap, nodes, listeners = _held(browser)
            print(f"| {number * _MEMORY} | {heap:.1f} | {nodes} | {listeners} |")
    return rows


def _held(browser: webdriver.Chrome) -> tuple[float, int, int]:
    """Return what is in use after collections: heap in MB, nodes, listeners."""
    for _ in range(3):
        browser.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
    values = metrics(browser)
    return values["JSHeapUsedSize"] / 1e6, int(values["Nodes"]), int(values["JSEventListeners"])
