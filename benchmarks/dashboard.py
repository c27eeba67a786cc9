"""
The dashboard under a large job: `python benchmarks/dashboard.py [--ranks 1024] [--steps 300]`.

A session is played into a real aggregator with five steps a second and one late rank. Reported are the time
of one tick that updates the pages, the server's time for a browser's refresh, and the size of a refresh (with
gzip, as a browser receives it, and without). `--browser` also measures a real browser (Chromium): bytes
received at the first visit and at a reload, main-thread time of a refresh, layout shift, and memory growth.
With `--steps 20000 --episodes 10`, ten ranks are late in turn and the session ends; then the time that a
person waits for each interaction is measured.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
from figures import answering, machine, publish
from played import Played
from plotly.io.json import to_json_plotly

from traceml_ray.dash_app.app import Refresher
from traceml_ray.dash_app.session_pages import SessionPages

STEPS_A_SECOND = 5
PAGES = ("/", "/node/node-1?from=newest", "/rank/5?from=newest", "/events", "/ledger")
SAMPLES = 180
"""Number of seconds after which a chart over time has its full length."""


def main() -> None:
    """Play, measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1024, help="number of ranks (default: 1024)")
    parser.add_argument("--steps", type=int, default=300, help="number of steps (default: 300)")
    parser.add_argument(
        "--ticks", type=int, default=60, help="number of measured updates of the pages (default: 60)"
    )
    parser.add_argument(
        "--episodes",
        type=int,
        default=0,
        help="number of episodes of a long run; measures the interactions of a person (default: 0)",
    )
    parser.add_argument("--gpus", type=int, default=8, help="ranks per node (default: 8)")
    parser.add_argument("--browser", action="store_true", help="also measure a real browser")
    parser.add_argument(
        "--refreshes",
        type=int,
        default=30,
        help="measured refreshes of each page in the browser (default: 30)",
    )
    parser.add_argument("--page", action="append", help="only this page in the browser; may be repeated")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        played = Played(
            Path(folder) / "bench",
            arguments.ranks,
            per_node=min(8, arguments.ranks),
            late=arguments.ranks - 1,
            onset=arguments.steps // 2,
            gpus=arguments.gpus,
        )
        pages = SessionPages(played.source, clock=played.clock)
        size = f"{arguments.ranks} ranks × {arguments.steps} steps"
        print(f"{machine()}\n{size}, {STEPS_A_SECOND} steps/s")
        for step in range(0, arguments.steps, 50):
            if arguments.episodes:
                late_in_turn(played, step, arguments.steps // arguments.episodes)
            played.play(50)
            pages.poll()
        gc.collect()
        gc.freeze()  # as the server does
        if arguments.episodes:
            from browser.measure import interactions  # tests/browser

            played.end()
            pages.poll()
            medians, slowest = zip(*((p50, most) for _, p50, most in interactions(pages)), strict=True)
            rows = [
                (f"{len(medians)} interactions, medians", f"{min(medians):.0f} to {max(medians):.0f} ms"),
                ("the same, slowest rounds", f"{min(slowest):.0f} to {max(slowest):.0f} ms"),
            ]
            publish("interactions", ("what", "measured"), rows)
            return
        server(played, pages, arguments.ticks)
        if arguments.browser:
            for _ in range(SAMPLES):
                played.play(1)
            browser(played, pages, arguments.refreshes, arguments.page or PAGES)


def late_in_turn(played: Played, step: int, period: int) -> None:
    """Let a different rank be late in a third of each period."""
    period_number, position = divmod(step, period)
    played.onset, played.late = (
        0,
        97 * period_number % played.world if period // 2 <= position < period * 5 // 6 else None,
    )


def server(played: Played, pages: SessionPages, ticks: int) -> None:
    """Measure the server's work for one browser, on each page."""
    print("\n| page | refresh p50 | p95 | first, gzip | refresh p50, gzip | p95, gzip | p95, as it is |")
    print("|---|---|---|---|---|---|---|")
    polls: list[float] = []
    rows = []
    spent, server_ms = answering(played.source), dict[str, float]()
    for page in PAGES:
        refresher, seen, times, sizes, cpu = Refresher(pages), dict[str, Any](), [], [], []
        for _ in range(ticks if page == "/" else max(5, ticks // 4)):
            played.play(STEPS_A_SECOND)
            spent[0], used = 0.0, time.process_time()
            while not pages.poll():  # the poller pauses if the machine is slow
                time.sleep(0.05)
            polls.append(pages.poll_ms[-1])
            began = time.perf_counter()
            path, _, search = page.partition("?")
            elements, answer = refresher.refresh(path, search, seen)
            sent = to_json_plotly([elements, answer]).encode()
            times.append(1e3 * (time.perf_counter() - began))
            cpu.append(1e3 * (time.process_time() - used - spent[0]))
            sizes.append((len(gzip.compress(sent, 6)) / 1e3, len(sent) / 1e3))
            seen = answer["seen"]
        p50, p95 = np.percentile(times[1:], [50, 95])
        (small, _), (large, whole) = np.percentile(sizes[1:], [50, 95], axis=0)
        server_ms[page] = float(np.median(cpu[1:]))
        took, first = f"{p50:.1f} ms | {p95:.1f} ms", f"{sizes[0][0]:.0f} kB"
        print(f"| {page} | {took} | {first} | {small:.1f} kB | {large:.1f} kB | {whole:.0f} kB |")
        rows.append((page, f"{p50:.0f} / {p95:.0f} ms", first, f"{small:.1f} kB"))
    head = ("page", "refresh in the server, p50 / p95", "first payload, gzip", "payload of a refresh, gzip")
    publish("web", head, rows)
    p50, p95 = np.percentile(polls, [50, 95])
    print(f"\none tick: p50 {p50:.0f} ms, p95 {p95:.0f} ms, with the aggregator's part")
    times = ", ".join(f"{page} {ms:.1f} ms" for page, ms in server_ms.items())
    print(f"CPU of a tick and a refresh without the aggregator's part: {times}")


def browser(played: Played, pages: SessionPages, refreshes: int, paths: Sequence[str]) -> None:
    """Measure the cost of the pages in a browser."""
    from browser.measure import measure  # tests/browser

    head = ("page", "layout shift", "main thread a refresh", "longest task", "seen after, p50")
    publish("browser", head, measure(pages, lambda: played.play(STEPS_A_SECOND), refreshes, paths))


if __name__ == "__main__":
    main()
